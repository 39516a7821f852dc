"""Threads that share an engine take turns at it: one thread drives it at a time."""

import os
import threading
from types import TracebackType
from typing import Protocol

from interlock.core import interrupts
from interlock.core.errors import RequestError


class Turns:
    """A lock that is handed on: a thread that gives it back and asks again goes behind one that waits.

    Waiting for it is a safe point; whoever takes it defers interrupts. It may be nested, so that a signal's handler can use what it guards.
    In a forked child, which has neither the engine's threads nor the one that may have had the turn, asking for it is a RequestError.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._next = threading.Lock()
        self._thread = _Depth()

    @property
    def inside(self) -> bool:
        """Whether this thread has the turn, or waits for it: so is what runs unasked in the midst of it, a generator that is garbage for one."""
        return self._thread.depth > 0

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one whose engine it is."""
        return os.getpid() != self._process

    @property
    def awaited(self) -> bool:
        """Whether some thread waits for its turn, or is about to take it."""
        return self._next.locked()

    def __enter__(self) -> None:
        if self.forked:
            raise RequestError(
                f"the engine belongs to process {self._process}, expected one of this process, which was forked from it; "
                "spawn processes, or make a new engine in each"
            )
        self._thread.depth += 1
        try:
            if self._thread.depth > 1:
                _acquire(self._lock)
                return
            _acquire(self._next)
            try:
                _acquire(self._lock)
            finally:
                self._next.release()
        except BaseException:
            self._thread.depth -= 1
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()
        self._thread.depth -= 1


class _Depth(threading.local):
    """How often a thread has asked for the turn and not given it back."""

    depth = 0


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Whether it could be taken within `timeout` seconds."""


def _acquire(lock: _Lock) -> None:
    while not lock.acquire(timeout=interrupts.SLICE_SECONDS):
        interrupts.deliver()
