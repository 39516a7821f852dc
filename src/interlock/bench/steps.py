"""Decode steps under the clock: whole steps as the engine makes them, and the kernels of one of them alone."""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from interlock.bench.measure import prompt_token_ids
from interlock.core.errors import InterlockError
from interlock.core.forward_context import BatchDescriptor, CUDAGraphMode
from interlock.core.sampling_params import SamplingParams
from interlock.engine.llm import LLM
from interlock.graphs.program import profile_buffer
from interlock.runner.model_runner import ModelRunner

_PROMPT_TOKENS = 16
_WARM_STEPS = 4
_REPLAYS = 31

_numbers = itertools.count()


def step_seconds(engine: LLM, batch: int, num_steps: int) -> float:
    """Median seconds of a decode step of `batch` sequences, scheduling and sampling included."""
    seconds = []
    with _decoding(engine, batch, num_steps + _WARM_STEPS):
        for _ in range(num_steps):
            begin = time.perf_counter()
            engine.core.step()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def replay_seconds(engine: LLM, batch: int) -> tuple[float, float]:
    """Of one FULL decode step: median seconds of its graph's replay, and median of the sum over its kernels of the slowest thread's time.

    The same step is replayed again and again: it writes the same KV and the same logits each time.
    """
    runner = engine.core.runner
    if not isinstance(runner, ModelRunner):
        raise InterlockError(f"the engine's runner is {runner!r}, expected a ModelRunner, whose programs can be replayed")
    program = runner.program(BatchDescriptor(batch, batch, True, CUDAGraphMode.FULL))
    profile = profile_buffer(program, engine.config.num_threads)
    replays, kernels = [], []
    with _decoding(engine, batch, _WARM_STEPS + 1):
        for _ in range(_REPLAYS):
            begin = time.perf_counter()
            runner.stream.replay(program)
            runner.stream.synchronize()
            replays.append(time.perf_counter() - begin)
            runner.stream.replay(program, profile)
            runner.stream.synchronize()
            kernels.append(float(np.max(profile.numpy(), axis=1).sum()) * 1e-9)
    return statistics.median(replays), statistics.median(kernels)


@contextmanager
def _decoding(engine: LLM, batch: int, num_tokens: int) -> Iterator[None]:
    """While inside, `batch` sequences are decoding and some steps of theirs are behind them; at the end they are aborted."""
    core = engine.core
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 1, ignore_eos=True)
    requests = []
    for _ in range(batch):
        number = next(_numbers)
        requests.append(core.make_request(f"steps-{number}", {"prompt_token_ids": prompt_token_ids(_PROMPT_TOKENS, number)}, params))
        core.add_request(requests[-1])
    while any(request.num_output_tokens < _WARM_STEPS for request in requests):
        core.step()
    try:
        yield
    finally:
        for request in requests:
            core.abort_request(request.request_id)
        while core.has_work:
            core.step()
