"""What the two halves of the multi connector tell each other with a step. A child is named by its place in the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from interlock.kv_transfer.connector import KVConnectorTransferResults


@dataclass(frozen=True, slots=True)
class OwnedLoad:
    """A load that begins: the child that makes it, the blocks that it writes, and whether the step that carries it consumes it."""

    req_id: str
    child: int
    block_ids: tuple[int, ...]
    synchronous: bool = False


@dataclass(frozen=True, slots=True)
class LostMetadata:
    """In place of a child's metadata: why it has none for the step."""

    cause: str


@dataclass(frozen=True, slots=True)
class MultiMetadata:
    """Scheduler half → worker half, with every step. children: their own metadata, or `LostMetadata`; loads: that begin; keepers: per
    finished request whose blocks are kept, the children that keep them."""

    children: tuple[Any, ...]
    loads: tuple[OwnedLoad, ...] = ()
    keepers: tuple[tuple[str, frozenset[int]], ...] = ()


@dataclass(frozen=True, slots=True)
class ChildReport:
    """What a child's worker half reported in a step, as far as it counts."""

    results: KVConnectorTransferResults
    worker_meta: Any
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultiWorkerMeta:
    """Worker half → scheduler half, with every step."""

    children: tuple[ChildReport, ...]
