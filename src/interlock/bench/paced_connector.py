"""A connector whose loads take a given time and no CPU: layer l of a load of T seconds lands at start + T * (l + 1) / L, by the clock.

It moves no bytes. What is promised must be in the promised blocks before the step, so that results can be compared bit by bit.
"""

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.forward_context import ForwardContext
from interlock.kv_transfer.connector import ConnectorRequest, KVConnector, KVConnectorRole
from interlock.kv_transfer.ledger import Ledger

PATH = "interlock.bench.paced_connector:PacedConnector"

_PR_SET_TIMERSLACK = 29  # linux/prctl.h

SleepUntil = Callable[[int], None]
"""`sleep_until(deadline)`: nanoseconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class PacedLoad:
    """The metadata of a step: how many seconds its loads take."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """The loads of one step. start: nanoseconds of the monotonic clock; transfers: of the ledger, per layer."""

    step: int
    start: int
    seconds: float
    ledger: Ledger
    transfers: Sequence[Sequence[int]]
    aborted: threading.Event


def sleep_until(deadline: int) -> None:
    """Sleep until `deadline`, without the GIL; the thread's timer slack says how exactly."""
    remaining = deadline - time.monotonic_ns()
    if remaining > 0:
        time.sleep(remaining * 1e-9)


class Pacer:
    """One thread that reports layers to the ledger when they are due."""

    def __init__(self, sleep: SleepUntil = sleep_until) -> None:
        self._sleep = sleep
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: dict[int, _Job] = {}
        self._thread = threading.Thread(target=self._run, name="interlock-pacer", daemon=True)
        self._thread.start()

    def submit(self, step: int, seconds: float, ledger: Ledger, transfers: Sequence[Sequence[int]]) -> None:
        """Begin loads that take `seconds` from now. transfers: ids of the ledger for each layer, in the order of the layers."""
        job = _Job(step, time.monotonic_ns(), seconds, ledger, transfers, threading.Event())
        self._running[step] = job
        self._jobs.put(job)

    def abort(self, step: int) -> None:
        """Report nothing more of a step."""
        job = self._running.get(step)
        if job is not None:
            job.aborted.set()

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        for job in list(self._running.values()):
            job.aborted.set()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # the default lets a sleep end 50 µs late
        while (job := self._jobs.get()) is not None:
            for layer, transfers in enumerate(job.transfers):
                self._sleep(job.start + int(job.seconds * 1e9 * (layer + 1) / len(job.transfers)))
                if job.aborted.is_set():
                    break
                for transfer in transfers:
                    job.ledger.end_transfer(transfer)
            del self._running[job.step]


class PacedConnector(KVConnector):
    """See the module. A step that loads carries a `PacedLoad` as its metadata. Only the worker half does anything."""

    supports_timelines = True
    saves_layers = False

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        self._pacer = Pacer() if role is KVConnectorRole.WORKER else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Enter the promised positions of every layer into the ledger; from then on the clock runs."""
        output, ledger = kwargs["scheduler_output"], kwargs["ledger"]
        if not output.load_promises:
            return
        load: PacedLoad = self._get_connector_metadata()
        assert self._pacer is not None
        transfers = [
            [ledger.begin_transfer(output.step, promise.req_id, layer, promise.start, promise.stop) for promise in output.load_promises]
            for layer in range(self.kv_cache_config.num_layers)
        ]
        self._pacer.submit(output.step, load.seconds, ledger, transfers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The ledger knows."""

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def abort_loads(self, step: int) -> None:
        """No byte of a load is written at any time."""
        if self._pacer is not None:
            self._pacer.abort(step)

    def shutdown(self) -> None:
        """Stop the thread."""
        if self._pacer is not None:
            self._pacer.close()

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Loads are promised by the benchmark itself."""
        return 0, False

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Nothing to keep."""

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """No metadata."""
