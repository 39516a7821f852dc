"""Decode with a peer and a tier as one connector: the hand-off comes from the peer, what comes back later from the tier, and no bit changes."""

import uuid

import pytest
from tier_engine import BLOCK_BYTES, MODES, bits, drain, make_prompts, open_engine, params_of, run_alone

from checkpoints import make_tiny_llama
from interlock import SamplingParams

PREFILL = SamplingParams(temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("multi_peer"), dtype="bfloat16")


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()[2:7]


@pytest.fixture(scope="module")
def alone(model, prompts):
    return run_alone(model, prompts, [params_of(number) for number in range(len(prompts))])


def with_reference(number, handed_over):
    params = params_of(number)
    return SamplingParams(
        **{name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed", "max_tokens", "ignore_eos", "logprobs")},
        extra_args={"kv_transfer_params": handed_over},
    )


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("num_blocks", [60, 16], ids=["roomy", "preemptions"])
def test_the_first_load_comes_from_the_peer_and_the_next_from_the_tier(model, prompts, alone, cudagraph_mode, num_blocks):
    peer = {"kv_connector": "PeerConnector"}
    tier = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes": 100 * BLOCK_BYTES}}
    names = [f"test-{uuid.uuid4().hex}" for _ in range(2)]
    options = {"cudagraph_mode": cudagraph_mode, "max_num_batched_tokens": 64}
    with (
        open_engine(model, "PeerConnector", {}, num_blocks=60, transfer={"engine_id": names[0]}, **options) as prefill,
        open_engine(model, "MultiConnector", {"connectors": [peer, tier]}, num_blocks, transfer={"engine_id": names[1]}, **options) as decode,
    ):
        handed_over = [output.kv_transfer_params for output in prefill.generate(prompts, PREFILL)]
        params = [with_reference(number, reference) for number, reference in enumerate(handed_over)]
        outputs = decode.generate(prompts, params)
        assert [bits(output) for output in outputs] == alone
        metrics = decode.metrics()
        assert metrics["num_failed_loads"] == 0
        assert metrics["num_external_tokens"] > 0
        assert (metrics["num_preemptions"] > 0) == (num_blocks == 16)
        drain(decode)
        drain(prefill)
        decode.core.reset_prefix_cache()
        outputs = decode.generate(prompts, [params_of(number) for number in range(len(prompts))])
        assert [bits(output) for output in outputs] == alone
        assert decode.metrics()["num_external_tokens"] > metrics["num_external_tokens"], "no reference came with these"
        drain(decode)


@pytest.mark.parametrize("deltas", [0, 1])
def test_a_stream_that_is_closed_lets_the_prefill_engine_have_its_blocks_back_although_decode_makes_no_step(model, prompts, deltas):
    names = [f"test-{uuid.uuid4().hex}" for _ in range(2)]
    with (
        open_engine(model, "PeerConnector", {}, num_blocks=60, transfer={"engine_id": names[0]}) as prefill,
        open_engine(model, "PeerConnector", {}, num_blocks=60, transfer={"engine_id": names[1]}) as decode,
    ):
        [handed_over] = prefill.generate(prompts[0], PREFILL)
        stream = decode.stream(prompts[0], with_reference(0, handed_over.kv_transfer_params))
        for _ in range(deltas):
            next(stream)
        stream.close()
        assert not decode.core.has_work
        drain(prefill)
