"""Tiers and a remote side under the test's control, and negative controls; the engine makes them by name, so the test's strings are here."""

import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shelf_connector import POISON, ShelfConnector

from interlock.core.forward_context import ForwardContext
from interlock.graphs.timeline import Timelines
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connector import KVConnectorTransferResults
from interlock.kv_transfer.connectors.block_files import BlockFiles
from interlock.kv_transfer.connectors.host_tier import HostIndex, HostTierWorker, _CopyIn
from interlock.kv_transfer.connectors.offload import OffloadConnector
from interlock.kv_transfer.connectors.storage import StorageConnector
from interlock.kv_transfer.connectors.tier_messages import TierLoad, TierSave
from interlock.kv_transfer.ledger import Ledger


class HeldWorker(HostTierWorker):
    """Loads and saves that have been ordered wait until the test lets them go on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hold_loads = self.hold_saves = False
        self.held_loads: list[tuple[TierLoad, int, Ledger]] = []
        self.held_saves: list[TierSave] = []
        self.loads: list[TierLoad] = []

    def load(self, load: TierLoad, step: int, ledger: Ledger) -> None:
        self.loads.append(load)
        if self.hold_loads:
            self.held_loads.append((load, step, ledger))
        else:
            super().load(load, step, ledger)

    def save(self, saves: Sequence[TierSave]) -> None:
        if self.hold_saves:
            self.held_saves += saves
        else:
            super().save(saves)

    def release(self) -> None:
        self.hold_loads = self.hold_saves = False
        for held in self.held_loads:
            super().load(*held)
        if self.held_saves:
            super().save(self.held_saves)
        self.held_loads, self.held_saves = [], []


class ForgetfulIndex(HostIndex):
    """A key that the test names is gone when its place is asked for, once."""

    gone: bytes | None = None

    def places(self, keys: Sequence[bytes]) -> list[int | None]:
        gone, ForgetfulIndex.gone = ForgetfulIndex.gone, None if ForgetfulIndex.gone in keys else ForgetfulIndex.gone
        return [None if key == gone else place for key, place in zip(keys, super().places(keys), strict=True)]


class PinlessIndex(HostIndex):
    """The negative control: what is being loaded may be taken for something else."""

    def pin(self, keys: Sequence[bytes]) -> None: ...

    def unpin(self, keys: Sequence[bytes]) -> None: ...


class HeldOffload(OffloadConnector):
    index_class = ForgetfulIndex
    worker_class = HeldWorker


class PinlessOffload(HeldOffload):
    index_class = PinlessIndex


class HolderOfNothing:
    """A pool that lets blocks go while they are read."""

    def quarantine(self, block_ids: Sequence[int], owner: str) -> None: ...

    def release_quarantine(self, block_ids: Sequence[int], owner: str) -> None: ...

    def published_key(self, block_id: int) -> bytes | None: ...

    def published_children(self) -> dict[bytes | None, list[int]]:
        return {}


class CarelessOffload(HeldOffload):
    """The negative control: blocks that are being saved are not held."""

    def bind_block_pool(self, block_pool: Any) -> None:
        super().bind_block_pool(HolderOfNothing())


class HastyRequest:
    """A request as it looks to somebody who takes every allocated block for one with KV."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def num_published_blocks(self) -> int:
        return min(len(self._request.block_ids), len(self._request.block_hashes))


class HastyOffload(CarelessOffload):
    """The negative control: saves what has been allocated, not what has landed (with the blocks held, the pool itself objects)."""

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        super().update_state_after_alloc(HastyRequest(request), block_ids, num_external_tokens)


class PuppetRemote(ShelfConnector):
    """An asynchronous remote side: its blocks hold poison until the test lands them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: dict[str, Any] = {}
        self.lands = False

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        for req_id, (block_ids, start, stop) in orders.loads.items():
            for layer in self.layers:
                layer[block_ids[start // self.block_size : -(-stop // self.block_size)]] = POISON
            self.held[req_id] = (block_ids, start, stop, orders.saves[f"tokens {req_id}"][1])

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.lands:
            for req_id, load in self.held.items():
                self._load(*load)
                self.loaded.add(req_id)
            self.held = {}
        return super().get_finished(finished_req_ids)


class TardyShelf(ShelfConnector):
    """Its loads bring garbage from the second block on, which it notices when the test says so."""

    notices = False

    def _load(self, block_ids: list[int], start: int, stop: int, tokens: tuple[int, ...]) -> None:
        super()._load(block_ids, start, stop, tokens)
        first = start // self.block_size + 1
        for layer in self.layers:
            layer[block_ids[first : stop // self.block_size]] = 0x3C00  # bfloat16: 0.0078125
        self.late = set(block_ids[first : stop // self.block_size])

    def get_block_ids_with_load_errors(self) -> set[int]:
        if TardyShelf.notices:
            TardyShelf.notices = False
            return self.late
        return set()


class Faults:
    """What happens to the read of one file. path: which; the fault is made once, when something from `start` on is read."""

    path: str | None = None
    start: int = 0
    kind: str = ""
    hanging = threading.Event()
    go_on = threading.Event()

    @classmethod
    def reset(cls) -> None:
        cls.path, cls.start, cls.kind = None, 0, ""
        cls.hanging, cls.go_on = threading.Event(), threading.Event()


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)


def _swap(path: Path) -> None:
    """Another entry, whole and with its own key, is renamed to this place."""
    other = next(other for other in path.parents[1].rglob("*.kv") if other != path)
    copy = path.with_suffix(".copy")
    copy.write_bytes(other.read_bytes())
    copy.replace(path)


def _put_in_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "truncated": _truncate,
    "flipped": _flip,
    "swapped": _swap,
    "a pipe": _put_in_place(os.mkfifo),
    "a directory": _put_in_place(Path.mkdir),
    "a link": _put_in_place(lambda path: path.symlink_to("/dev/zero")),
    "gone with its directory": lambda path: shutil.rmtree(path.parents[2]),
}


class FaultyFiles(BlockFiles):
    """Files to which `Faults` happen."""

    def read_bytes(self, path: Any, start: int, size: int) -> bytearray:
        if str(path) == Faults.path and start >= Faults.start:
            Faults.path = None
            if Faults.kind in CHANGES:
                CHANGES[Faults.kind](path)
            elif Faults.kind == "EIO":
                raise OSError(5, "Input/output error", str(path))
            elif Faults.kind == "hangs":
                Faults.hanging.set()
                Faults.go_on.wait(60)
        return super().read_bytes(path, start, size)


class FaultyStorage(StorageConnector):
    clock = VirtualClock()
    files_class = FaultyFiles


class TrustingFiles(FaultyFiles):
    """The negative control: what has the right size is taken as it is."""

    def _is_layer(self, data: Any, digest: bytes) -> bool:
        return len(data) == self.layer_bytes


class TrustingStorage(FaultyStorage):
    files_class = TrustingFiles


class Overlap:
    """Whether a step has written its first layer before the second layer of its loads is copied. All loads are submitted before any is made."""

    written: Timelines
    stamp: int
    timeout: float
    submitted: threading.Event = threading.Event()
    seen: bool | None

    @classmethod
    def watch(cls, written: Timelines, timeout: float) -> None:
        cls.written, cls.stamp, cls.timeout = written, written.value(0) + 1, timeout
        cls.submitted, cls.seen = threading.Event(), None

    @classmethod
    def first_layer(cls) -> None:
        assert cls.submitted.wait(60)

    @classmethod
    def second_layer(cls) -> None:
        if cls.seen is None:
            cls.seen = cls.written.wait(0, cls.stamp, cls.timeout)


class WatchedFiles(BlockFiles):
    def read_layer(self, key: bytes, layer: int, digest: bytes) -> memoryview:
        (Overlap.second_layer if layer else Overlap.first_layer)()
        return super().read_layer(key, layer, digest)


class WatchedStorage(StorageConnector):
    files_class = WatchedFiles

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        Overlap.submitted.set()


class WatchedWorker(HostTierWorker):
    def _copy_in(self, copy: _CopyIn) -> None:
        (Overlap.second_layer if copy.layer else Overlap.first_layer)()
        super()._copy_in(copy)


class WatchedOffload(OffloadConnector):
    worker_class = WatchedWorker

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        Overlap.submitted.set()


class Gossip(OffloadConnector):
    """Claims, step after step, that the loads of all requests that it has heard of have ended and failed, and that every block which it
    has not loaded itself is bad. `claims` counts what it says."""

    claims = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard_of: set[str] = set()
        self.loaded: dict[str, set[int]] = {}

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.heard_of.update(kwargs["request_ids"])
        for load in self._loads:
            self.loaded.setdefault(load.req_id, set()).update(load.block_ids)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        lies = frozenset(self.heard_of - set(self.loaded))
        Gossip.claims += len(lies)
        return dataclasses.replace(
            results,
            finished_sending=lies,
            finished_recving=results.finished_recving | lies,
            failed_recving=results.failed_recving | lies,
            recving_errors=dict.fromkeys(lies, "it is said so"),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        every = set(range(self.kv_cache_config.num_blocks))
        return super().get_block_ids_with_load_errors() | (every - set().union(*self.loaded.values()))


class Unreachable(ShelfConnector):
    """Offers what is on the shelf, and raises when a layer of it is waited for."""

    raised = 0

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._get_connector_metadata().loads:
            Unreachable.raised += 1
            raise OSError("the cache server is gone")


class LosesOrders(ShelfConnector):
    """Neither loads nor keeps anything, and raises once, in each step that the test names, where the step's metadata is made."""

    steps: ClassVar[set[int]] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if scheduler_output.step in LosesOrders.steps:
            raise OSError("the cache server is gone")
        return super().build_connector_meta(scheduler_output)


class TimesOut(ShelfConnector):
    """Gives a load up while it is waited for, as if it had taken too long. Its writer goes on until it is told to stop, and is late: it
    writes at the end of the next step."""

    writing: ClassVar[list[int]] = []
    late: ClassVar[list[int]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        TimesOut.writing = [block_id for block_ids, _, _ in self._get_connector_metadata().loads.values() for block_id in block_ids]

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._get_connector_metadata().loads:
            raise TimeoutError("the load took too long")

    def abort_loads(self, step: int) -> None:
        TimesOut.writing = []

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for layer in self.layers:
            layer[TimesOut.late] = POISON
        TimesOut.late, TimesOut.writing = TimesOut.writing, []
