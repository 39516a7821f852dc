"""A tier in host memory: what is in which slot, least recently used out first; and the thread that copies between slots and blocks."""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event, Lock, Thread

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.config import KVCacheConfig
from interlock.graphs.copy import copy_list
from interlock.kv_transfer.connectors.tier_messages import EndedLoad, TierLoad, TierSave
from interlock.kv_transfer.connectors.tier_reports import TierReports
from interlock.kv_transfer.ledger import Ledger

logger = logging.getLogger(__name__)

_SAVES_PER_COPY = 16  # blocks: how long a load may have to wait for saves


class HostIndex:
    """The content of `num_slots` slots (`TierIndex`). A slot that is being filled, or is pinned, is not taken for something else."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        self._filling: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[bytes] = Counter()
        self._orphans: dict[bytes, int] = {}

    def count_present(self, keys: Sequence[bytes]) -> int:
        """See `TierIndex`."""
        return next((index for index, key in enumerate(keys) if key not in self._stored), len(keys))

    def pin(self, keys: Sequence[bytes]) -> None:
        """See `TierIndex`."""
        self._pins.update(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """See `TierIndex`."""
        for key in keys:
            self._pins[key] -= 1
            assert self._pins[key] >= 0, f"key {key.hex()[:12]} was unpinned more often than it was pinned"
            if not self._pins[key]:
                del self._pins[key]
                if key in self._orphans:
                    self._free.append(self._orphans.pop(key))

    @property
    def num_pins(self) -> int:
        """Pins that have not been ended."""
        return self._pins.total()

    def places(self, keys: Sequence[bytes]) -> list[int | None]:
        """See `TierIndex`."""
        return [self._stored.get(key) for key in keys]

    def wants(self, key: bytes) -> bool:
        """See `TierIndex`."""
        return key not in self._stored and key not in self._filling

    def reserve(self, key: bytes) -> int | None:
        """See `TierIndex`."""
        if not self._free:
            victim = next((key for key in self._stored if key not in self._pins), None)
            if victim is None:
                return None
            self._free.append(self._stored.pop(victim))
        self._filling[key] = self._free.pop()
        return self._filling[key]

    def commit(self, key: bytes, place: int, stored: bool) -> None:
        """See `TierIndex`."""
        del self._filling[key]
        if stored:
            self._stored[key] = place
        else:
            self._free.append(place)

    def touch(self, keys: Iterable[bytes]) -> None:
        """See `TierIndex`."""
        for key in keys:
            if key in self._stored:
                self._stored.move_to_end(key)

    def distrust(self, key: bytes) -> None:
        """See `TierIndex`. A slot that another load still reads stays as it is."""
        if key in self._stored and key not in self._pins:
            self._free.append(self._stored.pop(key))

    def forget(self, key: bytes) -> None:
        """See `TierIndex`. A slot that a load still reads is free when the load has ended."""
        place = self._stored.pop(key, None)
        if place is not None:
            if key in self._pins:
                self._orphans[key] = place
            else:
                self._free.append(place)

    def close(self) -> None:
        """See `TierIndex`."""


class CopyThread:
    """One thread that runs jobs in order, urgent ones before the others."""

    def __init__(self, name: str) -> None:
        self._condition = Condition()
        self._urgent: deque[Callable[[], None]] = deque()
        self._other: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], *, urgent: bool) -> None:
        """Have `job` run; returns at once."""
        with self._condition:
            (self._urgent if urgent else self._other).append(job)
            self._condition.notify()

    def close(self, timeout: float | None = None) -> None:
        """Run what was submitted, and stop; wait for that up to `timeout` seconds. May be called twice."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            while True:
                if self._urgent:
                    return self._urgent.popleft()
                if self._other:
                    return self._other.popleft()
                if self._closed:
                    return None
                self._condition.wait()


@dataclass(slots=True, eq=False)
class _CopyIn:
    """A load under way. blocks, slots: int64, those that are there; transfers: per layer, if a step consumes it; missing: transfers of what
    has gone; layer: the next to be copied."""

    load: TierLoad
    step: int
    ledger: Ledger
    transfers: Sequence[int]
    missing: Sequence[int]
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    abort: Buffer = field(default_factory=lambda: Buffer.zeros((1,), "int64"))
    quiescent: Event = field(default_factory=Event)
    layer: int = 0
    seconds: float = 0.0


class HostTierWorker:
    """The memory of the slots, a slot's layers side by side, and the copies. memory: uint8 [num_slots, num_layers, block bytes]."""

    def __init__(self, config: KVCacheConfig, num_slots: int) -> None:
        self.reports = TierReports()
        self._block_bytes = config.block_bytes
        self._num_layers = config.num_layers
        self.memory = Buffer.zeros((num_slots, config.num_layers, config.block_bytes), "uint8")
        self._layer_addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._stop = Buffer.zeros((1,), "int64")
        self._lock = Lock()
        self._step_loads: dict[int, list[_CopyIn]] = {}
        self._thread: CopyThread | None = None

    def register(self, layers: Sequence[Buffer]) -> None:
        """The pool's layers; starts the thread."""
        self._layer_addresses = np.array([layer.address for layer in layers], np.int64)
        self._thread = CopyThread("interlock-host-tier")

    def load(self, load: TierLoad, step: int, ledger: Ledger) -> None:
        """Have a load made, layer by layer; loads that wait take turns, so that a layer of a whole step lands before the next. A synchronous
        one is reported to `ledger` as transfers of `step`."""
        count = load.num_available
        places = [place for place in load.places[:count] if place is not None]
        transfers, missing = self._begin(load, step, ledger) if load.synchronous else ([], [])
        copy = _CopyIn(load, step, ledger, transfers, missing, np.array(load.block_ids[:count], np.int64), np.array(places, np.int64))
        if load.synchronous:
            with self._lock:
                self._step_loads.setdefault(step, []).append(copy)
        self._submit(lambda: self._copy_in(copy), urgent=True)

    def save(self, saves: Sequence[TierSave]) -> None:
        """Have blocks copied into their slots."""
        for first in range(0, len(saves), _SAVES_PER_COPY):
            batch = saves[first : first + _SAVES_PER_COPY]
            self._submit(lambda batch=batch: self._save(batch), urgent=False)  # type: ignore[misc]

    def abort(self, step: int) -> None:
        """Stop the step's synchronous loads, and return when none of them writes any more."""
        with self._lock:
            loads = list(self._step_loads.get(step, ()))
        for copy in loads:
            copy.abort.numpy()[0] = 1
        for copy in loads:
            copy.quiescent.wait()

    def poll(self) -> None:
        """A copy in memory needs no watching."""

    def close(self) -> None:
        """Stop. May be called twice."""
        self._stop.numpy()[0] = 1
        if self._thread is not None:
            self._thread.close()

    # ---- on the thread

    def _copy_in(self, copy: _CopyIn) -> None:
        """The next layer of a load; the last one ends it."""
        began, error = time.monotonic(), None
        try:
            if copy_list(self._descriptors(copy.layer, copy.blocks, copy.slots, load=True), copy.abort) < len(copy.blocks):
                error = "the load was stopped"
            elif copy.transfers:
                copy.ledger.end_transfer(copy.transfers[copy.layer])
        except Exception as problem:
            logger.exception("the load of request %s from host memory failed", copy.load.req_id)
            error = f"the copy thread raised {type(problem).__name__}: {problem}"
        copy.seconds += time.monotonic() - began
        if error is None:
            copy.layer += 1
            if copy.layer < self._num_layers:
                self._submit(lambda: self._copy_in(copy), urgent=True)
                return
        self._end(copy, error)

    def _end(self, copy: _CopyIn, error: str | None) -> None:
        """Nothing is written for the load any more. The step that waits for it hears of its bad keys as well."""
        load, landed = copy.load, len(copy.blocks) if error is None else 0
        if landed:
            self.reports.note_speed(landed * self._num_layers * self._block_bytes, copy.seconds)
        bad = load.keys[landed : landed + 1] if landed == load.num_available else ()
        self.reports.end_load(EndedLoad(load, landed, bad))
        try:
            for transfer in copy.transfers[copy.layer :]:
                copy.ledger.end_transfer(transfer, error)
            for transfer in copy.missing:
                copy.ledger.end_transfer(transfer, "the tier no longer has the block")
        finally:
            with self._lock:
                others = [other for other in self._step_loads.pop(copy.step, ()) if other is not copy]
                if others:
                    self._step_loads[copy.step] = others
            copy.quiescent.set()

    def _save(self, saves: Sequence[TierSave]) -> None:
        blocks = np.array([save.block_id for save in saves], np.int64)
        slots = np.array([save.place for save in saves], np.int64)
        stored = False
        try:
            stored = all(
                copy_list(self._descriptors(layer, blocks, slots, load=False), self._stop) == len(saves) for layer in range(self._num_layers)
            )
        except Exception:
            logger.exception("blocks could not be saved to host memory")
        self.reports.end_saves([save.save_id for save in saves], stored)

    # ---- below

    def _begin(self, load: TierLoad, step: int, ledger: Ledger) -> tuple[list[int], list[int]]:
        """One transfer per layer for what is there, and one for what has gone."""
        block_size = (load.stop - load.start) // len(load.block_ids)
        middle = load.start + load.num_available * block_size

        def begin(start: int, stop: int) -> list[int]:
            return [ledger.begin_transfer(step, load.req_id, layer, start, stop) for layer in range(self._num_layers)] if start < stop else []

        return begin(load.start, middle), begin(middle, load.stop)

    def _descriptors(self, layer: int, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], *, load: bool) -> npt.NDArray[np.int64]:
        in_pool = self._layer_addresses[layer] + blocks * self._block_bytes
        in_tier = self.memory.address + (slots * self._num_layers + layer) * self._block_bytes
        size = np.full(len(blocks), self._block_bytes, np.int64)
        return np.stack([in_pool, in_tier, size] if load else [in_tier, in_pool, size], axis=1)

    def _submit(self, job: Callable[[], None], *, urgent: bool) -> None:
        assert self._thread is not None, "the tier is used before register"
        self._thread.submit(job, urgent=urgent)
