"""Drives a ModelRunner without an engine: hands it steps, keeps the books that a scheduler would keep, and reads logits as bit patterns."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from interlock.core.sampling_params import SamplingParams
from interlock.core.step import CachedRequestData, LoadPromise, ModelRunnerOutput, NewRequestData, SchedulerOutput
from interlock.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
Bits = npt.NDArray[np.uint32]


@contextlib.contextmanager
def released(release: Callable[[], object], workers: int = 1) -> Iterator[ThreadPoolExecutor]:
    """Threads for steps that wait for something. Its end waits for them, so `release` lets them go on first, also when the test has failed."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield pool
        finally:
            release()


class RunnerDriver:
    """Requests by id, each with blocks of its own, taken from the pool from `first_block` on."""

    def __init__(self, runner: ModelRunner, first_block: int = 0) -> None:
        self.runner = runner
        self.outputs: list[ModelRunnerOutput] = []
        self._next_block = first_block
        self._step = 0
        self._blocks: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._new: dict[str, NewRequestData] = {}
        self._finished: set[str] = set()

    def add(self, req_id: str, token_ids: list[int], *, room: int = 64, params: SamplingParams = GREEDY, seed: int = 0, computed: int = 0) -> None:
        """A request with blocks for its tokens and `room` more."""
        size = self.runner.kv_cache_config.block_size
        count = -(-(len(token_ids) + room) // size)
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        assert self._next_block <= self.runner.kv_cache_config.num_blocks
        self._blocks[req_id] = blocks
        self._tokens[req_id] = list(token_ids)
        self._computed[req_id] = computed
        self._new[req_id] = NewRequestData(req_id, list(token_ids), len(token_ids), params, seed, blocks, computed)

    def share_blocks(self, source: str, req_id: str, count: int) -> None:
        """Let the first `count` blocks of `req_id`, which has not run, be those of `source`."""
        data = self._new[req_id]
        self._new[req_id] = dataclasses.replace(data, block_ids=self._blocks[source][:count] + data.block_ids[count:])

    def finish(self, req_id: str) -> None:
        """The runner hears of the end with the next step."""
        self._finished.add(req_id)

    def step(self, counts: Mapping[str, int], promises: tuple[LoadPromise, ...] = ()) -> dict[str, Bits]:
        """One step of `counts` tokens per request; the logits of those that sampled, as integers, in a copy."""
        self._step += 1
        new = [self._new.pop(req_id) for req_id in counts if req_id in self._new]
        fresh = {data.req_id for data in new}
        cached = [CachedRequestData(r, [], self._computed[r], len(self._tokens[r])) for r in counts if r not in fresh]
        finished, self._finished = frozenset(self._finished), set()
        step = SchedulerOutput(self._step, new, cached, dict(counts), sum(counts.values()), finished, load_promises=promises)
        output = self.runner.execute_model(step)
        for req_id, count in counts.items():
            self._computed[req_id] += count
        for req_id, token in output.sampled_token_ids.items():
            self._tokens[req_id].append(token)
        self.outputs.append(output)
        rows = self.runner.logits.numpy().view(np.uint32)
        return {req_id: rows[row].copy() for row, req_id in enumerate(output.sampled_token_ids)}

    def generate(self, req_id: str, num_tokens: int, *, chunk: int = 512) -> tuple[list[int], Bits]:
        """Run one added request alone: its tokens, and the logits of each, uint32 [num_tokens, vocab_size]."""
        prompt = len(self._tokens[req_id])
        rows = []
        while len(self._tokens[req_id]) < prompt + num_tokens:
            count = min(chunk, len(self._tokens[req_id]) - self._computed[req_id])
            rows += self.step({req_id: count}).values()
        return self._tokens[req_id][prompt:], np.stack(rows)

    def tokens(self, req_id: str) -> list[int]:
        """All tokens of a request."""
        return self._tokens[req_id]

    @property
    def next_step(self) -> int:
        """The stamp of the step that comes next."""
        return self._step + 1

    def blocks(self, req_id: str) -> list[int]:
        """The blocks of a request."""
        return self._blocks[req_id]

    def pending(self, req_id: str) -> int:
        """Known tokens without KV."""
        return len(self._tokens[req_id]) - self._computed[req_id]
