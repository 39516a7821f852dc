"""Blocks that a connector names as not landed are outside input: what cannot be so is counted and dropped, and nothing is recomputed for ever."""

import dataclasses
import logging

import numpy as np
import pytest
from engine_fakes import FakeConnector, Harness, Offer, run_alone

from interlock.engine.load_reports import MAX_RECOMPUTES

PROMPT = list(range(1, 14))
LONG = [(7 * position) % 50 for position in range(4 * (MAX_RECOMPUTES + 4) + 1)]
NUM_BLOCKS = 24


class NamesBlocks(FakeConnector):
    """Adds what the test says to the blocks that it names, in every step."""

    names: frozenset = frozenset()

    def report(self, runner, output):
        report = super().report(runner, output)
        return dataclasses.replace(report, invalid_block_ids=report.invalid_block_ids | self.names)


def harness(policy="recompute", **options):
    connector = NamesBlocks()
    return Harness(connector=connector, policy=policy, **{"num_blocks": NUM_BLOCKS, **options}), connector


def dropped(h):
    return h.scheduler.counters()["num_dropped_reports"]


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("name", [10**6, -1, 12, "x", True, None, 2.5, (1,), np.bool_(True)], ids=repr)
def test_what_is_no_block_is_counted_and_dropped_and_the_log_says_so_once(name, is_async, caplog):
    h, connector = harness(num_blocks=12)
    connector.offers["a"] = Offer(12, is_async=is_async)
    h.add("a", PROMPT)
    h.add("b", [9] * 27, max_tokens=2)  # with these two the pool's last block is in use
    connector.names = frozenset([name])
    with caplog.at_level(logging.WARNING):
        h.drain()
    assert h.output_of("a") == run_alone(PROMPT, 4)
    assert h.done["a"].metrics.num_failed_loads == h.done["b"].metrics.num_failed_loads == 0
    assert dropped(h) == h.runner.last_step
    warnings = [record for record in caplog.records if "blocks as not landed" in record.getMessage()]
    assert len(warnings) == 1
    assert repr(name) in warnings[0].getMessage()
    h.assert_drained()


def test_an_id_of_another_integer_type_is_an_id():
    h, connector = harness()
    connector.offers["a"] = Offer(12)
    h.add("a", PROMPT)
    first = h.scheduler.schedule()
    connector.names = frozenset([np.int64(first.load_promises[0].block_ids[1])])
    h.take(first, h.runner.execute_model(first))
    assert h.scheduler.requests["a"].num_computed_tokens == 4
    connector.names = frozenset()
    h.drain()
    assert dropped(h) == 0
    assert h.output_of("a") == run_alone(PROMPT, 4)
    h.assert_drained()


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_connector_that_names_every_block_in_each_step_costs_each_load_one_recompute(policy, is_async):
    h, connector = harness(policy)
    connector.offers = {name: Offer(12, is_async=is_async, delay=2) for name in ("a", "c")}
    connector.names = frozenset(range(NUM_BLOCKS))
    prompts = {"a": PROMPT, "b": [9] * 17, "c": [8, *PROMPT]}
    for name, prompt in prompts.items():
        h.add(name, prompt)
    h.drain(60)
    for name, prompt in prompts.items():
        loads = name != "b"
        assert h.done[name].metrics.num_failed_loads == loads, "who loads nothing is left alone"
        if loads and policy == "fail":
            assert h.done[name].finish_reason == "error"
        else:
            assert h.output_of(name) == run_alone(prompt, 4)
    assert dropped(h) > 0
    h.assert_drained()


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_request_is_recomputed_a_bounded_number_of_times_and_then_ends_with_an_error_that_says_so(is_async):
    h, connector = harness(num_blocks=len(LONG) // 4 + 40, max_model_len=len(LONG) + 8, max_num_batched_tokens=256)
    connector.offers["a"] = Offer(len(LONG) - 1, is_async=is_async)
    request = h.add("a", LONG)
    while request.num_computed_tokens < len(LONG) - 1:
        h.step()
    loaded = list(request.block_ids[: len(LONG) // 4])
    for number in range(1, MAX_RECOMPUTES + 2):
        assert not request.finished
        assert len(h.streamed["a"]) <= 1
        connector.names = frozenset([loaded[-number]])
        h.step()
        assert request.metrics.num_failed_loads == number
    assert request.finish_reason == "error"
    assert f"failed to land {MAX_RECOMPUTES + 1} times, it is recomputed at most {MAX_RECOMPUTES} times: the load of KV blocks" in request.error
    assert dropped(h) == 0
    connector.names = frozenset()
    h.drain()
    h.add("b", LONG[:40])
    h.drain()
    assert h.output_of("b") == run_alone(LONG[:40], 4)
    h.assert_drained()


def test_a_block_that_has_been_taken_for_something_else_is_nobodys_failed_load():
    h, connector = harness(num_blocks=8, max_num_batched_tokens=64)
    connector.offers["a"] = Offer(12)
    h.add("a", PROMPT, max_tokens=1)
    (promise,) = h.step().load_promises
    h.drain()
    h.add("b", [9] * 24, max_tokens=8)
    h.step()
    assert set(promise.block_ids) & set(h.scheduler.requests["b"].block_ids)
    connector.names = frozenset(promise.block_ids)
    h.drain()
    assert h.output_of("b") == run_alone([9] * 24, 8)
    assert h.done["b"].metrics.num_failed_loads == 0
    h.assert_drained()


@pytest.mark.parametrize("of_a_cache", [False, True])
def test_who_shares_a_block_goes_by_the_load_that_brought_it(of_a_cache):
    connector = NamesBlocks(offers={"r1": Offer(8)})
    connector.recomputes_load = {"r1": of_a_cache}.__getitem__
    h = Harness(connector=connector, policy="fail", num_blocks=NUM_BLOCKS, max_num_batched_tokens=4)
    prompts = {"r1": [*PROMPT[:8], 20, 20], "r2": [*PROMPT[:8], 30, 30]}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=8)
        h.step()
    shared = h.scheduler.requests["r1"].block_ids[1]
    assert set(h.pool.owners(shared)) == {"r1", "r2"}
    h.runner.cells[shared] = [-1] * 4
    connector.late_invalid.add(shared)
    h.drain()
    for name, prompt in prompts.items():
        if of_a_cache:
            assert h.output_of(name) == run_alone(prompt, 8)
        else:
            assert "kv_load_failure_policy is 'fail'" in h.done[name].error
    h.assert_drained()
