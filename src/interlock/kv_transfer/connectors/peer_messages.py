"""What the two halves of the peer connector tell each other with a step."""

from dataclasses import dataclass, field

from interlock.core.step import LoadPromise
from interlock.kv_transfer.references import RemoteReference, TransferName


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Positions to be filled from what a reference stands for. `void`: why it must not be read; it then fails with that cause.

    parked: the request waits outside the steps for it.
    """

    promise: LoadPromise
    reference: RemoteReference
    void: str | None = None
    parked: bool = False


@dataclass(frozen=True, slots=True)
class PushChunk:
    """WRITE mode: positions [start, stop) of a transfer have KV once the `written` timelines have reached `stamp`.

    block_ids: all blocks of the request up to `stop`, from position 0; generations: theirs.
    """

    transfer: TransferName
    start: int
    stop: int
    stamp: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks of our request `request_id` are kept for who holds the reference with this signature. transfer: if they are pushed."""

    signature: str
    request_id: str
    transfer: TransferName | None = None


@dataclass(frozen=True, slots=True)
class RefusedPush:
    """A transfer that will never be complete, and why. request_id: whose blocks are kept until nothing reads them; None: nobody's."""

    transfer: TransferName
    cause: str
    request_id: str | None


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """Scheduler half → worker half, with every step.

    loads: this step's reads; leases: that begin; generations: new ones, by block; kept: references whose leases are to be extended;
    released: references that are needed no longer; cancelled: requests that wait for their load no longer. chunks: to be pushed;
    withdrawn: transfers whose blocks are given up for now; ended: transfers that will never be complete.
    """

    loads: tuple[PeerLoad, ...] = ()
    leases: tuple[Lease, ...] = ()
    generations: tuple[tuple[int, int], ...] = ()
    kept: tuple[RemoteReference, ...] = ()
    released: tuple[RemoteReference, ...] = ()
    cancelled: tuple[str, ...] = ()
    chunks: tuple[PushChunk, ...] = ()
    withdrawn: tuple[TransferName, ...] = ()
    ended: tuple[RefusedPush, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerWorkerMeta:
    """Worker half → scheduler half, with every step. epoch: this life of our pool, None if we hand nothing over; key: which references of
    this life are signed with; host, port: of its side channel; ended_loads: requests whose reads have ended, well or not;
    bytes_per_second: as measured, None before the first."""

    epoch: int | None
    ended_loads: frozenset[str] = frozenset()
    host: str | None = None
    port: int | None = None
    key: bytes = field(default=b"", repr=False)
    bytes_per_second: float | None = None
