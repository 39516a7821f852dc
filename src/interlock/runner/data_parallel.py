"""Data parallel: the ranks' one collective per step, over `torch.distributed` gloo, and what they agree in it about the steps to come.

torch is imported here and nowhere else for this, and only in an engine whose ranks run in lockstep.
"""

import importlib
import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from interlock.core import interrupts
from interlock.core.config import EngineConfig
from interlock.core.errors import ConfigError, DataParallelError

START_SECONDS = 600.0  # for the slowest rank to come up
STEP_SECONDS = 1800.0  # for the slowest rank to come to a step; a rank that dies is noticed at once

_SLICE = timedelta(seconds=interrupts.SLICE_SECONDS)  # the longest wait in which no signal is served

_AGREED = ("data_parallel_size", "cudagraph_mode", "enforce_eager", "capture_sizes", "max_num_seqs", "max_num_batched_tokens")


class DataParallelGroup(Protocol):
    """The ranks that agree on each step. `all_gather` is a collective: every rank calls it exactly once per step."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """The values of all ranks, in rank order. Raises DataParallelError when another rank is gone."""

    def close(self) -> None:
        """Leave the group."""


class GlooGroup:
    """A group over gloo. Rank 0 listens at `address`:`port`; all ranks come together when they make their object.

    options: what all ranks must have in common, by name; a difference is a ConfigError that names both values.
    Raises DataParallelError if the ranks do not come together.
    """

    def __init__(self, rank: int, size: int, address: str, port: int, *, options: Mapping[str, str] | None = None) -> None:
        try:
            torch: Any = importlib.import_module("torch")
            dist: Any = importlib.import_module("torch.distributed")
        except ImportError:
            raise ConfigError("data_parallel_lockstep needs PyTorch, which is not installed; run pip install 'interlock[torch]'") from None
        self.rank = rank
        self.size = size
        self._torch = torch
        self._broken: str | None = None
        try:
            store = _make_store(dist, rank, size, address, port)
            _compare_options(store, rank, size, options or {})
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, _gloo_options(dist, address))
        except (RuntimeError, OSError) as error:
            raise DataParallelError(
                f"data-parallel rank {rank} of {size} did not meet the others at {address}:{port}: {_first_line(error)}; "
                "start every rank with the same data_parallel_master_ip and data_parallel_master_port"
            ) from None
        self._store: Any = store

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """See `DataParallelGroup`. Signals are served while it waits; a group whose wait was interrupted is of no further use."""
        if self._broken is not None:
            raise DataParallelError(f"data-parallel rank {self.rank} left its group: {self._broken}; restart all ranks")
        mine = self._torch.tensor(list(values), dtype=self._torch.int64)
        gathered = [self._torch.empty_like(mine) for _ in range(self.size)]
        self._broken = "a collective was interrupted"
        try:
            _wait(self._group.allgather([gathered], [mine]))
        except RuntimeError as error:
            self._broken = _first_line(error)
            raise DataParallelError(f"data-parallel rank {self.rank} lost another rank: {self._broken}; restart all ranks") from None
        self._broken = None
        return [row.tolist() for row in gathered]

    def close(self) -> None:
        """Leave the group; the other ranks notice at their next collective. May be called twice."""
        if self._broken is None:
            self._broken = "it was closed"
        self._group = None
        self._store = None


@dataclass(frozen=True, slots=True)
class _Agreement:
    """What the ranks said in a step about the next: whether any has requests, and whether any asks for a pause."""

    any_requests: bool = False
    pause: bool = False


class Lockstep:
    """A group whose ranks also agree, in the same collective, on whether another step follows, so that all make the same number of steps.

    A rank steps while `wants_step`. It says before each step whether it has requests (`begin_step`); if any rank has, all make another.
    When none has, all rest, and whoever gets work begins the next step by itself; the others join it when they hear of its number
    (`wake`), so a message that comes late, or twice, calls for nothing. A pause is agreed too: it holds after the step that carries it,
    on all ranks, until any of them resumes.
    """

    def __init__(self, group: DataParallelGroup) -> None:
        self._group = group
        self.size = group.size
        self.num_steps = 0
        self.paused = False
        self._last = _Agreement()
        self._called_for = 0
        self._has_requests = False
        self._asks_pause = False
        self._others_busy = False

    @property
    def must_step(self) -> bool:
        """Whether the other ranks count on a next step of this one."""
        return self._called_for > self.num_steps or (self._last.any_requests and not self.paused)

    @property
    def others_busy(self) -> bool:
        """Whether another rank had tokens in the last step: it computes while this one may have nothing to do."""
        return self._others_busy

    def wants_step(self, has_work: bool) -> bool:
        """Whether to step now. has_work: whether this rank would, were it alone."""
        return self.must_step or (not self.paused and (has_work or self._asks_pause))

    def wake(self, step: int) -> None:
        """Another rank has entered step number `step` (from 1). Of a step that this rank has made already: nothing happens."""
        self._called_for = max(self._called_for, step)

    def join_next(self) -> None:
        """All ranks are about to make another step, whether this one has work or not."""
        self.wake(self.num_steps + 1)

    def pause(self) -> None:
        """Ask all ranks to rest after the next step. Nothing happens if they do, or were asked to, already."""
        self._asks_pause = not self.paused or self.must_step

    def resume(self) -> None:
        """End a pause: this rank makes the next step, which calls the others. Nothing happens if there is no pause."""
        self._asks_pause = False
        if self.paused:
            self.join_next()

    def begin_step(self, has_requests: bool) -> None:
        """The next collective is that of a step; has_requests: whether this rank needs another one after it."""
        self._has_requests = has_requests

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """The step's collective: `values` of all ranks, as the inner group gives them; what is agreed beside them stays here."""
        try:
            gathered = self._group.all_gather((*values, int(self._has_requests), int(self._asks_pause)))
        except BaseException:
            self._last, self._called_for = _Agreement(), 0
            raise
        self.num_steps += 1
        self._last = _Agreement(any(row[-2] for row in gathered), any(row[-1] for row in gathered))
        self.paused = self._last.pause
        self._asks_pause = False
        self._others_busy = sum(row[0] for row in gathered) > values[0]
        return [row[:-2] for row in gathered]

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def join_lockstep(config: EngineConfig) -> Lockstep | None:
    """The group of an engine that is one of several ranks in lockstep; None for one that runs by itself."""
    if config.data_parallel_size == 1 or not config.data_parallel_lockstep:
        return None
    options = {name: str(getattr(config, name)) for name in _AGREED}
    rank, size = config.data_parallel_rank, config.data_parallel_size
    return Lockstep(GlooGroup(rank, size, config.data_parallel_master_ip, config.data_parallel_master_port, options=options))


def _wait(work: Any) -> None:
    while True:
        interrupts.deliver()
        with suppress(RuntimeError):  # the slice may end, and the work be done before anybody looks
            work.wait(_SLICE)
        if work.is_completed():
            work.wait()
            return


def _make_store(dist: Any, rank: int, size: int, address: str, port: int) -> Any:
    """Where the ranks meet. Rank 0 listens at `address` alone; left to itself torch would listen on every interface."""
    timeout = timedelta(seconds=START_SECONDS)
    if rank != 0:
        return dist.TCPStore(address, port, size, False, timeout=timeout)
    listener = socket.create_server((address, port))
    return dist.TCPStore(address, port, size, True, timeout=timeout, master_listen_fd=listener.detach())


def _gloo_options(dist: Any, address: str) -> Any:
    """Ranks of one machine, which meet on the loopback interface, also talk there."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=STEP_SECONDS)
    on_loopback = ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    make_device = dist.ProcessGroupGloo.create_device
    options._devices = [make_device(hostname=address) if on_loopback else dist.ProcessGroupGloo.create_default_device()]
    return options


def _compare_options(store: Any, rank: int, size: int, options: Mapping[str, str]) -> None:
    """Every rank holds its options against those of all others."""
    store.set(f"options/{rank}", json.dumps(dict(options)))
    others = {other: json.loads(store.get(f"options/{other}")) for other in range(size) if other != rank}
    store.set(f"compared/{rank}", "")
    if rank == 0:
        for other in others:
            store.get(f"compared/{other}")  # the store goes with rank 0, which therefore is the last to look at it
    for other, theirs in others.items():
        for name, value in options.items():
            if theirs.get(name) != value:
                raise ConfigError(f"{name} is {value} on data-parallel rank {rank} and {theirs.get(name)} on rank {other}, expected the same on all")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()[0]
    return text.split(". This is typically")[0]
