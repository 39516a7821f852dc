"""The numerical law through the whole engine: a request's tokens and log-probabilities are, bit for bit, those that it has alone."""

import struct

import numpy as np
import pytest
import shelf_connector

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams

OPTIONS = {"threads": 2, "max_model_len": 128, "block_size": 8}
NUM_TOKENS = 12
HELD_BACK = list(range(3, 103))  # what half of the requests must not draw


def params_of(number):
    temperature = 0.0 if number % 2 == 0 else 0.9
    held_back = {"min_tokens": NUM_TOKENS, "stop_token_ids": HELD_BACK} if number % 4 > 1 else {}
    common = {"top_k": 40, "top_p": 0.95, "seed": number, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3, "n": 1 + number % 3}
    return SamplingParams(temperature=temperature, **common, **held_back)


def bits(output):
    """Everything that a prompt's samples say, with floats as integers."""
    return [
        (
            sample.token_ids,
            [[(token_id, struct.pack("<d", entry.logprob), entry.rank) for token_id, entry in position.items()] for position in sample.logprobs],
        )
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("engine_law"), dtype="bfloat16")


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(11)
    shared = rng.integers(3, 250, 24).tolist()
    own = [rng.integers(3, 250, length).tolist() for length in (1, 17, 40, 8, 23, 33)]
    return [own[0], own[1], shared + own[2], shared + own[3], shared[:16], shared + own[4], own[5], shared]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each prompt in an empty engine: eager, nothing cached, all in one chunk."""
    with LLM(model, enforce_eager=True, enable_prefix_caching=False, kv_cache_memory_bytes=16 << 20, **OPTIONS) as llm:
        outputs = [llm.generate([prompt], params_of(number))[0] for number, prompt in enumerate(prompts)]
    for number, output in enumerate(outputs):
        drawn = {token_id for sample in output.outputs for token_id in sample.token_ids}
        assert drawn.isdisjoint(HELD_BACK) == (number % 4 > 1)
    return [bits(output) for output in outputs]


# A block of this model has 2 layers x 2 (keys, values) x 2 heads x 8 positions x 16 x 2 bytes.
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 2


@pytest.mark.parametrize("cudagraph_mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize(
    ("num_blocks", "max_num_batched_tokens", "enable_prefix_caching"),
    [(200, 256, True), (200, 13, True), (18, 64, True), (18, 64, False)],
    ids=["roomy", "small chunks", "preemptions", "preemptions without cache"],
)
def test_companions_chunks_cache_hits_and_preemptions_change_no_bit(
    model, prompts, alone, cudagraph_mode, num_blocks, max_num_batched_tokens, enable_prefix_caching
):
    options = {
        "cudagraph_mode": cudagraph_mode,
        "max_num_seqs": 6,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
        "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES,
    }
    with LLM(model, **OPTIONS, **options) as llm:
        params = [params_of(number) for number in range(len(prompts))]
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [bits(output) for output in outputs] == alone
        metrics = llm.metrics()
        assert metrics["num_blocks"] == num_blocks
        assert (metrics["num_preemptions"] > 0) == (num_blocks == 18)
        assert (metrics["num_cached_tokens"] > 0) == enable_prefix_caching
        assert llm.audit().all_free


@pytest.fixture(scope="module")
def shelf(model, prompts):
    """The KV of all prompts, as another engine computed it."""
    shelf = shelf_connector.Shelf()
    with open_with_shelf(model, shelf, cudagraph_mode="FULL") as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
        drain(llm)
    return shelf


def open_with_shelf(model, shelf, policy="recompute", **options):
    shelf_connector.SHELF.append(shelf)
    transfer = {"kv_connector": "shelf_connector:ShelfConnector", "kv_load_failure_policy": policy}
    return LLM(model, kv_transfer_config=transfer, **{**OPTIONS, "kv_cache_memory_bytes": 200 * BLOCK_BYTES, **options})


def drain(llm):
    """Let every save and load end."""
    for _ in range(20):
        if llm.core.has_work:
            llm.core.step()
    assert not llm.core.has_work
    assert llm.audit().all_free


@pytest.mark.parametrize("cudagraph_mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("fail_from", [[], [0] * 4, [1, None, 0, 2, None, 1]], ids=["landing", "rejected", "mixed"])
@pytest.mark.parametrize("num_blocks", [200, 18])
def test_loaded_or_recomputed_after_a_failed_load_changes_no_bit(model, prompts, alone, shelf, cudagraph_mode, is_async, fail_from, num_blocks):
    mine = shelf_connector.Shelf(dict(shelf.entries), list(fail_from), is_async)
    options = {"cudagraph_mode": cudagraph_mode, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    with open_with_shelf(model, mine, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES, **options) as llm:
        outputs = llm.generate(prompts, [params_of(number) for number in range(len(prompts))])
        assert [bits(output) for output in outputs] == alone
        assert mine.num_loads > 4
        assert (mine.num_failures > 0) == any(index is not None for index in fail_from)
        assert llm.metrics()["num_failed_loads"] == mine.num_failures
        drain(llm)


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_policy_fail_answers_with_an_error_and_no_token_and_harms_nobody_else(model, prompts, alone, shelf, is_async):
    mine = shelf_connector.Shelf(dict(shelf.entries), [None, 0], is_async)
    with open_with_shelf(model, mine, policy="fail", cudagraph_mode="FULL", max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts[2:5], [params_of(number) for number in (0, 3, 4)])
        failed = [output for output in outputs if output.error is not None]
        assert len(failed) == 1
        assert "kv_load_failure_policy is 'fail'" in failed[0].error
        assert [(sample.finish_reason, sample.token_ids, sample.text) for sample in failed[0].outputs] == [("error", [], "")]
        drain(llm)
