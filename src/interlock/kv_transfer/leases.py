"""Leases: how long a producer keeps the blocks of a finished request for its consumer."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable

from interlock.kv_transfer.clock import Clock

logger = logging.getLogger(__name__)

_REMEMBERED_NOTICES = 4096


class LeaseTable:
    """The leases of one producer, by id: the signature of the reference, which nobody guesses. Consumers' notices come in on another
    thread than the engine's steps.

    A notice may overtake the step that grants its lease; it is remembered (the last 4096) and ends the lease when it is granted.
    """

    def __init__(self, clock: Clock, duration: float) -> None:
        self.duration = duration
        self.expired = 0
        self.unknown_notices = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._expiry: dict[str, float] = {}
        self._owners: dict[str, str] = {}
        self._ended: set[str] = set()
        self._early: OrderedDict[str, None] = OrderedDict()

    def now(self) -> float:
        """Seconds of the clock that ends of leases are counted in."""
        return self._clock.now()

    def grant(self, lease_id: str, request_id: str) -> None:
        """A lease of a request's blocks begins; it runs for `duration` seconds."""
        with self._lock:
            if lease_id in self._early:
                del self._early[lease_id]
                self._ended.add(lease_id)
            else:
                self._expiry[lease_id] = self._clock.now() + self.duration
                self._owners[lease_id] = request_id

    def extend(self, lease_ids: Iterable[str]) -> dict[str, float]:
        """A consumer's heartbeat: the new end of each lease that exists."""
        with self._lock:
            now = self._clock.now()
            alive = {i: now + self.duration for i in lease_ids if self._expiry.get(i, now) > now}
            self._expiry.update(alive)
            return alive

    def done(self, lease_id: str) -> None:
        """The consumer needs the blocks no longer."""
        with self._lock:
            if self._expiry.pop(lease_id, None) is not None:
                del self._owners[lease_id]
                self._ended.add(lease_id)
                return
            self._early[lease_id] = None
            while len(self._early) > _REMEMBERED_NOTICES:
                self._early.popitem(last=False)
                self.unknown_notices += 1

    def take_ended(self) -> frozenset[str]:
        """Leases that have ended since the last call: by notice, or by time."""
        with self._lock:
            now = self._clock.now()
            for lease_id in [i for i, expiry in self._expiry.items() if expiry <= now]:
                logger.warning("the lease of request %r expired: %g s without a word from its consumer", self._owners.pop(lease_id), self.duration)
                del self._expiry[lease_id]
                self._ended.add(lease_id)
                self.expired += 1
            ended, self._ended = frozenset(self._ended), set()
            return ended

    @property
    def held(self) -> int:
        """Number of leases that run."""
        with self._lock:
            return len(self._expiry)
