"""Engines with tiers, on a tiny model, and what their outputs are compared with."""

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from interlock import LLM, SamplingParams

OPTIONS: dict[str, Any] = {"threads": 2, "max_model_len": 128, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64}
NUM_TOKENS = 12
TIMEOUT = 120.0  # seconds that a test gives to threads beside its own
MODES = ["NONE", "PIECEWISE", "FULL"]

# A block of the tiny model has 2 layers x 2 (keys, values) x 2 heads x 8 positions x 16 x 2 bytes.
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 2

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)


def params_of(number: int) -> SamplingParams:
    temperature = 0.0 if number % 2 == 0 else 0.9
    return SamplingParams(temperature=temperature, top_k=40, top_p=0.95, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


def make_prompts() -> list[list[int]]:
    """Prompts, of which some share a prefix."""
    rng = np.random.default_rng(11)
    shared = rng.integers(3, 250, 24).tolist()
    own = [rng.integers(3, 250, length).tolist() for length in (1, 17, 40, 8, 23, 33)]
    return [own[0], own[1], shared + own[2], shared + own[3], shared[:16], shared + own[4], own[5], shared]


def bits(output: Any) -> Any:
    """Everything that a prompt's samples say, with floats as integers."""
    return [
        (sample.token_ids, [[(token, struct.pack("<d", entry.logprob)) for token, entry in position.items()] for position in sample.logprobs])
        for sample in output.outputs
    ]


def request_bits(request: Any) -> Any:
    """As `bits`, of a request of one sample that was stepped by hand."""
    positions = [dict(zip(position.token_ids, position.logprobs, strict=True)) for position in request.logprobs]
    logprobs = [[(token, struct.pack("<d", value)) for token, value in entries.items()] for entries in positions]
    return [(list(request.output_token_ids), logprobs)]


def run_alone(model: str, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Each prompt in an empty engine: eager, without tiers and cache, all in one chunk."""
    options = {**OPTIONS, "max_num_batched_tokens": 256}
    with LLM(model, enforce_eager=True, enable_prefix_caching=False, kv_cache_memory_bytes=64 * BLOCK_BYTES, **options) as llm:
        return [bits(llm.generate([prompt], wanted)[0]) for prompt, wanted in zip(prompts, params, strict=True)]


def open_engine(
    model: str, connector: str, extra: dict[str, Any], num_blocks: int = 20, transfer: dict[str, Any] | None = None, **options: Any
) -> LLM:
    config = {"kv_connector": connector, "kv_connector_extra_config": extra, **(transfer or {})}
    options = {**OPTIONS, "max_model_len": min(128, 8 * num_blocks), **options}
    return LLM(model, kv_transfer_config=config, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES, **options)


def step_until(llm: LLM, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "still waiting"
        llm.core.step()


def step_until_saved(llm: LLM, scheduler_half: Any, worker_half: Any) -> None:
    """Make the few steps that order the saves under way and hear of their ends; none is made while the tier's threads are at work, so a
    request that runs gets no further than that."""
    deadline = time.monotonic() + TIMEOUT
    while scheduler_half.has_news:
        llm.core.step()
        while not scheduler_half._reading <= set(worker_half.reports._released):
            assert time.monotonic() < deadline, "still waiting"
            time.sleep(0.001)


def tier_halves(llm: LLM) -> list[Any]:
    """The scheduler halves of the engine's tiers."""
    connector = llm.core._connector
    return [child.scheduler_half for child in getattr(connector, "children", [connector]) if hasattr(child, "scheduler_half")]


def drain(llm: LLM) -> None:
    """Let every load end, and every save be where it belongs; every block is back in the pool then."""
    step_until(llm, lambda: not llm.core.has_work and not any(half._saves for half in tier_halves(llm)))
    assert llm.audit().all_free, llm.audit()


def forget_local(llm: LLM) -> None:
    """Empty the pool's own prefix cache, so that only tiers know anything."""
    drain(llm)
    llm.core.reset_prefix_cache()
