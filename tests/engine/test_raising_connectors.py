"""Whatever a connector raises or answers costs at most the load, the save or the request that the call was about: the others keep their
bits, nothing hangs, every block comes back, and the engine goes on. The methods are those that the interface has."""

import logging
import math
import threading

import pytest
import shelf_connector
from raising_connector import CLASS_METHODS, FAULTS, METHODS, arm
from tier_engine import GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone

from checkpoints import make_tiny_llama
from interlock import SamplingParams
from interlock.core.errors import ConfigError
from interlock.kv_transfer.connector import KVConnectorTransferResults
from interlock.kv_transfer.connector_step import KVStep
from interlock.kv_transfer.ledger import Ledger

PROMPT = [3, *range(40, 70)]
COMPANION = [4, *range(80, 115)]
LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
CONNECTORS = ["RaisingShelf", "RaisingReader"]  # FULL waits for them at a barrier, and at gates

AT_START = {"bind_block_pool", "register_kv_caches", "register_pool", "register_timelines", "reset_capture_state"}
AT_THE_END = {"shutdown"}
NOT_CALLED_BY_THE_ENGINE = {"get_handshake_metadata", "has_connector_metadata"}
IN_TESTS_OF_THEIR_OWN = {"abort_loads", "recomputes_load", "request_preempted"}
COSTS_THE_REQUEST = {"on_new_request"}
COSTS_THE_MATCH = {"get_num_new_matched_tokens"}
COSTS_THE_LOAD = {
    "bind_connector_metadata",
    "build_connector_meta",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "start_load_kv",
    "update_state_after_alloc",
    "wait_for_layer_load",
}
COSTS_NO_LOAD = {
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "finish_forward",
    "get_finished",
    "get_kv_connector_stats",
    "get_transfer_results",
    "has_pending_push_work",
    "request_finished",
    "save_kv_layer",
    "update_connector_output",
    "wait_for_save",
}
IN_A_STEP = COSTS_THE_REQUEST | COSTS_THE_MATCH | COSTS_THE_LOAD | COSTS_NO_LOAD
BETWEEN_LAYERS = {"wait_for_layer_load", "save_kv_layer"}

# What is no answer; of the methods whose answer does not count, anything.
WRONG_ANSWERS = {
    "get_num_new_matched_tokens": [
        None,
        8,
        (8.0, False),
        ("8", False),
        (-5, False),
        (32, False),
        (10**9, True),
        (True, False),
        (8, "no"),
        (8, False, 0),
    ],
    "build_connector_meta": [None, 7],
    "request_finished": [None, True, (True,), ("yes", None), (False, "params"), (False, {1: 2})],
    "has_pending_push_work": [None, "yes"],
    "get_finished": [None, 5, (1, 2), (["a"], None), ({1}, {2}), ({"nobody"}, {"nobody"})],
    "get_transfer_results": [None, (set(), set()), KVConnectorTransferResults({1}, ["a"], None, None)],
    "get_block_ids_with_load_errors": [None, 5, [3], {"3"}, {True}],
    "get_kv_connector_stats": [None, {"loads": "many"}, {1: 2.0}],
}
COSTS_NOTHING_IF_WRONG = COSTS_THE_LOAD - {"build_connector_meta", "get_block_ids_with_load_errors"}


def cases(methods):
    """Modes and methods; between the layers of a FULL replay nobody is called."""
    return [(mode, method) for mode in MODES for method in sorted(methods) if mode != "FULL" or method not in BETWEEN_LAYERS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    return run_alone(model, [PROMPT, COMPANION], [GREEDY, LONG])


@pytest.fixture(scope="module")
def engines(model):
    """Engines by connector, mode and policy, one alive at a time: the one that has borne all faults so far bears the next."""
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    kept = {}

    def engine(connector, mode, policy="recompute"):
        key = (connector, mode, policy)
        if key not in kept:
            for name in list(kept):
                kept.pop(name).close()
            kept[key] = open_raising(model, connector, mode, policy)
        return kept[key]

    yield engine
    for llm in kept.values():
        llm.close()
    shelf_connector.SHELF.pop()


@pytest.fixture
def shelf():
    """An empty shelf for one test's own engine."""
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    yield shelf_connector.SHELF[-1]
    shelf_connector.SHELF.pop()


@pytest.fixture(autouse=True)
def no_fault_is_left():
    yield
    FAULTS.clear()


def open_raising(model, connector, mode="FULL", policy="recompute", num_blocks=40, **options):
    transfer = {"kv_load_failure_policy": policy}
    return open_engine(model, f"raising_connector:{connector}", {}, num_blocks, transfer, cudagraph_mode=mode, **options)


def run_with_a_fault(llm, method, how, answer=None):
    """PROMPT, whose KV is on the shelf, meets the fault while COMPANION, which began before, goes on. Both outputs."""
    if not shelf_connector.SHELF[-1].entries:
        llm.generate([PROMPT], GREEDY)
    forget_local(llm)
    for tokens in list(shelf_connector.SHELF[-1].entries):
        if tokens[: len(PROMPT)] != tuple(PROMPT):
            del shelf_connector.SHELF[-1].entries[tokens]  # the companion computes all of its own
    stream = llm.stream([COMPANION], LONG)
    next(stream)
    before = llm.metrics()
    arm(method, how, answer)
    (output,) = llm.generate([PROMPT], GREEDY)
    companion = list(stream)[-1].output
    drain(llm)
    assert method not in FAULTS, f"{method} was not called"
    after = llm.metrics()
    return output, companion, {name: after[name] - before[name] for name in ("num_failed_loads", "num_external_tokens", "num_dropped_reports")}


def check_that_it_goes_on(llm, alone):
    forget_local(llm)
    loads = shelf_connector.SHELF[-1].num_loads
    assert bits(llm.generate([PROMPT], GREEDY)[0]) == alone[0]
    assert shelf_connector.SHELF[-1].num_loads == loads + 1
    drain(llm)


def test_no_method_of_the_interface_is_forgotten():
    assert set(METHODS) == set(IN_A_STEP) | AT_START | AT_THE_END | NOT_CALLED_BY_THE_ENGINE | IN_TESTS_OF_THEIR_OWN
    assert set(CLASS_METHODS) == {"check_options", "requires_piecewise_for_cudagraph"}  # before there is an engine


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize(("mode", "method"), cases(IN_A_STEP))
def test_what_a_method_raises_costs_at_most_what_it_was_called_for(engines, alone, caplog, method, how, mode, connector):
    llm = engines(connector, mode)
    output, companion, counts = run_with_a_fault(llm, method, how)
    assert bits(companion) == alone[1]
    named = "get_transfer_results" if method == "get_finished" else method
    (logged,) = [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING and f"{connector}.{named} raised ValueError: naive" in record.getMessage()
    ]
    assert logged.name == "interlock.kv_transfer.guard"
    if method in COSTS_THE_REQUEST:
        assert output.outputs[0].finish_reason == "error"
        assert output.error == f"{connector}.{method} raised ValueError: naive"
    else:
        assert bits(output) == alone[0]
    assert (counts["num_external_tokens"] == 0) == (method in COSTS_THE_MATCH | COSTS_THE_REQUEST)
    assert counts["num_failed_loads"] == (method in COSTS_THE_LOAD)
    check_that_it_goes_on(llm, alone)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("mode", "method"), cases(COSTS_THE_LOAD))
def test_where_the_policy_is_fail_the_error_names_the_connector_and_its_method(engines, alone, method, mode, connector):
    llm = engines(connector, mode, "fail")
    for how in ("before", "after"):
        output, companion, _ = run_with_a_fault(llm, method, how)
        assert output.outputs[0].finish_reason == "error"
        assert not output.outputs[0].token_ids
        assert f"{connector}.{method} raised ValueError: naive" in output.error
        assert bits(companion) == alone[1]
    check_that_it_goes_on(llm, alone)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("mode", "method"), cases(IN_A_STEP))
def test_what_is_no_answer_costs_no_more_than_an_exception(engines, alone, caplog, method, mode, connector):
    llm = engines(connector, mode)
    caplog.set_level(logging.DEBUG, "interlock")  # what comes again is for debugging
    for answer in WRONG_ANSWERS.get(method, [7]):
        caplog.clear()
        output, companion, counts = run_with_a_fault(llm, method, "returns", answer)
        assert bits(companion) == alone[1]
        assert bits(output) == alone[0]
        loses = method in COSTS_THE_LOAD - COSTS_NOTHING_IF_WRONG
        assert counts["num_failed_loads"] == loses
        if method in WRONG_ANSWERS:
            assert connector in caplog.text or "waits for no transfer" in caplog.text
        if method in ("get_finished", "get_transfer_results"):
            assert counts["num_dropped_reports"] >= 1
    check_that_it_goes_on(llm, alone)


def run_in_a_thread(call):
    """Its result, unless it hangs."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "it hangs"
    return results[0]


@pytest.mark.parametrize(("mode", "method"), cases(IN_A_STEP))
def test_a_method_that_always_raises_leaves_an_engine_that_serves(model, alone, shelf, method, mode):
    """Nine times as many requests as would fill the pool, if the blocks of each were lost."""
    with open_raising(model, "RaisingLoader", mode, num_blocks=14) as llm:
        llm.generate([PROMPT], GREEDY)
        forget_local(llm)
        arm(method, "before", times=math.inf)
        outputs = run_in_a_thread(lambda: [llm.generate([PROMPT], GREEDY)[0] for _ in range(27)])
        FAULTS.clear()
        if method in COSTS_THE_REQUEST:
            assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        else:
            assert [bits(output) for output in outputs] == [alone[0]] * len(outputs)
        assert bits(llm.generate([PROMPT], GREEDY)[0]) == alone[0]
        drain(llm)


@pytest.mark.parametrize("method", ["bind_connector_metadata", "build_connector_meta", "get_finished", "get_transfer_results", "wait_for_save"])
def test_who_asks_to_keep_blocks_and_loses_the_end_of_it_keeps_them_and_nobody_hangs(model, alone, shelf, method):
    with open_raising(model, "RaisingShelf", num_blocks=14, kv_load_timeout=0.2, kv_async_load_timeout=0.4) as llm:
        llm.generate([PROMPT], GREEDY)
        forget_local(llm)
        arm(method, "before", times=math.inf)
        outputs = run_in_a_thread(lambda: [llm.generate([PROMPT], GREEDY)[0] for _ in range(4)])
        served = [output for output in outputs if output.error is None]
        assert served
        assert [bits(output) for output in served] == [alone[0]] * len(served)
        assert all("or to ended requests whose KV it keeps since it raised" in output.error for output in outputs if output.error is not None)
        assert llm.audit().clean


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("method", ["bind_connector_metadata", "build_connector_meta", "start_load_kv", "update_state_after_alloc"])
def test_a_load_outside_the_steps_fails_at_once_and_its_blocks_wait_until_it_is_named(model, alone, shelf, method, how, policy):
    """Some of these orders come to the worker half all the same, and the load is made and named. Of the others nothing says that they
    do not, so their blocks are never given to anybody else."""
    with open_raising(model, "RaisingShelf", policy=policy) as llm:
        llm.generate([PROMPT], GREEDY)
        forget_local(llm)
        shelf.is_async = True
        arm(method, how)
        output, companion = run_in_a_thread(lambda: llm.generate([PROMPT, COMPANION], [GREEDY, LONG]))
        assert bits(companion) == alone[1]
        if policy == "recompute" or (method, how) == ("start_load_kv", "after"):  # which names it in the same step
            assert bits(output) == alone[0]
        else:
            assert f"RaisingShelf.{method} raised ValueError: naive" in output.error
        for _ in range(3):
            llm.core.step()
        is_made = (method, how) in {("build_connector_meta", "before"), ("start_load_kv", "after"), ("update_state_after_alloc", "after")}
        audit = llm.audit()
        assert audit.clean
        assert audit.quarantined == (0 if is_made else 4)
        assert audit.free == audit.num_blocks - audit.quarantined
        assert llm.core.has_work != is_made, "until the deadline the engine waits for a report"


def lose_an_order(model, mode):
    """What PROMPT gives when the order of its load comes to the worker half with the step after its own. The load brings what is no KV."""
    with open_raising(model, "RaisingUnhurried", mode, num_blocks=6) as llm:
        llm.generate([PROMPT], GREEDY)
        forget_local(llm)
        shelf_connector.SHELF[-1].fail_from.append(0)
        arm("build_connector_meta", "before")
        (output,) = llm.generate([PROMPT], GREEDY)
        assert llm.metrics()["num_failed_loads"] == 1
        assert shelf_connector.SHELF[-1].num_loads == 1
        drain(llm)
        return bits(output)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_blocks_of_a_lost_order_come_back_when_the_load_that_was_made_all_the_same_has_ended(model, alone, shelf, mode):
    assert lose_an_order(model, mode) == alone[0]


def test_negative_control_a_load_of_a_lost_order_that_nobody_waits_for_is_written_into_other_content(model, alone, shelf, monkeypatch):
    monkeypatch.setattr(KVStep, "_await_owed", lambda self: None)
    assert lose_an_order(model, "NONE") != alone[0]


@pytest.mark.parametrize("how", ["before", "after", "returns"])
def test_who_cannot_say_whether_its_loads_are_recomputed_leaves_it_to_the_policy(engines, alone, how):
    llm = engines("RaisingShelf", "FULL", "fail")
    output, companion, _ = run_with_a_fault(llm, "recomputes_load", how, "yes")
    assert [bits(output), bits(companion)] == alone
    arm("recomputes_load", how, "yes", times=math.inf)
    output, companion, _ = run_with_a_fault(llm, "start_load_kv", "before")
    assert "RaisingShelf.start_load_kv raised ValueError: naive" in output.error
    assert bits(companion) == alone[1]


@pytest.mark.parametrize("how", ["before", "after", "returns"])
def test_a_preemption_that_the_connector_raises_about_is_one(model, alone, shelf, how):
    with open_raising(model, "RaisingShelf", num_blocks=9) as llm:
        arm("request_preempted", how)
        outputs = llm.generate([PROMPT, COMPANION], [GREEDY, LONG])
        assert llm.metrics()["num_preemptions"] >= 1
        assert not FAULTS
        assert [bits(output) for output in outputs] == alone
        drain(llm)


@pytest.mark.parametrize("how", ["before", "after"])
def test_blocks_of_loads_that_cannot_be_given_up_stay_quarantined(model, alone, shelf, how):
    """The connector does not report to the ledger, so nothing tells what it still writes."""
    with open_raising(model, "RaisingShelf") as llm:
        llm.generate([PROMPT], GREEDY)
        forget_local(llm)
        arm("start_load_kv", "after")
        arm("abort_loads", how)
        assert bits(llm.generate([PROMPT], GREEDY)[0]) == alone[0]
        audit = llm.audit()
        assert audit.clean
        assert audit.quarantined == 4
        assert llm.core.has_work, "until the deadline the engine waits for a report"
        assert bits(llm.generate([PROMPT], GREEDY)[0]) == alone[0]


@pytest.mark.parametrize("how", ["before", "after", "returns"])
def test_an_engine_closes_whatever_its_connector_raises(model, shelf, how, caplog):
    llm = open_raising(model, "RaisingShelf")
    arm("shutdown", how, times=2)
    llm.close()
    assert not FAULTS, "both halves are shut down"
    assert caplog.text.count("RaisingShelf.shutdown raised ValueError: naive") == (0 if how == "returns" else 2)
    llm.close()


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("method", sorted(AT_START))
def test_what_is_raised_before_the_first_step_is_an_error_of_the_configuration(model, shelf, method, how):
    arm(method, how)
    with pytest.raises(ConfigError, match=r"RaisingShelf.*ValueError: naive"):
        open_raising(model, "RaisingShelf")
    with open_raising(model, "RaisingShelf") as llm:
        llm.generate([PROMPT], GREEDY)


@pytest.mark.parametrize(("how", "error"), [("before", KeyboardInterrupt), ("after", SystemExit)])
@pytest.mark.parametrize(("mode", "method"), [case for case in cases(IN_A_STEP) if case[0] == "FULL" or case[1] in BETWEEN_LAYERS])
def test_interrupts_pass_and_nothing_hangs_or_leaks(model, alone, shelf, method, mode, how, error):
    with open_raising(model, "RaisingReader", mode) as llm:
        llm.generate([PROMPT], GREEDY)
        forget_local(llm)
        stream = llm.stream([COMPANION], LONG)
        next(stream)
        arm(method, how, error=error)

        def run_all():
            llm.generate([PROMPT], GREEDY)
            list(stream)
            drain(llm)

        with pytest.raises(error):
            run_all()
        assert not FAULTS
        run_in_a_thread(lambda: list(stream))
        drain(llm)
        check_that_it_goes_on(llm, alone)


def test_a_fault_of_the_ledger_is_none_of_the_connector_and_surfaces(engines, alone, monkeypatch):
    llm = engines("RaisingReader", "FULL")
    llm.generate([PROMPT], GREEDY)
    forget_local(llm)

    def broken(self, *arguments):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "retract_blocks", broken)
        with pytest.raises(ZeroDivisionError):
            llm.generate([PROMPT], GREEDY)
    check_that_it_goes_on(llm, alone)
