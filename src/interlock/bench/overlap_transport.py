"""Loads under compute over real transports: prompts whose KV lies in another process join a decoding batch, by the way of waiting for them."""

import contextlib
import importlib.util
import os
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from interlock.bench.measure import Figure, alternate, prompt_token_ids
from interlock.bench.overlap_step import Way
from interlock.core.errors import InterlockError
from interlock.core.sampling_params import SamplingParams
from interlock.engine.llm import LLM
from interlock.engine.request import Request
from interlock.pd.messages import Failed, Finished, Generate
from interlock.pd.pair import wait_ready
from interlock.pd.process import EngineProcess
from interlock.runner.model_runner import ModelRunner

_TURNS = 3  # of each way in a round
_STEPS = 3  # between a load and the next one


@dataclass(frozen=True, slots=True)
class Sizes:
    """`loading` prompts of `length` tokens join `others` rows that decode behind `context` tokens; all fit a pool of `pool_bytes`."""

    loading: int = 4
    length: int = 1501
    others: int = 4
    context: int = 64
    pool_bytes: int = 192 * 2**20

    def positions(self, rounds: int) -> int:
        """The longest that any row becomes."""
        num_steps = _STEPS + (2 * _STEPS + 1) * (1 + _TURNS * rounds)
        return max(self.context + num_steps, self.length + 2 * _STEPS) + 1


DEFAULT_SIZES: Final = Sizes()


class Producer:
    """A prefill engine in a process of its own, which keeps the KV of prompts for others."""

    def __init__(self, engine: Mapping[str, Any], connector: Mapping[str, Any]) -> None:
        transfer = {**connector, "kv_role": "kv_producer", "engine_id": f"prefill-{uuid.uuid4().hex}"}
        self._process = EngineProcess("prefill", {**engine, "kv_transfer_config": transfer})
        self._number = 0
        try:
            wait_ready(self._process, lambda name, stage, done, total: None)
        except BaseException:
            self.close()
            raise

    def offer(self, prompt: list[int]) -> Mapping[str, Any]:
        """The `kv_transfer_params` with which another engine may read the prompt's KV, once."""
        self._number += 1
        sampling = {"temperature": 0.0, "max_tokens": 1}
        self._process.send(
            Generate(f"offer-{self._number}", prompt, sampling, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
        )
        while not isinstance(answer := self._process.receive(), Finished):
            if isinstance(answer, Failed):
                raise InterlockError(f"the prefill process could not serve: {answer.error}")
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def close(self) -> None:
        """End the process."""
        self._process.stop()


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A step in which loading prompts joined the batch, and a later one of the same rows that loads nothing.

    seconds, alone: of the two steps; stall: from the token before to the token of the joining step, for a row that was there already;
    load_wait: how long the step waited for its loads; logits: bit patterns of both steps.
    """

    seconds: float
    stall: float
    load_wait: float
    alone: float
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[npt.NDArray[np.uint32], ...]

    def same_bits(self, other: "Joined") -> bool:
        """Whether both gave the same tokens and the same logits, bit by bit."""
        return self.tokens == other.tokens and all(map(np.array_equal, self.logits, other.logits))


class Consumer:
    """A decode engine in this process that waits for loads in one `way`, with a batch that decodes for ever."""

    def __init__(self, way: Way, sizes: Sizes, engine: Mapping[str, Any], connector: Mapping[str, Any]) -> None:
        self.way = way
        transfer = {**connector, "kv_role": "kv_consumer", "engine_id": f"decode-{uuid.uuid4().hex}"}
        self._llm = LLM(**engine, enable_prefix_caching=False, cudagraph_mode=way.mode, kv_load_wait=way.wait, kv_transfer_config=transfer)
        self._number = 0
        self._sizes = sizes
        runner = self._llm.core.runner
        assert isinstance(runner, ModelRunner)
        self._runner = runner
        self.num_layers, self.vocab_size = runner.model_config.num_layers, runner.model_config.vocab_size
        self._others = [self._add(prompt, None) for prompt in draw(sizes.others, sizes.context, self.vocab_size)]
        self.run_steps()

    def join(self, prompts: Sequence[list[int]], offers: Sequence[Mapping[str, Any]]) -> Joined:
        """Let `prompts` join, whose KV is at `offers`; then take them out again. Raises InterlockError unless all join in one step."""
        core = self._llm.core
        before = self.run_steps()
        requests = [self._add(prompt, offer) for prompt, offer in zip(prompts, offers, strict=True)]
        began = perf_counter()
        core.step()
        ended = perf_counter()
        rows = [*self._others, *requests]
        logits, tokens = [self._logits()], [_last_tokens(rows)]
        for request in requests:
            if request.num_output_tokens != 1 or request.metrics.num_failed_loads or request.metrics.loaded_bytes == 0:
                raise InterlockError(f"{self.way.name}: a prompt did not join with its KV loaded: {request.metrics}, {request.error}")
        for _ in range(_STEPS):
            again = perf_counter()
            core.step()
            alone = perf_counter() - again
        logits.append(self._logits())
        tokens.append(_last_tokens(rows))
        wait = max(request.metrics.load_wait_seconds for request in requests)
        for request in requests:
            core.abort_request(request.request_id)
        return Joined(ended - began, ended - before, wait, alone, tuple(tokens), tuple(logits))

    def run_steps(self) -> float:
        """Some steps of the batch alone; the time at which the last one ended."""
        for _ in range(_STEPS):
            self._llm.core.step()
        return perf_counter()

    def close(self) -> None:
        """End the engine."""
        self._llm.close()

    def _add(self, prompt: list[int], offer: Mapping[str, Any] | None) -> Request:
        self._number += 1
        extra = None if offer is None else {"kv_transfer_params": dict(offer)}
        room = self._llm.config.max_model_len or 0
        params = SamplingParams(temperature=0.0, max_tokens=room - len(prompt), ignore_eos=True, extra_args=extra)
        request = self._llm.core.make_request(f"request-{self._number}", {"prompt_token_ids": prompt}, params)
        self._llm.core.add_request(request)
        return request

    def _logits(self) -> npt.NDArray[np.uint32]:
        return self._runner.logits.numpy()[: self._sizes.others + self._sizes.loading].view(np.uint32).copy()


def measure(consumers: Sequence[Consumer], producer: Producer, sizes: Sizes, rounds: int) -> dict[str, tuple[Joined, ...]]:
    """What happened in each way, by its name. All ways of a round load the same KV; raises InterlockError when one gives other bits."""
    prompts = draw(sizes.loading, sizes.length, consumers[0].vocab_size, salt=1000)
    joined: dict[str, list[Joined]] = {consumer.way.name: [] for consumer in consumers}
    firsts: dict[int, Joined] = {}

    def run(consumer: Consumer, number: int) -> float:
        result = consumer.join(prompts, [producer.offer(prompt) for prompt in prompts])
        if not result.same_bits(firsts.setdefault(number, result)):
            raise InterlockError(f"{consumer.way.name}: the step gave other tokens or other logits than {consumers[0].way.name}")
        if number >= 0:
            joined[consumer.way.name].append(result)
        return result.seconds

    alternate(_TURNS * rounds, {consumer.way.name: partial(run, consumer) for consumer in consumers})
    return {name: tuple(results) for name, results in joined.items()}


def draw(count: int, length: int, vocab_size: int, salt: int = 0) -> list[list[int]]:
    """Prompts of exactly `length` tokens that share no prefix."""
    return [[token % vocab_size for token in prompt_token_ids(length, salt + number)] for number in range(count)]


def _last_tokens(requests: Sequence[Request]) -> tuple[int, ...]:
    return tuple(request.output_token_ids[-1] for request in requests)


def bound(load: float, compute: float, num_layers: int, threads: int, cpus: int) -> float:
    """The least time of a step of `compute` on `threads` threads whose load of `load` keeps another thread copying: a CPU copies or computes."""
    if cpus > threads:
        return max(load, compute) + min(load, compute) / num_layers
    return max(load, (load + cpus * compute) / cpus)


def figures(label: str, joined: Mapping[str, Sequence[Joined]], barrier: str, num_layers: int, threads: int) -> list[Figure]:
    """One figure for each way, against the bound. T is how long `barrier`, which copies while nothing computes, waits."""
    load = statistics.median(result.load_wait for result in joined[barrier]) * 1e3
    compute = statistics.median(result.alone for results in joined.values() for result in results) * 1e3
    least = bound(load, compute, num_layers, threads, available_cpus())
    notes: dict[str, float | str] = {"load T (ms)": load, "compute C (ms)": compute}
    found = []
    for name, results in joined.items():
        samples = tuple(result.seconds * 1e3 for result in results)
        stall = max(result.stall for result in results) * 1e3
        found.append(
            Figure(
                name=f"{label}: {name}",
                unit="ms",
                value=statistics.median(samples),
                samples=samples,
                peer="bound",
                peer_value=least,
                sense="at most",
                notes={"worst stall of others (ms)": stall, **notes},
            )
        )
        notes = {}
    return found


def transports() -> dict[str, Mapping[str, Any]]:
    """The peer connector's options by the name of a transport; NIXL where it is installed."""
    return {"shared memory": {}, **({"NIXL": {"transport": "nixl"}} if importlib.util.find_spec("nixl_cu12") else {})}


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    model: str, threads: int, rounds: int, ways: Sequence[Way], barrier: Way, say: Callable[[str], None], sizes: Sizes = DEFAULT_SIZES
) -> list[Figure]:
    """Figures of each way over each transport, between two processes."""
    engine = {"model": model, "threads": threads, "max_model_len": sizes.positions(rounds), "kv_cache_memory_bytes": sizes.pool_bytes}
    found = []
    for label, extra in transports().items():
        connector = {"kv_connector": "PeerConnector", "kv_connector_extra_config": extra}
        say(f"overlap: {label}: starting the engines")
        with contextlib.ExitStack() as opened:
            producer = opened.enter_context(contextlib.closing(Producer(engine, connector)))
            consumers = [opened.enter_context(contextlib.closing(Consumer(way, sizes, engine, connector))) for way in ways]
            say(f"overlap: {label}")
            joined = measure(consumers, producer, sizes, rounds)
        found += figures(label, joined, barrier.name, consumers[0].num_layers, threads)
    return found
