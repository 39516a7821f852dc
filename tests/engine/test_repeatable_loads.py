"""A load that can be repeated is asked for again after a preemption; any other is asked for once in a request's life."""

import pytest
from engine_fakes import FakeConnector, Harness, Offer, run_alone

from interlock.engine.load_reports import MAX_RECOMPUTES
from interlock.engine.request_queues import MAX_FAILED_LOADS

PROMPTS = {"old": [1, 2, 3, 4, 5, 6, 7, 8, 9], "young": [9, 8, 7, 6, 5, 4, 3, 2, 1]}


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("fail_from", [None, 0, 1])
def test_only_repeatable_loads_are_asked_for_again(is_async, repeatable, fail_from):
    connector = FakeConnector(offers={"young": Offer(8, is_async, fail_from=fail_from)})
    connector.load_is_repeatable = repeatable
    preempted = []
    connector.request_preempted = lambda request: preempted.append((request.request_id, len(request.block_ids)))
    harness = Harness(7, connector, policy="recompute", enable_prefix_caching=False)
    requests = {name: harness.add(name, prompt, max_tokens=10) for name, prompt in PROMPTS.items()}
    harness.drain()
    for name, prompt in PROMPTS.items():
        assert harness.output_of(name) == run_alone(prompt, 10)
    times = requests["young"].metrics.num_preemptions
    assert times > 0
    assert [name for name, _ in preempted] == ["young"] * times
    assert all(held > 0 for _, held in preempted), "the connector hears of it before the blocks are given up"
    assert [count for name, count in connector.allocated if name == "young" and count] == [8] * (1 + times if repeatable else 1)
    assert requests["young"].metrics.num_external_tokens == 8, "counted when it came"
    assert harness.scheduler.counters()["num_prompt_tokens"] == sum(map(len, PROMPTS.values()))
    harness.assert_drained()


def test_a_cache_that_fails_is_recomputed_although_the_policy_is_fail():
    connector = FakeConnector(offers={"r": Offer(8, fail_from=0)})
    connector.recomputes_failed_loads = True
    harness = Harness(16, connector, policy="fail")
    harness.add("r", PROMPTS["old"])
    harness.drain()
    assert harness.output_of("r") == run_alone(PROMPTS["old"], 4)
    assert harness.scheduler.counters()["num_failed_loads"] == 1
    harness.assert_drained()


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_load_that_fails_whenever_it_is_repeated_is_asked_for_no_more_and_the_request_is_answered(is_async):
    connector = FakeConnector(offers={"r": Offer(8, is_async, fail_from=0)})
    connector.load_is_repeatable = connector.recomputes_failed_loads = True
    harness = Harness(24, connector, max_model_len=80, policy="fail")
    request = harness.add("r", PROMPTS["old"], max_tokens=MAX_RECOMPUTES + 10)
    for tokens in range(1, MAX_RECOMPUTES + 8):
        while request.num_output_tokens < tokens:
            harness.step()
        harness.scheduler.blocks.reset_prefix_cache()
        harness.scheduler._queues.preempt(request)
        harness.runner.known.clear()  # as the step would say that it was preempted
    harness.drain()
    assert harness.output_of("r") == run_alone(PROMPTS["old"], MAX_RECOMPUTES + 10)
    assert request.metrics.num_failed_loads == MAX_FAILED_LOADS < MAX_RECOMPUTES
    harness.assert_drained()
