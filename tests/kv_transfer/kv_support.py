"""A tiny pool shape, messages of a step, and connectors under the test's control."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig, KVTransferConfig
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.core.step import LoadPromise, SchedulerOutput
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.lifecycle import KVStepDriver

BLOCK_SIZE = 4
LAYERS = ("layer.0", "layer.1", "layer.2")


def kv_cache_config(num_blocks: int = 8, block_size: int = BLOCK_SIZE, identity: str = "kv-a", dtype: Any = "bfloat16") -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=len(LAYERS),
        num_kv_heads=2,
        head_dim=8,
        dtype=dtype,
        layer_names=LAYERS,
        identity=identity,
    )


def engine_config(engine_id: str = "engine", role: Any = "kv_both", **extra: Any) -> EngineConfig:
    transfer = KVTransferConfig(kv_connector="PeerConnector", kv_role=role, engine_id=engine_id, kv_connector_extra_config=extra)
    return EngineConfig(model="smollm2", block_size=BLOCK_SIZE, kv_transfer_config=transfer)


def context(step: int, mode: CUDAGraphMode) -> ForwardContext:
    return ForwardContext(step, None, mode, None)


def scheduler_output(step: int, promises: Sequence[LoadPromise] = (), metadata: Any = None, num_tokens: int = 1) -> SchedulerOutput:
    return SchedulerOutput(
        step=step,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=[],
        num_scheduled_tokens={},
        total_num_scheduled_tokens=num_tokens,
        kv_connector_metadata=metadata if metadata is not None else "metadata",
        load_promises=tuple(promises),
    )


@dataclass(frozen=True)
class Batch:
    req_ids: list[str] = field(default_factory=lambda: ["a"])
    num_tokens: int = 1
    gate_wait_seconds: float = 0.0
    armed: list[bool] = field(default_factory=list)

    def arm_gates(self) -> None:
        self.armed.append(True)


def kv_caches(config: KVCacheConfig) -> dict[str, Buffer]:
    shape = (config.num_blocks, 2, config.num_kv_heads, config.block_size, config.head_dim)
    return {name: Buffer.zeros(shape, "bfloat16") for name in config.layer_names}


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class RecordingConnector(KVConnector):
    """Notes every call; `on_load` runs inside start_load_kv, `on_wait` inside wait_for_layer_load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[Any] = []
        self.load_kwargs: list[dict[str, Any]] = []
        self.bad_blocks: set[int] = set()
        self.on_load: Any = lambda forward_context, kwargs: None
        self.on_wait: Any = lambda layer_name: None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return None

    def handle_preemptions(self, connector_metadata: Any) -> None:
        self.calls.append(("handle_preemptions", self.has_connector_metadata()))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.calls.append(("start_load_kv", forward_context.cudagraph_runtime_mode, self.has_connector_metadata()))
        self.load_kwargs.append(kwargs)
        self.on_load(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait_for_layer_load", layer_name))
        self.on_wait(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        self.calls.append(("save_kv_layer", layer_name))

    def wait_for_save(self) -> None:
        self.calls.append(("wait_for_save", self.has_connector_metadata()))

    def finish_forward(self) -> None:
        self.calls.append(("finish_forward",))

    def abort_loads(self, step: int) -> None:
        self.calls.append(("abort_loads", step))

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class TimelineConnector(RecordingConnector):
    """As above, and it reports to the ledger; the test lands its transfers."""

    supports_timelines = True


def make_driver(connector_class: type[RecordingConnector], *, clock: Any = None, kv_load_wait: Any = "auto", timeout: float = 10.0) -> Any:
    """`(driver, connector, ledger)` over the tiny pool."""
    config = kv_cache_config()
    connector = connector_class(engine_config(), KVConnectorRole.WORKER, config)
    ledger = Ledger(config.num_layers, config.block_size, clock)
    driver = KVStepDriver(
        connector,
        ledger,
        config,
        kv_caches(config),
        load_timeout=timeout,
        kv_load_wait=kv_load_wait,
        modes=(CUDAGraphMode.NONE,),
        synchronize=lambda: connector.calls.append(("synchronize",)),
    )
    return driver, connector, ledger


def run_in_thread(function: Any) -> tuple[threading.Thread, list[Any]]:
    """Start `function` in a thread; its result, or its exception, is appended to the list."""
    results: list[Any] = []

    def target() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, results


def random_bytes(buffer: Buffer, seed: int) -> None:
    """Fill a buffer with bytes that depend on `seed`."""
    view = buffer.numpy().reshape(-1).view(np.uint8)
    view[:] = np.random.default_rng(seed).integers(0, 256, view.size, np.uint8)


def note_at_the_first_failure(ledger, take):
    """`(event, noted)`: what `take` returns in the moment in which a transfer first fails, before anybody else can hear of that."""
    end, failed, noted = ledger.end_transfer, threading.Event(), []

    def end_transfer(transfer, error=None):
        if error is not None and not noted:
            noted.append(take())
        end(transfer, error)
        if error is not None:
            failed.set()

    ledger.end_transfer = end_transfer
    return failed, noted


class Point:
    """Somebody has come to a point, and goes on when the test lets him."""

    def __init__(self):
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.arrived.set()
        assert self.go_on.wait(60)


@contextlib.contextmanager
def makes(kind, part):
    """Makes objects of a `kind` that has `points`. At the end whoever stands at one goes on, and `part` of each object is closed, which it may be
    twice."""
    made = []

    def make(*arguments, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        for point in one.points:
            point.go_on.set()
        getattr(one, part).close()
        getattr(one, part).close()
