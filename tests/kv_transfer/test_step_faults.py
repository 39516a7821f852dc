"""A step whose connector raises, names bad blocks, or is too late: what counts as landed, what is given up, and what is reported of it."""

import signal
from types import SimpleNamespace

import pytest
from kv_support import LAYERS, Batch, RecordingConnector, TimelineConnector, context, make_driver, run_in_thread, scheduler_output

from interlock.core import interrupts
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connector import KVConnectorTransferResults

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
ALL_LAYERS = range(len(LAYERS))
A, B = LoadPromise("a", 0, 7, (2, 3)), LoadPromise("b", 0, 4, (5,))

both = pytest.mark.parametrize("connector_class", [RecordingConnector, TimelineConnector])


def explode(*_args, **_kwargs):
    raise OSError("no route")


def begin(driver, mode=NONE, promises=(A,)):
    kv = driver.begin(context(1, mode))
    kv.pre_forward(scheduler_output(1, promises), Batch(), None)
    return kv


def end(driver, kv, layers=ALL_LAYERS):
    for layer in layers:
        driver.before_layer(layer)
    kv.finish_forward()
    return kv.post_forward(frozenset())


def read_all(ledger, *promises, error=None):
    """`on_load` of a connector whose reads end at once."""

    def load(_context, _arguments):
        for promise in promises:
            for layer in ALL_LAYERS:
                ledger.end_transfer(ledger.begin_transfer(1, promise.req_id, layer, promise.start, promise.stop), error)

    return load


class TestStart:
    @pytest.mark.parametrize("promises", [(A,), ()], ids=["at once", "after the launch"])
    def test_loads_start_when_what_was_launched_before_their_step_has_run(self, promises):
        driver, connector, _ = make_driver(RecordingConnector)
        driver.record = lambda: connector.calls.append(("recorded",)) or SimpleNamespace(wait=lambda: connector.calls.append(("waited",)))
        kv = begin(driver, promises=promises)
        if not promises:
            assert "waited" not in connector.names()
        end(driver, kv)
        names = [name for name in connector.names() if name in ("recorded", "waited", "wait_for_layer_load", "start_load_kv")]
        waits = ["wait_for_layer_load"] * len(LAYERS)
        start = ["waited", "start_load_kv"]
        assert names == ["recorded", *((*start, *waits) if promises else (*waits, *start))]

    @both
    @pytest.mark.parametrize("method", ["handle_preemptions", "bind_connector_metadata"])
    def test_what_is_raised_when_the_connector_is_told_of_the_step_loses_its_loads(self, connector_class, method):
        driver, connector, ledger = make_driver(connector_class)
        setattr(connector, method, explode)
        if connector.supports_timelines:
            connector.on_load = read_all(ledger, A)
        output = end(driver, begin(driver))
        assert output.invalid_block_ids == {2, 3}
        assert f"{method} raised OSError: no route" in output.load_errors["a"]
        assert (output.fault is None) == ("start_load_kv" in connector.names()), "what it was told may come to it yet"
        assert output.num_connector_faults == 1

    def test_a_connector_without_its_metadata_is_not_asked_to_load_wait_or_save(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.bind_connector_metadata = explode
        end(driver, begin(driver))
        assert connector.names() == ["handle_preemptions"]


class TestGivingUp:
    def test_a_start_that_raised_may_have_begun_loads(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.on_load = explode
        end(driver, begin(driver))
        assert connector.names().count("abort_loads") == 1

    def test_a_wait_that_raised_says_nothing_of_the_layer_and_all_loads_are_given_up(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.on_wait = lambda name: explode() if name == LAYERS[1] else None
        output = end(driver, begin(driver))
        assert output.load_errors["a"].startswith("layer 1, position 0: RecordingConnector.wait_for_layer_load raised OSError: no route")
        assert connector.names().count("abort_loads") == 1

    def test_without_promises_nothing_is_given_up(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.on_load = connector.on_wait = explode
        end(driver, begin(driver, promises=()))
        assert "abort_loads" not in connector.names()

    def test_a_read_that_is_still_under_way_at_the_end_is_given_up(self):
        """Its layer ran without waiting."""
        driver, connector, ledger = make_driver(TimelineConnector)
        transfers = []
        connector.on_load = lambda *_: transfers.extend(ledger.begin_transfer(1, "a", layer, 0, 7) for layer in ALL_LAYERS)
        connector.abort_loads = lambda step: ledger.end_transfer(transfers[1], "it was stopped")
        kv = begin(driver)
        for layer in (0, 2):
            ledger.end_transfer(transfers[layer])
        output = end(driver, kv, layers=(0, 2))
        assert output.invalid_block_ids == {2, 3}
        assert not output.pending_block_ids

    @pytest.mark.parametrize("wait", ["auto", "barrier"])
    def test_at_the_deadline_loads_are_given_up_before_the_next_layer_runs(self, wait):
        clock = VirtualClock()
        driver, connector, _ = make_driver(TimelineConnector, clock=clock, timeout=5.0, kv_load_wait=wait)
        waiting, result = run_in_thread(lambda: begin(driver))
        if wait == "auto":
            waiting.join()
            waiting, _ = run_in_thread(lambda: driver.before_layer(0))
        clock.wait_for_waiters(1)
        clock.advance(5.0)
        waiting.join()
        assert connector.names()[-1] == "abort_loads"
        end(driver, result[0], layers=(1, 2))
        assert connector.names().count("abort_loads") == 1

    def test_at_the_deadline_loads_are_given_up_while_the_replay_stands_at_its_gates(self):
        clock = VirtualClock()
        driver, connector, _ = make_driver(TimelineConnector, clock=clock, timeout=5.0)
        kv = begin(driver, FULL)
        kv.finish_forward()
        waits = []

        def wait(timeout):
            waits.append((timeout is None, connector.names().count("abort_loads")))
            clock.advance(2.5)
            return timeout is None

        kv.wait_forward(wait)
        assert waits == [(False, 0), (False, 0), (True, 1)]
        assert kv.post_forward(frozenset()).invalid_block_ids == {2, 3}
        assert connector.names().count("abort_loads") == 1

    def test_a_replay_that_ends_in_time_gives_nothing_up(self):
        clock = VirtualClock()
        driver, connector, ledger = make_driver(TimelineConnector, clock=clock, timeout=5.0)
        connector.on_load = read_all(ledger, A)
        kv = begin(driver, FULL)
        kv.finish_forward()
        clock.advance(6.0)
        answers = iter([False, True, True])
        kv.wait_forward(lambda timeout: next(answers))
        assert not kv.post_forward(frozenset()).invalid_block_ids
        assert "abort_loads" not in connector.names()

    def test_what_runs_behind_a_replay_waits_for_the_loads_of_its_own_layers(self):
        """That of layer 2 does not end."""
        clock = VirtualClock()
        driver, connector, ledger = make_driver(TimelineConnector, clock=clock, timeout=5.0)
        transfers = []
        connector.on_load = lambda *_: transfers.extend(ledger.begin_transfer(1, "a", layer, 0, 7) for layer in ALL_LAYERS)
        connector.abort_loads = lambda step: ledger.end_transfer(transfers[2], "it was stopped")
        kv = begin(driver, FULL)
        kv.finish_forward()
        for transfer in transfers[:2]:
            ledger.end_transfer(transfer)
        drafting, _ = run_in_thread(lambda: kv.wait_layers([1, 2]))
        clock.wait_for_waiters(1)
        clock.advance(5.0)
        drafting.join()
        output = kv.post_forward(frozenset())
        assert output.invalid_block_ids == {2, 3}
        assert not output.pending_block_ids

    def test_loads_that_are_late_for_it_are_given_up_even_if_no_read_of_them_is_known(self):
        clock = VirtualClock()
        driver, connector, _ = make_driver(TimelineConnector, clock=clock, timeout=5.0)
        kv = begin(driver, FULL)
        kv.finish_forward()
        clock.advance(5.0)
        kv.wait_layers([2])
        assert kv.post_forward(frozenset()).invalid_block_ids == {2, 3}
        assert connector.names().count("abort_loads") == 1


class TestPending:
    """Blocks that may still be written."""

    def test_who_reports_to_the_ledger_may_still_write_what_it_has_not_reported(self):
        driver, connector, ledger = make_driver(TimelineConnector)
        connector.on_load = lambda *_: ledger.begin_transfer(1, "a", 0, 0, 7)
        connector.abort_loads = explode
        kv = begin(driver, promises=(A, B))
        for req_id in ("a", "b"):
            ledger.fail_promise(1, req_id, "the peer refused")
        output = end(driver, kv)
        assert output.invalid_block_ids == {2, 3, 5}
        assert output.pending_block_ids == {2, 3}

    def test_who_does_not_may_still_write_whatever_failed_if_it_cannot_give_it_up(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.bad_blocks = {3}
        connector.on_wait = lambda name: explode() if name == LAYERS[1] else None
        connector.abort_loads = explode
        assert end(driver, begin(driver)).pending_block_ids == {2, 3}

    def test_who_gives_it_up_does_not(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.on_wait = explode
        output = end(driver, begin(driver))
        assert output.invalid_block_ids == {2, 3}
        assert not output.pending_block_ids


@pytest.fixture
def handlers():
    """`handlers(SIGUSR1=error)`: that signal's handler raises the error."""
    before = {}

    def install(**errors):
        for name, error in errors.items():
            number = signal.Signals[name]

            def handle(_number, _frame, error=error):
                raise error

            before[number] = signal.signal(number, handle)

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_interrupt_is_served_while_the_loads_of_a_step_that_the_first_has_ended_are_given_up(handlers):
    """The connector, which was interrupted, has not said that it writes no more."""
    handlers(SIGUSR1=KeyboardInterrupt, SIGUSR2=TimeoutError)
    driver, connector, _ = make_driver(RecordingConnector)

    def give_up(step):
        signal.raise_signal(signal.SIGUSR2)
        connector.calls.append(("gave up",))

    connector.abort_loads = give_up

    def interrupted_step():
        with begin(driver):
            signal.raise_signal(signal.SIGUSR1)
            interrupts.deliver()

    with interrupts.deferred():
        with pytest.raises(TimeoutError):
            interrupted_step()
        assert ("gave up",) not in connector.calls
        assert driver.take_abort_report().pending_block_ids == {2, 3}
        assert not connector.has_connector_metadata()


class TestReports:
    """Of loads that requests wait for outside the steps."""

    def test_a_load_that_ends_badly_between_two_questions_is_not_taken_to_have_ended_well(self):
        driver, connector, _ = make_driver(RecordingConnector)
        finished, bad = set(), set()

        def ask(answer):
            given = frozenset(answer)
            finished.add("w")
            bad.add(9)
            return given

        connector.get_transfer_results = lambda _: KVConnectorTransferResults(finished_recving=ask(finished))
        connector.get_block_ids_with_load_errors = lambda: ask(bad)
        output = end(driver, begin(driver))
        assert not output.finished_recving
        assert output.invalid_block_ids == {9}

    def test_causes_of_loads_of_both_kinds_are_reported(self):
        driver, connector, _ = make_driver(RecordingConnector)
        connector.bad_blocks = {3, 9}
        connector.get_transfer_results = lambda _: KVConnectorTransferResults(
            finished_sending=frozenset({"s"}), finished_recving=frozenset({"w"}), failed_recving=frozenset({"w"}), recving_errors={"w": "it was lost"}
        )
        output = end(driver, begin(driver))
        assert output.invalid_block_ids == {3, 9}
        assert set(output.load_errors) == {"a", "w"}
        assert output.load_errors["w"] == "it was lost"
        assert (output.finished_sending, output.finished_recving, output.failed_recving) == ({"s"}, {"w"}, {"w"})

    @both
    def test_if_the_connector_cannot_say_which_blocks_are_bad_all_loads_have_failed(self, connector_class):
        driver, connector, ledger = make_driver(connector_class)
        if connector.supports_timelines:
            connector.on_load = read_all(ledger, A)
        connector.get_block_ids_with_load_errors = explode
        connector.get_transfer_results = lambda _: KVConnectorTransferResults(
            finished_sending=frozenset({"s"}), finished_recving=frozenset({"w"}), failed_recving=frozenset({"v"}), recving_errors={"v": "it was lost"}
        )
        output = end(driver, begin(driver))
        assert output.invalid_block_ids == {2, 3}
        assert (output.finished_sending, output.finished_recving, output.failed_recving) == ({"s"}, {"v", "w"}, {"v", "w"})
        assert output.load_errors["v"] == "it was lost"
        for req_id in ("a", "w"):
            assert "get_block_ids_with_load_errors raised OSError: no route" in output.load_errors[req_id]


class TestSaves:
    def test_after_one_that_raised_no_further_layer_is_saved(self):
        driver, connector, _ = make_driver(RecordingConnector)
        kv = begin(driver, promises=())
        save, connector.save_kv_layer = connector.save_kv_layer, explode
        driver.after_layer(0)
        connector.save_kv_layer = save
        driver.after_layer(1)
        assert "save_kv_layer" not in connector.names()
        assert connector.names().count("synchronize") == 1
        end(driver, kv)
