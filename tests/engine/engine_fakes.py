"""A runner and a connector without a model: the KV of a position is a digest of the tokens up to it, so that any wrong read shows."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlock.core.config import EngineConfig, KVCacheConfig, KVTransferConfig
from interlock.core.sampling_params import SamplingParams
from interlock.core.step import KVConnectorOutput, LoadPromise, Logprobs, ModelRunnerOutput, SchedulerOutput
from interlock.engine.block_pool import BlockPool
from interlock.engine.request import Request
from interlock.engine.scheduler import Scheduler
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole

VOCAB = 50
GARBAGE = -1


def make_config(**options: Any) -> EngineConfig:
    policy = options.pop("policy", None)
    if policy is not None:
        options["kv_transfer_config"] = KVTransferConfig(kv_connector="fake", engine_id="test", kv_load_failure_policy=policy)
    return EngineConfig(model="fake", **{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options})


def make_kv_cache_config(num_blocks: int, block_size: int = 4, identity: str = "fake") -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        layer_names=("layers.0",),
        identity=identity,
    )


def cells_of(token_ids: Sequence[int]) -> list[int]:
    """The KV of every position: a function of the tokens up to it."""
    cells, digest = [], 7
    for token_id in token_ids:
        digest = (digest * 1_000_003 + token_id + 1) % 2**61
        cells.append(digest)
    return cells


def next_token(token_ids: Sequence[int]) -> int:
    """What the model says next."""
    return cells_of(token_ids)[-1] // 31 % VOCAB


def run_alone(prompt: Sequence[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """The output of a prompt that nobody disturbs."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == eos:
            break
    return token_ids[len(prompt) :]


@dataclass
class Known:
    """What the runner knows of a request."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int


class FakeRunner:
    """Executes steps on a pool of cells, and checks that nothing is read that was not written for the same tokens."""

    def __init__(self, num_blocks: int, block_size: int = 4, connector: "FakeConnector | None" = None) -> None:
        self.block_size = block_size
        self.connector = connector
        self.cells = [[0] * block_size for _ in range(num_blocks)]
        self.known: dict[str, Known] = {}
        self.last_step = 0
        self.num_computed = 0
        self.log: list[SchedulerOutput] = []

    def write(self, block_ids: Sequence[int], position: int, cell: int) -> None:
        self.cells[block_ids[position // self.block_size]][position % self.block_size] = cell

    def read(self, block_ids: Sequence[int], position: int) -> int:
        return self.cells[block_ids[position // self.block_size]][position % self.block_size]

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert output.step > self.last_step, "stamps only grow"
        self.last_step = output.step
        self.log.append(output)
        self._update_states(output)
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        assert set(output.num_scheduled_tokens) == {r.req_id for r in (*output.scheduled_new_reqs, *output.scheduled_cached_reqs)}
        if self.connector is not None:
            self.connector.load_promises(self, output)
        sampled, tainted = {}, set()
        for req_id, count in output.num_scheduled_tokens.items():
            if not self._compute(req_id, count):
                tainted.add(req_id)
            known = self.known[req_id]
            if known.num_computed_tokens == len(known.token_ids):
                sampled[req_id] = next_token(known.token_ids) if req_id not in tainted else 0
                known.token_ids.append(sampled[req_id])
        report = self.connector.report(self, output) if self.connector is not None else None
        invalid = report.invalid_block_ids if report is not None else frozenset()
        for req_id in tainted:
            assert invalid & set(self.known[req_id].block_ids), f"{req_id} read KV that was never written for it, and nobody said so"
        logprobs = {req_id: Logprobs([token, 1, 2], [-0.5, -1.0, -2.0], 2) for req_id, token in sampled.items()}
        return ModelRunnerOutput(step=output.step, sampled_token_ids=sampled, logprobs=logprobs, kv_connector_output=report)

    def take_abort_report(self) -> KVConnectorOutput | None:
        return None

    def shutdown(self) -> None:
        self.known.clear()

    def _update_states(self, output: SchedulerOutput) -> None:
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.known.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.known, f"{new.req_id} came as new twice"
            self.known[new.req_id] = Known(list(new.token_ids), list(new.block_ids), new.num_computed_tokens)
        for cached in output.scheduled_cached_reqs:
            known = self.known[cached.req_id]
            if cached.block_ids is not None:
                known.block_ids = list(cached.block_ids)
            known.block_ids += cached.new_block_ids
            known.num_computed_tokens = cached.num_computed_tokens
            del known.token_ids[cached.num_tokens :]
            assert len(known.token_ids) == cached.num_tokens

    def _compute(self, req_id: str, count: int) -> bool:
        known = self.known[req_id]
        start, stop = known.num_computed_tokens, known.num_computed_tokens + count
        assert stop <= len(known.token_ids)
        assert len(known.block_ids) * self.block_size >= stop
        assert len(set(known.block_ids)) == len(known.block_ids)
        cells = cells_of(known.token_ids[:stop])
        clean = all(self.read(known.block_ids, position) == cells[position] for position in range(start))
        for position in range(start, stop):
            self.write(known.block_ids, position, cells[position] if clean else GARBAGE)
        known.num_computed_tokens = stop
        self.num_computed += count
        return clean


@dataclass
class Offer:
    """What the other side has for a request, and how its load goes. fail_from: index of the first block that does not land."""

    num_tokens: int
    is_async: bool = False
    unknown_times: int = 0
    fail_from: int | None = None
    delay: int = 1
    pending_delay: int | None = None
    name_blocks: bool = True


@dataclass
class Transfer:
    req_id: str
    block_ids: list[int]
    start: int
    cells: list[int]
    countdown: int
    offer: Offer
    quiet: bool = False


@dataclass
class Lease:
    block_ids: list[int]
    cells: list[int]
    countdown: int


@dataclass
class FakeConnector(KVConnector):
    """Both halves under the test's control. A transfer writes its cells at its end, whatever has become of the request by then."""

    offers: dict[str, Offer] = field(default_factory=dict)
    keep: Mapping[str, int] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    allocated: list[tuple[str, int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    late_invalid: set[int] = field(default_factory=set)
    spurious: set[str] = field(default_factory=set)
    runner: FakeRunner | None = None
    _invalid: set[int] = field(default_factory=set)
    _pending: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(make_config(policy="recompute"), KVConnectorRole.SCHEDULER, make_kv_cache_config(1))

    # scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        offer = self.offers.get(request.request_id)
        if offer is None:
            return 0, False
        if offer.unknown_times:
            offer.unknown_times -= 1
            return None, False
        return max(offer.num_tokens - num_computed_tokens, 0), offer.is_async

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, num_external_tokens))
        offer = self.offers.get(request.request_id)
        if num_external_tokens and offer is not None and offer.is_async:
            start = request.num_computed_tokens
            cells = cells_of(request.all_token_ids)[start : start + num_external_tokens]
            transfer = Transfer(request.request_id, list(block_ids), start, cells, offer.delay, offer)
            self.transfers.append(transfer)
            if offer.delay == 0 and self.runner is not None:
                self._write(self.runner, transfer)  # the wire may be faster than a step that still runs

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return scheduler_output.step

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        assert isinstance(request, Request)
        assert request.request_id not in self.finished, "request_finished is called once"
        self.finished.append(request.request_id)
        if request.request_id not in self.keep:
            return False, None
        cells = cells_of(request.token_ids[: request.num_computed_tokens])
        self.leases[request.request_id] = Lease(list(block_ids), cells, self.keep[request.request_id])
        return True, {"remote_block_ids": list(block_ids)}

    # worker half, driven by the FakeRunner

    def load_promises(self, runner: FakeRunner, output: SchedulerOutput) -> None:
        for promise in output.load_promises:
            self._load(runner, promise, self.offers[promise.req_id])

    def _load(self, runner: FakeRunner, promise: LoadPromise, offer: Offer) -> None:
        known, size = runner.known[promise.req_id], runner.block_size
        assert promise.start % size == 0
        assert promise.stop <= len(known.token_ids) - 1
        assert list(promise.block_ids) == known.block_ids[promise.start // size : -(-promise.stop // size)]
        cells = cells_of(known.token_ids)
        failed = [] if offer.fail_from is None else list(promise.block_ids[offer.fail_from :])
        for position in range(promise.start, promise.stop):
            good = known.block_ids[position // size] not in failed
            runner.write(known.block_ids, position, cells[position] if good else GARBAGE)
        self._invalid.update(failed)
        if failed and offer.pending_delay is not None:
            self._pending.update(failed)
            late = [GARBAGE] * (len(failed) * size)
            self.transfers.append(Transfer(promise.req_id, failed, 0, late, offer.pending_delay, offer, quiet=True))

    def report(self, runner: FakeRunner, output: SchedulerOutput) -> KVConnectorOutput:
        recving, failing, sending = set(), set(), set()
        for transfer in list(self.transfers):
            transfer.countdown -= 1
            if transfer.countdown < 0:
                self.transfers.remove(transfer)
                recving.add(transfer.req_id)
                if self._end(runner, transfer):
                    failing.add(transfer.req_id)
        for req_id, lease in list(self.leases.items()):
            lease.countdown -= 1
            if lease.countdown < 0:
                for position, cell in enumerate(lease.cells):
                    assert runner.read(lease.block_ids, position) == cell, "a leased block was written"
                del self.leases[req_id]
                sending.add(req_id)
        invalid, pending = frozenset(self._invalid | self.late_invalid), frozenset(self._pending)
        for collected in (self._invalid, self._pending, self.late_invalid):
            collected.clear()
        spurious, self.spurious = self.spurious, set()
        return KVConnectorOutput(
            finished_sending=frozenset(sending | spurious),
            finished_recving=frozenset(recving | spurious),
            failed_recving=frozenset(failing),
            invalid_block_ids=invalid,
            pending_block_ids=pending,
        )

    def _first_bad(self, runner: FakeRunner, transfer: Transfer) -> int:
        if transfer.offer.fail_from is None or transfer.quiet:
            return len(transfer.block_ids)
        return transfer.start // runner.block_size + transfer.offer.fail_from

    def _write(self, runner: FakeRunner, transfer: Transfer) -> None:
        first_bad = self._first_bad(runner, transfer)
        for position, cell in enumerate(transfer.cells, transfer.start):
            runner.write(transfer.block_ids, position, cell if position // runner.block_size < first_bad else GARBAGE)

    def _end(self, runner: FakeRunner, transfer: Transfer) -> bool:
        if transfer.offer.delay or transfer.quiet:
            self._write(runner, transfer)
        failed = set(transfer.block_ids[self._first_bad(runner, transfer) : -(-(transfer.start + len(transfer.cells)) // runner.block_size)])
        if failed and transfer.offer.name_blocks:
            self._invalid.update(failed)
        return bool(failed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def random_prompt(rng: random.Random, low: int = 1, high: int = 14) -> list[int]:
    """A prompt that often shares a prefix with others."""
    base = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]]
    prompt = list(rng.choice(base))[: rng.randint(low, high)]
    if rng.random() < 0.3:
        prompt[-1] = rng.randrange(VOCAB)
    return prompt


class Harness:
    """A scheduler, a fake runner and perhaps a connector, driven step by step."""

    def __init__(
        self, num_blocks: int = 16, connector: FakeConnector | None = None, max_model_len: int = 40, eos: int | None = None, **options: Any
    ) -> None:
        self.config = make_config(**options)
        size = self.config.block_size
        self.scheduler = Scheduler(
            self.config,
            make_kv_cache_config(num_blocks, size),
            max_model_len,
            eos_token_ids=() if eos is None else (eos,),
            connector=connector,
            clock=lambda: float(self.runner.last_step),
        )
        self.connector = connector
        self.runner = FakeRunner(num_blocks, size, connector)
        if connector is not None:
            connector.runner = self.runner
        self.done: dict[str, Request] = {}
        self.streamed: dict[str, list[int]] = {}

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.blocks.pool

    def add(self, req_id: str, prompt: Sequence[int], cache_salt: str | None = None, **params: Any) -> Request:
        params = {"temperature": 0.0, "max_tokens": 4, **params}
        request = Request(req_id, list(prompt), SamplingParams(**params), seed=0, arrival_time=0.0, cache_salt=cache_salt)
        self.scheduler.add_request(request)
        self.streamed[req_id] = []
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.take(output, self.runner.execute_model(output))
        return output

    def take(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        changed = self.scheduler.update_from_output(output, result)
        assert len(set(map(id, changed))) == len(changed), "a request changes once in a step"
        for request in changed:
            seen = self.streamed[request.request_id]
            assert request.output_token_ids[: len(seen)] == seen, "a token that was streamed never changes"
            seen[:] = request.output_token_ids
            if request.finished:
                assert request.request_id not in self.done
                self.done[request.request_id] = request
        audit = self.pool.audit()
        assert audit.clean, audit

    def drain(self, limit: int = 400) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def assert_drained(self) -> None:
        assert not self.scheduler.has_unfinished_requests
        assert self.pool.audit().all_free, self.pool.audit()
        assert self.scheduler.counters()["num_requests_running"] == self.scheduler.counters()["num_requests_waiting"] == 0

    def output_of(self, req_id: str) -> list[int]:
        return self.done[req_id].output_token_ids
