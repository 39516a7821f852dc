import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from interlock.engine.block_pool import BlockPool, Hold


def test_blocks_without_content_are_taken_before_cached_ones_and_cached_ones_least_recently_used_first():
    pool = BlockPool(4, 4)
    first = pool.allocate(2, "a")
    pool.publish(first[0], b"k0", None)
    pool.publish(first[1], b"k1", b"k0")
    pool.free(first, "a")
    assert pool.allocate(2, "b") == [2, 3]
    assert pool.lookup(b"k0") == first[0]
    assert pool.allocate(1, "c") == [first[1]], "the tail of a prefix goes before its head"
    assert pool.lookup(b"k1") is None
    assert pool.lookup(b"k0") == first[0]


def test_a_block_that_comes_back_without_content_is_taken_before_cached_ones_that_came_back_earlier():
    pool = BlockPool(3, 4)
    cached, plain, last = pool.allocate(3, "a")
    pool.publish(cached, b"k", None)
    for block_id in (cached, plain, last):
        pool.free([block_id], "a")
    assert pool.allocate(3, "b") == [last, plain, cached]


def test_a_generation_counts_takings_for_new_content_not_cache_hits():
    pool = BlockPool(2, 4)
    (block_id,) = pool.allocate(1, "a")
    pool.publish(block_id, b"k", None)
    pool.free([block_id], "a")
    pool.reference([block_id], "b")
    assert pool.generations.tolist() == [1, 0]
    pool.free([block_id], "b")
    pool.allocate(2, "c")
    assert pool.generations.tolist() == [2, 1]


def test_generations_go_on_in_the_array_that_is_bound():
    pool = BlockPool(3, 4)
    pool.allocate(2, "a")
    array = np.full(3, 9, np.uint64)
    pool.bind_generations(array)
    assert array.tolist() == [1, 1, 0]
    pool.allocate(1, "b")
    assert array.tolist() == [1, 1, 1]
    assert pool.generations is array
    with pytest.raises(ValueError, match=r"uint64 \(3,\)"):
        pool.bind_generations(np.zeros(2, np.uint64))


def test_double_free_and_foreign_free_are_our_own_faults():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1, "a")
    with pytest.raises(AssertionError, match="b gives up block 0"):
        pool.free(blocks, "b")
    pool.free(blocks, "a")
    with pytest.raises(AssertionError, match="a gives up block 0"):
        pool.free(blocks, "a")
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 are free"):
        pool.allocate(3, "a")


def test_holds_that_cannot_be_are_our_own_faults():
    pool = BlockPool(3, 4)
    mine, leased, free = pool.allocate(3, "a")
    pool.free([free], "a")
    with pytest.raises(AssertionError, match="shared but holds no published content"):
        pool.reference([mine], "b")
    pool.publish(mine, b"k", None)
    with pytest.raises(AssertionError, match="a already holds block"):
        pool.reference([mine], "a")
    with pytest.raises(AssertionError, match="as None, not as a reference"):
        pool.lease([mine], "b")
    pool.lease([leased], "a")
    with pytest.raises(AssertionError, match="not as a reference"):
        pool.lease([leased], "a")
    with pytest.raises(AssertionError, match="a would write block"):
        pool.assert_writable(leased, "a")
    with pytest.raises(AssertionError, match="is held by nobody"):
        pool.quarantine([free], "load a")
    pool.quarantine([mine], "load a")
    with pytest.raises(AssertionError, match="is held by it already"):
        pool.quarantine([mine], "load a")
    with pytest.raises(AssertionError, match="not as REFERENCED"):
        pool.free([leased], "a")


def test_a_block_with_two_references_or_with_published_content_is_not_writable():
    pool = BlockPool(2, 4)
    (block_id,) = pool.allocate(1, "a")
    pool.assert_writable(block_id, "a")
    pool.publish(block_id, b"k", None)
    with pytest.raises(AssertionError, match="published"):
        pool.assert_writable(block_id, "a")
    pool.reference([block_id], "b")
    pool.unpublish(block_id)
    with pytest.raises(AssertionError, match="held by"):
        pool.assert_writable(block_id, "a")


def test_a_quarantined_block_comes_back_only_when_its_last_toucher_has_ended():
    pool = BlockPool(1, 4)
    blocks = pool.allocate(1, "a")
    pool.quarantine(blocks, "load a")
    pool.free(blocks, "a")
    assert pool.num_free_blocks == 0
    assert pool.audit().quarantined == 1
    pool.release_quarantine(blocks, "load a")
    assert pool.audit().all_free


def test_the_audit_names_a_broken_rule():
    pool = BlockPool(2, 4)
    pool.allocate(1, "a")
    pool._free[0] = None
    audit = pool.audit()
    assert not audit.clean
    assert audit.violations == ("block 0 is in the free list and held by {'a': <Hold.REFERENCED: 2>}",)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps, per block, who holds it how."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, 4)
        self.model: list[dict[str, Hold]] = [{} for _ in range(num_blocks)]
        self.owners = 0
        self.keys = 0

    def held(self, *holds):
        return [(block_id, owner) for block_id, owners in enumerate(self.model) for owner, hold in owners.items() if hold in holds]

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.pool.num_free_blocks))
        self.owners += 1
        before = self.pool.generations.copy()
        blocks = self.pool.allocate(count, f"r{self.owners}")
        assert len(set(blocks)) == count
        for block_id in blocks:
            assert not self.model[block_id]
            assert self.pool.generations[block_id] == before[block_id] + np.uint64(1)
            self.model[block_id] = {f"r{self.owners}": Hold.REFERENCED}
            if data.draw(st.booleans()):
                self.keys += 1
                self.pool.publish(block_id, b"%d" % self.keys, None)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share(self, data):
        block_id = self.pool.lookup(b"%d" % data.draw(st.integers(1, self.keys)))
        if block_id is not None:
            self.owners += 1
            self.pool.reference([block_id], f"r{self.owners}")
            self.model[block_id][f"r{self.owners}"] = Hold.REFERENCED

    @precondition(lambda self: self.held(Hold.REFERENCED))
    @rule(data=st.data(), lease=st.booleans(), quarantine=st.booleans())
    def end(self, data, lease, quarantine):
        block_id, owner = data.draw(st.sampled_from(self.held(Hold.REFERENCED)))
        if quarantine:
            self.pool.quarantine([block_id], f"load {owner}")
            self.model[block_id][f"load {owner}"] = Hold.QUARANTINED
        if lease:
            self.pool.lease([block_id], owner)
            self.model[block_id][owner] = Hold.LEASED
        else:
            self.pool.free([block_id], owner)
            del self.model[block_id][owner]

    @precondition(lambda self: self.held(Hold.LEASED, Hold.QUARANTINED))
    @rule(data=st.data())
    def release(self, data):
        block_id, owner = data.draw(st.sampled_from(self.held(Hold.LEASED, Hold.QUARANTINED)))
        if self.model[block_id].pop(owner) is Hold.LEASED:
            self.pool.release_lease([block_id], owner)
        else:
            self.pool.release_quarantine([block_id], owner)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pool"):
            audit = self.pool.audit()
            assert audit.clean, audit
            strongest = [max(owners.values(), default=None) for owners in self.model]
            assert audit.free == strongest.count(None)
            assert audit.referenced == strongest.count(Hold.REFERENCED)
            assert audit.leased == strongest.count(Hold.LEASED)
            assert audit.quarantined == strongest.count(Hold.QUARANTINED)
            assert [self.pool.owners(block_id) for block_id in range(len(self.model))] == self.model

    def teardown(self):
        if hasattr(self, "pool"):
            for block_id, owner in self.held(*Hold):
                release = {Hold.REFERENCED: self.pool.free, Hold.LEASED: self.pool.release_lease, Hold.QUARANTINED: self.pool.release_quarantine}
                release[self.model[block_id][owner]]([block_id], owner)
            assert self.pool.audit().all_free


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
