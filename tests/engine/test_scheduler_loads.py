"""External loads: by position, once, and with a way back when they do not land."""

import pytest
from engine_fakes import FakeConnector, Harness, Offer, run_alone

from interlock.core.errors import RequestError
from interlock.core.step import KVConnectorOutput, LoadPromise
from interlock.engine.block_manager import BlockManager
from interlock.engine.block_pool import Hold

PROMPT = list(range(1, 14))


def harness(policy="recompute", **options):
    connector = FakeConnector()
    return Harness(connector=connector, policy=policy, **options), connector


def test_a_synchronous_load_is_promised_and_consumed_in_the_step_that_schedules_the_request():
    h, connector = harness()
    connector.offers["a"] = Offer(12)
    h.add("a", PROMPT)
    output = h.step()
    assert output.load_promises == (LoadPromise("a", 0, 12, tuple(output.scheduled_new_reqs[0].block_ids[:3])),)
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.kv_connector_metadata == output.step
    assert connector.allocated == [("a", 12)]
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT, 4)
    assert h.runner.num_computed == 4
    h.assert_drained()


def test_a_load_covers_at_most_all_tokens_but_the_last():
    h, connector = harness()
    connector.offers["a"] = Offer(13)
    h.add("a", PROMPT)
    (promise,) = h.step().load_promises
    assert (promise.start, promise.stop) == (0, 12)
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT, 4)


def test_a_load_that_ends_inside_a_block_leaves_the_rest_of_it_to_the_step():
    h, connector = harness(max_num_batched_tokens=4)
    connector.offers["a"] = Offer(6)
    h.add("a", PROMPT)
    output = h.step()
    (promise,) = output.load_promises
    assert (promise.start, promise.stop, len(promise.block_ids)) == (0, 6, 2)
    assert output.num_scheduled_tokens == {"a": 4}
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT, 4)
    h.assert_drained()


@pytest.mark.parametrize("local_blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_partial_local_hit_is_completed_by_position(local_blocks, is_async):
    h, connector = harness()
    if local_blocks:
        h.add("warm", [*PROMPT[: local_blocks * 4], 40], max_tokens=1)
        h.drain()
    connector.offers["a"] = Offer(12, is_async=is_async)
    h.add("a", PROMPT)
    h.drain()
    (promised,) = [n for req_id, n in connector.allocated if req_id == "a"][:1]
    assert promised == 12 - 4 * local_blocks
    assert h.output_of("a") == run_alone(PROMPT, 4)
    assert h.done["a"].metrics.num_cached_tokens == 4 * local_blocks
    assert h.done["a"].metrics.num_external_tokens == promised
    h.assert_drained()


@pytest.mark.parametrize("length", [8, 9, 12])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_local_hit_needs_no_load_and_the_connector_hears_of_it(length, is_async):
    h, connector = harness()
    h.add("warm", [*PROMPT[:12], 40], max_tokens=1)
    h.drain()
    connector.offers["a"] = Offer((length - 1) // 4 * 4, is_async=is_async)
    h.add("a", PROMPT[:length])
    output = h.step()
    assert output.load_promises == ()
    assert "a" in output.num_scheduled_tokens
    assert ("a", 0) in connector.allocated
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT[:length], 4)
    h.assert_drained()


@pytest.mark.parametrize("output_tokens", [0, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_does_not_ask_again_for_the_load_that_it_consumed(output_tokens, is_async):
    h, connector = harness(num_blocks=8, enable_prefix_caching=False)
    connector.offers = {name: Offer(12, is_async=is_async, delay=0) for name in "ab"}
    prompts = {"a": PROMPT, "b": [9, *PROMPT[1:]]}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=14)
    while len(h.streamed["b"]) < max(output_tokens, 1):
        h.step()
    while h.scheduler.has_unfinished_requests:
        h.step()
    assert h.done["b"].metrics.num_preemptions > 0
    assert [req_id for req_id, _ in connector.asked].count("b") == 1
    assert [n for req_id, n in connector.allocated if req_id == "b" and n] == [12]
    for name, prompt in prompts.items():
        assert h.output_of(name) == run_alone(prompt, 14)
    h.drain()
    h.assert_drained()


def test_a_producer_that_is_preempted_in_mid_prompt_hands_over_every_block():
    connector = FakeConnector(keep={"b": 1})
    h = Harness(connector=connector, policy="recompute", num_blocks=7, max_num_batched_tokens=8)
    h.add("a", PROMPT, max_tokens=10)
    h.step()
    h.add("b", [7] * 11, max_tokens=1)
    h.drain()
    assert len(h.done["b"].output_kv_transfer_params["remote_block_ids"]) == 3
    assert h.output_of("a") == run_alone(PROMPT, 10)
    h.assert_drained()


def test_the_chunks_of_a_prompt_whose_head_is_loaded_are_computed_behind_it():
    h, connector = harness(max_num_batched_tokens=4)
    prompt = list(range(20))
    connector.offers["a"] = Offer(4)
    h.add("a", prompt, max_tokens=2)
    outputs = []
    while h.scheduler.has_unfinished_requests:
        outputs.append(h.step())
    assert [len(output.load_promises) for output in outputs] == [1] + [0] * (len(outputs) - 1)
    assert [output.num_scheduled_tokens["a"] for output in outputs] == [4, 4, 4, 4, 1]
    assert h.output_of("a") == run_alone(prompt, 2)
    h.assert_drained()


def test_an_asynchronous_load_parks_the_request_and_is_findable_only_after_it_has_landed():
    h, connector = harness()
    connector.offers["a"] = Offer(12, is_async=True, delay=3)
    h.add("a", PROMPT)
    h.add("b", PROMPT[:9])
    first = h.step()
    assert list(first.num_scheduled_tokens) == ["b"]
    assert first.load_promises == ()
    assert h.scheduler.counters()["num_requests_waiting"] == 1
    h.drain()
    assert connector.allocated.count(("a", 12)) == 1
    assert ("a", 0) in connector.allocated, "the connector hears when the request is resumed"
    assert h.output_of("a") == run_alone(PROMPT, 4)
    h.assert_drained()


@pytest.mark.parametrize(("fail_from", "num_bytes"), [(None, 12 * 8), (1, 0)])
def test_an_asynchronous_load_accounts_for_its_bytes_if_it_landed_and_for_the_time_from_parking_to_its_end(fail_from, num_bytes):
    h, connector = harness()
    connector.offers["a"] = Offer(12, is_async=True, delay=3, fail_from=fail_from)
    h.add("a", PROMPT)
    h.drain()
    metrics = h.done["a"].metrics
    assert metrics.num_parked_loads == 1
    assert metrics.loaded_bytes == num_bytes
    assert metrics.load_wait_seconds == 4, "the clock of the tests counts steps"
    assert h.output_of("a") == run_alone(PROMPT, 4)


def test_a_connector_that_does_not_know_yet_is_asked_again_and_holds_up_nobody():
    h, connector = harness()
    connector.offers["a"] = Offer(12, unknown_times=2)
    h.add("a", PROMPT)
    h.add("b", PROMPT[:5])
    assert list(h.step().num_scheduled_tokens) == ["b"]
    h.drain()
    assert [req_id for req_id, _ in connector.asked].count("a") == 3
    assert h.output_of("a") == run_alone(PROMPT, 4)
    h.assert_drained()


@pytest.mark.parametrize("fail_from", [0, 1, 2])
def test_a_rejected_synchronous_load_is_recomputed_from_the_first_invalid_position_in_fresh_blocks(fail_from):
    h, connector = harness()
    connector.offers["a"] = Offer(12, fail_from=fail_from)
    h.add("a", PROMPT)
    rejected = h.step().scheduled_new_reqs[0].block_ids
    assert h.streamed["a"] == [], "what the step computed on it is thrown away"
    (again,) = h.step().scheduled_cached_reqs
    assert again.num_computed_tokens == 4 * fail_from
    assert again.block_ids[:fail_from] == rejected[:fail_from]
    assert again.num_tokens == 13
    steps = h.runner.last_step
    h.drain()
    assert h.runner.last_step - steps <= 13 + 3
    assert [req_id for req_id, _ in connector.asked] == ["a"]
    assert h.output_of("a") == run_alone(PROMPT, 4)
    assert h.done["a"].metrics.num_failed_loads == 1
    h.assert_drained()


@pytest.mark.parametrize("abort_owner_after", [None, 0, 1])
def test_sharers_of_an_invalid_block_are_rolled_back_with_its_owner(abort_owner_after):
    h, connector = harness(max_num_batched_tokens=4)
    connector.offers["r1"] = Offer(8)
    prompts = {"r1": [*PROMPT[:8], 20, 20], "r2": [*PROMPT[:8], 30, 30]}
    h.add("r1", prompts["r1"], max_tokens=8)
    h.step()
    h.add("r2", prompts["r2"], max_tokens=8)
    h.step()
    shared = h.scheduler.requests["r1"].block_ids[1]
    assert set(h.pool.owners(shared)) == {"r1", "r2"}
    h.runner.cells[shared] = [-1] * 4
    connector.late_invalid.add(shared)
    before = {name: list(tokens) for name, tokens in h.streamed.items()}
    h.step()
    assert h.streamed == before
    assert h.scheduler.requests["r1"].num_computed_tokens == h.scheduler.requests["r2"].num_computed_tokens == 4
    assert h.pool.owners(shared) == {}
    assert h.pool.published_key(shared) is None
    assert not set(h.scheduler.requests["r1"].block_ids[1:]) & set(h.scheduler.requests["r2"].block_ids[1:])
    if abort_owner_after is not None:
        for _ in range(abort_owner_after):
            h.step()
        h.scheduler.abort_request("r1")
    h.drain()
    for name, prompt in prompts.items():
        if h.done[name].finish_reason == "length":
            assert h.output_of(name) == run_alone(prompt, 8)
    assert h.done["r2"].finish_reason == "length"
    h.assert_drained()


def test_a_sharer_in_flight_in_the_next_step_is_rolled_back_too():
    h, connector = harness(max_num_batched_tokens=4)
    connector.offers["r1"] = Offer(8)
    prompts = {"r1": [*PROMPT[:8], 20, 20], "r2": [*PROMPT[:8], 30, 30]}
    h.add("r1", prompts["r1"], max_tokens=8)
    h.step()
    first = h.scheduler.schedule()
    h.add("r2", prompts["r2"], max_tokens=8)
    second = h.scheduler.schedule()
    assert (list(first.num_scheduled_tokens), list(second.num_scheduled_tokens)) == (["r1"], ["r2"])
    shared = h.scheduler.requests["r1"].block_ids[1]
    h.runner.cells[shared] = [-1] * 4
    connector.late_invalid.add(shared)
    result = h.runner.execute_model(first)
    connector.late_invalid.add(shared)
    late = h.runner.execute_model(second)
    h.take(first, result)
    assert h.pool.audit().quarantined > 0, "the step in flight still writes there"
    h.take(second, type(late)(step=late.step, sampled_token_ids=late.sampled_token_ids, kv_connector_output=KVConnectorOutput()))
    assert h.pool.audit().quarantined == 0
    h.drain()
    for name, prompt in prompts.items():
        assert h.output_of(name) == run_alone(prompt, 8)
    h.assert_drained()


def test_a_block_with_a_write_pending_stays_quarantined_until_the_transfer_ends():
    h, connector = harness(num_blocks=8)
    connector.offers["a"] = Offer(12, fail_from=1, pending_delay=6)
    h.add("a", PROMPT, max_tokens=2)
    rejected = h.step().scheduled_new_reqs[0].block_ids[1:3]
    assert [h.pool.owners(block_id) for block_id in rejected] == [{"load a": Hold.QUARANTINED}] * 2
    h.scheduler.abort_request("a")
    with pytest.raises(RequestError, match="still in transfer"):
        h.add("a", PROMPT)
    h.add("b", [5] * 20, max_tokens=8)
    for _ in range(4):
        h.step()
        assert h.pool.audit().quarantined == 2
    h.drain()
    assert h.output_of("b") == run_alone([5] * 20, 8)
    h.assert_drained()


def test_policy_fail_ends_the_request_with_the_cause_and_without_a_token():
    h, connector = harness(policy="fail")
    connector.offers["a"] = Offer(12, fail_from=1)
    h.add("a", PROMPT)
    h.step()
    assert h.done["a"].finish_reason == "error"
    assert h.done["a"].output_token_ids == []
    assert "kv_load_failure_policy is 'fail': the load of KV blocks" in h.done["a"].error
    h.drain()
    h.assert_drained()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name_blocks", [True, False])
@pytest.mark.parametrize("fail_from", [0, 1])
def test_a_failed_asynchronous_load_follows_the_policy(policy, name_blocks, fail_from):
    h, connector = harness(policy=policy)
    connector.offers["a"] = Offer(12, is_async=True, delay=2, fail_from=fail_from, name_blocks=name_blocks)
    h.add("a", PROMPT)
    h.drain()
    if policy == "recompute":
        assert h.output_of("a") == run_alone(PROMPT, 4)
        assert h.runner.num_computed == 13 - (4 * fail_from if name_blocks else 0) + 3
    else:
        assert h.done["a"].finish_reason == "error"
        assert h.output_of("a") == []
    assert [req_id for req_id, _ in connector.asked] == ["a"]
    h.assert_drained()


def test_an_abort_during_an_asynchronous_load_keeps_the_blocks_until_the_load_ends():
    h, connector = harness(num_blocks=6)
    connector.offers["a"] = Offer(12, is_async=True, delay=5)
    h.add("a", PROMPT, max_tokens=2)
    h.step()
    h.scheduler.abort_request("a")
    assert connector.finished == ["a"]
    assert h.pool.audit().quarantined == 3
    h.add("b", [5] * 10, max_tokens=8)
    h.drain()
    assert h.output_of("b") == run_alone([5] * 10, 8)
    h.assert_drained()


def load_into_blocks_of_a_step_in_flight():
    h, connector = harness(num_blocks=4)
    connector.offers["b"] = Offer(12, is_async=True, delay=0)
    h.add("a", [5] * 13, max_tokens=2)
    running = h.scheduler.schedule()
    h.scheduler.abort_request("a")
    h.add("b", PROMPT, max_tokens=2)
    following = h.scheduler.schedule()
    for output in (running, following):
        h.take(output, h.runner.execute_model(output))
    h.drain()
    assert h.output_of("b") == run_alone(PROMPT, 2)
    h.assert_drained()


def test_a_load_never_races_with_the_step_of_a_blocks_former_owner():
    load_into_blocks_of_a_step_in_flight()


def test_negative_control_without_the_fence_the_trailing_write_wipes_the_load(monkeypatch):
    monkeypatch.setattr(BlockManager, "_fence", lambda self, request, block_ids: None)
    with pytest.raises(AssertionError, match="read KV that was never written for it"):
        load_into_blocks_of_a_step_in_flight()


def test_a_producer_keeps_the_blocks_under_a_lease_until_the_consumer_is_done():
    connector = FakeConnector(keep={"a": 4})
    h = Harness(connector=connector, policy="recompute")
    h.add("a", PROMPT, max_tokens=1)
    h.step()
    assert h.done["a"].output_kv_transfer_params["remote_block_ids"]
    assert h.pool.audit().leased == 4
    assert not h.scheduler.has_unfinished_requests
    assert h.scheduler.has_work, "an idle engine still notices the end of a lease"
    h.drain()
    h.assert_drained()


def test_request_finished_is_called_once_also_for_a_request_that_was_never_scheduled():
    h, connector = harness()
    h.add("a", PROMPT)
    h.scheduler.abort_request("a")
    h.drain()
    assert connector.finished == ["a"]
    h.assert_drained()


def test_ends_of_transfers_that_nobody_waits_for_are_counted_and_dropped():
    h, connector = harness()
    connector.offers["gone"] = Offer(12, is_async=True, delay=1)
    h.add("r", PROMPT, max_tokens=8)
    h.add("gone", PROMPT[:13])
    h.step()
    h.scheduler.abort_request("gone")
    for names in ({"never seen"}, {"r"}, {"gone"}, {"gone"}):
        connector.spurious = names
        h.step()
    h.drain()
    assert h.scheduler.counters()["num_dropped_reports"] >= 6
    assert h.output_of("r") == run_alone(PROMPT, 8)
    h.assert_drained()


def test_landed_requests_that_wait_for_blocks_make_room_for_an_earlier_one():
    h, connector = harness(num_blocks=8, enable_prefix_caching=False)
    connector.offers = {"b": Offer(12, is_async=True, delay=2), "c": Offer(12, is_async=True, delay=2)}
    h.add("a", [3] * 3, max_tokens=20)
    prompts = {"b": [9, *PROMPT[1:]], "c": [8, *PROMPT[1:]]}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=12)
    h.drain()
    assert h.output_of("a") == run_alone([3] * 3, 20)
    for name, prompt in prompts.items():
        assert h.output_of(name) == run_alone(prompt, 12)
    h.assert_drained()
