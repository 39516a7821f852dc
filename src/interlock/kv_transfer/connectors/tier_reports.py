"""What the threads of a tier have to say to the step's thread."""

from collections.abc import Iterable, Sequence
from threading import Lock

from interlock.kv_transfer.connector import KVConnectorTransferResults
from interlock.kv_transfer.connectors.tier_messages import EndedLoad, TierWorkerMeta

_SMOOTHING = 0.2  # weight of the newest load in the measured speed


class TierReports:
    """Collects ends of loads and saves from any thread; the step's thread takes them in `results`, `bad_blocks` and `worker_meta`, in this order."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ended: list[EndedLoad] = []
        self._taken: list[EndedLoad] = []
        self._released: list[int] = []
        self._stored: list[tuple[int, bool]] = []
        self._bytes_per_second: float | None = None
        self.counters = {"num_loaded_blocks": 0, "num_failed_loads": 0, "num_saved_blocks": 0, "num_failed_saves": 0}

    def end_load(self, ended: EndedLoad) -> None:
        """A load has ended; nothing is written for it any more."""
        with self._lock:
            self._ended.append(ended)
            self.counters["num_loaded_blocks"] += ended.num_landed
            self.counters["num_failed_loads"] += not ended.complete

    def note_speed(self, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` took this long."""
        speed = nbytes / max(seconds, 1e-9)
        with self._lock:
            known = self._bytes_per_second
            self._bytes_per_second = speed if known is None else _SMOOTHING * speed + (1 - _SMOOTHING) * known

    def release_saves(self, save_ids: Iterable[int]) -> None:
        """The blocks of these saves are not read any more."""
        with self._lock:
            self._released += save_ids

    def store_save(self, save_id: int, stored: bool) -> None:
        """A save has ended."""
        with self._lock:
            self._store([save_id], stored)

    def end_saves(self, save_ids: list[int], stored: bool) -> None:
        """Saves have ended, and their blocks are not read any more: one report says both."""
        with self._lock:
            self._released += save_ids
            self._store(save_ids, stored)

    def results(self) -> KVConnectorTransferResults:
        """The asynchronous loads that have ended since the last call."""
        with self._lock:
            taken, self._ended = self._ended, []
        self._taken += taken
        ended = [end for end in taken if not end.load.synchronous]
        return KVConnectorTransferResults(
            finished_recving=frozenset(end.load.req_id for end in ended),
            failed_recving=frozenset(end.load.req_id for end in ended if not end.complete),
        )

    def bad_blocks(self) -> set[int]:
        """Blocks of the loads in the last `results` that have not landed. Those of synchronous loads are known to the ledger."""
        return {block for end in self._taken if not end.load.synchronous for block in end.load.block_ids[end.num_landed :]}

    def worker_meta(self) -> TierWorkerMeta:
        """The report to the scheduler half; the loads in it are those of the last `results`."""
        with self._lock:
            meta = TierWorkerMeta(tuple(self._released), tuple(self._stored), tuple(self._taken), self._bytes_per_second)
            self._released, self._stored, self._taken = [], [], []
            return meta

    def take_counters(self) -> dict[str, float]:
        """Counts since the last call."""
        with self._lock:
            counts = {name: float(value) for name, value in self.counters.items()}
            self.counters = dict.fromkeys(self.counters, 0)
            return counts

    def _store(self, save_ids: Sequence[int], stored: bool) -> None:
        self._stored += [(save_id, stored) for save_id in save_ids]
        self.counters["num_saved_blocks" if stored else "num_failed_saves"] += len(save_ids)
