"""What the two halves of the peer connector tell each other with a step."""

from dataclasses import dataclass

from interlock.core.step import LoadPromise
from interlock.kv_transfer.references import RemoteReference


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """A promise to be kept by reading a reference. `void`: why it must not be read; it then fails with that cause."""

    promise: LoadPromise
    reference: RemoteReference
    void: str | None = None


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """Scheduler half → worker half, with every step.

    loads: this step's reads; leases: that begin, each as its id and our request whose blocks are kept; generations: new ones, by
    block; kept: references whose leases are to be extended; released: references that are needed no longer.
    """

    loads: tuple[PeerLoad, ...] = ()
    leases: tuple[tuple[str, str], ...] = ()
    generations: tuple[tuple[int, int], ...] = ()
    kept: tuple[RemoteReference, ...] = ()
    released: tuple[RemoteReference, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerWorkerMeta:
    """Worker half → scheduler half, with every step. epoch: this life of our pool, None if we hand nothing over; ended_loads: requests
    whose reads have ended, well or not."""

    epoch: int | None
    ended_loads: frozenset[str] = frozenset()
