"""`min_tokens` in a real engine: what would end a request is not drawn before so many tokens are there."""

import pytest

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams

PROMPT = [9, 8, 7, 6, 5]
OPTIONS = {"threads": 2, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose greedy answer to PROMPT has its end token third, and that answer without an end."""
    plain = make_tiny_llama(tmp_path_factory.mktemp("plain"), dtype="bfloat16", tie=False, eos_token_id=None)
    with LLM(plain, enforce_eager=True, **OPTIONS) as llm:
        free = run(llm, logprobs=3)
    assert free.token_ids[2] not in free.token_ids[:2]
    return make_tiny_llama(tmp_path_factory.mktemp("ends"), dtype="bfloat16", tie=False, eos_token_id=free.token_ids[2]), free


def run(llm, **params):
    output = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8, **params))[0].outputs[0]
    assert llm.audit().all_free
    return output


@pytest.mark.parametrize("cudagraph_mode", ["NONE", "PIECEWISE", "FULL"])
def test_an_end_may_come_one_token_after_min_tokens_and_no_sooner(model, cudagraph_mode):
    path, free = model
    eos, other = free.token_ids[2], free.token_ids[1]
    with LLM(path, cudagraph_mode=cudagraph_mode, **OPTIONS) as llm:
        for min_tokens in (0, 1, 2):
            output = run(llm, min_tokens=min_tokens)
            assert (output.token_ids, output.finish_reason, output.stop_reason) == (free.token_ids[:3], "stop", None)
        later = run(llm, min_tokens=3, logprobs=3)
        assert later.token_ids[:2] == free.token_ids[:2]
        assert eos not in later.token_ids[:3]
        assert run(llm, min_tokens=3, ignore_eos=True).token_ids[:3] == later.token_ids[:3]
        stopped = run(llm, min_tokens=1, stop_token_ids=[other])
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free.token_ids[:2], "stop", other)
        assert other not in run(llm, min_tokens=2, stop_token_ids=[other]).token_ids[:2]


def test_log_probabilities_and_ranks_are_those_of_the_model_itself(model):
    path, free = model
    with LLM(path, **OPTIONS) as llm:
        third = run(llm, min_tokens=3, logprobs=3).logprobs[2]
    ranked = sorted(free.logprobs[2].items(), key=lambda entry: entry[1].rank)
    assert next(iter(third.items())) == ranked[1], "the second most likely token is drawn, as the second most likely one"
    assert third == dict(ranked), "the end token is still the most likely one"


def test_a_stop_token_is_held_back_from_each_request_of_a_batch_for_as_long_as_its_own_min_tokens_say(model):
    path, free = model
    params = [SamplingParams(temperature=0.0, max_tokens=8, min_tokens=count) for count in (3, 0, 8, 2, 5)]
    with LLM(path, **OPTIONS) as llm:
        alone = [llm.generate([PROMPT], one)[0].outputs[0].token_ids for one in params]
        together = llm.generate([PROMPT] * len(params), params)
        assert [output.outputs[0].token_ids for output in together] == alone
        assert alone[1] == alone[3] == free.token_ids[:3]
        assert len(alone[2]) == 8
        assert llm.audit().all_free
