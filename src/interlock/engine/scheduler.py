"""Which tokens of which requests are computed in the next step, and what the step's result means for them.

A step gives running requests their next tokens first, then admits waiting ones, in the order of arrival, within a budget of tokens
and seats. A request is computed in chunks; decode is a chunk of one. When blocks run out, the request that arrived last gives up its
blocks and is recomputed later, so the oldest always goes on and nobody starves.
"""

import bisect
import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Collection

from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import RequestError
from interlock.core.step import CachedRequestData, KVConnectorOutput, LoadPromise, ModelRunnerOutput, NewRequestData, SchedulerOutput
from interlock.engine.block_manager import BlockManager
from interlock.engine.request import LoadState, Request, RequestStatus
from interlock.kv_transfer.connector import KVConnector

logger = logging.getLogger(__name__)

_by_arrival = operator.attrgetter("arrival_index")


class _Plan:
    """A step while it is being planned."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.new: list[NewRequestData] = []
        self.cached: list[CachedRequestData] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted: set[str] = set()
        self.promises: list[LoadPromise] = []

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens
        request.in_flight_step = self.step


class Scheduler:
    """Owns the requests and, through the `BlockManager`, the blocks. One thread drives it; a step may be planned before the one before
    it was processed (a request takes part in one step at a time). `max_model_len` bounds prompt and output together."""

    def __init__(
        self,
        config: EngineConfig,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        eos_token_ids: Collection[int] = (),
        connector: KVConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = BlockManager(kv_cache_config, config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_failed_loads = 0
        self.num_dropped_reports = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._connector = connector
        self._recompute = config.kv_transfer_config is not None and config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._clock = clock
        self._step = 0
        self._arrivals = 0
        self._waiting: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._running: list[Request] = []
        self._failed_blocks: dict[str, set[int]] = {}
        self._finished_req_ids: set[str] = set()
        self._ended: list[Request] = []
        if connector is not None:
            connector.bind_block_pool(self.blocks.pool)

    # Arrivals and aborts

    def check(self, request: Request) -> None:
        """Raises RequestError if the request can never be served, or its id is in use."""
        limit = self._token_limit(request)
        if request.num_prompt_tokens >= self._max_model_len:
            raise RequestError(
                f"the prompt of request {request.request_id} has {request.num_prompt_tokens} tokens, expected fewer than max_model_len, "
                f"which is {self._max_model_len}; shorten the prompt or raise max_model_len"
            )
        needed, present = self.blocks.num_blocks_for(limit - 1), self.blocks.pool.num_blocks
        if needed > present:
            raise RequestError(
                f"request {request.request_id} needs up to {needed} KV blocks ({request.num_prompt_tokens} prompt tokens, "
                f"max_tokens {request.sampling_params.max_tokens}), the pool has {present}; raise kv_cache_memory_bytes or lower max_tokens"
            )
        if request.request_id in self.requests or self.blocks.knows(request.request_id):
            raise RequestError(
                f"request_id is {request.request_id!r}, which a request that has not ended (or whose KV is still in transfer) uses already"
            )

    def add_request(self, request: Request) -> None:
        """Take a request in. Raises RequestError, with nothing changed, if it cannot be served."""
        self.check(request)
        if self._connector is not None:
            self._connector.on_new_request(request)
        request.token_limit = self._token_limit(request)
        request.stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self.blocks.adopt(request)
        self.requests[request.request_id] = request
        self._waiting.append(request)

    def _token_limit(self, request: Request) -> int:
        max_tokens = request.sampling_params.max_tokens
        return self._max_model_len if max_tokens is None else min(request.num_prompt_tokens + max_tokens, self._max_model_len)

    def abort_request(self, req_id: str) -> Request | None:
        """End a request at any moment; None if no such request is alive. It appears once more in the next `update_from_output`."""
        request = self.requests.get(req_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
            self._ended.append(request)
        return request

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether another step is wanted: requests, ends to be told, leases and transfers that wait for the outside."""
        if self.requests or self._ended:
            return True
        return self._connector is not None and bool(self._finished_req_ids or self.blocks.has_pending or self._connector.has_pending_push_work())

    def counters(self) -> dict[str, int]:
        """Gauges and counters by name."""
        return {
            "num_requests_running": len(self._running),
            "num_requests_waiting": len(self._waiting) + len(self._loading),
            "num_preemptions": self.num_preemptions,
            "num_failed_loads": self.num_failed_loads,
            "num_dropped_reports": self.num_dropped_reports,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_external_tokens": self.num_external_tokens,
        }

    # Planning a step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. It may have no tokens; it is then still to be executed, for what the connector has to do."""
        self._step += 1
        plan = _Plan(self._step, self._max_num_batched_tokens)
        finished = frozenset(self._finished_req_ids)
        self._finished_req_ids.clear()
        self._schedule_running(plan)
        if self._waiting and not plan.preempted:
            self._schedule_waiting(plan, finished)
        output = SchedulerOutput(
            step=plan.step,
            scheduled_new_reqs=plan.new,
            scheduled_cached_reqs=plan.cached,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=self._max_num_batched_tokens - plan.budget,
            finished_req_ids=finished,
            preempted_req_ids=frozenset(plan.preempted),
            load_promises=tuple(plan.promises),
        )
        if self._connector is not None:
            output = dataclasses.replace(output, kv_connector_metadata=self._connector.build_connector_meta(output))
        return output

    def _schedule_running(self, plan: _Plan) -> None:
        index = 0
        while index < len(self._running) and plan.budget > 0:
            request = self._running[index]
            if request.in_flight_step is not None:
                index += 1
                continue
            computed = request.num_computed_tokens
            count = min(len(request.token_ids) - computed, plan.budget)
            fresh: list[int] = []
            if self.blocks.missing(request, computed + count) > 0:
                if not self._make_room(request, computed + count, plan):
                    if request.status is RequestStatus.RUNNING:
                        index += 1
                    continue
                fresh = self.blocks.grow(request, computed + count)
            self.blocks.assert_writable(request, count)
            replaced = list(request.block_ids) if request.replace_blocks else None
            request.replace_blocks = False
            plan.cached.append(CachedRequestData(request.request_id, [] if replaced else fresh, computed, len(request.token_ids), replaced))
            plan.add(request, count)
            index += 1

    def _make_room(self, request: Request, num_tokens: int, plan: _Plan) -> bool:
        """Preempt later arrivals until the running `request` can grow to `num_tokens` positions; if none is left, preempt itself.
        With a later arrival in flight, whose blocks come back soon, the request only sits out this step."""
        while not self.blocks.fits(num_tokens, request.block_ids):
            later = [other for other in self._running if other.arrival_index > request.arrival_index]
            victim = self._latest_holder(request.arrival_index, [other for other in later if other.in_flight_step is None])
            if victim is None:
                if any(other.in_flight_step is not None for other in later):
                    return False
                victim = request
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _latest_holder(self, arrival_index: int, running: list[Request]) -> Request | None:
        """The latest arrival behind `arrival_index` that could give up blocks: running, or landed and waiting for its turn."""
        landed = [other for other in self._waiting if other.block_ids and other.arrival_index > arrival_index]
        return max(running + landed, key=_by_arrival, default=None)

    def _preempt(self, request: Request, plan: _Plan) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            bisect.insort(self._waiting, request, key=_by_arrival)
            plan.preempted.add(request.request_id)
        self.blocks.truncate(request, 0)
        request.status = RequestStatus.PREEMPTED
        request.replace_blocks = False
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _schedule_waiting(self, plan: _Plan, finished: frozenset[str]) -> None:
        index = 0
        while index < len(self._waiting) and plan.budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[index]
            if request.request_id in finished:
                index += 1  # the runner and the connector hear of the former owner's end first
                continue
            admitted = self._admit(request, plan)
            if admitted is None:
                index += 1
            elif not admitted:
                break
            else:
                self._waiting.remove(request)

    def _admit(self, request: Request, plan: _Plan) -> bool | None:
        """Give a waiting request its place in this step, or start its asynchronous load. False: no room for it, nor for anybody behind
        it. None: its connector does not know yet what it has."""
        num_external, is_async = 0, False
        asks = self._connector is not None and request.load_state is LoadState.UNASKED
        resumes = bool(request.block_ids)
        matched = [] if resumes else self.blocks.match(request)
        computed = request.num_computed_tokens or len(matched) * self.blocks.block_size
        if self._connector is not None and asks:
            found, is_async = self._connector.get_num_new_matched_tokens(request, computed)
            if found is None:
                return None
            num_external = max(0, min(found, request.num_tokens - 1 - computed))
            is_async = is_async and num_external > 0
        start = computed + num_external
        count = 0 if is_async else min(request.num_tokens - start, plan.budget)
        if not self._fits_whole(request, matched, plan):
            return False
        if resumes:
            self.blocks.grow(request, start + count)
        else:
            self.blocks.start(request, matched, start + count)
        if self._connector is not None and (asks or resumes):
            self._connector.update_state_after_alloc(request, request.block_ids, num_external)
        if request.load_state is LoadState.UNASKED:
            request.num_external_tokens = request.metrics.num_external_tokens = num_external
            request.metrics.num_cached_tokens = computed
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += computed
            self.num_external_tokens += num_external
            request.load_state = LoadState.LOADING if num_external else LoadState.SETTLED
        if is_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self._loading[request.request_id] = request
            return True
        self._start_running(request, computed, start, count, plan)
        return True

    def _fits_whole(self, request: Request, matched: list[int], plan: _Plan) -> bool:
        """Whether all known tokens of a waiting request fit. With nothing running, later arrivals that hold landed KV make room for it."""
        while not self.blocks.fits(request.num_tokens, request.block_ids, matched):
            victim = None if self._running else self._latest_holder(request.arrival_index, [])
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _start_running(self, request: Request, computed: int, start: int, count: int, plan: _Plan) -> None:
        """Put an admitted request into the step: KV up to `computed` is there, up to `start` is promised, `count` tokens are computed."""
        size = self.blocks.block_size
        request.status = RequestStatus.RUNNING
        bisect.insort(self._running, request, key=_by_arrival)
        if start > computed:
            block_ids = tuple(request.block_ids[computed // size : self.blocks.num_blocks_for(start)])
            plan.promises.append(LoadPromise(request.request_id, computed, start, block_ids))
        request.num_computed_tokens = start
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
        self.blocks.assert_writable(request, count)
        plan.new.append(
            NewRequestData(
                req_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                seed=request.seed,
                block_ids=list(request.block_ids),
                num_computed_tokens=start,
                sample_index=request.sample_index,
            )
        )
        plan.add(request, count)

    # The result of a step

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[Request]:
        """Take a step's result in. Returns the requests that got a token or ended, each once."""
        assert result.step == output.step, f"the result of step {result.step} came for step {output.step}"
        stepped = self._land_step(output)
        report = result.kv_connector_output
        thrown_away: set[Request] = set()
        if report is not None:
            if self._connector is not None:
                self._connector.update_connector_output(report)
            thrown_away = self._handle_report(output, report)
        self.blocks.retire(output.step)
        now = self._clock()
        mode = result.cudagraph_runtime_mode.name
        changed = []
        for request in stepped:
            modes = request.metrics.cudagraph_modes
            modes[mode] = modes.get(mode, 0) + 1
            if request in thrown_away:
                continue
            request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
            if request.load_state is LoadState.LOADING:
                request.load_state = LoadState.SETTLED
            self.blocks.publish(request)
            token_id = result.sampled_token_ids.get(request.request_id)
            assert (token_id is None) == (request.num_computed_tokens < request.num_tokens), f"the runner sampled {token_id} for {request.request_id}"
            if token_id is not None:
                self._append(request, token_id, result, now)
                changed.append(request)
        changed += self._ended
        self._ended.clear()
        return changed

    def fail_step(self, output: SchedulerOutput, error: str) -> list[Request]:
        """The step failed on the device, and everything that it started has ended. Its requests end with `error`."""
        self._finished_req_ids |= output.finished_req_ids
        for request in self._land_step(output):
            request.error = error
            self._finish(request, RequestStatus.FINISHED_ERROR)
            self._ended.append(request)
        self.blocks.retire(output.step)
        ended, self._ended = self._ended, []
        return ended

    def abandon_step(self, output: SchedulerOutput, error: str) -> None:
        """Nobody waited for the end of the step. Its requests end with `error`; its blocks come back when a later step retires."""
        self._finished_req_ids |= output.finished_req_ids
        for req_id in output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and request.in_flight_step == output.step:
                request.error = error
                self._finish(request, RequestStatus.FINISHED_ERROR)
                self._ended.append(request)

    def _land_step(self, output: SchedulerOutput) -> list[Request]:
        """Take the step's requests out of flight; returns those for whom it still counts."""
        stepped = []
        for req_id in output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and request.in_flight_step == output.step:
                request.in_flight_step = None
                if request.discard_in_flight:
                    request.discard_in_flight = False
                else:
                    stepped.append(request)
        return stepped

    def _append(self, request: Request, token_id: int, result: ModelRunnerOutput, now: float) -> None:
        """Add a sampled token, and end the request if it is the last."""
        params = request.sampling_params
        request.token_ids.append(token_id)
        if params.logprobs is not None:
            request.logprobs.append(result.logprobs[request.request_id])
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        num_tokens = len(request.token_ids)
        if num_tokens - request.num_prompt_tokens >= params.min_tokens:
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return self._finish(request, RequestStatus.FINISHED_STOPPED)
            if token_id in request.stop_token_ids:
                request.stop_reason = token_id
                return self._finish(request, RequestStatus.FINISHED_STOPPED)
        if num_tokens >= request.token_limit:
            self._finish(request, RequestStatus.FINISHED_LENGTH)
        return None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request: tell the connector once, then lease, quarantine or free its blocks."""
        req_id = request.request_id
        if self._loading.pop(req_id, None) is not None:
            self.blocks.quarantine_transfer(req_id, request.block_ids)
            self._failed_blocks.pop(req_id, None)
        elif request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            if request.load_state is LoadState.LOADING:
                request.num_computed_tokens -= request.num_external_tokens  # promised, not landed: nobody may be told that it is there
        else:
            self._waiting.remove(request)
        request.status = status
        request.metrics.finished_time = self._clock()
        del self.requests[req_id]
        self._finished_req_ids.add(req_id)
        keep = False
        if self._connector is not None:
            keep, request.output_kv_transfer_params = self._connector.request_finished(request, request.block_ids)
        if keep:
            self.blocks.lease(request)
        else:
            self.blocks.truncate(request, 0)

    # What the connector's worker half reports

    def _handle_report(self, output: SchedulerOutput, report: KVConnectorOutput) -> set[Request]:
        """Act on ends of transfers and on KV that did not land. Returns the running requests whose result of this step does not hold."""
        self._account_loads(output, report)
        thrown_away = self._handle_invalid_blocks(output, report) if report.invalid_block_ids else set()
        for req_id in report.finished_recving | report.failed_recving:
            if req_id in self._loading:
                self._land_load(self._loading.pop(req_id), req_id in report.failed_recving, report)
            elif not self.blocks.end_transfer(req_id):
                self._drop_report("finished_recving", req_id)
        for req_id in report.finished_sending:
            if not self.blocks.end_lease(req_id):
                self._drop_report("finished_sending", req_id)
        return thrown_away

    def _account_loads(self, output: SchedulerOutput, report: KVConnectorOutput) -> None:
        promised = sum(promise.stop - promise.start for promise in output.load_promises)
        for promise in output.load_promises:
            request = self.requests.get(promise.req_id)
            if request is not None:
                request.metrics.load_wait_seconds += report.load_wait_seconds
                request.metrics.loaded_bytes += report.loaded_bytes * (promise.stop - promise.start) // promised

    def _handle_invalid_blocks(self, output: SchedulerOutput, report: KVConnectorOutput) -> set[Request]:
        """Roll back, or fail, every request that holds a block whose KV did not land: who asked for it, and who shares it."""
        invalid = report.invalid_block_ids
        for promise in output.load_promises:
            pending = [block_id for block_id in promise.block_ids if block_id in report.pending_block_ids]
            if pending:
                self.blocks.quarantine_transfer(promise.req_id, pending)
        owners = {owner: None for block_id in sorted(invalid) for owner in self.blocks.pool.owners(block_id)}
        self.blocks.invalidate(invalid)
        thrown_away = set()
        for request in [self.requests[owner] for owner in owners if owner in self.requests]:
            if request.request_id in self._loading:
                self._failed_blocks.setdefault(request.request_id, set()).update(invalid)
            else:
                thrown_away.add(request)
                self._roll_back(request, invalid, report)
        return thrown_away

    def _land_load(self, request: Request, failed: bool, report: KVConnectorOutput) -> None:
        """An asynchronous load has ended: the request waits for its turn, with what has landed."""
        request.status = RequestStatus.WAITING
        bisect.insort(self._waiting, request, key=_by_arrival)
        invalid: Collection[int] = self._failed_blocks.pop(request.request_id, set()) & set(request.block_ids)
        if failed and not invalid:
            invalid = request.block_ids[request.num_computed_tokens // self.blocks.block_size :]
        request.num_computed_tokens += request.num_external_tokens
        request.load_state = LoadState.SETTLED
        if invalid:
            self._roll_back(request, invalid, report)
        if not request.finished:
            self.blocks.publish(request)

    def _roll_back(self, request: Request, invalid: Collection[int], report: KVConnectorOutput) -> None:
        """From its first invalid block on, nothing of a request holds: recompute it in fresh blocks without asking again, or end it."""
        request.load_state = LoadState.SETTLED
        request.metrics.num_failed_loads += 1
        self.num_failed_loads += 1
        request.discard_in_flight = request.in_flight_step is not None
        request.replace_blocks = request.status is RequestStatus.RUNNING
        self.blocks.truncate(request, next(index for index, block_id in enumerate(request.block_ids) if block_id in invalid))
        if not self._recompute:
            cause = report.load_errors.get(request.request_id, f"the load of KV blocks {sorted(invalid)} failed")
            request.error = f"KV of request {request.request_id} did not land, and kv_load_failure_policy is 'fail': {cause}"
            self._finish(request, RequestStatus.FINISHED_ERROR)
            self._ended.append(request)

    def _drop_report(self, kind: str, req_id: str) -> None:
        """An end of a transfer that nobody waits for: outside input, so it is counted, never fatal."""
        self.num_dropped_reports += 1
        logger.warning("%s names request %s, which waits for no transfer; dropped", kind, req_id)
