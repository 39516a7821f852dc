"""The host tier's copies, stopped half way: what counts as stored, when a load has ended, and in which order layers are copied."""

import threading

import numpy as np
import pytest
from kv_support import kv_cache_config, kv_caches, note_at_the_first_failure, random_bytes

from interlock.core.step import LoadPromise
from interlock.graphs import copy
from interlock.kernels import native
from interlock.kv_transfer.connectors import host_tier
from interlock.kv_transfer.connectors.host_tier import HostIndex, HostTierWorker
from interlock.kv_transfer.connectors.tier_messages import TierLoad, TierSave
from interlock.kv_transfer.ledger import Ledger

CONFIG = kv_cache_config()
LAYERS = range(CONFIG.num_layers)
SIZE = CONFIG.block_size


def key_of(number):
    return number.to_bytes(32, "little")


class Copies:
    """Every copy of the tier's thread comes through here. on_layer: what is done before the copy of a layer; arrived: it is being done;
    order: what was copied, as (layer, block)."""

    def __init__(self, caches):
        self.caches = list(caches.values())
        self.on_layer, self.arrived, self.order = {}, threading.Event(), []

    def __call__(self, descriptors, abort):
        for layer, buffer in enumerate(self.caches):
            for address in descriptors[:, :2].ravel():
                if buffer.address <= address < buffer.address + buffer.nbytes:
                    self.order.append((layer, int(address - buffer.address) // CONFIG.block_bytes))
        before = self.on_layer.get(self.order[-1][0])
        if before is not None:
            self.arrived.set()
            before(abort)
        return copy.copy_list(descriptors, abort)


class Tier:
    def __init__(self, monkeypatch):
        native.load([copy.COPY_LIST])
        self.caches = kv_caches(CONFIG)
        for seed, buffer in enumerate(self.caches.values()):
            random_bytes(buffer, seed)
        self.copies = Copies(self.caches)
        monkeypatch.setattr(host_tier, "copy_list", self.copies)
        self.worker = HostTierWorker(CONFIG, 8)
        self.worker.register(list(self.caches.values()))
        self.ledger = Ledger(CONFIG.num_layers, SIZE)
        self.gate = threading.Event()

    def snapshot(self):
        return np.stack([buffer.numpy().view(np.uint8).reshape(CONFIG.num_blocks, -1) for buffer in self.caches.values()])

    def hold_thread(self):
        """What is submitted from now on waits for `gate`."""
        self.worker._thread.submit(self.gate.wait, urgent=True)

    def load(self, number, places, block_ids, *, step=None):
        stop, keys = len(places) * SIZE, tuple(map(key_of, range(len(places))))
        load = TierLoad(number, f"r{number}", 0, stop, tuple(block_ids), keys, tuple(places), step is not None)
        self.worker.load(load, step or 0, self.ledger)

    def drain(self):
        """Returns when the thread has done what was submitted."""
        done = threading.Event()
        self.worker._thread.submit(done.set, urgent=False)
        self.gate.set()
        assert done.wait(60)

    def ended(self):
        """The loads that have ended, by their number: blocks landed, and bad keys."""
        self.worker.reports.results()
        return {end.load.load_id: (end.num_landed, end.bad_keys) for end in self.worker.reports.worker_meta().loads}


@pytest.fixture
def tier(monkeypatch):
    made = Tier(monkeypatch)
    yield made
    made.gate.set()
    made.worker.close()
    made.worker.close()


def stopped(abort):
    """The copy goes on when it has been told to stop."""
    pause = threading.Event()
    while not abort.numpy()[0]:
        pause.wait(0.001)


def broken(abort):
    raise OSError("the memory is gone")


@pytest.mark.parametrize("num_present", [1, 2])
def test_who_hears_that_a_transfer_has_failed_can_hear_of_the_bad_key(tier, num_present):
    tier.ledger.open_step(1, [LoadPromise("r1", 0, 3 * SIZE, (2, 3, 5))], 60)
    failed, noted = note_at_the_first_failure(tier.ledger, tier.ended)
    tier.load(1, [0, 1, 2][:num_present] + [None] * (3 - num_present), (2, 3, 5), step=1)
    assert failed.wait(60)
    assert noted == [{1: (num_present, (key_of(num_present),))}]


@pytest.mark.parametrize("problem", [stopped, broken])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_save_that_was_cut_short_is_no_hit(tier, problem, layer):
    index, keys = HostIndex(8), [key_of(0), key_of(1)]
    saves = [TierSave(number, key, block, index.reserve(key)) for number, (key, block) in enumerate(zip(keys, (2, 5), strict=True))]
    tier.copies.on_layer[layer] = problem
    tier.worker.save(saves)
    assert tier.copies.arrived.wait(60)
    tier.worker.close()
    meta = tier.worker.reports.worker_meta()
    assert sorted(meta.released) == [0, 1]
    assert sorted(meta.stored) == [(0, False), (1, False)]
    copied = [(tier.worker.memory.numpy()[save.place, at] == tier.snapshot()[at, save.block_id]).all() for at in LAYERS for save in saves]
    assert copied == [at < layer for at in LAYERS for _ in saves], "some layers of it are there, or none"
    for save_id, stored in meta.stored:
        index.commit(keys[save_id], saves[save_id].place, stored)
    assert [index.count_present([key]) for key in keys] == [0, 0]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_load_is_quiescent_when_all_its_ends_were_told_and_nothing_is_written_any_more(tier, layer):
    seen = []

    def note_end(transfer, error=None):
        if error is not None:
            seen.append(load.quiescent.is_set())
        Ledger.end_transfer(tier.ledger, transfer, error)

    tier.ledger.end_transfer = note_end
    tier.copies.on_layer[layer] = stopped
    tier.ledger.open_step(1, [LoadPromise("r1", 0, 2 * SIZE, (5, 6))], 60)
    tier.hold_thread()
    tier.load(1, [3, 1], [5, 6], step=1)
    (load,) = tier.worker._step_loads[1]
    tier.gate.set()
    assert tier.copies.arrived.wait(60)
    tier.worker.abort(1)
    assert seen == [False] * (len(LAYERS) - layer)
    assert tier.ledger.unfinished_block_ids(1) == set()
    assert tier.ended() == {1: (0, ())}, "the tier has both blocks still"
    before = tier.snapshot()
    tier.drain()
    assert np.array_equal(tier.snapshot(), before)
    assert tier.ledger.close_step(1).invalid_block_ids == {5, 6}


@pytest.mark.parametrize(("places", "landed", "bad"), [([3, 1], 2, ()), ([3, None], 1, (key_of(1),)), ([None, 1], 0, (key_of(0),))])
@pytest.mark.parametrize("is_synchronous", [True, False])
def test_the_first_block_that_has_gone_is_named(tier, places, landed, bad, is_synchronous):
    if is_synchronous:
        tier.ledger.open_step(1, [LoadPromise("r1", 0, 2 * SIZE, (5, 6))], 60)
    tier.load(1, places, [5, 6], step=1 if is_synchronous else None)
    tier.drain()
    assert tier.ended() == {1: (landed, bad)}


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_layer_of_all_loads_is_copied_before_the_next_one_and_loads_before_saves(tier, is_synchronous):
    blocks = [(1, 2), (3, 4), (5, 6)]
    if is_synchronous:
        tier.ledger.open_step(1, [LoadPromise(f"r{number}", 0, 2 * SIZE, pair) for number, pair in enumerate(blocks)], 60)
    tier.hold_thread()
    tier.worker.save([TierSave(1, key_of(9), 7, 6)])
    for number, pair in enumerate(blocks):
        tier.load(number, [2 * number, 2 * number + 1], pair, step=1 if is_synchronous else None)
    tier.drain()
    assert tier.copies.order == [(layer, block) for layer in LAYERS for pair in blocks for block in pair] + [(layer, 7) for layer in LAYERS]
    assert tier.ended() == dict.fromkeys(range(3), (2, ()))


def test_a_load_of_a_step_can_be_stopped_although_another_one_of_it_has_ended(tier):
    tier.ledger.open_step(1, [LoadPromise(f"r{number}", 0, SIZE, (number,)) for number in (1, 2)], 60)
    tier.hold_thread()
    tier.load(1, [None], [1], step=1)
    tier.load(2, [3], [2], step=1)
    tier.copies.on_layer[1] = stopped
    tier.gate.set()
    assert tier.copies.arrived.wait(60)
    tier.worker.abort(1)
    assert tier.ended() == {1: (0, (key_of(0),)), 2: (0, ())}
    assert tier.ledger.unfinished_block_ids(1) == set()
