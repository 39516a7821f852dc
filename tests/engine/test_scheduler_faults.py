"""Steps that fail, that nobody waits for, or in which the connector raised: who ends, what is told again, and which blocks are held until when."""

import dataclasses

import pytest
from engine_fakes import FakeConnector, Harness, Offer, run_alone

from interlock.core.step import KVConnectorOutput

PROMPT = list(range(1, 14))
NEVER = 10**6  # steps


def harness(connector=None, **options):
    connector = connector or FakeConnector()
    return Harness(connector=connector, policy="recompute", **options), connector


def take_with_fault(h, output, **changes):
    """The step is executed; in its report the connector has raised where it was told of loads."""
    result = h.runner.execute_model(output)
    report = dataclasses.replace(result.kv_connector_output, fault="it raised", num_connector_faults=1, **changes)
    h.take(output, dataclasses.replace(result, kv_connector_output=report))


def quarantined(h):
    audit = h.pool.audit()
    assert audit.clean
    return audit.quarantined


def fail(h, output, report=None):
    return h.scheduler.fail_step(output, "the step failed", report)


def abandon(h, output, report=None):
    h.scheduler.abandon_step(output, "the step failed", report)
    return []


both_ways = pytest.mark.parametrize("lose", [fail, abandon])


class TestLostSteps:
    @both_ways
    def test_the_ends_that_the_runner_was_to_hear_of_in_it_come_with_the_next(self, lose):
        h, _ = harness()
        h.add("a", PROMPT, max_tokens=1)
        h.step()
        output = h.scheduler.schedule()
        assert output.finished_req_ids == {"a"}
        lose(h, output)
        assert h.scheduler.schedule().finished_req_ids == {"a"}

    @both_ways
    def test_its_requests_end_and_its_blocks_come_back_when_it_touches_them_no_more(self, lose):
        h, _ = harness()
        h.add("a", PROMPT)
        h.add("b", PROMPT[::-1])
        output = h.scheduler.schedule()
        h.scheduler.abort_request("b")
        h.scheduler._queues.take_ended()
        changed = lose(h, output)
        assert [request.request_id for request in changed] == (["a"] if lose is fail else [])
        assert not h.scheduler.requests
        assert h.pool.audit().all_free == (lose is fail)
        h.step()
        assert h.pool.audit().all_free

    @both_ways
    def test_a_later_request_of_the_same_id_goes_on(self, lose):
        h, _ = harness()
        h.add("a", PROMPT)
        lost = h.scheduler.schedule()
        h.scheduler.abort_request("a")
        h.scheduler._queues.take_ended()
        h.add("a", PROMPT)
        told, output = h.scheduler.schedule(), h.scheduler.schedule()
        assert (told.finished_req_ids, set(output.num_scheduled_tokens)) == ({"a"}, {"a"})
        lose(h, lost)
        for planned in (told, output):
            h.take(planned, h.runner.execute_model(planned))
        h.drain()
        assert h.output_of("a") == run_alone(PROMPT, 4)

    @both_ways
    def test_what_its_loads_may_still_write_is_held_until_they_are_named(self, lose):
        h, connector = harness()
        connector.offers["a"] = Offer(12)
        h.add("a", PROMPT)
        output = h.scheduler.schedule()
        (promise,) = output.load_promises
        lose(h, output, KVConnectorOutput(pending_block_ids=frozenset(promise.block_ids[1:])))
        h.step()
        assert quarantined(h) == 2
        connector.spurious = {"a"}
        h.step()
        assert h.pool.audit().all_free
        assert h.scheduler.counters()["num_dropped_reports"] == 1, "as the end of a lease"

    @both_ways
    def test_if_the_connector_has_not_heard_of_it_its_loads_may_begin_with_the_next_and_are_held_until_that_has_ended(self, lose):
        h, connector = harness()
        connector.offers["a"] = Offer(12)
        h.add("a", PROMPT)
        lose(h, h.scheduler.schedule())
        output = h.scheduler.schedule()
        assert quarantined(h) >= 3
        h.take(output, h.runner.execute_model(output))
        assert h.pool.audit().all_free

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_one_that_is_interrupted_while_the_connector_is_told_of_it_is_lost(self, error):
        class Interrupted(FakeConnector):
            interrupts = 1

            def build_connector_meta(self, scheduler_output):
                if self.interrupts:
                    self.interrupts -= 1
                    raise error
                return super().build_connector_meta(scheduler_output)

        h, _ = harness(Interrupted())
        h.add("a", PROMPT)
        with pytest.raises(error):
            h.scheduler.schedule()
        assert not h.scheduler.requests
        h.add("b", PROMPT)
        h.drain()
        assert h.done["a"].finish_reason == "error"
        assert h.output_of("b") == run_alone(PROMPT, 4)
        h.assert_drained()


class TestFaults:
    def test_blocks_of_loads_that_may_begin_yet_are_held_and_nothing_is_loaded_until_a_step_in_which_all_went_well(self):
        h, connector = harness()
        connector.offers = {name: Offer(12) for name in "bc"}
        connector.offers["a"] = Offer(12, fail_from=0)
        h.add("a", PROMPT)
        take_with_fault(h, h.scheduler.schedule())
        assert quarantined(h) == 3
        h.add("b", PROMPT[::-1])
        output = h.scheduler.schedule()
        assert quarantined(h) == 3
        h.take(output, h.runner.execute_model(output))
        assert quarantined(h) == 0
        h.add("c", [9, *PROMPT])
        h.drain()
        assert [req_id for req_id, _ in connector.asked] == ["a", "c"]
        for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1]), ("c", [9, *PROMPT])):
            assert h.output_of(name) == run_alone(prompt, 4)
        h.assert_drained()

    def test_steps_are_not_made_for_ever_for_one_in_which_all_goes_well(self):
        h, connector = harness()
        connector.offers["a"] = Offer(12, fail_from=0)
        h.add("a", PROMPT, max_tokens=1)
        for _ in range(6):
            take_with_fault(h, h.scheduler.schedule())
        assert "a" in h.done
        assert not h.scheduler.has_work
        assert quarantined(h) == 3

    def test_a_load_that_a_request_waits_for_is_lost_if_the_connector_raised_when_it_was_to_begin(self):
        h, connector = harness()
        connector.offers = {"a": Offer(12, is_async=True, delay=NEVER), "b": Offer(12)}
        h.add("a", PROMPT)
        take_with_fault(h, h.scheduler.schedule())
        h.add("b", [9, *PROMPT])
        while not {"a", "b"} <= h.done.keys():
            h.step()
        assert [req_id for req_id, _ in connector.asked] == ["a"], "it may begin yet, and nothing is to be loaded beside it"
        assert h.output_of("a") == run_alone(PROMPT, 4)
        assert quarantined(h) == 3
        assert h.scheduler.has_work, "it may be named yet"
        connector.spurious = {"a"}
        h.drain()
        h.assert_drained()

    @pytest.mark.parametrize("where", ["when it is ordered", "when it is to begin"])
    def test_a_lost_load_that_is_never_named_is_waited_for_until_its_deadline(self, where):
        class Raising(FakeConnector):
            def update_state_after_alloc(self, request, block_ids, num_external_tokens):
                if where == "when it is ordered" and num_external_tokens:
                    raise OSError

        h, connector = harness(Raising(), kv_async_load_timeout=20.0)
        connector.offers["a"] = Offer(12, is_async=True, delay=NEVER)
        h.add("a", PROMPT)
        output = h.scheduler.schedule()
        if where == "when it is ordered":
            h.take(output, h.runner.execute_model(output))
        else:
            take_with_fault(h, output)
        h.drain()
        assert h.output_of("a") == run_alone(PROMPT, 4)
        assert 20 <= h.runner.last_step <= 22
        assert quarantined(h) == 3
        assert h.done["a"].metrics.num_failed_loads == 1

    def test_a_request_that_only_leases_keep_from_its_blocks_ends_if_their_ends_may_have_been_lost(self):
        h, connector = harness(FakeConnector(keep={"a": NEVER}), num_blocks=6, kv_async_load_timeout=5.0, max_model_len=24)
        h.add("a", PROMPT, max_tokens=1)
        h.step()
        h.add("b", [7] * 16)
        for _ in range(10):
            h.step()
        assert "b" in h.scheduler.requests, "the lease may end"
        take_with_fault(h, h.scheduler.schedule())
        while h.scheduler.requests:
            h.step()
        h.add("c", [7] * 16)
        for _ in range(4):
            h.step()
            assert "c" in h.scheduler.requests, "it may end yet"
        while h.scheduler.requests:
            h.step()
        assert h.done["c"].finish_reason == "error"
        assert h.done["b"].finish_reason == "error"
        assert "whose KV it keeps since it raised" in h.done["b"].error
        assert connector.leases


@pytest.mark.parametrize("has_landed", [True, False])
def test_what_a_request_was_promised_counts_as_its_kv_when_it_has_landed_and_not_before(has_landed):
    h, connector = harness(FakeConnector(keep={"a": 1}))
    connector.offers["a"] = Offer(12)
    h.add("a", PROMPT)
    output = h.scheduler.schedule()
    if has_landed:
        h.take(output, h.runner.execute_model(output))
    request = h.scheduler.abort_request("a")
    assert request.num_computed_tokens == (13 if has_landed else 0)
    if not has_landed:
        h.take(output, h.runner.execute_model(output))
    h.drain()
    h.assert_drained()


class TestPlans:
    def test_one_that_is_interrupted_ends_whom_it_was_about_and_what_the_connector_was_told_for_it_may_begin_yet(self):
        class Interrupted(FakeConnector):
            def update_state_after_alloc(self, request, block_ids, num_external_tokens):
                super().update_state_after_alloc(request, block_ids, num_external_tokens)
                if request.request_id == "told":
                    raise KeyboardInterrupt

        h, connector = harness(Interrupted(), num_blocks=20)
        h.add("before", PROMPT, max_tokens=1)
        h.step()
        connector.offers = {"promised": Offer(12), "parked": Offer(12, is_async=True, delay=NEVER), "later": Offer(12), "last": Offer(12)}
        prompts = {name: [number, *PROMPT[:12]] for number, name in enumerate(("promised", "parked", "told", "later", "last"), 20)}
        for name in ("promised", "parked", "told"):
            h.add(name, prompts[name])
        with pytest.raises(KeyboardInterrupt):
            h.scheduler.schedule()
        assert not h.scheduler.requests
        assert quarantined(h) == 3 + 3 + 4, "of the promise, of the load, of the one that was being told of"
        h.add("later", prompts["later"])
        output = h.scheduler.schedule()
        assert output.finished_req_ids == {"before", "promised", "parked", "told"}
        h.take(output, h.runner.execute_model(output))
        assert quarantined(h) == 3
        h.add("last", prompts["last"])
        connector.spurious = {"parked"}
        h.drain()
        assert [req_id for req_id, _ in connector.asked][-2:] == ["told", "last"], "nothing is loaded beside what may begin yet"
        for name in ("promised", "parked", "told"):
            assert h.done[name].finish_reason == "error"
        for name in ("later", "last"):
            assert h.output_of(name) == run_alone(prompts[name], 4)
        h.assert_drained()

    def test_the_promise_of_a_load_that_the_connector_refused_to_take_is_void(self):
        class Raising(FakeConnector):
            def update_state_after_alloc(self, request, block_ids, num_external_tokens):
                raise OSError("no route")

        h, connector = harness(Raising())
        connector.offers["a"] = Offer(12)
        h.add("a", PROMPT)
        (promise,) = h.scheduler.schedule().load_promises
        assert "update_state_after_alloc raised OSError: no route" in promise.void

    def test_a_connector_that_never_knows_what_it_has_is_waited_for_as_long_as_for_a_load(self):
        h, connector = harness(kv_async_load_timeout=5.0)
        connector.offers["a"] = Offer(12, unknown_times=NEVER)
        h.add("a", PROMPT)
        h.add("b", [9, *PROMPT])
        h.drain()
        assert h.output_of("a") == run_alone(PROMPT, 4)
        assert len([req_id for req_id, _ in connector.asked if req_id == "a"]) == 6
        assert h.done["b"].metrics.finished_time < h.done["a"].metrics.finished_time

    def test_a_request_that_lacks_a_block_sits_a_step_out_while_a_later_one_that_may_give_it_back_is_in_flight(self):
        h = Harness(num_blocks=2, max_num_batched_tokens=4)
        h.add("a", [1] * 8, max_tokens=1)
        first = h.scheduler.schedule()
        h.add("b", [2] * 4, max_tokens=1)
        second = h.scheduler.schedule()
        assert (set(first.num_scheduled_tokens), set(second.num_scheduled_tokens)) == ({"a"}, {"b"})
        h.take(first, h.runner.execute_model(first))
        third = h.scheduler.schedule()
        assert not third.num_scheduled_tokens
        for output in (second, third):
            h.take(output, h.runner.execute_model(output))
        h.drain()
        assert h.scheduler.counters()["num_preemptions"] == 0
        assert (h.output_of("a"), h.output_of("b")) == (run_alone([1] * 8, 1), run_alone([2] * 4, 1))

    def test_where_blocks_ran_out_nobody_is_admitted(self):
        h = Harness(num_blocks=8)
        for name in ("a", "b", "c"):
            h.add(name, [ord(name)] * 9, max_tokens=12)
        h.drain()
        preempting = [output for output in h.runner.log if output.preempted_req_ids]
        assert preempting
        assert not any(output.scheduled_new_reqs for output in preempting)
        for name in ("a", "b", "c"):
            assert h.output_of(name) == run_alone([ord(name)] * 9, 12)

    def test_the_runner_is_told_all_blocks_of_a_request_again_once_after_it_was_rolled_back(self):
        h, connector = harness()
        connector.offers["a"] = Offer(12, fail_from=0)
        h.add("a", PROMPT)
        h.drain()
        told = [entry.block_ids is not None for output in h.runner.log for entry in output.scheduled_cached_reqs]
        assert told == [True, *[False] * (len(told) - 1)]
