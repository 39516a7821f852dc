"""What a step was promised, layer by layer: what of it is being read, what has landed, and the verdict in the end.

Nothing here locks: the records belong to the ledger, which changes them under its lock.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A promise that was not kept: positions from `first_invalid_position` on, and the local blocks that hold them."""

    req_id: str
    first_invalid_position: int
    block_ids: tuple[int, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a step's promises. landed_positions: summed over layers."""

    failures: tuple[LoadFailure, ...] = ()
    landed_positions: int = 0

    @property
    def invalid_block_ids(self) -> frozenset[int]:
        """Local blocks whose content is not what was promised."""
        return frozenset(block for failure in self.failures for block in failure.block_ids)

    @property
    def load_errors(self) -> dict[str, str]:
        """Cause per request."""
        return {failure.req_id: failure.cause for failure in self.failures}


@dataclass(slots=True, eq=False)
class Piece:
    """One promise, one layer. `ended`: positions whose transfer has ended; `closed`: nothing that comes now can change it."""

    promise: LoadPromise
    layer: int
    issued: list[tuple[int, int]] = field(default_factory=list)
    landed: list[tuple[int, int]] = field(default_factory=list)
    ended: int = 0
    closed: bool = False
    cause: str | None = None

    @property
    def start(self) -> int:
        """The first promised position."""
        return self.promise.start

    @property
    def stop(self) -> int:
        """The position behind the last promised one."""
        return self.promise.stop

    @property
    def first_invalid(self) -> int:
        """The first promised position that has not landed; `stop` if all have."""
        position = self.start
        for start, stop in sorted(self.landed):
            if start > position:
                break
            position = max(position, stop)
        return position

    @property
    def complete(self) -> bool:
        """Whether every promised position has landed."""
        return self.first_invalid >= self.stop

    def issue(self, start: int, stop: int) -> None:
        """Positions [start, stop) are about to be read. Raises KVTransferError if they were not promised, or are read twice."""
        if not self.start <= start < stop <= self.stop:
            raise KVTransferError(
                f"request {self.promise.req_id!r}, layer {self.layer}: positions [{start}, {stop}) leave the promised [{self.start}, {self.stop})"
            )
        if any(start < other_stop and other_start < stop for other_start, other_stop in self.issued):
            raise KVTransferError(f"request {self.promise.req_id!r}, layer {self.layer}: positions [{start}, {stop}) are read twice")
        self.issued.append((start, stop))

    def cut(self, position: int) -> None:
        """Positions from `position` on have not landed."""
        self.landed = [(start, min(stop, position)) for start, stop in self.landed if start < position]

    def block_positions(self, block_size: int) -> list[tuple[int, int]]:
        """Per block of the promise: its id and the first promised position in it."""
        first = self.start // block_size
        return [(block, max(self.start, (first + i) * block_size)) for i, block in enumerate(self.promise.block_ids)]


@dataclass(slots=True, eq=False)
class Transfer:
    """A read of positions [start, stop) of a piece, in `step`."""

    step: int
    piece: Piece
    start: int
    stop: int
    ended: bool = False


@dataclass(slots=True, eq=False)
class StepRecord:
    """What an open step was promised. awaited: the layers that each waiter waits for; expired: it gave up on something."""

    step: int
    deadline: float
    timeout: float
    by_layer: list[list[Piece]]
    open_pieces: list[int]  # per layer
    by_request: dict[str, list[Piece]] = field(default_factory=dict)
    published: set[int] = field(default_factory=set)
    awaited: list[Sequence[int]] = field(default_factory=list)
    expired: bool = False

    def is_open(self, layers: Sequence[int]) -> bool:
        """Whether something of these layers has not ended."""
        return any(self.open_pieces[layer] for layer in layers)

    def all_pieces(self) -> Iterator[Piece]:
        """The pieces of all layers."""
        return itertools.chain.from_iterable(self.by_layer)

    @property
    def timeout_cause(self) -> str:
        """What is said of a piece that the deadline has caught."""
        return f"it had not landed {self.timeout:g} s after the step began (kv_load_timeout)"

    def verdict(self, block_size: int) -> Verdict:
        """What became of the promises, per request from the first position on that is not there in every layer."""
        failures = []
        for req_id, pieces in self.by_request.items():
            worst = min(pieces, key=lambda piece: piece.first_invalid)
            if not worst.complete:
                first = worst.first_invalid
                skipped = first // block_size - worst.start // block_size
                cause = f"layer {worst.layer}, position {first}: {worst.cause or 'it was never read'}"
                failures.append(LoadFailure(req_id, first, worst.promise.block_ids[skipped:], cause))
        landed = sum(piece.first_invalid - piece.start for piece in self.all_pieces())
        return Verdict(tuple(failures), landed)
