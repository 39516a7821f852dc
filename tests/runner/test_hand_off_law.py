"""The numerical law across processes: KV that another process computed gives, bit for bit, the logits of a single process."""

import uuid

import numpy as np
import pytest
from hand_off_processes import Answer, Case, hand_over
from rank_processes import run_ranks
from runner_driver import RunnerDriver

from checkpoints import make_tiny_llama
from interlock.core.config import EngineConfig
from interlock.runner.model_runner import ModelRunner

PROMPT = np.random.default_rng(17).integers(3, 250, 53).tolist()
MODES = ["NONE", "PIECEWISE", "FULL"]
CASES = [*(f"random Llama, {mode}" for mode in MODES), "SmolLM2, FULL"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Prefill cuts the prompt into chunks, in the default mode, whatever decode does; SmolLM2's decode also has other block and team sizes."""
    tiny = make_tiny_llama(tmp_path_factory.mktemp("m"), dtype="bfloat16", num_layers=3)
    small = {"kv_cache_memory_bytes": 1 << 20}
    cases = {f"random Llama, {mode}": Case(tiny, mode, PROMPT, 5, small | {"max_num_batched_tokens": 24, "max_num_seqs": 4}, small) for mode in MODES}
    decode = {"threads": 2, "block_size": 8}
    return cases | {"SmolLM2, FULL": Case("smollm2", "FULL", PROMPT, 3, {"max_num_batched_tokens": 32}, decode)}


@pytest.fixture(scope="module")
def answers(cases, alone) -> dict[str, Answer]:
    """All cases in one pair of processes, which find most kernels compiled."""
    return run_ranks(hand_over, cases, f"law-{uuid.uuid4().hex}", patience=240.0)[1]


@pytest.fixture(scope="module")
def alone(cases):
    """Tokens and logits by model, from a single process without a connector: eager, one thread, the prompt in one chunk."""
    found = {}
    for case in cases.values():
        if case.model not in found:
            runner = ModelRunner(EngineConfig(model=case.model, threads=1, enforce_eager=True, max_num_seqs=4, kv_cache_memory_bytes=16 << 20))
            driver = RunnerDriver(runner)
            driver.add("r", case.prompt)
            found[case.model] = driver.generate("r", case.num_tokens)
            runner.shutdown()
    return found


@pytest.mark.parametrize("company", [0, 1], ids=["alone", "beside a companion that decodes"])
@pytest.mark.parametrize("name", CASES)
def test_logits_after_a_hand_off_between_processes_are_those_of_a_single_process(cases, answers, alone, name, company):
    case, answer = cases[name], answers[name]
    tokens, bits = alone[case.model]
    assert answer.tokens[company] == tokens
    np.testing.assert_array_equal(answer.logits[company], bits)


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_came_from_the_other_process_in_the_mode_that_was_asked_for(cases, answers, name):
    case, answer = cases[name], answers[name]
    assert answer.modes == {case.mode}
    per_token = {"smollm2": 30 * 2 * 3 * 64 * 2}.get(case.model, 3 * 2 * 2 * 16 * 2)
    assert answer.loaded_bytes == [per_token * (len(PROMPT) - 1)] * 2
    assert answer.all_free
