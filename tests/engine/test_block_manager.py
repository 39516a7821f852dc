"""Who may still touch a block after its request has given it up, and until when it is nobody else's."""

import pytest
from engine_fakes import make_kv_cache_config

from interlock.core.sampling_params import SamplingParams
from interlock.engine.block_manager import BlockManager
from interlock.engine.request import Request

NUM_BLOCKS, SIZE = 8, 4


@pytest.fixture
def blocks():
    return BlockManager(make_kv_cache_config(NUM_BLOCKS, SIZE), enable_caching=True)


def start(blocks, name="a", num_tokens=16, in_flight=None, first_token=0):
    """A request with blocks for `num_tokens`."""
    request = Request(name, list(range(first_token, first_token + num_tokens)), SamplingParams(), seed=0, arrival_time=0.0)
    blocks.adopt(request)
    blocks.start(request, blocks.match(request), num_tokens)
    request.in_flight_step = in_flight
    return request


def taken(blocks):
    return NUM_BLOCKS - blocks.pool.num_free_blocks


class TestSteps:
    """Of a step that is running."""

    @pytest.mark.parametrize("num_kept", [0, 1])
    def test_blocks_that_it_touches_come_back_when_it_or_a_later_one_has_retired(self, blocks, num_kept):
        request = start(blocks, in_flight=3)
        blocks.truncate(request, num_kept)
        blocks.retire(2)
        assert taken(blocks) == 4
        assert blocks.pool.audit().quarantined == 4 - num_kept
        blocks.retire(3)
        assert taken(blocks) == num_kept

    def test_a_later_step_ends_what_earlier_ones_touched(self, blocks):
        for step, name in ((3, "a"), (4, "b")):
            blocks.truncate(start(blocks, name, in_flight=step, first_token=100 * step), 0)
        assert taken(blocks) == 8
        blocks.retire(5)
        assert taken(blocks) == 0

    def test_a_lease_that_ends_earlier_does_not_give_them_back(self, blocks):
        blocks.lease(start(blocks, in_flight=3))
        assert blocks.end_lease("a")
        assert taken(blocks) == 4
        blocks.retire(3)
        assert taken(blocks) == 0


class TestTransfers:
    def test_blocks_of_a_load_are_held_until_it_has_ended_however_often_they_are_named(self, blocks):
        request = start(blocks)
        blocks.quarantine_transfer("a", request.block_ids[2:])
        blocks.quarantine_transfer("a", request.block_ids[1:])
        blocks.truncate(request, 0)
        assert taken(blocks) == 3
        assert blocks.end_transfer("a")
        assert taken(blocks) == 0
        assert not blocks.end_transfer("a")

    def test_an_overdue_one_is_waited_for_no_longer_and_the_next_of_its_request_is(self, blocks):
        for _ in range(2):
            request = start(blocks)
            blocks.quarantine_transfer("a", request.block_ids)
            blocks.truncate(request, 0)
            assert blocks.has_pending
            blocks.stop_expecting("a")
            assert not blocks.has_pending
            assert blocks.knows("a")
            assert blocks.end_transfer("a")
            assert not blocks.knows("a")

    def test_nothing_more_is_loaded_while_loads_that_nobody_waits_for_hold_more_than_half_of_the_pool(self, blocks):
        held = [start(blocks, name, num_tokens, first_token=100 * num_tokens) for name, num_tokens in (("a", 16), ("b", 4))]
        for request in held:
            assert blocks.may_load
            blocks.quarantine_transfer(request.request_id, request.block_ids)
        assert not blocks.may_load
        blocks.end_transfer("b")
        assert blocks.may_load


class TestDoubts:
    """About what a connector that has raised may still do."""

    def test_they_end_with_a_later_step_in_which_all_went_well(self, blocks):
        for step, name in ((3, "a"), (4, "b")):
            request = start(blocks, name, first_token=100 * step)
            blocks.hold_in_doubt(step, request.block_ids)
            blocks.truncate(request, 0)
        for step, held in ((3, 8), (4, 4), (5, 0)):
            blocks.end_doubt(step)
            assert taken(blocks) == held

    def test_nothing_is_loaded_until_then(self, blocks):
        blocks.begin_doubt()
        assert not blocks.may_load
        blocks.end_doubt(1)
        assert blocks.may_load

    def test_steps_are_made_to_end_them_but_not_for_ever(self, blocks):
        blocks.hold_in_doubt(3, start(blocks).block_ids)
        for step, is_expected in ((3, True), (5, True), (6, False), (6, False)):
            blocks.stop_expecting_sound_step(step)
            assert blocks.has_pending == is_expected

    def test_those_that_are_expected_no_longer_count_as_lost(self, blocks):
        request = start(blocks, num_tokens=20)
        blocks.hold_in_doubt(3, request.block_ids)
        assert blocks.may_load
        blocks.stop_expecting_sound_step(6)
        assert not blocks.may_load


class TestStarvation:
    """Of a request that can get no block because of what the outside does not give back."""

    def test_it_is_when_only_overdue_loads_hold_blocks_that_are_not_its_own(self, blocks):
        request = start(blocks, "mine", 8)
        other = start(blocks, "a", 8, first_token=100)
        blocks.quarantine_transfer("a", other.block_ids)
        blocks.truncate(other, 0)
        assert not blocks.is_starved(request)
        blocks.stop_expecting("a")
        assert blocks.is_starved(request)
        start(blocks, "third", 4, first_token=200)
        assert not blocks.is_starved(request)

    def test_leases_whose_end_may_have_been_lost_count_where_they_are_to(self, blocks):
        request = start(blocks, "mine", 8)
        blocks.lease(start(blocks, "a", 8, first_token=100))
        assert not blocks.is_starved(request, beside_leases=True)
        blocks.doubt_leases()
        assert not blocks.is_starved(request)
        assert blocks.is_starved(request, beside_leases=True)
        assert blocks.end_lease("a")
        assert not blocks.is_starved(request, beside_leases=True)


class TestRequests:
    def test_full_blocks_alone_are_published_and_those_that_were_found_are_not_published_again(self, blocks):
        request = start(blocks, num_tokens=10)
        request.num_computed_tokens = 10
        blocks.publish(request)
        assert [blocks.pool.published_key(block_id) is not None for block_id in request.block_ids] == [True, True, False]
        again = start(blocks, "b", num_tokens=10)
        assert again.block_ids[:2] == request.block_ids[:2]
        assert (again.num_computed_tokens, again.num_published_blocks) == (8, 2)

    def test_what_was_given_up_is_neither_computed_nor_published(self, blocks):
        request = start(blocks)
        request.num_computed_tokens = 16
        blocks.publish(request)
        blocks.truncate(request, 2)
        assert (request.num_computed_tokens, request.num_published_blocks, len(request.block_ids)) == (8, 2, 2)
        blocks.truncate(request, 3)
        assert (request.num_computed_tokens, request.num_published_blocks) == (8, 2)

    def test_cached_blocks_that_are_free_are_taken_from_what_is_free(self, blocks):
        first = start(blocks, num_tokens=16)
        first.num_computed_tokens = 16
        blocks.publish(first)
        blocks.truncate(first, 0)
        start(blocks, "other", 16, first_token=100)
        request = Request("b", list(range(20)), SamplingParams(), seed=0, arrival_time=0.0)
        blocks.adopt(request)
        matched = blocks.match(request)
        assert len(matched) == 4
        assert blocks.fits(16, matched=matched)
        assert not blocks.fits(17, matched=matched)

    @pytest.mark.parametrize(("computed", "count", "shared"), [(3, 1, 0), (3, 2, 1), (4, 4, 1), (4, 5, 2)])
    def test_every_block_of_the_next_tokens_has_to_be_its_own(self, blocks, computed, count, shared):
        request = start(blocks)
        request.num_computed_tokens = computed
        blocks.assert_writable(request, count)
        blocks.pool.quarantine([request.block_ids[shared]], "somebody")
        with pytest.raises(AssertionError, match="would write block"):
            blocks.assert_writable(request, count)
