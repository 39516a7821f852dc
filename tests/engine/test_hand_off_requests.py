"""Whole engines and their users' `kv_transfer_params`: what cannot be served is refused, what was altered is recomputed, never answered from."""

import uuid

import pytest

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams
from interlock.core.errors import RequestError

MINE, THEIRS = [i % 40 + 3 for i in range(50)], [i * 7 % 40 + 3 for i in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("hand_off"), dtype="bfloat16")


def open_engine(model, role=None, connector="PeerConnector", **transfer):
    config = {"kv_connector": connector, "kv_role": role, "engine_id": f"test-{uuid.uuid4().hex}", **transfer} if role else None
    return LLM(model, threads=1, max_model_len=128, kv_cache_memory_bytes=1 << 20, kv_transfer_config=config)


def generate(llm, prompt, params=None, max_tokens=6):
    extra = None if params is None else {"kv_transfer_params": params}
    return llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra))[0]


def drain(*engines):
    while any(llm.core.has_work for llm in engines):
        for llm in engines:
            llm.core.step()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (5, "kv_transfer_params"),
        ("x", "kv_transfer_params"),
        ({"do_remote_prefill": "true"}, "do_remote_prefill"),
        ({"tp_size": 2}, "tp_size"),
        ({"transfer_mode": "pipe"}, "transfer_mode"),
        ({"do_remote_prefill": True}, "kv_transfer_config"),
        ({"do_remote_decode": True}, "kv_transfer_config"),
    ],
)
def test_parameters_that_an_engine_cannot_serve_are_refused_and_it_goes_on(model, params, named):
    with open_engine(model) as llm:
        with pytest.raises(RequestError, match=named):
            generate(llm, MINE, params)
        assert len(generate(llm, MINE).outputs[0].token_ids) == 6
        assert not llm.audit().referenced


def test_a_tier_alone_hands_nothing_over(model):
    extra = {"cpu_bytes": 1 << 20}
    with (
        open_engine(model, "kv_both", "OffloadConnector", kv_connector_extra_config=extra) as llm,
        pytest.raises(RequestError, match="hands no KV over"),
    ):
        generate(llm, MINE, {"do_remote_decode": True}, 1)


@pytest.mark.parametrize(("role", "field"), [("kv_producer", "do_remote_prefill"), ("kv_consumer", "do_remote_decode")])
def test_a_role_that_does_not_fit_is_refused(model, role, field):
    with open_engine(model, role) as llm, pytest.raises(RequestError, match=f"kv_role is '{role}'"):
        generate(llm, MINE, {field: True})


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_anothers_blocks_are_never_answered_from_and_the_others_hand_off_is_whole(model, policy):
    with open_engine(model) as single:
        alone = {id(prompt): generate(single, prompt).outputs[0].token_ids for prompt in (MINE, THEIRS)}
    with open_engine(model, "kv_producer") as prefill, open_engine(model, "kv_consumer", kv_load_failure_policy=policy) as decode:
        mine, theirs = (generate(prefill, prompt, {"do_remote_decode": True}, 1).kv_transfer_params for prompt in (MINE, THEIRS))
        for altered in ("remote_block_ids", "remote_request_id"):
            output = generate(decode, MINE, mine | {altered: theirs[altered]})
            if policy == "fail":
                assert "were altered" in output.error
                assert not output.outputs[0].token_ids
            else:
                assert output.outputs[0].token_ids == alone[id(MINE)]
            decode.reset_prefix_cache()
        for _ in range(20):
            decode.core.step()
            prefill.core.step()
        assert prefill.audit().leased == 8
        output = generate(decode, THEIRS, theirs)
        assert output.outputs[0].token_ids == alone[id(THEIRS)]
        assert output.metrics.num_external_tokens == len(THEIRS) - 1
        generate(decode, MINE, mine)
        drain(prefill, decode)
        for llm in (prefill, decode):
            assert not llm.audit().leased
            assert not llm.audit().referenced
            assert not llm.audit().quarantined
