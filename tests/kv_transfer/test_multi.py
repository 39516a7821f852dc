"""Several connectors as one: a load has one owner, reports count only from those whom they concern, and all save."""

import dataclasses

import pytest
from kv_support import LAYERS, Request, engine_config, kv_cache_config
from multi_children import MADE
from multi_support import MODES, Pair, child, make, promise, recv, sent, transfer_config

from interlock.core.config import KVTransferConfig
from interlock.core.errors import ConfigError, RequestError
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import KVConnectorOutput
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.registry import check_connector, connector_class, create_connector


@pytest.fixture(autouse=True)
def nothing_made():
    MADE.clear()


# Who owns a load


@pytest.mark.parametrize(
    ("offers", "owner", "answer"),
    [
        ([(8, False), (8, True)], 0, (8, False)),
        ([(4, False), (8, True)], 1, (8, True)),
        ([(0, False), (4, False)], 1, (4, False)),
        ([(0, False), (0, False)], None, (0, False)),
    ],
)
def test_the_first_that_has_the_longest_hit_owns_the_load_and_the_others_hear_of_the_blocks(offers, owner, answer):
    multi, children = make(KVConnectorRole.SCHEDULER, "Child", "Child")
    for made, offer in zip(children, offers, strict=True):
        made.offer = offer
    request = Request("r", list(range(12)), 12)
    assert multi.get_num_new_matched_tokens(request, 0) == answer
    multi.update_state_after_alloc(request, [3, 4, 5], answer[0])
    assert [made.named("allocated") for made in children] == [
        [("allocated", "r", [3, 4, 5], answer[0] if index == owner else 0)] for index in range(2)
    ]
    assert multi.scheduler_half.owner("r") == owner


def test_as_long_as_one_does_not_know_nobody_loads_and_who_has_answered_is_not_asked_again():
    multi, (slow, quick) = make(KVConnectorRole.SCHEDULER, "Child", "Child")
    slow.offer, quick.offer = (None, False), (4, True)
    request = Request("r", list(range(12)), 12)
    assert multi.get_num_new_matched_tokens(request, 0) == (None, False)
    assert multi.get_num_new_matched_tokens(request, 0) == (None, False)
    assert len(quick.named("asked")) == 1
    slow.offer = (8, False)
    assert multi.get_num_new_matched_tokens(request, 0) == (8, False)
    slow.offer = quick.offer = (None, False)
    assert multi.get_num_new_matched_tokens(request, 0) == (None, False), "an answer is not kept beyond its question"


@pytest.mark.parametrize(("now", "answer", "owner"), [((4, True), (6, False), 0), ((0, False), (6, False), 0), ((7, True), (7, True), 1)])
def test_a_hit_that_was_found_before_the_others_knew_theirs_is_asked_for_again_before_it_is_relied_upon(now, answer, owner):
    multi, (slow, quick) = make(KVConnectorRole.SCHEDULER, "Child", "Child")
    slow.offer, quick.offer = (None, False), (8, True)
    request = Request("r", list(range(12)), 12)
    assert multi.get_num_new_matched_tokens(request, 0) == (None, False)
    slow.offer, quick.offer = (6, False), (None, False)
    assert multi.get_num_new_matched_tokens(request, 0) == (None, False), "it does not know any more"
    assert len(slow.named("asked")) == 2
    quick.offer = now
    assert multi.get_num_new_matched_tokens(request, 0) == answer
    multi.update_state_after_alloc(request, [1, 2, 3], answer[0])
    assert multi.scheduler_half.owner("r") == owner


def test_an_answer_for_another_local_prefix_is_not_used():
    multi, (slow, quick) = make(KVConnectorRole.SCHEDULER, "Child", "Child")
    slow.offer, quick.offer = (None, False), (8, True)
    request = Request("r", list(range(12)), 12)
    assert multi.get_num_new_matched_tokens(request, 0) == (None, False)
    slow.offer, quick.offer = (0, False), (4, True)
    assert multi.get_num_new_matched_tokens(request, 4) == (4, True)


def test_a_preempted_request_is_brought_again_only_to_those_whose_loads_can_be_repeated():
    multi, (peer, tier) = make(KVConnectorRole.SCHEDULER, "Child", "Repeatable")
    assert multi.load_is_repeatable
    peer.offer, tier.offer = (8, False), (4, False)
    request = Request("r", list(range(12)), 12)
    assert multi.get_num_new_matched_tokens(request, 0) == (8, False)
    multi.update_state_after_alloc(request, [0, 1, 2], 8)
    multi.request_preempted(request)
    assert [made.named("preempted") for made in (peer, tier)] == [[("preempted", "r")]] * 2
    assert multi.get_num_new_matched_tokens(request, 0) == (4, False)
    multi.update_state_after_alloc(request, [4, 5, 6], 4)
    assert multi.scheduler_half.owner("r") == 1
    assert len(peer.named("asked")) == 1
    assert peer.named("allocated")[-1][-1] == 0
    multi.request_finished(request, [4, 5, 6])
    assert multi.get_num_new_matched_tokens(Request("r", list(range(12)), 12), 0) == (8, False), "a new request of the same id begins anew"


def test_a_child_that_refuses_a_request_speaks_for_all_and_those_told_before_hear_of_its_end():
    multi, (first, second) = make(KVConnectorRole.SCHEDULER, "Child", "Child")
    second.refuses = True
    with pytest.raises(RequestError, match="not this one"):
        multi.on_new_request(Request("r", [1], 1))
    assert first.named("finished") == [("finished", "r")]


# Reports


def test_only_the_owners_report_of_a_load_counts_and_only_once():
    pair = Pair("Child", "Child")
    pair.asked[0].offer = (8, True)
    pair.load("r")
    pair.working[1].reports = recv("r")
    report = pair.step()
    assert report.finished_recving == frozenset()
    assert report.kv_connector_stats["num_dropped_reports"] == 1
    pair.working[0].reports = recv("r")
    assert pair.step().finished_recving == {"r"}
    pair.working[0].reports, pair.working[1].reports = recv("r"), recv("r", failed=["r"])
    report = pair.step()
    assert (report.finished_recving, report.failed_recving) == (frozenset(), frozenset())
    assert report.kv_connector_stats["num_dropped_reports"] == 2
    assert [[sorted(output.finished_recving) for output in asked.outputs] for asked in pair.asked] == [[[], ["r"], []], [[], [], []]]


def test_a_failure_counts_if_the_owner_reports_it_with_its_own_blocks():
    pair = Pair("Child", "Child")
    pair.asked[1].offer = (8, True)
    pair.load("r", blocks=(4, 5, 6))
    pair.working[0].bad_blocks = {4, 5}
    report = pair.step()
    assert report.invalid_block_ids == frozenset()
    assert report.kv_connector_stats["num_dropped_reports"] == 1
    pair.working[1].reports, pair.working[1].bad_blocks = recv("r", failed=["r"]), {5, 6}
    report = pair.step()
    assert (report.finished_recving, report.failed_recving, report.invalid_block_ids) == ({"r"}, {"r"}, {5})


def test_ownership_survives_a_preemption_and_a_late_report_of_the_former_owner_is_dropped():
    pair = Pair("Child", "Repeatable")
    pair.asked[0].offer, pair.asked[1].offer = (8, True), (8, True)
    request = pair.load("r")
    pair.working[0].reports = recv("r")
    assert pair.step().finished_recving == {"r"}
    pair.scheduler.update_state_after_alloc(request, [0, 1, 2], 0)
    assert pair.scheduler.scheduler_half.owner("r") == 0, "resumed, it is still the owner's"
    pair.scheduler.request_preempted(request)
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    pair.scheduler.update_state_after_alloc(request, [5, 6, 7], 8)
    pair.working[0].reports = recv("r")
    assert pair.step().finished_recving == frozenset()
    pair.working[1].reports = recv("r")
    assert pair.step().finished_recving == {"r"}


def test_kept_blocks_are_let_go_when_all_who_keep_them_have_said_so():
    pair = Pair("Child", "Child", "Child")
    pair.asked[0].keeps = pair.asked[2].keeps = True
    pair.asked[2].params = {"remote_block_ids": [1]}
    request = Request("r", [1, 2], 2)
    pair.scheduler.on_new_request(request)
    assert pair.scheduler.request_finished(request, [1]) == (True, {"remote_block_ids": [1]})
    assert pair.scheduler.has_pending_push_work()
    pair.working[1].reports = sent("r")
    assert pair.step().finished_sending == frozenset()
    pair.working[2].reports = sent("r")
    assert pair.step().finished_sending == frozenset()
    pair.working[2].reports = sent("r")
    report = pair.step()
    assert (report.finished_sending, report.kv_connector_stats["num_dropped_reports"]) == (frozenset(), 1)
    pair.working[0].reports = sent("r")
    assert pair.step().finished_sending == {"r"}
    assert not pair.scheduler.has_pending_push_work()


def test_each_child_gets_its_own_metadata_and_worker_report():
    pair = Pair("Child", "Child")
    pair.step()
    assert [asked.outputs[-1].kv_connector_worker_meta for asked in pair.asked] == [f"meta of {id(made)}" for made in pair.working]


# Loads of a step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_load_wait", ["auto", "barrier"])
@pytest.mark.parametrize("names", [("Child", "WithTimelines"), ("WithTimelines", "Child"), ("Child", "Child"), ("WithTimelines", "WithTimelines")])
def test_synchronous_loads_of_children_of_both_kinds_land_in_one_step(mode, kv_load_wait, names):
    pair = Pair(*names, kv_load_wait=kv_load_wait)
    for index, asked in enumerate(pair.asked):
        asked.offer = (8, False)
        pair.load(f"r{index}", blocks=(2 * index, 2 * index + 1))
        asked.offer = (0, False)
    report = pair.step([promise("r0", 0, 1), promise("r1", 2, 3)], mode)
    assert report.invalid_block_ids == frozenset()
    assert report.loaded_bytes > 0
    assert [working.named("start_load_kv") for working in pair.working] == [[("start_load_kv", ["r0"])], [("start_load_kv", ["r1"])]]
    for working in pair.working:
        asked_layers = [call[1] for call in working.named("wait_for_layer_load")]
        assert asked_layers in ([], list(LAYERS)), "nobody is asked twice for a layer"
        if not working.supports_timelines and mode is not CUDAGraphMode.FULL:
            assert asked_layers == list(LAYERS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("names", [("Child", "WithTimelines"), ("Child", "Child")])
def test_blocks_that_an_owner_names_count_as_not_landed(mode, names):
    pair = Pair(*names)
    pair.asked[0].offer = (8, False)
    pair.load("r", blocks=(0, 1))
    pair.working[0].bad_blocks = {1}
    assert pair.step([promise("r", 0, 1)], mode).invalid_block_ids == {1}
    pair.working[0].bad_blocks = {0}
    assert pair.step(mode=mode).invalid_block_ids == {0}, "it may notice later"
    pair.working[0].bad_blocks = {0}
    assert pair.step(mode=mode, finished=["r"]).invalid_block_ids == {0}
    pair.working[0].bad_blocks = {0}
    assert pair.step(mode=mode).invalid_block_ids == frozenset(), "the request has gone, the block may be another's"


@pytest.mark.parametrize("mode", MODES)
def test_a_child_that_raises_costs_its_own_loads_only(mode):
    pair = Pair("Raises", "WithTimelines")
    for index, asked in enumerate(pair.asked):
        asked.offer = (8, False)
        pair.load(f"r{index}", blocks=(2 * index, 2 * index + 1))
        asked.offer = (0, False)
    report = pair.step([promise("r0", 0, 1), promise("r1", 2, 3)], mode)
    assert report.invalid_block_ids == {0, 1}
    assert "OSError: the cache server is gone" in report.load_errors["r0"]


def test_what_a_child_raises_without_a_load_of_the_step_is_logged_and_the_other_child_starts_its_own(caplog):
    pair = Pair("Raises", "Child")
    assert pair.step().invalid_block_ids == frozenset()
    assert "the cache server is gone" in caplog.text
    assert pair.working[1].named("start_load_kv") == [("start_load_kv", [])]


def test_all_children_save():
    pair = Pair("SavesLayers", "Child")
    assert pair.worker.saves_layers
    pair.step()
    for working in pair.working:
        assert [call[1] for call in working.named("save_kv_layer")] == list(LAYERS)
        assert working.named("wait_for_save") == [("wait_for_save",)]


# What it declares, and its configuration


def test_it_needs_piecewise_if_a_child_does():
    for needs_it in (False, True):
        config = transfer_config(child("Child"), child("NeedsPiecewise", needs_it=needs_it))
        assert connector_class(config).requires_piecewise_for_cudagraph(config.kv_connector_extra_config) == needs_it


def test_it_has_timelines_if_a_child_has_them_and_is_a_cache_if_all_are():
    assert make(KVConnectorRole.WORKER, "Child", "WithTimelines")[0].supports_timelines
    assert not make(KVConnectorRole.WORKER, "Child", "Child")[0].supports_timelines
    assert make(KVConnectorRole.WORKER, "Repeatable", "Repeatable")[0].recomputes_failed_loads
    assert not make(KVConnectorRole.WORKER, "Repeatable", "Child")[0].recomputes_failed_loads


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"\['connectors'\] is None, expected a list"),
        ({"connectors": []}, "expected a list"),
        ({"connectors": ["OffloadConnector"]}, "expected a list of objects"),
        ({"connectors": [child("Child")], "connector": 1}, r"unknown keys \['connector'\]"),
        ({"connectors": [{"kv_connector_extra_config": {}}]}, "has no kv_connector"),
        ({"connectors": [{"kv_connector": "Nothing"}]}, "kv_connector is 'Nothing'"),
        ({"connectors": [{**child("Child"), "kv_load_failure_policy": "fail"}]}, "set it once"),
        ({"connectors": [{**child("Child"), "colour": 1}]}, r"unknown keys \['colour'\]"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(extra, message):
    transfer = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    config = dataclasses.replace(engine_config(), kv_transfer_config=transfer)
    with pytest.raises(ConfigError, match=message):
        create_connector(config, KVConnectorRole.SCHEDULER, kv_cache_config())


def test_two_peers_under_one_engine_id_are_refused_before_anything_is_made():
    peer = {"kv_connector": "PeerConnector"}
    config = dataclasses.replace(engine_config(), kv_transfer_config=transfer_config(peer, child("Child"), peer))
    with pytest.raises(ConfigError, match=r"two PeerConnectors with the same engine_id 'engine'.*list one PeerConnector"):
        check_connector(config, kv_cache_config())
    check_connector(dataclasses.replace(config, kv_transfer_config=transfer_config(peer, {**peer, "engine_id": "other"})), kv_cache_config())


def test_children_have_the_engines_role_unless_they_name_their_own():
    config = transfer_config(child("Child"), {**child("Child"), "kv_role": "kv_consumer"})
    create_connector(dataclasses.replace(engine_config(), kv_transfer_config=config), KVConnectorRole.SCHEDULER, kv_cache_config())
    assert [made.kv_transfer_config.kv_role for made in MADE] == ["kv_both", "kv_consumer"]
    assert {made.kv_transfer_config.engine_id for made in MADE} == {"engine"}


def test_a_childs_own_engine_id_is_another_one_on_each_rank():
    config = transfer_config(child("Child"), {**child("Child"), "engine_id": "own"})
    for rank in range(2):
        config = dataclasses.replace(config, engine_id=f"engine_dp{rank}")
        options = dataclasses.replace(engine_config(), kv_transfer_config=config, data_parallel_size=2, data_parallel_rank=rank)
        create_connector(options, KVConnectorRole.SCHEDULER, kv_cache_config())
    assert [made.kv_transfer_config.engine_id for made in MADE] == ["engine_dp0", "own_dp0", "engine_dp1", "own_dp1"]


def test_a_report_of_another_connector_is_ignored():
    multi, children = make(KVConnectorRole.SCHEDULER, "Child")
    multi.update_connector_output(KVConnectorOutput(kv_connector_worker_meta="something"))
    assert children[0].outputs == []
