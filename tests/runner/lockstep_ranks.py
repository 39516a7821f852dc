"""Ranks of a data-parallel engine as threads of one process, and a group that counts what passes through it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

WATCHDOG_SECONDS = 60.0


class ThreadGroup:
    """One rank's end of a group whose ranks are threads. A collective that some rank does not join breaks it after `watchdog` seconds."""

    def __init__(self, rank: int, rows: list[Sequence[int]], barrier: threading.Barrier, watchdog: float) -> None:
        self.size = len(rows)
        self.collectives = 0
        self.gathered: list[list[list[int]]] = []
        self.barrier = barrier
        self._rank = rank
        self._rows = rows
        self._watchdog = watchdog

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        self.collectives += 1
        self._rows[self._rank] = list(values)
        self.barrier.wait(self._watchdog)
        gathered = [list(row) for row in self._rows]
        self.barrier.wait(self._watchdog)
        self.gathered.append(gathered)
        return gathered

    def close(self) -> None:
        pass


def thread_groups(size: int, watchdog: float = WATCHDOG_SECONDS) -> list[ThreadGroup]:
    """The ends of one group."""
    rows: list[Sequence[int]] = [[]] * size
    barrier = threading.Barrier(size)
    return [ThreadGroup(rank, rows, barrier, watchdog) for rank in range(size)]


class FixedGroup:
    """A group of two whose other rank always says the same: `row`."""

    size = 2

    def __init__(self, row: Sequence[int]) -> None:
        self.row = list(row)
        self.collectives = 0

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        self.collectives += 1
        return [list(values), self.row]

    def close(self) -> None:
        pass


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls at the same time, one thread each; their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(2 * WATCHDOG_SECONDS) for future in [pool.submit(call) for call in calls]]


def pool_bytes(runner: Any) -> npt.NDArray[np.uint8]:
    """A copy of a runner's whole KV pool, layer by layer."""
    return np.concatenate([layer.numpy().view(np.uint8).reshape(-1) for layer in runner.kv_cache.layers])
