import dataclasses

import pytest
from engine_fakes import VOCAB, Harness, run_alone

from interlock.core.errors import RequestError
from interlock.engine.request import RequestStatus


def test_a_request_alone_is_prefilled_in_chunks_and_then_decoded():
    h = Harness(max_num_batched_tokens=4, max_num_seqs=2)
    h.add("a", range(10), max_tokens=3)
    counts = []
    while h.scheduler.has_unfinished_requests:
        counts.append(h.step().num_scheduled_tokens["a"])
    assert counts == [4, 4, 2, 1, 1]
    assert h.output_of("a") == run_alone(range(10), 3)
    assert h.done["a"].finish_reason == "length"
    h.assert_drained()


def test_running_requests_come_first_and_waiting_ones_in_order_of_arrival():
    h = Harness(max_num_batched_tokens=6, max_num_seqs=3)
    for name in "abcd":
        h.add(name, [ord(name) % VOCAB] * 4, max_tokens=2)
    assert h.step().num_scheduled_tokens == {"a": 4, "b": 2}
    assert h.step().num_scheduled_tokens == {"a": 1, "b": 2, "c": 3}
    assert list(h.step().num_scheduled_tokens) == ["b", "c", "d"], "a is done and gives its seat to d"
    h.drain()
    h.assert_drained()


def test_the_step_stamp_only_grows_also_over_empty_steps():
    h = Harness()
    steps = [h.step().step for _ in range(3)]
    h.add("a", [1, 2])
    steps += [h.step().step for _ in range(3)]
    assert steps == sorted(set(steps))


def test_a_prefix_is_visible_only_after_the_step_that_wrote_it():
    h = Harness()
    h.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    h.add("b", [1, 2, 3, 4, 5, 6, 7])
    first = h.scheduler.schedule()
    assert [new.num_computed_tokens for new in first.scheduled_new_reqs] == [0, 0]
    h.add("c", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = h.scheduler.schedule()
    assert [new.num_computed_tokens for new in second.scheduled_new_reqs] == [0], "nothing has retired yet"
    h.take(first, h.runner.execute_model(first))
    h.take(second, h.runner.execute_model(second))
    h.add("d", [1, 2, 3, 4, 5, 6, 7, 8])
    assert {new.req_id: new.num_computed_tokens for new in h.step().scheduled_new_reqs} == {"d": 4}, "at most N-1 tokens are a hit"
    h.drain()
    for name, prompt in (("a", range(1, 10)), ("b", range(1, 8)), ("c", range(1, 10)), ("d", range(1, 9))):
        assert h.output_of(name) == run_alone(prompt, 4)
    h.assert_drained()


def test_a_request_that_ends_on_a_block_boundary_publishes_only_what_has_kv():
    h = Harness()
    h.add("a", [1, 2, 3, 4], max_tokens=4)
    h.drain()
    assert h.pool.audit().cached == 1
    prompt = [1, 2, 3, 4, *h.output_of("a"), 7, 7, 7]
    h.add("b", prompt)
    h.drain()
    assert h.done["b"].metrics.num_cached_tokens == 4
    assert h.output_of("b") == run_alone(prompt, 4)


def test_a_salt_separates_users_and_a_shared_salt_joins_them():
    h = Harness()
    prompt = list(range(9))
    for name, salt in (("none", None), ("a", "a"), ("b", "b"), ("a2", "a"), ("none2", None), ("empty", "")):
        h.add(name, prompt, cache_salt=salt)
        h.drain()
    hits = {name: request.metrics.num_cached_tokens for name, request in h.done.items()}
    assert hits == {"none": 0, "a": 0, "b": 0, "a2": 8, "none2": 8, "empty": 0}


def test_when_blocks_run_out_the_latest_arrival_is_recomputed_and_outputs_do_not_change():
    h = Harness(num_blocks=6, max_num_batched_tokens=32)
    prompts = {name: [index, 1, 2, 3, 4, 5, 6] for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=12)
    preempted = []
    while h.scheduler.has_unfinished_requests:
        preempted += sorted(h.step().preempted_req_ids)
    assert preempted
    assert preempted[0] == "c"
    assert "a" not in preempted
    for name, prompt in prompts.items():
        assert h.output_of(name) == run_alone(prompt, 12)
    assert h.done["a"].metrics.finished_time < h.done["b"].metrics.finished_time < h.done["c"].metrics.finished_time
    h.assert_drained()


def test_a_request_that_can_never_fit_is_refused_when_it_arrives():
    h = Harness(num_blocks=3)
    with pytest.raises(RequestError, match=r"needs up to 5 KV blocks .* the pool has 3; raise kv_cache_memory_bytes"):
        h.add("a", range(10), max_tokens=10)
    with pytest.raises(RequestError, match="40 tokens, expected fewer than max_model_len, which is 40"):
        h.add("b", [1] * 40)
    h.add("c", range(10), max_tokens=3)
    h.drain()
    assert h.output_of("c") == run_alone(range(10), 3)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    h = Harness()
    h.add("a", [1, 2])
    with pytest.raises(RequestError, match="request_id is 'a'"):
        h.add("a", [3])
    h.drain()
    h.done.clear()
    h.add("a", [3, 4, 5])
    h.drain()
    assert h.output_of("a") == run_alone([3, 4, 5], 4)


@pytest.mark.parametrize(
    ("params", "length", "reason", "stop_reason"),
    [
        ({"max_tokens": 12}, 3, "stop", None),
        ({"max_tokens": 12, "ignore_eos": True}, 12, "length", None),
        ({"max_tokens": 2}, 2, "length", None),
        ({"max_tokens": None, "ignore_eos": True}, 36, "length", None),
        ({"max_tokens": 12, "stop": 1}, 2, "stop", 1),
    ],
)
def test_a_request_ends_for_the_reason_that_its_parameters_name(params, length, reason, stop_reason):
    prompt = [3, 1, 4, 1]
    free = run_alone(prompt, 36)
    eos = free[2]
    if "stop" in params:
        params["stop_token_ids"] = [free[params.pop("stop")]]
    assert eos not in free[:2]
    assert eos not in free[3:12]
    h = Harness(eos=eos)
    h.add("a", prompt, **params)
    h.drain()
    assert h.output_of("a") == free[:length]
    assert h.done["a"].finish_reason == reason
    assert h.done["a"].stop_reason == (None if stop_reason is None else free[stop_reason])


def test_the_runner_hears_what_min_tokens_holds_back_and_whatever_end_it_draws_is_one():
    eos, stops = run_alone([3, 1, 4, 1], 3)[2], [7, 3, 7]
    h = Harness(eos=eos)
    for name, params in (("a", {"min_tokens": 2}), ("b", {"min_tokens": 1, "ignore_eos": True}), ("c", {})):
        h.add(name, [3, 1, 4, 1], stop_token_ids=stops, max_tokens=5, **params)
    held_back = {new.req_id: new.all_stop_token_ids for new in h.step().scheduled_new_reqs}
    both = tuple(sorted({3, 7, eos}))
    assert held_back == {"a": both, "b": both, "c": ()}
    h.drain()
    assert h.done["a"].finish_reason == "stop"


def test_logprobs_come_with_every_token_of_a_request_that_wants_them():
    h = Harness()
    h.add("a", [1, 2], logprobs=2)
    h.add("b", [1, 2])
    h.drain()
    assert [entry.token_ids[0] for entry in h.done["a"].logprobs] == h.output_of("a")
    assert h.done["b"].logprobs == []


@pytest.mark.parametrize("steps_before", range(6))
def test_an_abort_at_any_moment_gives_everything_back_and_disturbs_nobody(steps_before):
    h = Harness(max_num_batched_tokens=4)
    h.add("a", range(10), max_tokens=5)
    h.add("b", range(5), max_tokens=5)
    for _ in range(steps_before):
        h.step()
    aborted = h.scheduler.abort_request("a")
    assert aborted.status is RequestStatus.FINISHED_ABORTED
    assert h.scheduler.abort_request("a") is None
    h.drain()
    assert h.done["a"].finish_reason == "abort"
    assert h.output_of("b") == run_alone(range(5), 5)
    assert "a" not in h.runner.known or steps_before == 0
    h.assert_drained()


def test_the_blocks_of_a_request_that_is_aborted_in_mid_step_come_back_when_the_step_retires():
    h = Harness(num_blocks=3)
    h.add("a", range(9), max_tokens=2)
    output = h.scheduler.schedule()
    h.scheduler.abort_request("a")
    assert h.pool.audit().quarantined == 3
    h.add("b", [7, 7, 7], max_tokens=2)
    empty = h.scheduler.schedule()
    assert empty.total_num_scheduled_tokens == 0, "no block is reused while the step may still write it"
    h.take(output, h.runner.execute_model(output))
    h.take(empty, h.runner.execute_model(empty))
    h.drain()
    assert h.output_of("b") == run_alone([7, 7, 7], 2)
    h.assert_drained()


def test_a_failed_step_ends_its_requests_with_the_error_and_no_other():
    h = Harness(max_num_batched_tokens=4)
    h.add("a", range(4), max_tokens=5)
    h.step()
    h.add("b", range(8), max_tokens=5)
    h.add("c", range(6), max_tokens=5)
    output = h.scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"a", "b"}
    ended = h.scheduler.fail_step(output, "kernel attention, row 3: the logits hold NaN")
    assert {request.request_id: request.finish_reason for request in ended} == {"a": "error", "b": "error"}
    assert all("NaN" in request.error for request in ended)
    h.drain()
    assert h.output_of("c") == run_alone(range(6), 5)
    h.assert_drained()


def test_a_request_whose_own_logits_are_bad_ends_alone_and_publishes_nothing():
    h = Harness()
    for name, prompt in (("a", [1] * 9), ("b", [2] * 9)):
        h.add(name, prompt)
    output = h.scheduler.schedule()
    result = h.runner.execute_model(output)
    h.take(output, dataclasses.replace(result, failed_requests={"a": "the logits hold NaN"}))
    assert (h.done["a"].finish_reason, h.done["a"].error) == ("error", "the logits hold NaN")
    assert h.output_of("a") == []
    assert h.pool.audit().cached == 0
    h.drain()
    assert h.output_of("b") == run_alone([2] * 9, 4)
    h.assert_drained()


def test_two_steps_in_flight_never_hold_the_same_request():
    h = Harness(max_num_batched_tokens=8, num_blocks=12)
    prompts = {f"r{index}": [index] * 6 for index in range(4)}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=6)
    ahead = h.scheduler.schedule()
    while h.scheduler.has_work:
        output = h.scheduler.schedule()
        assert not set(output.num_scheduled_tokens) & set(ahead.num_scheduled_tokens)
        h.take(ahead, h.runner.execute_model(ahead))
        ahead = output
    for name, prompt in prompts.items():
        assert h.output_of(name) == run_alone(prompt, 6)
    h.take(ahead, h.runner.execute_model(ahead))
    h.assert_drained()
