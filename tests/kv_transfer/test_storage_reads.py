"""Reads of files that hang: what they hold up, what is said of them, and that they write nothing once they were given up; and writes that
hang, which hold no blocks."""

import functools
import threading

import numpy as np
import pytest
from kv_support import Point, kv_cache_config, kv_caches, note_at_the_first_failure, random_bytes

from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors import storage_worker
from interlock.kv_transfer.connectors.block_files import BlockFiles
from interlock.kv_transfer.connectors.storage_worker import StorageWorker
from interlock.kv_transfer.connectors.tier_messages import TierLoad, TierSave
from interlock.kv_transfer.ledger import Ledger

CONFIG = kv_cache_config(num_blocks=16)
LAYERS = range(CONFIG.num_layers)
NUM_KEYS = 12
READ_TIMEOUT = 5.0


def key_of(number):
    return number.to_bytes(32, "little")


class Hold(Point):
    """The read of a part of a file has its bytes, and returns with them when the test lets it."""

    reader = None

    def __call__(self):
        self.reader = threading.current_thread()
        super().__call__()

    def let_go_and_join(self):
        """Returns when the thread has ended: it was replaced."""
        self.go_on.set()
        self.reader.join(60)
        assert not self.reader.is_alive()


class HoldingFiles(BlockFiles):
    """holds: by key, and by layer, where layers are read one by one. order: what was read, layer by layer. write_hold: of any write."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.holds, self.order = {}, []
        self.write_hold = None

    def write(self, key, payload, *, replace=False):
        if self.write_hold is not None:
            self.write_hold()
        super().write(key, payload, replace=replace)

    def read(self, key):
        payload = super().read(key)
        self.holds.get(key, lambda: None)()
        return payload

    def read_layer(self, key, layer, digest):
        self.order.append((key, layer))
        data = super().read_layer(key, layer, digest)
        self.holds.get((key, layer), lambda: None)()
        return data


class Storage:
    """A worker over files of `NUM_KEYS` blocks, and its pool."""

    def __init__(self, directory):
        self.files = HoldingFiles(directory, CONFIG, 1 << 30)
        for number in range(NUM_KEYS):
            self.files.write(key_of(number), self.content(number).tobytes())
        caches = self.caches = kv_caches(CONFIG)
        for seed, buffer in enumerate(caches.values()):
            random_bytes(buffer, seed)
        self.layers = [buffer.numpy().view(np.uint8).reshape(CONFIG.num_blocks, -1) for buffer in caches.values()]
        self.clock = VirtualClock()
        self.worker = StorageWorker(CONFIG, self.files, self.clock, READ_TIMEOUT, 1 << 20)
        self.worker.register(list(caches.values()))
        self.ledger = Ledger(CONFIG.num_layers, CONFIG.block_size)
        self.num_loads = 0

    @staticmethod
    @functools.cache
    def content(number):
        return np.random.default_rng(number).integers(0, 256, (CONFIG.num_layers, CONFIG.block_bytes), np.uint8)

    def snapshot(self):
        return np.stack(self.layers)

    def hold(self, number, layer=None):
        """layer: None, if the file is read as a whole."""
        key = key_of(number) if layer is None else (key_of(number), layer)
        return self.files.holds.setdefault(key, Hold())

    def load(self, numbers, block_ids, *, step=None):
        """step: that consumes it; None for a load that is waited for outside the steps."""
        self.num_loads += 1
        load_id = self.num_loads
        stop = len(numbers) * CONFIG.block_size
        load = TierLoad(load_id, f"r{load_id}", 0, stop, tuple(block_ids), tuple(map(key_of, numbers)), (0,) * len(numbers), step is not None)
        self.worker.load(load, step or 0, self.ledger)

    def ended(self, count):
        """The loads that have ended, `count` of them at least, by their number: blocks landed, and bad keys."""
        found, pause = {}, threading.Event()
        for _ in range(60_000):
            self.worker.reports.results()
            found |= {end.load.load_id: (end.num_landed, end.bad_keys) for end in self.worker.reports.worker_meta().loads}
            if len(found) >= count:
                return found
            pause.wait(0.001)
        raise AssertionError(f"only {sorted(found)} have ended, expected {count}")

    def expire(self):
        self.clock.advance(READ_TIMEOUT)
        self.worker.poll()


@pytest.fixture
def storage(tmp_path):
    made = Storage(tmp_path)
    yield made
    for hold in filter(None, (*made.files.holds.values(), made.files.write_hold)):
        hold.go_on.set()
    made.worker.close()
    made.worker.close()


def give_up(storage, how):
    if how == "abort":
        storage.worker.abort(1)
    elif how == "poll":
        storage.expire()
    else:
        storage.worker.close()


def give_up_a_held_read(storage, how, is_synchronous):
    """Of blocks 5 and 6 something is held; the load is given up, and other bytes stand there. Returns the hold and the bytes."""
    if is_synchronous:
        storage.ledger.open_step(1, [LoadPromise("r1", 0, 2 * CONFIG.block_size, (5, 6))], 60)
    hold = storage.hold(1, layer=1 if is_synchronous else None)
    storage.load([0, 1], [5, 6], step=1 if is_synchronous else None)
    assert hold.arrived.wait(60)
    give_up(storage, how)
    for layer in storage.layers:
        layer[[5, 6]] = 0xEE
    return hold, storage.snapshot()


over_all_ends = pytest.mark.parametrize(("how", "is_synchronous"), [("abort", True), ("poll", False), ("close", True), ("close", False)], ids=str)


@over_all_ends
def test_a_load_that_was_given_up_writes_nothing_however_late_its_read_returns(storage, how, is_synchronous):
    hold, before = give_up_a_held_read(storage, how, is_synchronous)
    hold.let_go_and_join()
    assert np.array_equal(storage.snapshot(), before)


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_read_that_returns_before_its_load_is_given_up_is_written(storage, is_synchronous):
    """The control of the above: it is the end of the load that keeps the bytes out."""
    hold, before = give_up_a_held_read(storage, "poll" if is_synchronous else "abort", is_synchronous)  # neither is for such a load
    hold.go_on.set()
    assert storage.ended(1) == {1: (2, ())}
    after = storage.snapshot()
    first = 1 if is_synchronous else 0  # layer 0 of both, and layer 1 of block 5, had landed before
    assert np.array_equal(after[first:, 6], storage.content(1)[first:])
    assert np.array_equal(np.delete(after, [5, 6], axis=1), np.delete(before, [5, 6], axis=1))


@over_all_ends
def test_what_was_given_up_has_ended_at_once_and_the_key_that_hangs_is_bad(storage, how, is_synchronous):
    hold, _ = give_up_a_held_read(storage, how, is_synchronous)
    assert storage.ended(1) == {1: (0 if is_synchronous else 1, (key_of(1),))}
    if is_synchronous:
        assert storage.ledger.unfinished_block_ids(1) == set()
        assert storage.ledger.close_step(1).invalid_block_ids == {5, 6}
    hold.let_go_and_join()
    storage.worker.reports.results()
    assert storage.worker.reports.worker_meta().loads == (), "its end is told once"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_who_hears_that_a_transfer_has_failed_can_hear_of_the_bad_key(storage, missing):
    storage.ledger.open_step(1, [LoadPromise("r1", 0, 3 * CONFIG.block_size, (5, 6, 7))], 60)
    storage.files.path(key_of(missing)).unlink()
    failed, noted = note_at_the_first_failure(storage.ledger, lambda: (storage.ended(0), [*storage.worker._reads]))
    storage.load([0, 1, 2], [5, 6, 7], step=1)
    assert failed.wait(60)
    assert noted == [({1: (missing, (key_of(missing),))}, [1])], "who gives the load up now still finds it"


def hold_both_readers(storage):
    """Two loads of one block each, 0 and 1: what is submitted now waits until one of the holds lets go."""
    holds = [storage.hold(number) for number in (0, 1)]
    for number, hold in enumerate(holds):
        storage.load([number], [number])
        assert hold.arrived.wait(60)
    return holds


def test_an_abort_is_of_the_loads_that_its_step_consumes(storage):
    holds = hold_both_readers(storage)
    for step in (1, 2):
        storage.ledger.open_step(step, [LoadPromise(f"r{step + 2}", 0, CONFIG.block_size, (4 + step,))], 60)
        storage.load([1 + step], [4 + step], step=step)
    storage.worker.abort(0)  # by which the loads that are waited for outside the steps were ordered
    storage.worker.abort(1)
    assert storage.ledger.close_step(1).invalid_block_ids == {5}
    for hold in holds:
        hold.go_on.set()
    assert storage.ended(4) == {1: (1, ()), 2: (1, ()), 3: (0, ()), 4: (1, ())}
    assert not storage.ledger.close_step(2).invalid_block_ids


def test_no_key_of_a_load_is_bad_that_is_given_up_between_two_layers(storage):
    other, first, behind = storage.hold(0), storage.hold(1, layer=0), storage.hold(2)
    storage.ledger.open_step(1, [LoadPromise("r2", 0, CONFIG.block_size, (5,))], 60)
    storage.load([0], [4])
    assert other.arrived.wait(60)
    storage.load([1], [5], step=1)
    storage.load([2], [6])
    first.go_on.set()
    assert behind.arrived.wait(60)
    storage.worker.abort(1)
    assert storage.ended(1) == {2: (0, ())}
    for hold in (other, behind):
        hold.go_on.set()
    assert storage.ended(2) == {1: (1, ()), 3: (1, ())}


def test_readers_outlive_loads_that_were_given_up_before_they_began(storage):
    holds = hold_both_readers(storage)
    for number in range(3):
        storage.ledger.open_step(1 + number, [LoadPromise(f"r{3 + number}", 0, CONFIG.block_size, (5,))], 60)
        storage.load([2], [5], step=1 + number)
        storage.worker.abort(1 + number)
    storage.load([3], [6])
    for hold in holds:
        hold.go_on.set()
    assert storage.ended(6)[6] == (1, ())


def test_a_load_cannot_be_given_up_while_bytes_go_into_the_pool(storage):
    seen = []

    def note_end(transfer, error=None):
        (read,) = storage.worker._open_reads()
        seen.append((error, read.lock.locked()))
        return Ledger.end_transfer(storage.ledger, transfer, error)

    storage.ledger.end_transfer = note_end
    storage.ledger.open_step(1, [LoadPromise("r1", 0, CONFIG.block_size, (5,))], 60)
    storage.load([0], [5], step=1)
    assert storage.ended(1) == {1: (1, ())}
    assert seen == [(None, True) for _ in LAYERS]


def test_a_load_that_is_given_up_before_it_began_writes_nothing_and_no_key_of_it_is_bad(storage):
    holds, before = hold_both_readers(storage), storage.snapshot()
    storage.ledger.open_step(1, [LoadPromise("r3", 0, CONFIG.block_size, (5,))], 60)
    storage.load([2], [5], step=1)
    storage.worker.abort(1)
    assert storage.ended(1) == {3: (0, ())}
    for hold in holds:
        hold.go_on.set()
    assert storage.ended(2) == {1: (1, ()), 2: (1, ())}
    storage.load([3], [7])
    assert storage.ended(1) == {4: (1, ())}
    assert np.array_equal(np.delete(storage.snapshot(), [0, 1, 7], axis=1), np.delete(before, [0, 1, 7], axis=1))
    assert storage.files.order == []


def test_readers_that_hang_are_replaced(storage):
    for number in range(5):
        hold = storage.hold(number)
        storage.load([number], [number])
        assert hold.arrived.wait(60), "nobody reads any more"
        storage.expire()
        assert storage.ended(1) == {number + 1: (0, (key_of(number),))}
    storage.load([5, 6], [8, 9])
    assert storage.ended(1) == {6: (2, ())}
    assert np.array_equal(storage.snapshot()[:, [8, 9]], np.stack([storage.content(5), storage.content(6)], axis=1))


def test_a_whole_layer_of_all_loads_of_a_step_is_read_before_the_next_one(storage):
    holds = hold_both_readers(storage)
    names = {"r3": (5, 6), "r4": (7, 8), "r5": (9, 10)}
    storage.ledger.open_step(1, [LoadPromise(name, 0, 2 * CONFIG.block_size, blocks) for name, blocks in names.items()], 60)
    for numbers, blocks in zip([(2, 3), (4, 5), (6, 7)], names.values(), strict=True):
        storage.load(numbers, blocks, step=1)
    holds[0].go_on.set()
    assert storage.ledger.wait_step(1)
    assert storage.files.order == [(key_of(number), layer) for layer in LAYERS for number in range(2, 8)]
    assert storage.ledger.close_step(1).failures == ()
    expected = np.stack([storage.content(number) for number in range(2, 8)], axis=1)
    assert np.array_equal(storage.snapshot()[:, 5:11], expected)


def test_beyond_the_bound_readers_that_hang_are_not_replaced_and_read_again_when_they_return(storage, monkeypatch):
    monkeypatch.setattr(storage_worker, "_MAX_STUCK_READERS", 1)
    first, second = hold_both_readers(storage)
    storage.expire()
    assert storage.ended(2) == {1: (0, (key_of(0),)), 2: (0, (key_of(1),))}
    third = storage.hold(2)
    storage.load([2], [2])
    assert third.arrived.wait(60), "the first reader was replaced"
    storage.load([3], [3])
    storage.expire()
    assert storage.ended(2) == {3: (0, (key_of(2),)), 4: (0, ())}, "nobody was left to begin the last one"
    first.let_go_and_join()
    storage.load([4], [4])
    second.go_on.set()
    assert storage.ended(1) == {5: (1, ())}, "the second reader was not replaced, and reads again"
    assert second.reader.is_alive()
    again = storage.hold(5)
    storage.load([5], [5])
    assert again.arrived.wait(60)
    storage.expire()
    assert storage.ended(1) == {6: (0, (key_of(5),))}
    storage.load([6], [6])
    assert storage.ended(1) == {7: (1, ())}, "the first reader has returned, so another one may be replaced"


def test_what_waits_to_be_written_holds_no_blocks_and_what_does_not_fit_beside_it_is_not_saved(storage):
    storage.worker._staging_bytes = 2 * storage.files.payload_bytes
    hold = storage.files.write_hold = Hold()
    before = storage.snapshot()
    storage.worker.save([TierSave(number, key_of(100 + number), 5 + number, 0) for number in range(3)])
    assert hold.arrived.wait(60)
    meta = storage.worker.reports.worker_meta()
    assert sorted(meta.released) == [0, 1, 2]
    assert meta.stored == ((2, False),)
    for layer in storage.layers:
        layer[:] = 0xEE
    hold.go_on.set()
    storage.worker.close()
    assert sorted(storage.worker.reports.worker_meta().stored) == [(0, True), (1, True)]
    for number in range(2):
        assert bytes(storage.files.read(key_of(100 + number))) == before[:, 5 + number].tobytes()
    assert not storage.files.contains(key_of(102))
    assert storage.worker._staged == 0
