"""Prefill and decode engines in two processes that hand KV over, and tell the logits of every token as bit patterns."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from runner_driver import Bits

from interlock import SamplingParams
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.step import ModelRunnerOutput, SchedulerOutput
from interlock.engine.core import EngineCore
from interlock.engine.pacing import pause_seconds
from interlock.engine.request import Request
from interlock.runner.model_runner import ModelRunner

COMPANION = [(13 * index) % 240 + 3 for index in range(21)]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt that is computed by one engine and continued by another. prefill, decode: options in which the two engines differ."""

    model: str
    mode: str
    prompt: list[int]
    num_tokens: int
    prefill: dict[str, Any]
    decode: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it on decode. tokens and logits (`[num_tokens, vocab_size]`): of the request alone, and beside a companion. loaded_bytes:
    of each of the two; modes: the graph modes of their steps. all_free: whether the pools of both engines have all blocks back."""

    tokens: list[list[int]]
    logits: list[Bits]
    loaded_bytes: list[int]
    modes: set[str]
    all_free: bool


class RecordingRunner(ModelRunner):
    """Keeps the logits of every token, by request."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.recorded: defaultdict[str, list[Bits]] = defaultdict(list)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute_model(scheduler_output)
        rows = self.logits.numpy().view(np.uint32)
        for row, req_id in enumerate(output.sampled_token_ids):
            self.recorded[req_id].append(rows[row].copy())
        return output


class Engine:
    """An engine that is stepped by hand."""

    def __init__(self, case: Case, role: str, engine_id: str, options: dict[str, Any]) -> None:
        transfer = KVTransferConfig(kv_connector="PeerConnector", kv_role=role, engine_id=engine_id)  # type: ignore[arg-type]
        sizes = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 16 << 20, "threads": 1}
        config = EngineConfig.from_mapping({"model": case.model, "cudagraph_mode": case.mode, **sizes, **options, "kv_transfer_config": transfer})
        self.runner = RecordingRunner(config)
        self.core = EngineCore(config, self.runner)

    def add(self, req_id: str, prompt: Sequence[int], num_tokens: int, transfer: dict[str, Any] | None = None) -> Request:
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
        request = self.core.make_request(req_id, list(prompt), params)
        self.core.add_request(request)
        return request

    def run(self, *requests: Request) -> None:
        while not all(request.finished for request in requests):
            self.step()
        errors = [request.error for request in requests if request.error is not None]
        assert not errors, errors

    def step(self) -> None:
        self.core.step()
        time.sleep(pause_seconds(self.core))

    def drain(self) -> bool:
        """Let everything end; whether all blocks are back."""
        while self.core.has_work:
            self.step()
        return self.core.audit().all_free

    def close(self) -> None:
        self.core.shutdown()
        self.runner.shutdown()


def hand_over(rank: int, link: Connection, cases: dict[str, Case], engine_id: str) -> dict[str, Any]:
    """Rank 0 is prefill, rank 1 is decode; `link` is what a proxy would be. Rank 1 returns an Answer for each of `cases`."""
    play = _prefill if rank == 0 else _decode
    return {name: play(case, f"{engine_id}-{number}-{rank}", link) for number, (name, case) in enumerate(cases.items())}


def _prefill(case: Case, engine_id: str, link: Connection) -> bool:
    engine = Engine(case, "kv_producer", engine_id, case.prefill)
    assert link.recv() == "ready"  # a lease runs out, however long decode takes to start
    for req_id in ("alone", "accompanied"):
        request = engine.add(req_id, case.prompt, 1, {"do_remote_decode": True})
        engine.run(request)
        link.send(request.output_kv_transfer_params)
    link.send(engine.drain())  # the leases end when decode has read the blocks
    assert link.recv() == "closed"
    engine.close()
    return True


def _decode(case: Case, engine_id: str, link: Connection) -> Answer:
    engine = Engine(case, "kv_consumer", engine_id, case.decode)
    link.send("ready")
    requests = [engine.add("alone", case.prompt, case.num_tokens, link.recv())]
    engine.run(requests[0])
    engine.core.reset_prefix_cache()
    companion = engine.add("companion", COMPANION, case.num_tokens + 4)
    while companion.num_output_tokens < 2:
        engine.step()
    requests.append(engine.add("accompanied", case.prompt, case.num_tokens, link.recv()))
    engine.run(*requests, companion)
    all_free = engine.drain()
    all_free &= link.recv()
    answer = Answer(
        [list(request.output_token_ids) for request in requests],
        [np.stack(engine.runner.recorded[request.request_id]) for request in requests],
        [request.metrics.loaded_bytes for request in requests],
        {mode for request in requests for mode in request.metrics.cudagraph_modes},
        all_free,
    )
    engine.close()
    link.send("closed")
    return answer
