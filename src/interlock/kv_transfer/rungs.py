"""The rungs on which a step waits for its loads, and which one a step is on."""

import enum

from interlock.core.config import KVLoadWait
from interlock.core.errors import ConfigError
from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.connector import KVConnector


class Rung(enum.Enum):
    """How a load is waited for. BARRIER: before the launch. HOOK: before each layer's KV write, from Python. GATE: there too, but by
    nodes inside the replay."""

    BARRIER = "barrier"
    HOOK = "hook"
    GATE = "gate"


def choose_rung(mode: CUDAGraphMode, connector: KVConnector, kv_load_wait: KVLoadWait) -> Rung:
    """The rung of a step that runs in `mode`: the one place where it is chosen. Raises ConfigError for a forced rung that cannot be had."""
    if kv_load_wait == "barrier":
        return Rung.BARRIER
    if mode is not CUDAGraphMode.FULL:
        return Rung.HOOK
    if kv_load_wait == "hook":
        raise ConfigError("kv_load_wait is 'hook', but no Python runs between the layers of a FULL replay; set cudagraph_mode to PIECEWISE or NONE")
    if connector.supports_timelines and connector.progresses_by_itself:
        return Rung.GATE
    if kv_load_wait == "gate":
        raise ConfigError(
            f"kv_load_wait is 'gate', but {type(connector).__name__} does not report the ends of its reads from a thread of its own "
            "(supports_timelines, progresses_by_itself); use 'auto' or 'barrier'"
        )
    return Rung.BARRIER
