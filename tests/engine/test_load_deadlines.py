"""A connector that never says how its load ended: the engine's own deadline ends the wait, and what may still be written stays untouched."""

import pytest
import shelf_connector
from engine_fakes import FakeConnector, Harness, Offer, run_alone
from shelf_connector import ShelfConnector
from tier_engine import GREEDY, MODES, bits, forget_local, open_engine
from tier_engine import run_alone as run_model_alone

from checkpoints import make_tiny_llama
from interlock.core.errors import RequestError
from interlock.engine.block_manager import BlockManager

PROMPT = list(range(1, 14))
NEVER = 10_000
DEADLINE = 5.0  # the clock of the harness counts steps


def harness(policy="recompute", **options):
    connector = FakeConnector()
    return Harness(connector=connector, policy=policy, kv_async_load_timeout=DEADLINE, **options), connector


def land_late(h, connector):
    """The connector's load ends at last: it writes what it has, and names its request."""
    for transfer in connector.transfers:
        transfer.countdown = 0
    h.step()


def test_a_load_that_nobody_hears_of_is_recomputed_in_fresh_blocks_and_its_late_end_frees_the_others():
    h, connector = harness()
    connector.offers["a"] = Offer(12, is_async=True, delay=NEVER)
    request = h.add("a", PROMPT)
    h.step()
    promised = list(request.block_ids)
    while not request.finished:
        h.step()
        assert not h.streamed["a"] or not set(request.block_ids) & set(promised[:3])
    assert h.output_of("a") == run_alone(PROMPT, 4)
    assert request.metrics.num_failed_loads == 1
    h.drain()
    assert h.pool.audit().quarantined == 3, "the load may still write there"
    with pytest.raises(RequestError, match="still in transfer"):
        h.add("a", PROMPT)
    h.add("b", [7] * 30, max_tokens=4)
    land_late(h, connector)
    assert h.pool.audit().quarantined == 0
    h.drain()
    assert h.output_of("b") == run_alone([7] * 30, 4)
    assert h.scheduler.counters()["num_dropped_reports"] == 0
    h.assert_drained()


@pytest.mark.parametrize("fail_from", [None, 0])
def test_the_late_end_of_a_load_means_nothing_to_the_request_that_is_being_recomputed(fail_from):
    h, connector = harness(num_blocks=14)
    connector.offers["a"] = Offer(12, is_async=True, delay=NEVER, fail_from=fail_from, name_blocks=False)
    h.add("a", PROMPT, max_tokens=12)
    h.add("b", [7] * 10, max_tokens=24)
    while len(h.streamed["a"]) < 10:
        h.step()
    land_late(h, connector)
    assert h.pool.audit().quarantined == 0
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT, 12)
    assert h.output_of("b") == run_alone([7] * 10, 24)
    h.assert_drained()


def test_negative_control_without_the_quarantine_the_late_write_meets_the_next_owner(monkeypatch):
    monkeypatch.setattr(BlockManager, "quarantine_transfer", lambda self, req_id, block_ids: None)
    with pytest.raises(AssertionError, match="read KV that was never written for it"):
        test_the_late_end_of_a_load_means_nothing_to_the_request_that_is_being_recomputed(0)


def test_a_load_that_ends_before_its_deadline_is_a_load():
    h, connector = harness()
    connector.offers["a"] = Offer(12, is_async=True, delay=3)
    h.add("a", PROMPT)
    h.drain()
    assert h.done["a"].metrics.num_failed_loads == 0
    assert h.output_of("a") == run_alone(PROMPT, 4)
    h.assert_drained()


def test_policy_fail_ends_the_request_with_an_error_that_names_the_deadline():
    h, connector = harness(policy="fail")
    connector.offers["a"] = Offer(12, is_async=True, delay=NEVER)
    h.add("a", PROMPT)
    h.drain()
    assert h.done["a"].finish_reason == "error"
    assert "within 5 s (kv_async_load_timeout)" in h.done["a"].error
    assert h.pool.audit().quarantined == 3
    land_late(h, connector)
    h.assert_drained()


def test_an_aborted_load_that_nobody_hears_of_does_not_keep_the_engine_at_work():
    h, connector = harness()
    connector.offers["a"] = Offer(12, is_async=True, delay=NEVER)
    h.add("a", PROMPT)
    h.step()
    h.scheduler.abort_request("a")
    h.step()
    assert h.scheduler.has_work
    h.drain()
    assert h.pool.audit().quarantined == 3
    land_late(h, connector)
    h.assert_drained()


def test_a_request_that_finds_no_room_beside_lost_loads_ends_with_an_error_and_not_never():
    h, connector = harness(num_blocks=6)
    connector.offers["a"] = Offer(12, is_async=True, delay=NEVER)
    h.add("a", PROMPT)
    h.add("b", PROMPT[:9], max_tokens=2)
    h.drain()
    assert h.done["a"].finish_reason == "error"
    assert "kv_async_load_timeout" in h.done["a"].error
    assert h.output_of("b") == run_alone(PROMPT[:9], 2)
    land_late(h, connector)
    h.add("c", PROMPT)
    h.drain()
    assert h.output_of("c") == run_alone(PROMPT, 4)
    h.assert_drained()


def test_a_request_that_will_find_room_when_others_let_go_of_blocks_is_not_ended_for_lost_loads():
    h, connector = harness(num_blocks=7)
    connector.offers["a"] = Offer(8, is_async=True, delay=NEVER)
    connector.keep["b"] = 12
    h.add("a", PROMPT[:9], max_tokens=1)
    h.add("b", [7] * 13, max_tokens=1)
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT[:9], 1)
    land_late(h, connector)
    h.assert_drained()


def test_a_preempted_request_asks_for_no_second_load_while_the_first_may_still_write():
    h, connector = harness(num_blocks=12, enable_prefix_caching=False)
    connector.load_is_repeatable = True
    connector.offers["b"] = Offer(12, is_async=True, delay=NEVER)
    prompts = {"a": PROMPT, "b": [9, *PROMPT[1:]]}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=14)
    h.drain()
    assert h.done["b"].metrics.num_preemptions > 0
    assert [req_id for req_id, _ in connector.asked].count("b") == 1
    for name, prompt in prompts.items():
        assert h.output_of(name) == run_alone(prompt, 14)
    land_late(h, connector)
    h.assert_drained()


def test_a_connector_that_never_knows_what_it_has_counts_as_having_nothing(caplog):
    h, connector = harness()
    connector.offers["a"] = Offer(12, unknown_times=NEVER)
    h.add("a", PROMPT)
    h.drain()
    assert h.output_of("a") == run_alone(PROMPT, 4)
    assert [req_id for req_id, _ in connector.asked].count("a") == DEADLINE + 1
    assert h.done["a"].metrics.num_external_tokens == 0
    assert "has not known for 5 s (kv_async_load_timeout)" in caplog.text
    h.assert_drained()


class SilentConnector(ShelfConnector):
    """Accepts asynchronous loads and never says a word about them."""

    def start_load_kv(self, forward_context, **kwargs):
        self.shelf.num_loads += len(self._get_connector_metadata().loads)


class RaisingConnector(ShelfConnector):
    """Raises where it is to start asynchronous loads, and where it is asked for a layer."""

    def start_load_kv(self, forward_context, **kwargs):
        if self._get_connector_metadata().loads:
            self.shelf.num_loads += 1
            raise OSError("no route")

    def wait_for_layer_load(self, layer_name):
        raise OSError("no such layer")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), dtype="bfloat16")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("connector", [SilentConnector, RaisingConnector])
def test_an_engine_survives_a_connector_that_answers_with_silence_or_an_error(model, monkeypatch, connector, mode, policy):
    shelf = shelf_connector.Shelf(is_async=True)
    monkeypatch.setattr(shelf_connector, "SHELF", [shelf])
    prompts = [list(range(40, 70)), list(range(100, 120)), list(range(150, 170))]
    alone = run_model_alone(model, prompts, [GREEDY] * 3)
    options = {"cudagraph_mode": mode, "kv_async_load_timeout": 0.2, "num_blocks": 64}
    name = f"test_load_deadlines:{connector.__name__}"
    with open_engine(model, name, {}, transfer={"kv_load_failure_policy": policy}, **options) as llm:
        llm.generate(prompts[:1], GREEDY)
        forget_local(llm)
        lost, companion = llm.generate(prompts[:2], GREEDY)
        assert shelf.num_loads == 1
        assert bits(companion) == alone[1]
        if policy == "recompute":
            assert bits(lost) == alone[0]
        else:
            assert lost.outputs[0].finish_reason == "error"
        assert llm.core.audit().clean
        assert llm.core.audit().quarantined > 0
        assert bits(llm.generate(prompts[2:], GREEDY)[0]) == alone[2]
