"""Requests that share blocks whose load turns out to have failed, in a real engine: all of them are computed anew, or end, and nobody else."""

import pytest
import shelf_connector
from tier_engine import MODES, bits, drain, forget_local, open_engine, request_bits, run_alone

from interlock import SamplingParams

SHARED = list(range(40, 64))  # three blocks
OWNER, SHARER, OTHER = [*SHARED, 7, 8, 9, 10], [*SHARED, 11, 12, 13], list(range(100, 120))
LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
STEP_TOKENS = 8


@pytest.fixture(scope="module")
def expected(model):
    return run_alone(model, [OWNER, SHARER, OTHER], [LONG] * 3)


@pytest.fixture(autouse=True)
def shelf():
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    yield shelf_connector.SHELF[-1]
    shelf_connector.SHELF.pop()


def open_shelf(model, mode, policy):
    options = {"cudagraph_mode": mode, "max_num_batched_tokens": STEP_TOKENS, "num_blocks": 40, "transfer": {"kv_load_failure_policy": policy}}
    llm = open_engine(model, "shelf_connector:ShelfConnector", {}, **options)
    llm.generate([[*SHARED, 99]], LONG)  # what the shelf has of the two
    forget_local(llm)
    return llm


def start(llm, name, prompt):
    request = llm.core.make_request(name, {"prompt_token_ids": prompt}, LONG)
    llm.core.add_request(request)
    return request


def reject(llm, request, first, count):
    """The load of these blocks is noticed to have brought garbage, which is there now."""
    bad = request.block_ids[first : first + count]
    for layer in llm.core.runner.kv_cache.layers:
        layer.numpy()[bad] = shelf_connector.POISON
    llm.core.runner._kv.connector.bad_blocks.update(bad)
    return bad


def two_that_share(llm):
    owner = start(llm, "owner", OWNER)
    while not owner.num_output_tokens:
        llm.core.step()
    sharer, other = start(llm, "sharer", SHARER), start(llm, "other", OTHER)
    while not (sharer.num_output_tokens and other.num_output_tokens):
        llm.core.step()
    assert owner.block_ids[:3] == sharer.block_ids[:3]
    assert owner.metrics.num_external_tokens == 24
    return owner, sharer, other


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize(("first", "count"), [(1, 1), (0, 3)], ids=["the second block", "all blocks"])
def test_who_shares_a_rejected_block_is_recomputed_with_its_owner_and_changes_no_bit(model, expected, cudagraph_mode, first, count):
    with open_shelf(model, cudagraph_mode, "recompute") as llm:
        owner, sharer, other = two_that_share(llm)
        steps = llm.metrics()["num_steps"]
        before = {request.request_id: list(request.output_token_ids) for request in (owner, sharer)}
        bad = reject(llm, owner, first, count)
        llm.core.step()
        for request in (owner, sharer):
            assert request.output_token_ids == before[request.request_id], "what the step made of it is thrown away"
            assert request.num_computed_tokens <= first * 8
            assert not set(request.block_ids) & set(bad)
        while llm.core.has_unfinished_requests:
            llm.core.step()
            assert not set(owner.block_ids[first:]) & set(sharer.block_ids[first:]), "each computes blocks of its own"
        assert llm.metrics()["num_steps"] - steps <= 2 * (len(OWNER) + LONG.max_tokens) // STEP_TOKENS + LONG.max_tokens + 3
        assert [request_bits(request) for request in (owner, sharer, other)] == expected
        assert [request.metrics.num_failed_loads for request in (owner, sharer, other)] == [1, 1, 0]
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_who_shares_goes_on_where_the_owner_leaves_half_way_through_its_recompute(model, expected, cudagraph_mode, num_steps):
    with open_shelf(model, cudagraph_mode, "recompute") as llm:
        owner, sharer, other = two_that_share(llm)
        reject(llm, owner, 0, 3)
        for _ in range(num_steps):
            llm.core.step()
        llm.core.abort_request("owner")
        while llm.core.has_unfinished_requests:
            llm.core.step()
        assert [request_bits(request) for request in (sharer, other)] == expected[1:]
        drain(llm)
        assert [bits(output) for output in llm.generate([OWNER], LONG)] == expected[:1], "what is found of it later is right"
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_under_policy_fail_all_who_hold_the_block_end_with_an_error_and_nobody_else(model, expected, cudagraph_mode):
    with open_shelf(model, cudagraph_mode, "fail") as llm:
        owner, sharer, other = two_that_share(llm)
        reject(llm, owner, 1, 1)
        while llm.core.has_unfinished_requests:
            llm.core.step()
        for request in (owner, sharer):
            assert request.finish_reason == "error"
            assert "kv_load_failure_policy is 'fail'" in request.error
        assert request_bits(other) == expected[2]
        drain(llm)


def test_negative_control_without_the_rejection_the_garbage_shows(model, expected):
    with open_shelf(model, "FULL", "recompute") as llm:
        owner, sharer, _ = two_that_share(llm)
        reject(llm, owner, 1, 1)
        llm.core.runner._kv.connector.bad_blocks.clear()
        while llm.core.has_unfinished_requests:
            llm.core.step()
        assert [owner.finish_reason, sharer.finish_reason] == ["error", "error"] or owner.output_token_ids != expected[0][0][0]
        drain(llm)
