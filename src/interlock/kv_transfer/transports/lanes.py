"""A thread for each peer: what one peer holds up, it holds up for itself alone."""

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 30.0  # after which a peer's thread ends; the next task starts another one
_MAX_LANES = 256  # peers with a thread to themselves; beyond, some share one of
_SHARED_LANES = 16

Task = TypeVar("Task")


class Lanes(Generic[Task]):
    """Runs tasks, those of one peer in order, those of different peers side by side. name: of the threads; run: what is done with a
    task; it should raise nothing."""

    def __init__(self, name: str, run: Callable[[Task], None]) -> None:
        self._name = name
        self._run = run
        self._lock = threading.Lock()
        self._queues: dict[Hashable, queue.SimpleQueue[tuple[Hashable, Task] | None]] = {}
        self._threads: dict[Hashable, threading.Thread] = {}
        self._lane_of: dict[Hashable, Hashable] = {}  # of the peers that have tasks
        self._num_tasks: dict[Hashable, int] = {}  # of each of them
        self._closed = False

    def put(self, peer: Hashable, task: Task) -> None:
        """Have a task run; returns at once. After `close` nothing is run any more."""
        with self._lock:
            if self._closed:
                return
            lane = self._lane_of.get(peer)
            if lane is None:
                has_own = peer in self._queues or len(self._queues) < _MAX_LANES
                lane = self._lane_of[peer] = peer if has_own else hash(peer) % _SHARED_LANES
            tasks = self._queues.get(lane)
            if tasks is None:
                tasks = self._queues[lane] = queue.SimpleQueue()
                thread = self._threads[lane] = threading.Thread(target=self._serve, args=(lane, tasks), name=self._name, daemon=True)
                thread.start()
            self._num_tasks[peer] = self._num_tasks.get(peer, 0) + 1
            tasks.put((peer, task))

    def is_busy(self, peer: Hashable) -> bool:
        """Whether a task of the peer is waiting or being run."""
        with self._lock:
            return peer in self._num_tasks

    def close(self) -> None:
        """Run what is waiting, and end the threads. May be called twice."""
        with self._lock:
            self._closed = True
            threads = list(self._threads.values())
            for tasks in self._queues.values():
                tasks.put(None)
        for thread in threads:
            thread.join()

    def _serve(self, lane: Hashable, tasks: "queue.SimpleQueue[tuple[Hashable, Task] | None]") -> None:
        while True:
            try:
                item = tasks.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                item = None
            if item is None:
                with self._lock:
                    if tasks.empty():
                        del self._queues[lane], self._threads[lane]
                        return
                continue
            peer, task = item
            try:
                self._run(task)
            except Exception:
                logger.exception("a task of %s failed", self._name)
            del item, task  # what it holds of a peer's memory is let go now, not with the next task
            with self._lock:
                self._num_tasks[peer] -= 1
                if not self._num_tasks[peer]:
                    del self._num_tasks[peer], self._lane_of[peer]
