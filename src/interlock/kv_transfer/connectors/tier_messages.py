"""What the two halves of a tier connector (offload, storage) tell each other with a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Positions [start, stop) of a request, whole blocks, are to be loaded into `block_ids`.

    keys: of the blocks' content; places: where the tier keeps it, None where it has gone since it was looked up.
    synchronous: the step that carries the load consumes it.
    """

    load_id: int
    req_id: str
    start: int
    stop: int
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    places: tuple[int | None, ...]
    synchronous: bool

    @property
    def num_available(self) -> int:
        """How many of its first blocks the tier still has."""
        return next((index for index, place in enumerate(self.places) if place is None), len(self.places))


@dataclass(frozen=True, slots=True)
class TierSave:
    """A block whose KV is to be kept. Until the worker half has let go of it, the block is quarantined. place: where it goes."""

    save_id: int
    key: bytes
    block_id: int
    place: int


@dataclass(frozen=True, slots=True)
class TierMetadata:
    """Scheduler half → worker half, with every step."""

    loads: tuple[TierLoad, ...] = ()
    saves: tuple[TierSave, ...] = ()


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that writes nothing any more. num_landed: its first blocks that have landed; bad_keys: what the tier could not deliver."""

    load: TierLoad
    num_landed: int
    bad_keys: tuple[bytes, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all of it has landed."""
        return self.num_landed == len(self.load.block_ids)


@dataclass(frozen=True, slots=True)
class TierWorkerMeta:
    """Worker half → scheduler half, with every step. released: saves whose block is not read any more; stored: saves that have ended,
    each with whether the tier now has the content; loads: that have ended; bytes_per_second: of loads, as measured, None before the first."""

    released: tuple[int, ...] = ()
    stored: tuple[tuple[int, bool], ...] = ()
    loads: tuple[EndedLoad, ...] = ()
    bytes_per_second: float | None = None
