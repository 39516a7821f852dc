"""Real connectors as one, when something goes wrong with a load: it is its owner's affair, and nobody else's word about it counts."""

import uuid

import pytest
import shelf_connector
from test_multi_peer import PREFILL, with_reference
from tier_engine import BLOCK_BYTES, GREEDY, MODES, bits, drain, forget_local, open_engine, params_of, run_alone
from tier_puppets import Faults, ForgetfulIndex, Gossip, LosesOrders, TimesOut, Unreachable

from interlock.kv_transfer.connectors.multi_worker import MultiWorkerHalf

BLOCK = 8
A = [(7 * position) % 240 + 3 for position in range(4 * BLOCK + 3)]
B = [(11 * position) % 240 + 5 for position in range(4 * BLOCK + 2)]
PEER = {"kv_connector": "PeerConnector"}
SYNCHRONOUS, ASYNCHRONOUS = 1 << 30, 0


@pytest.fixture(scope="module")
def greedy_alone(model):
    return run_alone(model, [A, B], [GREEDY, GREEDY])


@pytest.fixture(autouse=True)
def no_faults():
    Faults.reset()


def storage(path, async_load_bytes=ASYNCHRONOUS, connector="tier_puppets:FaultyStorage"):
    return {"kv_connector": connector, "kv_connector_extra_config": {"path": str(path), "async_load_bytes": async_load_bytes}}


def offload(async_load_bytes=ASYNCHRONOUS, connector="tier_puppets:HeldOffload", cpu_blocks=40):
    extra = {"cpu_bytes": cpu_blocks * BLOCK_BYTES, "async_load_bytes": async_load_bytes}
    return {"kv_connector": connector, "kv_connector_extra_config": extra}


def open_multi(model, *children, num_blocks=40, **options):
    transfer = {"engine_id": f"test-{uuid.uuid4().hex}", **options.pop("transfer", {})}
    return open_engine(model, "MultiConnector", {"connectors": list(children)}, num_blocks, transfer, **options)


def halves(llm, child):
    return llm.core._connector.children[child].scheduler_half, llm.core.runner._kv.connector.children[child].worker_half


def fill(llm, child, prompt=A):
    """The prompt is in the tiers, and nowhere else; returns the keys of its blocks."""
    request = llm.core.make_request("filling", {"prompt_token_ids": prompt}, GREEDY)
    llm.core.add_request(request)
    while not request.finished:
        llm.core.step()
    forget_local(llm)
    keys = request.block_hashes[: len(prompt) // BLOCK]
    if hasattr(halves(llm, child)[1], "_files"):
        while not all(halves(llm, child)[1]._files.contains(key) for key in keys):
            llm.core.step()
    drain(llm)
    return keys


def watch_owners(llm):
    """Per request, the owners of its loads, in order; nothing else changes an owner."""
    half, owners = llm.core._connector.scheduler_half, {}
    allocated = half.allocated

    def note(request, block_ids, num_external_tokens):
        allocated(request, block_ids, num_external_tokens)
        owner = half.owner(request.request_id)
        if num_external_tokens:
            owners.setdefault(request.request_id, []).append(owner)
        assert owner == owners.get(request.request_id, [None])[-1]

    half.allocated = note
    return owners


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("kind", ["deleted", "flipped", "EIO"])
def test_a_bad_file_is_a_miss_beside_a_peer_although_the_policy_is_fail(model, greedy_alone, tmp_path, kind, async_load_bytes, cudagraph_mode):
    with open_multi(model, PEER, storage(tmp_path, async_load_bytes), cudagraph_mode=cudagraph_mode) as llm:
        keys = fill(llm, 1)
        Faults.path, Faults.kind = str(halves(llm, 1)[1]._files.path(keys[1])), kind
        assert bits(llm.generate([A], GREEDY)[0]) == greedy_alone[0]
        assert Faults.path is None
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_a_slot_that_has_gone_is_a_miss_beside_a_peer_although_the_policy_is_fail(model, greedy_alone, async_load_bytes, cudagraph_mode):
    with open_multi(model, PEER, offload(async_load_bytes), cudagraph_mode=cudagraph_mode) as llm:
        ForgetfulIndex.gone = fill(llm, 1)[2]
        assert bits(llm.generate([A], GREEDY)[0]) == greedy_alone[0]
        assert ForgetfulIndex.gone is None
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("max_sync_load_seconds", [None, 1e-9], ids=["synchronous", "parked"])
def test_beside_a_tiers_miss_a_peers_failed_load_goes_by_the_policy_and_names_its_cause(
    model, greedy_alone, tmp_path, max_sync_load_seconds, policy, cudagraph_mode
):
    async_load_bytes = SYNCHRONOUS if max_sync_load_seconds is None else ASYNCHRONOUS
    children, transfer = (PEER, storage(tmp_path, async_load_bytes)), {"kv_load_failure_policy": policy}
    options = {"cudagraph_mode": cudagraph_mode, "max_sync_load_seconds": max_sync_load_seconds}
    with open_engine(model, "PeerConnector", {}, transfer={"engine_id": f"test-{uuid.uuid4().hex}"}) as prefill:
        reference = prefill.generate([B], PREFILL)[0].kv_transfer_params
    with open_multi(model, *children, transfer=transfer, **options) as llm:
        keys = fill(llm, 1)
        Faults.path, Faults.kind = str(halves(llm, 1)[1]._files.path(keys[0])), "flipped"
        of_the_tier, of_the_peer = llm.generate([A, B], [params_of(0), with_reference(0, reference)])
        assert bits(of_the_tier) == run_alone(model, [A], [params_of(0)])[0]
        assert llm.metrics()["num_failed_loads"] == 2
        if policy == "fail":
            assert of_the_peer.outputs[0].finish_reason == "error"
            assert of_the_peer.outputs[0].token_ids == []
            assert "cannot be reached" in of_the_peer.error
        else:
            assert bits(of_the_peer) == run_alone(model, [B], [params_of(0)])[0]
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_a_child_that_raises_while_it_is_waited_for_keeps_no_block(model, greedy_alone, cudagraph_mode):
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    Unreachable.raised = 0
    children = ({"kv_connector": "tier_puppets:Unreachable"}, offload(SYNCHRONOUS, cpu_blocks=1))
    with open_multi(model, *children, cudagraph_mode=cudagraph_mode, transfer={"kv_load_failure_policy": "recompute"}) as llm:
        llm.generate([A], GREEDY)
        for _ in range(3):
            forget_local(llm)
            assert bits(llm.generate([A], GREEDY)[0]) == greedy_alone[0]
            drain(llm)
        asked = cudagraph_mode != "FULL"
        assert Unreachable.raised == (3 if asked else 0), "once a step: its loads of the step have failed"
        assert llm.metrics()["num_failed_loads"] == (3 if asked else 0)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_a_child_that_loses_its_metadata_loses_no_order_of_a_tier(model, greedy_alone, monkeypatch, async_load_bytes, cudagraph_mode):
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    monkeypatch.setattr(LosesOrders, "steps", set(range(0, 1000, 2)))
    children = ({"kv_connector": "tier_puppets:LosesOrders"}, offload(async_load_bytes))
    with open_multi(model, *children, cudagraph_mode=cudagraph_mode) as llm:
        keys = fill(llm, 1)
        assert halves(llm, 1)[0].index.count_present(keys) == len(keys)
        assert bits(llm.generate([A], GREEDY)[0]) == greedy_alone[0]
        assert llm.metrics()["num_external_tokens"] == len(keys) * BLOCK
        assert llm.metrics()["num_failed_loads"] == 0
        drain(llm)


def time_out(model, mode):
    """What A gives when the child that loads it has raised."""
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    children = ({"kv_connector": f"tier_puppets:{name}"} for name in ("TimesOut", "LosesOrders"))
    with open_multi(model, *children, num_blocks=6, cudagraph_mode=mode, transfer={"kv_load_failure_policy": "recompute"}) as llm:
        llm.generate([A], GREEDY)
        forget_local(llm)
        output = llm.generate([A], GREEDY)[0]
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)
        return bits(output)


@pytest.mark.parametrize("cudagraph_mode", ["NONE", "PIECEWISE"])
def test_a_child_that_raises_is_told_to_stop_before_its_blocks_are_computed_in(model, greedy_alone, cudagraph_mode):
    assert time_out(model, cudagraph_mode) == greedy_alone[0]


def test_negative_control_a_child_that_is_not_told_to_stop_writes_into_blocks_of_others(model, greedy_alone, monkeypatch):
    monkeypatch.setattr(TimesOut, "abort_loads", lambda self, step: None)
    assert time_out(model, "NONE") != greedy_alone[0]


# What one says of another's load


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("parked", [False, True], ids=["hand-offs of the step", "parked hand-offs"])
@pytest.mark.parametrize(
    ("memory", "files"),
    [(ASYNCHRONOUS, ASYNCHRONOUS), (SYNCHRONOUS, SYNCHRONOUS), (SYNCHRONOUS, ASYNCHRONOUS)],
    ids=["tiers asynchronous", "tiers synchronous", "one of each"],
)
def test_a_child_that_reports_on_all_requests_and_blocks_changes_nothing(
    model, prompts, outputs_alone, tmp_path, memory, files, parked, cudagraph_mode
):
    """Each request's first load is the peer's, after a preemption the tiers'; the tier in the middle talks of all of them."""
    chosen = range(2, 7)
    children = (PEER, offload(memory, "tier_puppets:Gossip", cpu_blocks=12), storage(tmp_path, files, "StorageConnector"))
    options = {"cudagraph_mode": cudagraph_mode, "max_sync_load_seconds": 1e-9 if parked else None, "enable_prefix_caching": False}
    prefill_id = {"engine_id": f"test-{uuid.uuid4().hex}"}
    Gossip.claims = 0
    with (
        open_engine(model, "PeerConnector", {}, num_blocks=60, transfer=prefill_id) as prefill,
        open_multi(model, *children, num_blocks=16, **options) as decode,
    ):
        for number in chosen:
            fill(decode, 2, prompts[number])  # what is asked for again is found
        before, owners = decode.metrics()["num_preemptions"], watch_owners(decode)
        for _ in range(20):  # when loads land decides who is preempted
            references = [output.kv_transfer_params for output in prefill.generate([prompts[number] for number in chosen], PREFILL)]
            wanted = [with_reference(number, reference) for number, reference in zip(chosen, references, strict=True)]
            outputs = decode.generate([prompts[number] for number in chosen], wanted)
            assert [bits(output) for output in outputs] == [outputs_alone[number] for number in chosen]
            assert all(of_one[0] == 0 and 0 not in of_one[1:] for of_one in owners.values()), owners
            if any(len(of_one) > 1 for of_one in owners.values()):
                break
        else:
            pytest.fail("nobody was preempted and has loaded again")
        metrics = decode.metrics()
        assert (metrics["num_failed_loads"], metrics["num_dropped_reports"]) == (0, 0), "what was said has not reached the engine"
        assert metrics["num_preemptions"] > before
        assert Gossip.claims > 0
        drain(decode)
        drain(prefill)


def test_negative_control_if_anybodys_report_counted_the_engine_would_hear_of_it(model, greedy_alone, monkeypatch):
    monkeypatch.setattr(MultiWorkerHalf, "_ends", lambda self, req_id, index: True)
    Gossip.claims = 0
    with open_multi(model, offload(cpu_blocks=40), offload(connector="tier_puppets:Gossip", cpu_blocks=1)) as llm:
        fill(llm, 0)
        assert bits(llm.generate([A], GREEDY)[0]) == greedy_alone[0]
        assert Gossip.claims > 0
        assert llm.metrics()["num_dropped_reports"] > 0
        drain(llm)


# Blocks of one prompt in two places


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("head_in", ["memory", "files"])
@pytest.mark.parametrize("num_local", [0, 2])
def test_of_a_prompt_whose_head_and_tail_lie_in_two_tiers_the_one_behind_the_local_prefix_is_loaded(
    model, greedy_alone, tmp_path, head_in, num_local, async_load_bytes, cudagraph_mode
):
    children = (offload(async_load_bytes), storage(tmp_path, async_load_bytes, "StorageConnector"))
    with open_multi(model, *children, cudagraph_mode=cudagraph_mode) as llm:
        keys = fill(llm, 1)
        memory, files = halves(llm, 0)[0].index, halves(llm, 1)[1]._files
        in_memory, in_files = (keys[:2], keys[2:]) if head_in == "memory" else (keys[2:], keys[:2])
        if num_local:
            llm.generate([A[: num_local * BLOCK + 1]], GREEDY)
            drain(llm)
        for key in keys:
            if key not in in_memory:
                memory.forget(key)
            if key not in in_files:
                files.remove(key)
        before, owners = llm.metrics()["num_external_tokens"], watch_owners(llm)
        assert bits(llm.generate([A], GREEDY)[0]) == greedy_alone[0]
        assert llm.metrics()["num_external_tokens"] - before == 2 * BLOCK
        owner = 0 if (head_in == "memory") == (num_local == 0) else 1
        assert list(owners.values()) == [[owner]]
        assert llm.metrics()["num_failed_loads"] == 0
        drain(llm)
