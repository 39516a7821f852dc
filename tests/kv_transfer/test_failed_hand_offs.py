"""A hand-off that fails, between whole engines: an error without a token, or the answer of an undisturbed run; never another prompt's."""

import re
import uuid

import pytest
from storm import MAX_TOKENS, Engine, answer, engine_options

from interlock import LLM, SamplingParams
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors.peer import PeerConnector

MODES = ["NONE", "PIECEWISE", "FULL"]
LEASE_SECONDS = 60.0
NUMBER = 3  # the prompt that is handed over


class AgingPeer(PeerConnector):
    """Its leases end when the test says so; both sides have one clock, as on one host."""

    clock = VirtualClock()


class DeadlyPeer(PeerConnector):
    """After it has copied the first layer, the producer is killed."""

    producer = None
    copies = 0

    @staticmethod
    def copy(descriptors, abort):
        if DeadlyPeer.copies == 1:
            DeadlyPeer.producer.kill()
        DeadlyPeer.copies += 1
        return PeerConnector.copy(descriptors, abort)


def transfer_config(connector, role, policy="fail", composed=False):
    options = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": {"lease_seconds": LEASE_SECONDS}}
    if composed:
        tier = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes": 1 << 20}}
        options = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": {"connectors": [options, tier]}}
    return {**options, "engine_id": f"test-{uuid.uuid4().hex}", "kv_load_failure_policy": policy}


def open_decode(model, mode, policy, composed, connector=f"{__name__}:AgingPeer"):
    transfer = transfer_config(connector, "kv_consumer", policy, composed)
    return LLM(**engine_options(model, cudagraph_mode=mode, enable_prefix_caching=False, kv_load_timeout=20.0, kv_transfer_config=transfer))


def run(llm, prompt, params, max_tokens=MAX_TOKENS):
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args=extra)
    request = llm.core.make_request(f"r-{uuid.uuid4().hex}", {"prompt_token_ids": prompt}, sampling)
    llm.core.add_request(request)
    while not request.finished:
        llm.core.step()
    return request


def drain(llm):
    while llm.core.has_work:
        llm.core.step()
    assert llm.audit().all_free, llm.audit()


def end_leases(prefill):
    """Time passes; a lease begins with the step behind its request's end."""
    while prefill.core.has_work:
        prefill.core.step()
        AgingPeer.clock.advance(LEASE_SECONDS + 1)
    drain(prefill)


def assert_failed(llm, request, policy, expected, cause):
    """As the policy says, and counted."""
    assert llm.metrics()["num_failed_loads"] == 1
    if policy == "fail":
        assert (request.finish_reason, request.output_token_ids) == ("error", [])
        assert re.search(f"kv_load_failure_policy is 'fail': .*({cause})", request.error)
    else:
        assert answer(request) == expected[NUMBER][:MAX_TOKENS]


def used_before(prefill, decode, prompts, params):
    assert answer(run(decode, prompts[NUMBER], params))
    assert decode.metrics()["num_failed_loads"] == 0
    return params


def overwritten(prefill, decode, prompts, params):
    """The lease has ended, and the blocks belong to other prompts."""
    end_leases(prefill)
    prefill.core.reset_prefix_cache()
    for number in range(10, 20):
        run(prefill, prompts[number], None, 1)
    return params


def closed(prefill, decode, prompts, params):
    prefill.close()
    return params


def out_of_range(prefill, decode, prompts, params):
    return {**params, "remote_block_ids": [[10**6] * len(params["remote_block_ids"][0])]}


def of_nobody(prefill, decode, prompts, params):
    return {**params, "remote_request_id": "nobody"}


FAILURES = {
    out_of_range: "the reference names block 1000000",
    of_nobody: "of request 'nobody' were altered",
    used_before: "was used before",
    overwritten: "lease of the blocks ended|gave block [0-9]+ away",
    closed: "cannot be reached",
}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("mode", "composed"), [*((mode, False) for mode in MODES), ("FULL", True)])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_reference_that_is_no_good_ends_as_the_policy_says(model, prompts, expected, failure, mode, composed, policy):
    producer = transfer_config(f"{__name__}:AgingPeer", "kv_producer")
    with LLM(**engine_options(model, kv_transfer_config=producer)) as prefill, open_decode(model, mode, policy, composed) as decode:
        params = run(prefill, prompts[NUMBER], {"do_remote_decode": True}, 1).output_kv_transfer_params
        prefill.core.step()  # the lease begins
        request = run(decode, prompts[NUMBER], failure(prefill, decode, prompts, params))
        assert_failed(decode, request, policy, expected, FAILURES[failure])
        assert answer(run(decode, prompts[1], None)) == expected[1][:MAX_TOKENS]
        drain(decode)
        if failure is not closed:
            end_leases(prefill)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("mode", MODES)
def test_a_producer_that_is_killed_after_the_first_layer_was_read_ends_the_load_as_the_policy_says(model, prompts, expected, mode, policy):
    options = engine_options(model, kv_transfer_config=transfer_config("PeerConnector", "kv_producer"))
    prefill = DeadlyPeer.producer = Engine("prefill", options)
    try:
        prefill.wait_ready()
        with open_decode(model, mode, policy, False, f"{__name__}:DeadlyPeer") as decode:
            prefill.generate("r", prompts[NUMBER], 1, {"do_remote_decode": True})
            _, _, _, params, *_ = prefill.receive("done")
            DeadlyPeer.copies = 0
            request = run(decode, prompts[NUMBER], params)
            assert DeadlyPeer.copies >= 2
            assert not prefill.process.is_alive()
            assert_failed(decode, request, policy, expected, "layer 1, position 0: the connection to the producer was lost")
            assert answer(run(decode, prompts[1], None)) == expected[1][:MAX_TOKENS]
            drain(decode)
    finally:
        if prefill.process.is_alive():
            prefill.kill()
