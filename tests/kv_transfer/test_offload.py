"""The host tier's books: which slot holds what, what is pinned, what is evicted; what its options may be."""

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_support import Request, engine_config, kv_cache_config, kv_caches, random_bytes

from interlock.core.config import KVTransferConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.core.step import LoadPromise
from interlock.graphs.copy import COPY_LIST
from interlock.kernels import native
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors.host_tier import HostIndex, HostTierWorker
from interlock.kv_transfer.connectors.tier_messages import TierLoad, TierSave, TierWorkerMeta
from interlock.kv_transfer.connectors.tier_scheduler import TierSchedulerHalf
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.registry import create_connector

CONFIG = kv_cache_config()
BLOCK_BYTES = CONFIG.num_layers * CONFIG.block_bytes


def key_of(number):
    return number.to_bytes(32, "little")


def store(index, *numbers):
    """Save content; returns the keys that found room."""
    placed = [(key_of(number), index.reserve(key_of(number))) for number in numbers]
    for key, place in placed:
        if place is not None:
            index.commit(key, place, stored=True)
    return [key for key, place in placed if place is not None]


# The index


def test_a_key_is_found_once_it_is_stored():
    index = HostIndex(2)
    place = index.reserve(key_of(1))
    assert index.count_present([key_of(1)]) == 0
    assert not index.wants(key_of(1)), "its save is in flight"
    index.commit(key_of(1), place, stored=True)
    assert index.count_present([key_of(1), key_of(2)]) == 1
    assert index.places([key_of(1), key_of(2)]) == [place, None]


def test_a_save_that_failed_leaves_its_slot_free_and_its_key_wanted():
    index = HostIndex(1)
    index.commit(key_of(1), index.reserve(key_of(1)), stored=False)
    assert index.wants(key_of(1))
    assert store(index, 2) == [key_of(2)]


def test_the_least_recently_used_is_evicted_and_never_a_pinned_or_half_filled_one():
    index = HostIndex(3)
    store(index, 1, 2, 3)
    index.touch([key_of(1)])
    index.pin([key_of(2)])
    assert store(index, 4) == [key_of(4)]
    assert [index.count_present([key_of(number)]) for number in (1, 2, 3, 4)] == [1, 1, 0, 1]
    index.pin([key_of(1), key_of(2)])
    half_filled = index.reserve(key_of(5))
    assert half_filled is not None
    assert index.reserve(key_of(6)) is None
    index.unpin([key_of(1), key_of(2)])
    assert index.reserve(key_of(6)) is not None, "1 has no pin left"
    assert index.count_present([key_of(2)]) == 1, "2 has one left"
    index.unpin([key_of(2)])
    assert index.num_pins == 0


def test_what_is_distrusted_is_a_miss_unless_somebody_still_reads_it():
    index = HostIndex(2)
    store(index, 1, 2)
    index.pin([key_of(2)])
    index.distrust(key_of(1))
    index.distrust(key_of(2))
    assert [index.count_present([key_of(number)]) for number in (1, 2)] == [0, 1]


def test_what_is_wrong_is_a_miss_at_once_and_its_slot_is_free_when_nobody_reads_it():
    index = HostIndex(2)
    store(index, 1, 2)
    index.pin([key_of(2)])
    index.forget(key_of(1))
    index.forget(key_of(2))
    index.forget(key_of(3))
    assert [index.wants(key_of(number)) for number in (1, 2)] == [True, True]
    assert len(store(index, 4, 5)) == 1, "the slot of 2 is still read"
    index.unpin([key_of(2)])
    assert len(store(index, 6)) == 1
    assert [index.count_present([key_of(number)]) for number in (4, 6)] == [1, 1]


@given(st.lists(st.tuples(st.sampled_from(["reserve", "commit", "fail", "pin", "unpin", "touch", "distrust"]), st.integers(0, 7)), max_size=60))
def test_slots_are_never_shared_and_pinned_content_never_moves(actions):
    index = HostIndex(4)
    filling, pins, pinned_at = {}, [], {}
    for action, number in actions:
        key = key_of(number)
        if action == "reserve" and index.wants(key) and (place := index.reserve(key)) is not None:
            filling[key] = place
        elif action in ("commit", "fail") and key in filling:
            index.commit(key, filling.pop(key), stored=action == "commit")
        elif action == "pin" and index.count_present([key]):
            index.pin([key])
            pins.append(key)
            pinned_at[key] = index.places([key])
        elif action == "unpin" and key in pins:
            index.unpin([key])
            pins.remove(key)
        elif action == "touch":
            index.touch([key])
        elif action == "distrust":
            index.distrust(key)
        stored = [place for place in index.places([key_of(other) for other in range(8)]) if place is not None]
        used = stored + list(filling.values())
        assert len(set(used)) == len(used) <= 4
        assert all(index.places([key]) == pinned_at[key] for key in pins)
    assert index.num_pins == len(pins)


# When a load lets its request wait


@pytest.mark.parametrize(
    ("async_load_bytes", "max_sync_load_seconds", "bytes_per_second", "is_async"),
    [
        (2 * BLOCK_BYTES, None, 1.0, True),
        (2 * BLOCK_BYTES + 1, None, 1.0, False),
        (1 << 40, 1.0, None, False),
        (1 << 40, 1.0, 2 * BLOCK_BYTES, False),
        (1 << 40, 1.0, 2 * BLOCK_BYTES - 1, True),
    ],
)
def test_a_load_waits_outside_the_steps_if_it_is_large_or_predicted_to_be_slow(async_load_bytes, max_sync_load_seconds, bytes_per_second, is_async):
    index = HostIndex(4)
    store(index, 1, 2)
    half = TierSchedulerHalf("tier", index, CONFIG.block_size, BLOCK_BYTES, async_load_bytes, max_sync_load_seconds, saves=True, loads=True)
    half.update(TierWorkerMeta(bytes_per_second=bytes_per_second))
    request = HashedRequest("r", list(range(3 * CONFIG.block_size)), 1)
    assert half.num_matched(request, 0) == (2 * CONFIG.block_size, is_async)
    assert half.num_matched(request, 2 * CONFIG.block_size) == (0, False)


class HashedRequest(Request):
    block_hashes = (key_of(1), key_of(2), key_of(3))


# The copies


@pytest.fixture
def tier():
    native.load([COPY_LIST])
    caches = kv_caches(CONFIG)
    for seed, buffer in enumerate(caches.values()):
        random_bytes(buffer, seed)
    worker = HostTierWorker(CONFIG, 4)
    worker.register(list(caches.values()))
    yield worker, [buffer.numpy() for buffer in caches.values()]
    worker.close()
    worker.close()


def wait_for(collect):
    """Poll the worker's reports until there are some."""
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not (found := collect()):
        assert time.monotonic() < deadline, "no report"
        pause.wait(0.001)
    return found


def load_of(places, *, synchronous, block_ids=(5, 6)):
    stop = len(block_ids) * CONFIG.block_size
    return TierLoad(1, "r", 0, stop, tuple(block_ids), tuple(map(key_of, range(len(block_ids)))), tuple(places), synchronous)


@pytest.mark.parametrize("synchronous", [False, True])
def test_saved_blocks_come_back_byte_for_byte(tier, synchronous):
    worker, layers = tier
    before = [layer.copy() for layer in layers]
    worker.save([TierSave(1, key_of(0), 2, 3), TierSave(2, key_of(1), 0, 1)])
    stored = []
    while len(stored) < 2:
        stored += wait_for(lambda: worker.reports.worker_meta().stored)
    assert sorted(stored) == [(1, True), (2, True)]
    ledger = Ledger(CONFIG.num_layers, CONFIG.block_size)
    ledger.open_step(1, [LoadPromise("r", 0, 2 * CONFIG.block_size, (5, 6))] if synchronous else [], 60)
    worker.load(load_of([3, 1], synchronous=synchronous), 1, ledger)
    if synchronous:
        assert ledger.wait_step(1)
        wait_for(lambda: worker.reports.results() and worker.reports.worker_meta().loads)
    else:
        assert wait_for(lambda: worker.reports.results().finished_recving) == {"r"}
        assert worker.reports.bad_blocks() == set()
    for layer, was in zip(layers, before, strict=True):
        assert (layer[5] == was[2]).all()
        assert (layer[6] == was[0]).all()
        assert (np.delete(layer, [5, 6], axis=0) == np.delete(was, [5, 6], axis=0)).all()
    assert ledger.close_step(1).failures == ()


@pytest.mark.parametrize("places", [[None, 1], [3, None]])
def test_what_has_gone_fails_alone_and_at_once(tier, places):
    worker, _ = tier
    ledger = Ledger(CONFIG.num_layers, CONFIG.block_size)
    ledger.open_step(1, [LoadPromise("r", 0, 2 * CONFIG.block_size, (5, 6))], 60)
    worker.load(load_of(places, synchronous=True), 1, ledger)
    assert not ledger.wait_step(1)
    assert ledger.close_step(1).invalid_block_ids == ({5, 6} if places[0] is None else {6})
    worker.load(load_of(places, synchronous=False), 1, ledger)
    assert wait_for(lambda: worker.reports.results().failed_recving) == {"r"}
    assert worker.reports.bad_blocks() == ({5, 6} if places[0] is None else {6})


def test_after_an_abort_nothing_of_the_step_is_written(tier):
    worker, layers = tier
    ledger = Ledger(CONFIG.num_layers, CONFIG.block_size)
    ledger.open_step(1, [LoadPromise("r", 0, 2 * CONFIG.block_size, (5, 6))], 60)
    worker.load(load_of([3, 1], synchronous=True), 1, ledger)
    worker.abort(1)
    after = [layer.copy() for layer in layers]
    assert ledger.unfinished_block_ids(1) == set()
    worker.abort(1)
    assert all((layer == was).all() for layer, was in zip(layers, after, strict=True))


# Options


def create(name, extra, role=KVConnectorRole.SCHEDULER):
    transfer = KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra)
    return create_connector(dataclasses.replace(engine_config(), kv_transfer_config=transfer), role, CONFIG)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"\['cpu_bytes'\] is None, expected a number of bytes"),
        ({"cpu_bytes": "1G"}, "is '1G', expected a number of bytes"),
        ({"cpu_bytes": True}, "is True, expected a number of bytes"),
        ({"cpu_bytes": BLOCK_BYTES - 1}, f"expected at least {BLOCK_BYTES}, the size of one block"),
        ({"cpu_bytes": BLOCK_BYTES, "async_load_bytes": -1}, "at least 0"),
        ({"cpu_bytes": BLOCK_BYTES, "size": 1}, r"unknown keys \['size'\], expected some of \['async_load_bytes', 'cpu_bytes'\]"),
    ],
)
def test_options_that_cannot_be_used_are_refused(extra, message):
    with pytest.raises(ConfigError, match=message):
        create("OffloadConnector", extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"\['path'\] is None, expected a directory"),
        ({"path": "/dev/null/x"}, "cannot be made"),
        ({"read_timeout": 0}, "is 0, expected a number of seconds above 0"),
        ({"read_timeout": float("inf")}, "is inf, expected"),
        ({"read_timeout": 1e300}, r"\['read_timeout'\] is 1e\+300, expected .* at most 86400"),
        ({"read_timeout": 10**400}, r"\['read_timeout'\] is 10+, expected .* at most 86400"),
        ({"path": "a\0b"}, r"\['path'\]\) cannot be made"),
        ({"path": "\ud800"}, r"\['path'\]\) cannot be made"),
        ({"max_bytes": 10}, "max_bytes is 10, expected at least"),
        ({"staging_bytes": 10}, "staging_bytes is 10, expected at least"),
        ({"cpu_bytes": 1}, r"unknown keys \['cpu_bytes'\]"),
    ],
)
def test_options_of_the_storage_connector_that_cannot_be_used_are_refused(extra, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        create("StorageConnector", {"path": str(tmp_path), **extra} if extra else {})


@pytest.mark.parametrize(("occupy", "message"), [(Path.touch, "cannot be made"), (lambda path: path.symlink_to("/"), "is a symbolic link")])
def test_a_subdirectory_of_storage_that_is_something_else_is_refused(occupy, message, tmp_path):
    occupy(tmp_path / "interlock-kv")
    with pytest.raises(ConfigError, match=message):
        create("StorageConnector", {"path": str(tmp_path)})


@pytest.mark.parametrize("name", ["OffloadConnector", "MultiConnector"])
def test_a_call_of_the_other_half_says_so(name):
    tier = {"cpu_bytes": BLOCK_BYTES}
    extra = tier if name == "OffloadConnector" else {"connectors": [{"kv_connector": "OffloadConnector", "kv_connector_extra_config": tier}]}
    scheduler, worker = create(name, extra), create(name, extra, KVConnectorRole.WORKER)
    with pytest.raises(LifecycleError, match="worker-side method was called on the scheduler half"):
        scheduler.wait_for_layer_load("layer.0") if name == "MultiConnector" else scheduler.get_kv_connector_stats()
    with pytest.raises(LifecycleError, match="scheduler-side method was called on the worker half"):
        worker.has_pending_push_work()
    scheduler.shutdown()
    worker.shutdown()
    worker.shutdown()
