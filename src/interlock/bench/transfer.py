"""Moving bytes between two processes: each transport, beside what it is made of, over the same lists in one run."""

import contextlib
import ctypes
import importlib.util
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from interlock.bench.measure import Figure, alternate, compare
from interlock.bench.raw_nixl import RawNixl
from interlock.bench.session import Session
from interlock.bench.transfer_peer import RAW_NIXL, Endpoint, Peer, PoolSize
from interlock.core.buffer import Buffer
from interlock.core.errors import InterlockError
from interlock.graphs.copy import COPY_LIST
from interlock.kernels import native
from interlock.kv_transfer.transports.peer_client import PeerPool
from interlock.kv_transfer.transports.shared_memory import allocate_pool
from interlock.kv_transfer.transports.transport import Descriptors

MEMCPY: Final = "memcpy"
SHARED_MEMORY: Final = "shared_memory"
NIXL: Final = "nixl"
SIZES: Final = tuple(2**power * 1024 for power in range(0, 17, 2))
PROMISED: Final = {SHARED_MEMORY: (MEMCPY, 0.85), NIXL: (RAW_NIXL, 0.9)}
"""Each transport's opponent, and which share of its bytes per second it is to reach, from `_PROMISED_FROM` on and on lists of blocks."""

_PROMISED_FROM = 4 * 2**20
_SAMPLE_BYTES = 64 * 2**20  # moved in one sample,
_SAMPLE_TRANSFERS = 200  # or so many transfers, whichever is less
_TURNS = 3  # of each way in a round
_LABELS = {SHARED_MEMORY: "shared memory", NIXL: "NIXL", MEMCPY: "memcpy", RAW_NIXL: "raw NIXL"}

Move = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentList:
    """Offsets `[n, 3]` of (destination, source, bytes) into the two pools, posted in `posts` equal parts, each awaited before the next."""

    name: str
    offsets: Descriptors
    promised: bool
    posts: int = 1

    @property
    def nbytes(self) -> int:
        """All bytes of the list."""
        return int(self.offsets[:, 2].sum())


def segment_lists(size: PoolSize, sizes: Sequence[int] = SIZES, blocks: int = 16) -> list[SegmentList]:
    """One segment of each of `sizes`; and `blocks` scattered blocks of every layer, all at once and layer by layer."""
    lists = [SegmentList(_bytes(nbytes), np.array([[0, 0, nbytes]], np.int64), nbytes >= _PROMISED_FROM) for nbytes in sizes]
    shape, draw = size.shape, np.random.default_rng(0)
    ours, theirs = (draw.permutation(size.num_blocks)[:blocks] for _ in range(2))
    layers = np.arange(size.num_layers)[:, None] * shape.layer_bytes
    destinations, sources = ((layers + chosen * shape.block_bytes).ravel() for chosen in (ours, theirs))
    scattered = np.stack([destinations, sources, np.full(len(sources), shape.block_bytes)], axis=1).astype(np.int64)
    name = f"{size.num_layers} layers of {blocks} blocks of {_bytes(shape.block_bytes)}"
    return [*lists, SegmentList(name, scattered, True), SegmentList(f"{name}, one by one", scattered, False, size.num_layers)]


class Ways:
    """The ways of moving bytes out of another process's pool into one of ours, by name; opened together, measured in turn."""

    def __init__(self, size: PoolSize, names: Sequence[str]) -> None:
        native.load([COPY_LIST])
        self.names = tuple(names)
        self.pool = allocate_pool(size.nbytes)
        self._opened = contextlib.ExitStack()
        self._opened.callback(self.pool.close)
        self._pools: dict[str, PeerPool] = {}
        self._raw: RawNixl | None = None
        self._abort = Buffer.zeros((1,), "int64")
        try:
            self._open(size)
        except BaseException:
            self.close()
            raise

    def prepare(self, way: str, segments: SegmentList) -> Move:
        """A transfer of the list that can be made again and again."""
        moves = [self._prepare(way, part) for part in np.split(segments.offsets, segments.posts)]
        if len(moves) == 1:
            return moves[0]

        def move() -> None:
            for part in moves:
                part()

        return move

    def check(self, segments: SegmentList, move: Move, way: str) -> None:
        """Make a transfer into cleared memory. Raises InterlockError unless every byte is the peer's."""
        ours, theirs = self.pool.buffer.numpy(), self.source.numpy()
        for destination, _, nbytes in segments.offsets:
            ours[destination : destination + nbytes] = 0
        move()
        for destination, source, nbytes in segments.offsets:
            if not np.array_equal(ours[destination : destination + nbytes], theirs[source : source + nbytes]):
                raise InterlockError(f"{_LABELS[way]}: {segments.name}: what was moved is not what the other process holds")

    def close(self) -> None:
        """End the other process and give the memory back."""
        self._opened.close()

    def _open(self, size: PoolSize) -> None:
        engine_id = f"bench-{uuid.uuid4().hex}"
        self._peer = self._opened.enter_context(contextlib.closing(Peer(engine_id, size, [name for name in self.names if name != MEMCPY])))
        self._peer.mapping.prefault()
        self.source = self._peer.mapping.buffer
        for kind in (SHARED_MEMORY, NIXL):
            if kind in self.names:
                endpoint = self._opened.enter_context(contextlib.closing(Endpoint(kind, f"{engine_id}-reader", size, self.pool)))
                self._pools[kind] = endpoint.open(engine_id, self._peer.reply.ports[kind])
                self._pools[kind].memory.prefault()
        if RAW_NIXL in self.names:
            self._raw = RawNixl(f"{engine_id}-reader", self.pool.buffer)
            self._raw.connect(self._peer.reply.agent)

    def _prepare(self, way: str, offsets: Descriptors) -> Move:
        if way == MEMCPY:
            return self._memcpy(offsets + self._bases(self.source.address))
        if way == RAW_NIXL:
            assert self._raw is not None
            return self._raw.reader(offsets + self._bases(self._peer.reply.pool_address))
        memory = self._pools[way].memory
        descriptors = offsets + self._bases(memory.address)

        def move() -> None:
            memory.post("read", descriptors, self._abort).wait(lambda: False)

        return move

    def _bases(self, source: int) -> Descriptors:
        return np.array([self.pool.buffer.address, source, 0], np.int64)

    def _memcpy(self, descriptors: Descriptors) -> Move:
        """libc's memcpy for one segment; for a list, a native loop of it."""
        if len(descriptors) == 1:
            copy = ctypes.CDLL(None).memcpy
            copy.restype, copy.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
            destination, source, nbytes = (int(value) for value in descriptors[0])
            return lambda: copy(destination, source, nbytes)
        loop: Callable[..., Any] = COPY_LIST.callable()
        return lambda: loop(descriptors.ctypes.data, len(descriptors), self._abort.address)


def run(session: Session) -> list[Figure]:
    """Every list, with all ways in turn. NIXL where it is installed."""
    names = [SHARED_MEMORY, MEMCPY, *([NIXL, RAW_NIXL] if importlib.util.find_spec("nixl_cu12") else [])]
    size = PoolSize()
    session.say("transfer: starting the other process")
    with contextlib.closing(Ways(size, names)) as ways:
        return measure(ways, segment_lists(size), session.rounds, session.say)


def measure(ways: Ways, lists: Sequence[SegmentList], rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """One figure for each list and transport, in GB/s, and one for the time of the smallest list, in microseconds."""
    figures: list[Figure] = []
    seconds: dict[str, dict[str, tuple[float, ...]]] = {}
    for segments in lists:
        say(f"transfer: {segments.name}")
        seconds[segments.name] = alternate(_TURNS * rounds, {way: partial(_sample, ways, way, segments) for way in ways.names})
    for way, (opponent, share) in PROMISED.items():
        if way not in ways.names:
            continue
        for segments in lists:
            samples = {_LABELS[name]: _rates(segments, seconds[segments.name][name]) for name in (way, opponent)}
            figures.append(compare(f"{_LABELS[way]}: {segments.name}", "GB/s", samples, bound=share if segments.promised else None))
        least = min(lists, key=lambda segments: segments.nbytes)
        overhead = {_LABELS[name]: tuple(value * 1e6 for value in seconds[least.name][name]) for name in (way, opponent)}
        figures.append(compare(f"{_LABELS[way]}: a transfer of {least.name}", "µs", overhead, sense="at most"))
    return figures


def _sample(ways: Ways, way: str, segments: SegmentList, number: int) -> float:
    """Seconds of one transfer, as the mean of several in a row."""
    move = ways.prepare(way, segments)
    ways.check(segments, move, way)
    count = max(1, min(_SAMPLE_TRANSFERS, _SAMPLE_BYTES // segments.nbytes))
    begin = time.perf_counter()
    for _ in range(count):
        move()
    return (time.perf_counter() - begin) / count


def _rates(segments: SegmentList, seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(segments.nbytes / value / 1e9 for value in seconds)


def _bytes(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 1024} KiB"
