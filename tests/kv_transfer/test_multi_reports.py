"""Nothing that a child reports is lost on its way through the multi connector, and what a child raises costs nobody else anything."""

import dataclasses
import inspect
import logging

import pytest
from kv_support import LAYERS, Request
from multi_children import MADE, RaisesOnce
from multi_support import Pair, make, promise, recv, sent

from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole, KVConnectorTransferResults
from interlock.kv_transfer.connectors.multi import MultiConnector

REPORTED = {
    "finished_sending": frozenset("s"),
    "finished_recving": frozenset("rf"),
    "failed_recving": frozenset("f"),
    "recving_errors": {"f": "gone"},
}
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
ANSWERED_BY_MULTI = {"get_finished", "has_connector_metadata", "get_handshake_metadata"}


def two_loads(pair, names=("r", "f")):
    pair.asked[1].offer = (8, True)
    for number, name in enumerate(names):
        pair.load(name, blocks=(2 * number, 2 * number + 1))


def test_every_field_of_a_childs_results_reaches_the_engine_and_the_childs_other_half():
    assert [field.name for field in dataclasses.fields(KVConnectorTransferResults)] == list(REPORTED)
    pair = Pair("Child", "Child")
    two_loads(pair)
    pair.asked[1].keeps = True
    pair.scheduler.request_finished(Request("s", [1, 2], 2), [5])
    pair.working[1].reports = KVConnectorTransferResults(**REPORTED)
    report = pair.step()
    assert {name: getattr(report, name, None) for name in REPORTED if name != "recving_errors"} == {
        name: value for name, value in REPORTED.items() if name != "recving_errors"
    }
    assert report.load_errors == REPORTED["recving_errors"]
    assert pair.worker.worker_half._results[1] == KVConnectorTransferResults(**REPORTED)
    seen = pair.asked[1].outputs[-1]
    assert (seen.finished_sending, seen.finished_recving, seen.failed_recving) == tuple(REPORTED.values())[:3]


def test_the_cause_of_a_load_that_is_not_ones_own_is_dropped_with_the_report():
    pair = Pair("Child", "Child")
    two_loads(pair)
    pair.working[0].reports = KVConnectorTransferResults(**{**REPORTED, "finished_sending": frozenset()})
    report = pair.step()
    assert (report.finished_recving, report.failed_recving, report.load_errors) == (frozenset(), frozenset(), {})
    assert report.kv_connector_stats["num_dropped_reports"] == 2


def test_every_method_of_a_connector_is_passed_on():
    methods = {name for name, _ in inspect.getmembers(KVConnector, inspect.isfunction) if not name.startswith("_")}
    own = {name for name in methods if getattr(MultiConnector, name) is not getattr(KVConnector, name)}
    assert methods - own <= ANSWERED_BY_MULTI, "a method of the interface that the children never hear of"
    flags = {name for name, value in vars(KVConnector).items() if isinstance(value, bool)}
    multi, _ = make(KVConnectorRole.SCHEDULER, "Child", "Repeatable")
    assert flags <= set(vars(multi)), "a declaration of the interface that does not depend on the children"


# Whose load is recomputed


def test_a_failed_load_is_recomputed_if_its_owner_says_so():
    pair = Pair("Child", "Repeatable")
    for index, name in enumerate(("of a peer", "of a tier")):
        pair.asked[index].offer = (8, True)
        pair.load(name, blocks=(2 * index, 2 * index + 1))
        pair.asked[index].offer = (0, False)
    assert [pair.scheduler.recomputes_load(name) for name in ("of a peer", "of a tier", "of nobody")] == [False, True, False]
    request = Request("of a peer", list(range(12)), 12)
    pair.scheduler.request_preempted(request)
    assert not pair.scheduler.recomputes_load("of a peer"), "ownership survives a preemption"
    pair.asked[1].offer = (8, True)
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    pair.scheduler.update_state_after_alloc(request, [4, 5], 8)
    assert pair.scheduler.recomputes_load("of a peer"), "its second load is the tier's"


# What children raise


@pytest.fixture(autouse=True)
def nothing_made():
    MADE.clear()
    RaisesOnce.raising = None


def raise_in(method, role=KVConnectorRole.WORKER):
    RaisesOnce.raising = (role, method)


def give_loads(pair, is_async=False):
    """Each child has a load, of two blocks, in the next step; returns their promises."""
    for index, asked in enumerate(pair.asked):
        asked.offer = (8, is_async)
        pair.load(f"r{index}", blocks=(2 * index, 2 * index + 1))
        asked.offer = (0, False)
    return [promise("r0", 0, 1), promise("r1", 2, 3)]


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
@pytest.mark.parametrize("other", ["WithTimelines", "Child"])
def test_a_child_that_raises_while_it_is_waited_for_fails_its_own_load_and_leaves_no_block_pending(mode, other):
    pair = Pair("RaisesOnce", other)
    promises = give_loads(pair)
    raise_in("wait_for_layer_load")
    report = pair.step(promises, mode)
    assert RaisesOnce.raising is None
    assert report.invalid_block_ids == {0, 1}
    assert report.pending_block_ids == frozenset(), "no transfer is left open"
    assert "the connector raised OSError: no wait_for_layer_load" in report.load_errors["r0"]


@pytest.mark.parametrize("where", ["start_load_kv", "wait_for_layer_load"])
@pytest.mark.parametrize("other", ["WithTimelines", "Child"])
def test_a_child_that_raises_while_it_loads_is_told_to_stop_before_its_blocks_are_given_back(where, other):
    pair = Pair("RaisesOnce", other)
    promises = give_loads(pair)
    raise_in(where)
    report = pair.step(promises)
    assert RaisesOnce.raising is None
    assert report.invalid_block_ids == {0, 1}
    assert report.pending_block_ids == frozenset()
    assert report.fault is None
    assert pair.working[0].named("abort_loads") == [("abort_loads", 1)]
    assert pair.working[1].named("abort_loads") == []


@pytest.mark.parametrize("where", ["start_load_kv", "wait_for_layer_load"])
@pytest.mark.parametrize("other", ["WithTimelines", "Child"])
def test_the_blocks_of_a_child_that_cannot_stop_wait_until_it_names_the_load(where, other):
    pair = Pair("CannotStop", other)
    promises = give_loads(pair)
    raise_in(where)
    report = pair.step(promises)
    assert report.pending_block_ids >= {0, 1}
    assert report.pending_block_ids == {0, 1} or other == "Child", "with a ledger it is known which blocks these are"
    pair.working[0].reports = recv("r0")
    assert pair.step().finished_recving == {"r0"}


@pytest.mark.parametrize(("role", "where"), [(SCHEDULER, "build_connector_meta"), (WORKER, "bind_connector_metadata")])
@pytest.mark.parametrize("other", ["WithTimelines", "Child", "SavesLayers"])
def test_what_a_child_without_a_load_raises_with_its_metadata_costs_no_other_its_part_in_the_step(role, where, other):
    pair = Pair("RaisesOnce", other)
    pair.asked[1].offer = (8, False)
    pair.load("r", blocks=(0, 1))
    raise_in(where, role)
    pair.working[0].reports, pair.working[0].calls = sent("gone"), []
    report = pair.step([promise("r", 0, 1)])
    assert RaisesOnce.raising is None
    assert report.invalid_block_ids == frozenset()
    assert report.fault is None
    assert pair.working[1].named("start_load_kv") == [("start_load_kv", ["r"])]
    assert len(pair.working[1].named("wait_for_save")) == 1
    assert pair.working[0].calls == [], "it knows nothing of the step"
    assert pair.working[0].reports == KVConnectorTransferResults(), "and reports what it has"
    assert not pair.working[0].has_connector_metadata()
    pair.step()
    assert [len(pair.working[0].named(name)) for name in ("start_load_kv", "wait_for_save")] == [1, 1]


@pytest.mark.parametrize(("role", "where"), [(SCHEDULER, "build_connector_meta"), (WORKER, "bind_connector_metadata"), (WORKER, "start_load_kv")])
@pytest.mark.parametrize("is_async", [False, True], ids=["of the step", "outside the steps"])
def test_orders_that_a_child_has_not_taken_are_in_doubt_until_it_has_begun_its_loads(role, where, is_async):
    pair = Pair("RaisesOnce", "Child")
    promises = [] if is_async else give_loads(pair)
    if is_async:
        give_loads(pair, is_async=True)
    raise_in(where, role)
    report = pair.step(promises)
    if where == "start_load_kv" and not is_async:
        assert report.fault is None, "it was told to stop"
        return
    assert f"RaisesOnce.{where} raised OSError: no {where}" in report.fault
    assert report.invalid_block_ids == {block for promised in promises for block in promised.block_ids}
    raise_in(where, role)
    assert f"RaisesOnce.{where} raised OSError: no {where}" in pair.step().fault, "it may still take them"
    assert pair.step().fault is None


def test_a_child_that_raises_while_late_loads_are_waited_for_may_still_make_them():
    pair = Pair("RaisesOnce", "Child")
    promises = give_loads(pair)
    raise_in("bind_connector_metadata")
    assert pair.step(promises).fault is not None
    pair.working[0].start_load_kv = lambda *arguments, **options: raise_in("wait_for_layer_load")
    assert "the wait for them has raised" in pair.step().fault
    assert RaisesOnce.raising is None
    assert pair.driver.owes_loads
    del pair.working[0].start_load_kv
    assert pair.step().fault is None
    assert not pair.driver.owes_loads


def test_late_loads_of_a_child_that_raised_in_a_hook_before_they_began_are_waited_for_too():
    pair = Pair("RaisesOnce", "Child")
    promises = give_loads(pair)
    raise_in("bind_connector_metadata")
    assert pair.step(promises).fault is not None
    pair.working[0].calls = []
    raise_in("wait_for_layer_load")
    assert pair.step().fault is None
    assert RaisesOnce.raising is None
    names = [call[0] for call in pair.working[0].calls]
    assert names == ["start_load_kv", *["wait_for_layer_load"] * len(LAYERS), "wait_for_save"]


def test_a_child_that_cannot_say_whether_it_has_work_leaves_the_others_theirs():
    pair = Pair("RaisesOnce", "Child")
    pair.asked[1].has_pending_push_work = lambda: True
    raise_in("has_pending_push_work", KVConnectorRole.SCHEDULER)
    assert pair.scheduler.has_pending_push_work()
    assert RaisesOnce.raising is None


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_a_child_without_a_load_that_raises_while_it_is_waited_for_costs_no_load(mode):
    pair = Pair("RaisesOnce", "Child")
    pair.asked[1].offer = (8, False)
    pair.load("r", blocks=(0, 1))
    raise_in("wait_for_layer_load")
    report = pair.step([promise("r", 0, 1)], mode)
    assert report.invalid_block_ids == frozenset()
    assert [call[1] for call in pair.working[1].named("wait_for_layer_load")] == list(LAYERS)


@pytest.mark.parametrize("where", ["get_transfer_results", "get_kv_connector_stats", "build_connector_worker_meta"])
def test_a_child_that_raises_where_it_reports_loses_its_own_report_only(where, caplog):
    pair = Pair("RaisesOnce", "Child")
    two_loads(pair)
    raise_in(where)
    pair.working[1].reports = recv("r", failed=["f"])
    report = pair.step()
    assert (report.finished_recving, report.failed_recving) == ({"r", "f"}, {"f"})
    assert "raised where it was to answer" in caplog.text
    assert len(pair.asked[1].outputs) == 1


def test_a_child_that_cannot_say_what_of_its_loads_failed_has_failed_in_all_of_them():
    pair = Pair("RaisesOnce", "Child")
    for index, asked in enumerate(pair.asked):
        asked.offer = (8, True)
        pair.load(f"r{index}", blocks=(2 * index, 2 * index + 1))
        asked.offer = (0, False)
    raise_in("get_block_ids_with_load_errors")
    assert pair.step().invalid_block_ids == {0, 1}


@pytest.mark.parametrize("where", ["wait_for_save", "finish_forward", "bind_connector_metadata", "shutdown"])
def test_all_children_are_called_although_one_raises_and_its_error_is_raised_in_the_end(where):
    multi, children = make(KVConnectorRole.WORKER, "RaisesOnce", "Child")
    called = []
    setattr(children[1], where, lambda *arguments: called.append(where))
    raise_in(where)
    with pytest.raises(OSError, match=f"no {where}"):
        multi.worker_half.for_each(lambda child: getattr(child, where)()) if where != "shutdown" else multi.shutdown()
    assert called == [where]


def test_a_child_that_raises_where_it_is_asked_has_nothing_and_where_a_request_ends_keeps_nothing():
    pair = Pair("RaisesOnce", "Child")
    pair.asked[1].offer = (8, False)
    raise_in("get_num_new_matched_tokens", KVConnectorRole.SCHEDULER)
    request = pair.load("r")
    assert pair.scheduler.scheduler_half.owner("r") == 1
    pair.asked[1].keeps, pair.asked[1].params = True, {"here": 1}
    raise_in("request_finished", KVConnectorRole.SCHEDULER)
    assert pair.scheduler.request_finished(request, [0, 1, 2]) == (True, {"here": 1})
    assert pair.asked[1].named("finished") == [("finished", "r")]


@pytest.mark.parametrize("name", [10**6, -1, "x", True, None], ids=repr)
def test_a_child_that_names_what_is_no_block_of_its_own_is_warned_of_once(name, caplog):
    pair = Pair("Child", "Child")
    pair.asked[0].offer = (8, True)
    pair.load("r", blocks=(0, 1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pair.working[0].bad_blocks = {name}
            report = pair.step()
            assert report.invalid_block_ids == frozenset()
            assert report.kv_connector_stats["num_dropped_reports"] == 1
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
