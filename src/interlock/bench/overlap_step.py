"""One step that can be made again and again: the same rows at the same positions, with or without a load that it consumes.

What is behind a row is computed once. Each step after that rewrites the same last positions with the same bits, so that every step, on
every rung, must give the same tokens and the same logits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interlock.bench.measure import prompt_token_ids
from interlock.bench.paced_connector import PATH, PacedLoad
from interlock.core.config import EngineConfig, KVLoadWait, KVTransferConfig
from interlock.core.errors import ConfigError, InterlockError
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.sampling_params import SamplingParams
from interlock.core.step import CachedRequestData, LoadPromise, ModelRunnerOutput, NewRequestData, SchedulerOutput
from interlock.runner.model_runner import ModelRunner

LOADING = "loading"  # the row whose KV is loaded

_POOL_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Way:
    """One way of waiting for a load: the graph mode and the rung."""

    name: str
    mode: CUDAGraphMode
    wait: KVLoadWait


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of the step. The loading row loads `loaded` positions and computes `computed` more; others: the context behind each row
    that decodes."""

    loaded: int
    others: Sequence[int]
    computed: int = 1

    def rows(self, vocab_size: int) -> dict[str, "Row"]:
        """The rows by name, the loading one first."""
        sizes = {LOADING: (self.loaded, self.computed), **{f"other-{number}": (context, 1) for number, context in enumerate(self.others)}}
        drawn = {name: prompt_token_ids(behind + count, salt) for salt, (name, (behind, count)) in enumerate(sizes.items())}
        return {name: Row([token % vocab_size for token in drawn[name]], count) for name, (_, count) in sizes.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """All tokens of a row, of which the step computes the last `count`."""

    tokens: list[int]
    count: int

    @property
    def behind(self) -> int:
        """Positions whose KV is there before the step."""
        return len(self.tokens) - self.count


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a step gave: tokens by row, and the logits' bit patterns, uint32 [rows, vocab_size]. began, ended: seconds of `time.perf_counter`."""

    began: float
    ended: float
    tokens: dict[str, int]
    logits: npt.NDArray[np.uint32]

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.ended - self.began

    def same_bits(self, other: "Answer") -> bool:
        """Whether both gave the same tokens and the same logits, bit by bit."""
        return self.tokens == other.tokens and np.array_equal(self.logits, other.logits)


class RepeatedStep:
    """A runner whose step is `batch`, waiting for loads in one `way`. options: of the engine, over those of this step."""

    def __init__(self, model: str, threads: int, way: Way, batch: Batch, **options: object) -> None:
        self.way = way
        config = {
            "model": model,
            "threads": threads,
            "cudagraph_mode": way.mode,
            "kv_load_wait": way.wait,
            "max_num_seqs": 1 + len(batch.others),
            "kv_cache_memory_bytes": _POOL_BYTES,
            "kv_transfer_config": KVTransferConfig(kv_connector=PATH),
            **options,
        }
        self.runner = ModelRunner(EngineConfig.from_mapping(config))
        self._rows = batch.rows(self.runner.model_config.vocab_size)
        self._blocks: dict[str, list[int]] = {}
        self._step = 0
        try:
            self._compute_prompts()
        except BaseException:
            self.close()
            raise

    def run(self, load_seconds: float | None = None) -> Answer:
        """Make the step; with `load_seconds`, the KV of the loading row takes so long to land. Raises InterlockError if it ends before that."""
        cached = [CachedRequestData(name, [], row.behind, len(row.tokens)) for name, row in self._rows.items()]
        step = self._output([], cached, {name: row.count for name, row in self._rows.items()}, load_seconds)
        began = time.perf_counter()
        output = self.runner.execute_model(step)
        ended = time.perf_counter()
        if load_seconds is not None:
            self._check(output, load_seconds, ended - began)
        logits = self.runner.logits.numpy()[: len(self._rows)].view(np.uint32).copy()
        return Answer(began, ended, dict(output.sampled_token_ids), logits)

    def close(self) -> None:
        """Give everything back."""
        self.runner.shutdown()

    def _compute_prompts(self) -> None:
        """What is behind each row, in chunks; the blocks are the row's alone."""
        size, first = self.runner.kv_cache_config.block_size, 0
        for name, row in self._rows.items():
            tokens = row.tokens
            blocks = self._blocks[name] = list(range(first, first + -(-len(tokens) // size)))
            first += len(blocks)
            if first > self.runner.kv_cache_config.num_blocks:
                raise ConfigError(
                    f"the KV pool holds {self.runner.kv_cache_config.num_blocks} blocks, the batch needs more; raise kv_cache_memory_bytes"
                )
            new = [NewRequestData(name, tokens, len(tokens), SamplingParams(temperature=0.0), 0, blocks, 0)]
            done = 0
            while done < row.behind:
                count = min(self.runner.config.max_num_batched_tokens, row.behind - done)
                cached = [] if done == 0 else [CachedRequestData(name, [], done, len(tokens))]
                self.runner.execute_model(self._output(new if done == 0 else [], cached, {name: count}, None))
                done += count

    def _output(
        self, new: list[NewRequestData], cached: list[CachedRequestData], counts: dict[str, int], load_seconds: float | None
    ) -> SchedulerOutput:
        self._step += 1
        promises: tuple[LoadPromise, ...] = ()
        metadata = None
        if load_seconds is not None:
            stop = self._rows[LOADING].behind
            blocks = self._blocks[LOADING][: -(-stop // self.runner.kv_cache_config.block_size)]
            promises, metadata = (LoadPromise(LOADING, 0, stop, tuple(blocks)),), PacedLoad(load_seconds)
        return SchedulerOutput(self._step, new, cached, counts, sum(counts.values()), kv_connector_metadata=metadata, load_promises=promises)

    def _check(self, output: ModelRunnerOutput, load_seconds: float, seconds: float) -> None:
        report, expected = output.kv_connector_output, self.way.mode
        if output.cudagraph_runtime_mode is not expected:
            raise InterlockError(f"{self.way.name}: the step ran as {output.cudagraph_runtime_mode.name}, expected {expected.name}")
        if report is None or report.load_errors:
            raise InterlockError(f"{self.way.name}: the load failed: {report and dict(report.load_errors)}")
        if seconds < load_seconds:
            raise InterlockError(f"{self.way.name}: the step took {seconds:g} s, but its load lands after {load_seconds:g} s; it did not wait")
