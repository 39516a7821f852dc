import dataclasses
import threading

import pytest
from kv_support import LAYERS, Batch, RecordingConnector, TimelineConnector, context, make_driver, run_in_thread, scheduler_output

from interlock.core.errors import ConfigError, LifecycleError
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connector_step import StepState
from interlock.kv_transfer.inert_lifecycle import InertKVStepDriver
from interlock.kv_transfer.rungs import Rung, choose_rung

ALL_MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
HOOK_MODES = ALL_MODES[:2]
PROMISE = LoadPromise("a", 0, 7, (2, 3))


def python_rung(mode: CUDAGraphMode) -> str:
    """Waits from Python in every mode: these steps have no replay that could wait at gates."""
    return "barrier" if mode is CUDAGraphMode.FULL else "auto"


def run_layers(driver):
    for layer in range(len(LAYERS)):
        driver.before_layer(layer)
        driver.after_layer(layer)


def run_step(driver, step, mode, promises=()):
    """A whole step, with the layer hooks where the mode has them."""
    with driver.begin(context(step, mode)) as kv:
        kv.pre_forward(scheduler_output(step, promises), Batch(), None)
        if mode is not CUDAGraphMode.FULL:
            run_layers(driver)
        kv.finish_forward()
        return kv.post_forward(frozenset())


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_step_with_synchronous_loads_calls_the_connector_in_order(mode):
    driver, connector, _ = make_driver(RecordingConnector)
    output = run_step(driver, 1, mode, [PROMISE])
    layers = [] if mode is CUDAGraphMode.FULL else [name for _ in LAYERS for name in ("wait_for_layer_load", "synchronize", "save_kv_layer")]
    assert connector.names() == ["handle_preemptions", "start_load_kv", *layers, "finish_forward", "wait_for_save"]
    assert connector.calls[0] == ("handle_preemptions", False)
    assert connector.calls[1] == ("start_load_kv", mode, True)
    assert connector.calls[-1] == ("wait_for_save", True)
    assert not connector.has_connector_metadata()
    assert not output.invalid_block_ids
    assert output.loaded_bytes == 7 * driver.bytes_per_layer_token * len(LAYERS)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_loads_that_the_step_does_not_consume_start_after_the_launch_in_the_steps_context(mode):
    driver, connector, _ = make_driver(RecordingConnector)
    run_step(driver, 1, mode)
    names = connector.names()
    assert names[-3:] == ["start_load_kv", "finish_forward", "wait_for_save"]
    assert names.count("start_load_kv") == 1
    assert ("start_load_kv", mode, True) in connector.calls


def test_start_load_kv_gets_the_same_keyword_arguments_in_all_modes():
    driver, connector, _ = make_driver(RecordingConnector)
    for step, mode in enumerate(ALL_MODES):
        run_step(driver, step, mode, [PROMISE])
    assert [set(kwargs) for kwargs in connector.load_kwargs] == [{"scheduler_output", "request_ids", "num_tokens", "attn_metadata", "ledger"}] * 3


def test_a_step_without_tokens_has_the_whole_lifecycle():
    driver, connector, _ = make_driver(RecordingConnector)
    driver.no_forward(context(1, CUDAGraphMode.NONE), scheduler_output(1, num_tokens=0), Batch([], 0))
    assert connector.names() == ["handle_preemptions", "start_load_kv", "finish_forward", "wait_for_save"]


def test_behind_a_barrier_pre_forward_returns_only_when_every_layer_has_landed():
    clock = VirtualClock()
    driver, connector, ledger = make_driver(TimelineConnector, clock=clock, kv_load_wait="barrier")
    transfers = []
    connector.on_load = lambda ctx, kwargs: transfers.extend(kwargs["ledger"].begin_transfer(1, "a", layer, 0, 7) for layer in range(3))
    kv = driver.begin(context(1, CUDAGraphMode.FULL))
    thread, result = run_in_thread(lambda: kv.pre_forward(scheduler_output(1, [PROMISE]), Batch(), None))
    clock.wait_for_waiters(1)
    for transfer in transfers:
        assert not result
        ledger.end_transfer(transfer)
    thread.join()
    assert result == [None]
    kv.finish_forward()
    assert not kv.post_forward(frozenset()).invalid_block_ids


@pytest.mark.parametrize("mode", HOOK_MODES)
def test_layer_0_runs_while_the_last_layer_is_in_flight(mode):
    driver, connector, ledger = make_driver(TimelineConnector)
    transfers = []
    connector.on_load = lambda ctx, kwargs: transfers.extend(kwargs["ledger"].begin_transfer(1, "a", layer, 0, 7) for layer in range(3))
    with driver.begin(context(1, mode)) as kv:
        kv.pre_forward(scheduler_output(1, [PROMISE]), Batch(), None)
        ledger.end_transfer(transfers[0])
        driver.before_layer(0)
        driver.after_layer(0)
        assert ledger.unfinished_block_ids(1) == {2, 3}
        for transfer in transfers[1:]:
            ledger.end_transfer(transfer)
        driver.before_layer(1)
        driver.before_layer(2)
        kv.finish_forward()
        assert not kv.post_forward(frozenset()).invalid_block_ids


@pytest.mark.parametrize("mode", HOOK_MODES)
@pytest.mark.parametrize("connector_class", [RecordingConnector, TimelineConnector])
def test_a_forced_barrier_waits_for_all_layers_before_the_launch(mode, connector_class):
    driver, connector, _ = make_driver(connector_class, kv_load_wait="barrier")

    def load(_context, kwargs):
        if connector.supports_timelines:
            for layer in range(3):
                kwargs["ledger"].end_transfer(kwargs["ledger"].begin_transfer(1, "a", layer, 0, 7))

    connector.on_load = load
    with driver.begin(context(1, mode)) as kv:
        kv.pre_forward(scheduler_output(1, [PROMISE]), Batch(), None)
        before = len(connector.calls)
        assert connector.names().count("wait_for_layer_load") == (0 if connector.supports_timelines else 3)
        driver.before_layer(0)
        assert len(connector.calls) == before
        kv.finish_forward()
        assert not kv.post_forward(frozenset()).invalid_block_ids


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_read_that_was_never_issued_is_a_failure_at_the_deadline(mode):
    clock = VirtualClock()
    driver, connector, _ = make_driver(TimelineConnector, clock=clock, timeout=5.0, kv_load_wait=python_rung(mode))
    thread, result = run_in_thread(lambda: run_step(driver, 1, mode, [PROMISE]))
    clock.wait_for_waiters(1)
    assert not result
    clock.advance(5.0)
    thread.join()
    assert result[0].invalid_block_ids == {2, 3}
    assert "kv_load_timeout" in result[0].load_errors["a"]
    assert connector.names().count("abort_loads") == 1


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_read_that_stalls_past_the_deadline_is_a_failure_and_its_late_end_is_dropped(mode):
    clock = VirtualClock()
    driver, connector, ledger = make_driver(TimelineConnector, clock=clock, timeout=5.0, kv_load_wait=python_rung(mode))
    transfers = []

    def load(_context, kwargs):
        transfers.extend(ledger.begin_transfer(1, "a", layer, 0, 7) for layer in range(3))
        ledger.end_transfer(transfers[0])
        ledger.end_transfer(transfers[2])

    connector.on_load = load
    thread, result = run_in_thread(lambda: run_step(driver, 1, mode, [PROMISE]))
    clock.wait_for_waiters(1)
    clock.advance(4.9)
    clock.wait_for_waiters(1)
    assert not result
    clock.advance(0.1)
    thread.join()
    assert result[0].invalid_block_ids == {2, 3}
    assert "layer 1" in result[0].load_errors["a"]
    assert result[0].pending_block_ids == {2, 3}
    assert not ledger.end_transfer(transfers[1])
    assert ledger.counters.late == 1


@pytest.mark.parametrize("mode", ALL_MODES)
def test_blocks_that_a_connector_names_count_as_not_landed(mode):
    driver, connector, _ = make_driver(RecordingConnector)
    connector.bad_blocks = {3}
    output = run_step(driver, 1, mode, [PROMISE])
    assert output.invalid_block_ids == {3}
    assert "position 4" in output.load_errors["a"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_a_connector_raises_while_loading_fails_the_load_not_the_engine(mode):
    driver, connector, _ = make_driver(RecordingConnector)

    def explode(*_args):
        raise OSError("no route")

    connector.on_load = explode
    output = run_step(driver, 1, mode, [PROMISE])
    assert output.invalid_block_ids == {2, 3}
    assert "no route" in output.load_errors["a"]
    connector.on_load = lambda *_args: None
    assert not run_step(driver, 2, mode, [PROMISE]).invalid_block_ids


@pytest.mark.parametrize("mode", HOOK_MODES)
def test_a_layer_that_ran_without_waiting_counts_as_not_landed(mode):
    driver, _, _ = make_driver(RecordingConnector)
    with driver.begin(context(1, mode)) as kv:
        kv.pre_forward(scheduler_output(1, [PROMISE]), Batch(), None)
        driver.before_layer(0)
        driver.before_layer(2)
        kv.finish_forward()
        output = kv.post_forward(frozenset())
    assert output.invalid_block_ids == {2, 3}
    assert "layer.1" in output.load_errors["a"]


def test_a_connector_claim_after_the_deadline_is_too_late():
    clock = VirtualClock()
    driver, connector, _ = make_driver(RecordingConnector, clock=clock, timeout=5.0)
    connector.on_load = lambda *_args: clock.advance(6.0)
    assert run_step(driver, 1, CUDAGraphMode.FULL, [PROMISE]).invalid_block_ids == {2, 3}


class TestStates:
    def test_without_a_context_is_an_error(self):
        driver, _, _ = make_driver(RecordingConnector)
        with pytest.raises(LifecycleError, match="no default"):
            driver.begin(None)

    def test_finish_without_begin(self):
        driver, _, _ = make_driver(RecordingConnector)
        with pytest.raises(LifecycleError, match="outside a step"):
            driver.before_layer(0)
        kv = driver.begin(context(1, CUDAGraphMode.NONE))
        with pytest.raises(LifecycleError, match="CREATED"):
            kv.post_forward(frozenset())

    def test_double_finish(self):
        driver, _, _ = make_driver(RecordingConnector)
        with driver.begin(context(1, CUDAGraphMode.NONE)) as kv:
            kv.pre_forward(scheduler_output(1), Batch(), None)
            kv.finish_forward()
            kv.post_forward(frozenset())
            assert kv.state is StepState.FINISHED
            with pytest.raises(LifecycleError, match="FINISHED"):
                kv.post_forward(frozenset())
            with pytest.raises(LifecycleError, match="FINISHED"):
                kv.abort()

    def test_post_forward_before_finish_forward(self):
        driver, _, _ = make_driver(RecordingConnector)
        kv = driver.begin(context(1, CUDAGraphMode.NONE))
        kv.pre_forward(scheduler_output(1), Batch(), None)
        with pytest.raises(LifecycleError, match="finish_forward"):
            kv.post_forward(frozenset())
        kv.finish_forward()
        with pytest.raises(LifecycleError, match="twice"):
            kv.finish_forward()

    def test_a_leaked_step_is_an_error_that_says_so(self):
        driver, _, _ = make_driver(RecordingConnector)
        with pytest.raises(LifecycleError, match="left without"), driver.begin(context(1, CUDAGraphMode.NONE)) as kv:
            kv.pre_forward(scheduler_output(1), Batch(), None)
        leaked = driver.begin(context(2, CUDAGraphMode.NONE))
        with pytest.raises(LifecycleError, match="step 2 is CREATED"):
            driver.begin(context(3, CUDAGraphMode.NONE))
        leaked.abort()
        run_step(driver, 4, CUDAGraphMode.NONE)

    def test_the_scheduler_output_of_another_step_is_refused(self):
        driver, _, _ = make_driver(RecordingConnector)
        with pytest.raises(LifecycleError, match="belongs to step 1"), driver.begin(context(1, CUDAGraphMode.NONE)) as kv:
            kv.pre_forward(scheduler_output(2), Batch(), None)

    def test_a_failed_forward_aborts_the_step_and_its_loads(self):
        driver, connector, ledger = make_driver(TimelineConnector)
        transfers = []
        connector.on_load = lambda ctx, kwargs: transfers.append(ledger.begin_transfer(1, "a", 0, 0, 7))
        kv = driver.begin(context(1, CUDAGraphMode.NONE))
        kv.pre_forward(scheduler_output(1, [PROMISE]), Batch(), None)
        with pytest.raises(ZeroDivisionError), kv:
            raise ZeroDivisionError
        assert kv.state is StepState.ABORTED
        assert ("abort_loads", 1) in connector.calls
        assert not connector.has_connector_metadata()
        assert not ledger.end_transfer(transfers[0])
        assert ledger.counters.late == 1

    def test_warm_up_and_capture_never_reach_a_connector(self):
        driver, connector, _ = make_driver(RecordingConnector)
        with driver.disabled():
            run_layers(driver)
            with pytest.raises(LifecycleError, match="disabled"):
                driver.begin(context(1, CUDAGraphMode.NONE))
        assert connector.calls == []
        kv = driver.begin(context(1, CUDAGraphMode.NONE))
        with pytest.raises(LifecycleError, match="disabled while"), driver.disabled():
            pass
        kv.abort()


class TestRung:
    def test_full_has_gates_where_the_connector_reports_from_a_thread_of_its_own(self):
        _, connector, _ = make_driver(TimelineConnector)
        for wait in ("auto", "gate"):
            assert [choose_rung(mode, connector, wait) for mode in ALL_MODES] == [Rung.HOOK, Rung.HOOK, Rung.GATE]
        connector.progresses_by_itself = False
        assert choose_rung(CUDAGraphMode.FULL, connector, "auto") is Rung.BARRIER

    def test_full_has_a_barrier_otherwise_and_the_other_modes_have_hooks(self):
        _, connector, _ = make_driver(RecordingConnector)
        assert [choose_rung(mode, connector, "auto") for mode in ALL_MODES] == [Rung.HOOK, Rung.HOOK, Rung.BARRIER]
        assert {choose_rung(mode, connector, "barrier") for mode in ALL_MODES} == {Rung.BARRIER}

    def test_a_rung_that_cannot_be_had_is_refused_when_the_driver_is_made(self):
        _, connector, _ = make_driver(RecordingConnector)
        with pytest.raises(ConfigError, match="supports_timelines"):
            choose_rung(CUDAGraphMode.FULL, connector, "gate")
        with pytest.raises(ConfigError, match="PIECEWISE or NONE"):
            choose_rung(CUDAGraphMode.FULL, connector, "hook")


def test_the_driver_of_an_engine_without_connector_does_nothing_and_refuses_loads():
    driver = InertKVStepDriver()
    with driver.begin(context(1, CUDAGraphMode.NONE)) as kv:
        kv.pre_forward(scheduler_output(1), Batch(), None)
        run_layers(driver)
        kv.finish_forward()
        assert kv.post_forward(frozenset()) is None
    with pytest.raises(LifecycleError, match="kv_transfer_config"):
        driver.begin(context(2, CUDAGraphMode.NONE)).pre_forward(scheduler_output(2, [PROMISE]), Batch(), None)


def test_a_wait_ends_on_the_last_report_without_the_clock_moving():
    clock = VirtualClock()
    _, _, ledger = make_driver(TimelineConnector, clock=clock)
    ledger.open_step(1, [PROMISE], 5.0)
    transfers = [ledger.begin_transfer(1, "a", 1, 0, 4), ledger.begin_transfer(1, "a", 1, 4, 7)]
    thread, result = run_in_thread(lambda: ledger.wait_layer(1, 1))
    clock.wait_for_waiters(1)
    reporter = threading.Thread(target=lambda: [ledger.end_transfer(transfer) for transfer in transfers])
    reporter.start()
    thread.join()
    reporter.join()
    assert result == [True]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_a_connector_raises_in_a_deferred_start_or_a_wait_without_promises_does_not_fail_the_step(mode, monkeypatch, caplog):
    driver, connector, _ = make_driver(RecordingConnector)

    def explode(*_args):
        raise OSError("no route")

    connector.on_load = explode
    monkeypatch.setattr(connector, "wait_for_layer_load", explode)
    assert not run_step(driver, 1, mode).invalid_block_ids
    assert connector.names()[-3:] == ["start_load_kv", "finish_forward", "wait_for_save"]
    assert "RecordingConnector.start_load_kv raised OSError: no route" in caplog.text
    assert ("RecordingConnector.wait_for_layer_load raised OSError: no route" in caplog.text) == (mode is not CUDAGraphMode.FULL)
    connector.on_load = lambda *_args: None
    assert not run_step(driver, 2, mode).invalid_block_ids


class TestAbort:
    """What an aborted step leaves behind."""

    def fail(self, driver, mode=CUDAGraphMode.NONE, layers=0, promises=(PROMISE,)):
        kv = driver.begin(context(1, mode))
        kv.pre_forward(scheduler_output(1, promises), Batch(), None)
        for layer in range(layers):
            driver.before_layer(layer)
        with pytest.raises(ZeroDivisionError), kv:
            raise ZeroDivisionError
        return driver.take_abort_report()

    def test_reads_that_have_not_ended_may_still_write(self):
        driver, connector, ledger = make_driver(TimelineConnector)
        transfers = []
        connector.on_load = lambda ctx, kwargs: transfers.extend(ledger.begin_transfer(1, "a", layer, 0, 7) for layer in range(3))
        report = self.fail(driver)
        assert (report.pending_block_ids, report.fault) == ({2, 3}, None)
        assert driver.take_abort_report() is None
        assert not ledger.end_transfer(transfers[0])

    def test_reads_that_end_when_they_are_given_up_do_not(self, monkeypatch):
        driver, connector, ledger = make_driver(TimelineConnector)
        transfers = []
        connector.on_load = lambda ctx, kwargs: transfers.extend(ledger.begin_transfer(1, "a", layer, 0, 7) for layer in range(3))
        monkeypatch.setattr(connector, "abort_loads", lambda step: [ledger.end_transfer(transfer, "given up") for transfer in transfers])
        assert not self.fail(driver).pending_block_ids

    def test_who_reports_nothing_to_the_ledger_says_for_each_layer_that_its_reads_have_ended(self):
        driver, connector, _ = make_driver(RecordingConnector)
        assert not self.fail(driver, layers=1).pending_block_ids
        assert connector.names() == ["handle_preemptions", "start_load_kv", "wait_for_layer_load", "abort_loads", *["wait_for_layer_load"] * 2]

    @pytest.mark.parametrize("method", ["abort_loads", "wait_for_layer_load"])
    def test_who_does_not_say_it_may_still_write(self, method, monkeypatch):
        driver, connector, _ = make_driver(RecordingConnector)

        def explode(_):
            raise OSError("no route")

        monkeypatch.setattr(connector, method, explode)
        assert self.fail(driver).pending_block_ids == {2, 3}

    @pytest.mark.parametrize("mode", ALL_MODES)
    def test_a_start_that_was_interrupted_may_still_write(self, mode):
        driver, connector, _ = make_driver(RecordingConnector)

        def interrupt(*_):
            raise KeyboardInterrupt

        connector.on_load = interrupt
        with pytest.raises(KeyboardInterrupt):
            run_step(driver, 1, mode, [PROMISE])
        report = driver.take_abort_report()
        assert report.pending_block_ids == {2, 3}
        assert report.fault == "the step failed before its loads were started"

    @pytest.mark.parametrize("connector_class", [RecordingConnector, TimelineConnector])
    @pytest.mark.parametrize("method", ["handle_preemptions", "bind_connector_metadata"])
    def test_nothing_writes_if_it_was_interrupted_before_its_loads_were_started(self, method, connector_class, monkeypatch):
        driver, connector, _ = make_driver(connector_class)

        def interrupt(_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(connector, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_step(driver, 1, CUDAGraphMode.NONE, [PROMISE])
        report = driver.take_abort_report()
        assert not report.pending_block_ids
        assert report.fault == "the step failed before its loads were started"
        assert not run_step(driver, 2, CUDAGraphMode.NONE).invalid_block_ids

    def test_loads_that_the_step_does_not_consume_begin_although_it_fails(self):
        driver, connector, _ = make_driver(RecordingConnector)
        assert self.fail(driver, CUDAGraphMode.FULL, promises=()).fault is None
        assert connector.names() == ["handle_preemptions", "start_load_kv", "abort_loads"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_promise_that_is_void_fails_at_once_and_the_others_of_the_step_land(mode):
    driver, connector, ledger = make_driver(TimelineConnector, kv_load_wait=python_rung(mode))

    def load(_context, kwargs):
        for layer in range(3):
            ledger.end_transfer(ledger.begin_transfer(1, "b", layer, 0, 4))

    connector.on_load = load
    output = run_step(driver, 1, mode, [LoadPromise("a", 0, 7, (2, 3), "it was refused"), LoadPromise("b", 0, 4, (5,))])
    assert output.invalid_block_ids == {2, 3}
    assert output.load_errors == {"a": "layer 0, position 0: it was refused"}
    assert output.fault is None


class TestLoadsThatWereOrderedBefore:
    """A step whose metadata was lost had loads; the connector may begin them with the next step."""

    ASKED = ("start_load_kv", "wait_for_layer_load", "wait_for_save")

    @staticmethod
    def lose_orders(driver, connector, step=1, **fields):
        output = dataclasses.replace(scheduler_output(step, fields.pop("promises", ())), connector_fault="it raised", **fields)
        report = driver.no_forward(context(step, CUDAGraphMode.NONE), output, Batch())
        assert report.fault == "it raised"
        connector.calls.clear()

    def asked(self, connector):
        names = [name for name in connector.names() if name in self.ASKED]
        connector.calls.clear()
        return names

    @pytest.mark.parametrize("mode", ALL_MODES)
    @pytest.mark.parametrize("orders", [{"promises": [PROMISE]}, {"async_load_req_ids": frozenset("a")}], ids=["of the step", "outside the steps"])
    def test_the_step_that_may_begin_them_waits_for_them_too(self, mode, orders):
        driver, connector, _ = make_driver(RecordingConnector)
        self.lose_orders(driver, connector, **orders)
        hooks = [] if mode is CUDAGraphMode.FULL else ["wait_for_layer_load"] * len(LAYERS)  # under FULL, start_load_kv has waited
        assert run_step(driver, 2, mode).fault is None
        assert self.asked(connector) == [*hooks, "start_load_kv", *hooks, "wait_for_save"]
        run_step(driver, 3, mode)
        assert self.asked(connector) == [*hooks, "start_load_kv", "wait_for_save"]

    def test_hooks_that_wait_for_loads_of_the_step_have_waited_for_them(self):
        driver, connector, _ = make_driver(RecordingConnector)
        self.lose_orders(driver, connector, promises=[PROMISE])
        run_step(driver, 2, CUDAGraphMode.NONE, [PROMISE])
        assert self.asked(connector) == ["start_load_kv", *["wait_for_layer_load"] * len(LAYERS), "wait_for_save"]

    def test_a_step_that_lost_no_load_leaves_none_to_wait_for(self):
        driver, connector, _ = make_driver(RecordingConnector)
        self.lose_orders(driver, connector)
        assert not driver.owes_loads

    def test_they_are_owed_until_a_step_has_seen_their_end(self):
        driver, connector, _ = make_driver(RecordingConnector)
        self.lose_orders(driver, connector, promises=[PROMISE])
        self.lose_orders(driver, connector, step=2)
        assert driver.owes_loads, "nothing was begun with a step without metadata"

        def explode(_):
            raise OSError("no route")

        def explode_behind_the_start(layer_name):
            if "start_load_kv" in connector.names():
                explode(layer_name)

        connector.on_wait = explode_behind_the_start
        assert "the wait for them has raised" in run_step(driver, 3, CUDAGraphMode.NONE).fault
        connector.on_wait = lambda layer_name: None
        kv = driver.begin(context(4, CUDAGraphMode.NONE))
        kv.pre_forward(scheduler_output(4), Batch(), None)
        kv.finish_forward()
        kv.abort()
        assert "may have begun, failed" in driver.take_abort_report().fault
        assert driver.owes_loads
        assert run_step(driver, 5, CUDAGraphMode.NONE).fault is None
        assert not driver.owes_loads
