"""How long whoever drives an engine rests between two steps."""

from typing import Final

from interlock.engine.core import EngineCore

_WAITING_SECONDS: Final = 0.0005  # while requests wait for KV that is on its way
_WATCHING_SECONDS: Final = 0.05  # while there is nothing but leases to watch over


def pause_seconds(core: EngineCore) -> float:
    """Seconds to rest before the next step: none after a step that computed something."""
    if not core.has_unfinished_requests:
        return _WATCHING_SECONDS
    return 0.0 if core.num_scheduled_tokens else _WAITING_SECONDS
