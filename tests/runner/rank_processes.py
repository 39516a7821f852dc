"""Ranks of a data-parallel engine as spawned processes: what each does in a scenario, and how the test starts them and watches over them."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from runner_driver import RunnerDriver

from children import end_with_parent
from interlock import SamplingParams
from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import InterlockError
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.engine.core import EngineCore
from interlock.kv_transfer.connector import KVConnector
from interlock.runner.data_parallel import join_lockstep
from interlock.runner.model_runner import ModelRunner

WATCHDOG_SECONDS = 60.0
PROMPT = [(7 * index) % 240 + 3 for index in range(26)]
OTHER_PROMPT = [(11 * index) % 240 + 3 for index in range(9)]


def run_ranks(scenario: Callable[..., Any], *arguments: Any, size: int = 2, patience: float = WATCHDOG_SECONDS) -> list[Any]:
    """Run `scenario(rank, link, *arguments)` in one process per rank and return what each returned; `link` joins ranks 0 and 1.

    An InterlockError is returned, None stands for a rank that died; any other error fails the test, and so does it if no rank gives an
    answer for `patience` seconds.
    """
    context = multiprocessing.get_context("spawn")
    links = context.Pipe()
    processes, answers = [], [None] * size
    waiting: dict[Connection, int] = {}
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_run, args=(scenario, theirs, rank, links[rank], *arguments), daemon=True))
            processes[-1].start()
            theirs.close()
            waiting[ours] = rank
        while waiting:
            ready = wait(list(waiting), patience)
            assert ready, f"ranks {sorted(waiting.values())} hang"
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, answers[rank] = connection.recv()
                except EOFError:
                    continue
                assert ok, f"rank {rank}: {answers[rank]}"
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(scenario: Callable[..., Any], connection: Connection, *arguments: Any) -> None:
    end_with_parent()
    try:
        answer = True, scenario(*arguments)
    except InterlockError as error:
        answer = True, error
    except BaseException:
        answer = False, traceback.format_exc()
    connection.send(answer)


def listening_addresses() -> set[str]:
    """The addresses at which this process listens, as /proc/net writes them (hexadecimal, without the port)."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        found |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
    return found


class SlowTier(KVConnector):
    """Holds the KV of PROMPT but for its last token (PAGES) and loads it asynchronously: it lands in the `land_after`-th step of the rank."""

    saves_layers = False
    pages: Sequence[Any] = ()  # per layer [positions, 2, heads, dim]; each rank computes them for itself

    def __init__(self, config: EngineConfig, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.land_after = self.kv_transfer_config.kv_connector_extra_config["land_after"]
        self.new: dict[str, list[int]] = {}
        self.loading: dict[str, tuple[list[int], int]] = {}
        self.landed: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (len(PROMPT) - 1 - num_computed_tokens if list(request.all_token_ids) == PROMPT else 0), True

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            self.new[request.request_id] = list(block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        new, self.new = self.new, {}
        return new

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        self.layers = [buffer.numpy() for buffer in kv_caches.values()]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for req_id, blocks in self._get_connector_metadata().items():
            self.loading[req_id] = blocks, self.land_after
        for req_id, (blocks, left) in list(self.loading.items()):
            self.loading[req_id] = blocks, left - 1
            if left == 1:
                del self.loading[req_id]
                self._land(blocks)
                self.landed.add(req_id)

    def _land(self, blocks: list[int]) -> None:
        for layer, page in zip(self.layers, self.pages, strict=True):
            size = layer.shape[3]
            for position in range(len(PROMPT) - 1):
                layer[blocks[position // size], :, :, position % size] = page[position]

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str] | None, set[str] | None]:
        landed, self.landed = self.landed, set()
        return None, landed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def config_of(model: str, rank: int, port: int, **options: Any) -> EngineConfig:
    sizes = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "threads": 1}
    group = {"data_parallel_size": 2, "data_parallel_rank": rank, "data_parallel_lockstep": True, "data_parallel_master_port": port}
    return EngineConfig(model=model, **{**sizes, **group, **options})


def compute_pages(config: EngineConfig) -> list[Any]:
    """The KV of PROMPT but for its last token, as a lone rank computes it."""
    runner = ModelRunner(EngineConfig(model=config.model, block_size=4, threads=1, enforce_eager=True, kv_cache_memory_bytes=1 << 20))
    driver = RunnerDriver(runner)
    driver.add("r", PROMPT, room=0)
    driver.step({"r": len(PROMPT)})
    pages = [
        [layer.numpy()[driver.blocks("r")[position // 4], :, :, position % 4].copy() for position in range(len(PROMPT) - 1)]
        for layer in runner.kv_cache.layers
    ]
    runner.shutdown()
    return pages


class Rank:
    """An engine that is stepped by hand. trace: per step its number, gloo's count of collectives, tokens, and the mode that was agreed."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config)
        assert self.core.lockstep is not None
        self.lockstep = self.core.lockstep
        self.trace: list[tuple[int, int, int]] = []
        self.tokens: dict[str, list[int]] = {}

    def add(self, req_id: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(self.core.make_request(req_id, prompt, params))
        self.tokens[req_id] = []

    def step(self) -> None:
        for delta in self.core.step():
            self.tokens[delta.request_id] += delta.token_ids
        group: Any = self.lockstep._group
        self.trace.append((self.lockstep.num_steps, group._group._get_sequence_number_for_group(), self.core.num_scheduled_tokens))

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.core.has_work
            self.step()


def starved_ranks(rank: int, link: Connection, model: str, mode: str, port: int) -> dict[str, Any]:
    """A rank that only waits for KV beside one that decodes, for 200 steps; swapped; then a pause with late wake-ups."""
    transfer = KVTransferConfig(kv_connector="rank_processes:SlowTier", kv_connector_extra_config={"land_after": 200})
    config = config_of(model, rank, port, kv_transfer_config=transfer, cudagraph_mode=CUDAGraphMode[mode], enable_prefix_caching=False)
    SlowTier.pages = compute_pages(config)
    engine = Rank(config)
    waits_first = rank == 0
    engine.add("first", PROMPT if waits_first else OTHER_PROMPT, max_tokens=4 if waits_first else 202)
    while engine.core.has_work:
        engine.step()
    engine.add("second", OTHER_PROMPT if waits_first else PROMPT, max_tokens=202 if waits_first else 40)
    engine.steps(202)
    if rank == 0:
        engine.add("third", OTHER_PROMPT, max_tokens=30)
        engine.lockstep.pause()
    while not engine.lockstep.paused:
        engine.steps(1)
    paused_at = engine.lockstep.num_steps
    assert engine.core.has_unfinished_requests
    for stale in (paused_at - 1, paused_at):
        engine.lockstep.wake(stale)
        assert not engine.core.has_work
    if rank == 0:
        assert link.recv() == "paused too"
        engine.lockstep.resume()
        engine.lockstep.resume()
        link.send(paused_at + 1)
    else:
        link.send("paused too")
        step = link.recv()
        engine.lockstep.wake(step)
        engine.lockstep.wake(step)
    while engine.core.has_work:
        engine.step()
    engine.lockstep.wake(paused_at + 1)
    assert not engine.core.has_work
    answer = {"trace": engine.trace, "tokens": engine.tokens, "paused_at": paused_at, "all_free": engine.core.audit().all_free}
    engine.core.shutdown()
    return answer


def lost_rank(rank: int, link: Connection, model: str, port: int) -> Any:
    """Rank 1 ends without a word in the middle of a run."""
    engine = Rank(config_of(model, rank, port))
    assert listening_addresses() == {"0100007F"}, "the ranks of one machine listen on the loopback interface alone"
    engine.add("r", OTHER_PROMPT, max_tokens=100)
    engine.steps(3)
    if rank == 1:
        link.recv()
        os._exit(0)
    link.send("go")
    try:
        engine.steps(10)
    finally:
        assert not engine.lockstep.must_step
        engine.core.shutdown()
    return "went on without the other"


def different_options(rank: int, link: Connection, model: str, port: int) -> Any:
    """The ranks were started with different options."""
    return join_lockstep(config_of(model, rank, port, max_num_seqs=8 - rank))
