"""Time as the ledger, the leases and the deadlines see it: injectable, so that a test moves it by hand."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock (seconds) that can also wake a waiter."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""

    def wait_until(self, condition: threading.Condition, deadline: float) -> None:
        """Wait on `condition`, which the caller holds, until it is notified or `deadline` has passed. May return early."""


class MonotonicClock:
    """The machine's monotonic clock: other hosts' have another start."""

    def now(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()

    def wait_until(self, condition: threading.Condition, deadline: float) -> None:
        """See `Clock.wait_until`."""
        condition.wait(max(0.0, deadline - time.monotonic()))


class VirtualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._now = start
        self._waiting: list[threading.Condition] = []
        self._arrived = threading.Condition(self._lock)

    def now(self) -> float:
        """Seconds since the start, as advanced."""
        with self._lock:
            return self._now

    def wait_until(self, condition: threading.Condition, deadline: float) -> None:
        """See `Clock.wait_until`."""
        with self._lock:
            if self._now >= deadline:
                return
            self._waiting.append(condition)
            self._arrived.notify_all()
        try:
            condition.wait()
        finally:
            with self._lock:
                self._waiting.remove(condition)

    def advance(self, seconds: float) -> None:
        """Move time on and wake every waiter, so that it looks at its deadline again."""
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        # A waiter holds its condition from its look at the clock until it sleeps, so this notification cannot be lost.
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait_for_waiters(self, count: int, timeout: float = 30.0) -> None:
        """Block (real time) until `count` threads wait on this clock: how a test knows that the code under test is waiting."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._waiting) >= count, timeout):
                raise TimeoutError(f"{len(self._waiting)} threads wait on the virtual clock after {timeout:g} s, expected {count}")
