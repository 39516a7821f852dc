"""The life of requests: they arrive, are planned into steps, take in the results, and end."""

import dataclasses
import time
from collections.abc import Callable, Collection

from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import RequestError
from interlock.core.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from interlock.engine.block_manager import BlockManager
from interlock.engine.load_reports import LoadReports
from interlock.engine.request import LoadState, Request, RequestStatus
from interlock.engine.request_queues import RequestQueues
from interlock.engine.step_planner import StepPlanner
from interlock.kv_transfer.connector import KVConnector
from interlock.kv_transfer.registry import bind_block_pool
from interlock.kv_transfer.scheduler_guard import SchedulerGuard
from interlock.kv_transfer.transfer_params import check_hand_off


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
        transfer = config.kv_transfer_config
        self._connector = SchedulerGuard(connector) if connector is not None else None
        self.blocks = BlockManager(kv_cache_config, config.enable_prefix_caching)
        self._queues = RequestQueues(self.blocks, self._connector, clock, config.kv_async_load_timeout)
        self._planner = StepPlanner(config, self.blocks, self._queues, self._connector, clock)
        decides = self._connector is not None and (transfer is None or transfer.kv_load_failure_policy == "fail")
        recomputes = self._connector.recomputes_load if self._connector is not None and decides else lambda req_id: True
        self._reports = LoadReports(self.blocks, self._queues, recomputes, kv_cache_config.bytes_per_token, config.kv_async_load_timeout)
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        if connector is not None:
            bind_block_pool(connector, self.blocks.pool)

    def shutdown(self) -> None:
        """Shut the connector's scheduler half down. May be called twice."""
        if self._connector is not None:
            self._connector.shutdown()

    # Arrivals and aborts

    def check(self, request: Request) -> None:
        """Raises RequestError if the request can never be served, or its id is in use."""
        check_hand_off(request.kv_transfer_params, possible=self._connector is not None and self._connector.hands_over)
        if request.num_prompt_tokens >= self._max_model_len:
            raise RequestError(
                f"the prompt of request {request.request_id} has {request.num_prompt_tokens} tokens, expected fewer than max_model_len, "
                f"which is {self._max_model_len}; shorten the prompt or raise max_model_len"
            )
        needed, present = self.blocks.num_blocks_for(self._token_limit(request) - 1), self.blocks.pool.num_blocks
        if needed > present:
            raise RequestError(
                f"request {request.request_id} needs up to {needed} KV blocks ({request.num_prompt_tokens} prompt tokens, "
                f"max_tokens {request.sampling_params.max_tokens}), the pool has {present}; raise kv_cache_memory_bytes or lower max_tokens"
            )
        if request.request_id in self._queues.requests or self.blocks.knows(request.request_id):
            raise RequestError(
                f"request_id is {request.request_id!r}, which a request that has not ended (or whose KV is still in transfer) uses already"
            )

    def add_request(self, request: Request) -> None:
        """Take a request in. Raises RequestError, with nothing changed, if it cannot be served."""
        self.check(request)
        fault = self._connector.on_new_request(request) if self._connector is not None else None
        request.token_limit = self._token_limit(request)
        request.stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        if request.sampling_params.min_tokens:  # also of a request that does not end at EOS, as in vLLM
            request.all_stop_token_ids = tuple(sorted(self._eos_token_ids | request.stop_token_ids))
        self.blocks.adopt(request)
        self._queues.add(request)
        if fault is not None:
            self._queues.end(request, RequestStatus.FINISHED_ERROR, fault)

    def abort_request(self, req_id: str) -> Request | None:
        """End a request at any moment; None if no such request is alive. It appears once more in the next `update_from_output`."""
        request = self._queues.requests.get(req_id)
        if request is not None:
            self._queues.end(request, RequestStatus.FINISHED_ABORTED)
        return request

    @property
    def requests(self) -> dict[str, Request]:
        """The living requests by id; not to be changed."""
        return self._queues.requests

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._queues.requests)

    @property
    def has_work(self) -> bool:
        """Whether another step is wanted: requests, ends to be told, leases and transfers that wait for the outside."""
        if self._queues.requests or self._queues.ended:
            return True
        if self._connector is None:
            return False
        return bool(self._queues.finished_req_ids) or self.blocks.has_pending or self._connector.has_pending_push_work()

    def counters(self) -> dict[str, int]:
        """Gauges and counters by name."""
        return {
            "num_requests_running": len(self._queues.running),
            "num_requests_waiting": len(self._queues.waiting) + len(self._queues.loading),
            "num_preemptions": self._queues.num_preemptions,
            "num_failed_loads": self._reports.num_failed_loads,
            "num_dropped_reports": self._reports.num_dropped_reports,
            "num_prompt_tokens": self._planner.num_prompt_tokens,
            "num_cached_tokens": self._planner.num_cached_tokens,
            "num_external_tokens": self._planner.num_external_tokens,
        }

    # Steps

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. It may have no tokens; it is then still to be executed, for what the connector has to do."""
        self._reports.expire()
        output = self._planner.plan()
        if self._connector is None:
            return output
        for req_id, cause in self._planner.take_failed_orders().items():
            self._lose_order(req_id, cause)
        try:
            metadata = self._connector.build_connector_meta(output)
        except BaseException:
            self.abandon_step(output, f"step {output.step}, of which it was to be a part, was interrupted before it began")
            raise
        return dataclasses.replace(output, kv_connector_metadata=metadata.value, connector_fault=metadata.fault)

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[Request]:
        """Take a step's result in. Returns the requests that got a token or ended, each once."""
        assert result.step == output.step, f"the result of step {result.step} came for step {output.step}"
        stepped = self._land_step(output)
        report = result.kv_connector_output
        thrown_away: set[Request] = set()
        if report is not None:
            if self._connector is not None:
                self._connector.update_connector_output(report)
            self._begin_doubt(output, report)
            thrown_away = self._reports.handle(output, report)
            self._end_doubt(output, report)
        self.blocks.retire(output.step)
        now = self._clock()
        mode = result.cudagraph_runtime_mode.name
        changed = []
        for request in stepped:
            modes = request.metrics.cudagraph_modes
            modes[mode] = modes.get(mode, 0) + 1
            if request not in thrown_away and self._take_step(request, output, result, now):
                changed.append(request)
        return changed + self._queues.take_ended()

    def fail_step(self, output: SchedulerOutput, error: str, report: KVConnectorOutput | None = None) -> list[Request]:
        """The step failed on the device, and everything that it started has ended, but for what the connector's `report` names.
        Its requests end with `error`."""
        self._hold_loads(output, report)
        for request in self._land_step(output):
            self._queues.end(request, RequestStatus.FINISHED_ERROR, error)
        self._queues.finished_req_ids |= output.finished_req_ids
        self.blocks.retire(output.step)
        return self._queues.take_ended()

    def abandon_step(self, output: SchedulerOutput, error: str, report: KVConnectorOutput | None = None) -> None:
        """Nobody waited for the end of the step. Its requests end with `error`; its blocks come back when a later step retires."""
        self._hold_loads(output, report)
        for req_id in output.num_scheduled_tokens:
            request = self._queues.requests.get(req_id)
            if request is not None and request.in_flight_step == output.step:
                self._queues.end(request, RequestStatus.FINISHED_ERROR, error)
        self._queues.finished_req_ids |= output.finished_req_ids

    def _hold_loads(self, output: SchedulerOutput, report: KVConnectorOutput | None) -> None:
        """Of a step that failed. Without a report the connector has not heard of it."""
        if self._connector is None:
            return
        report = report or KVConnectorOutput(fault=f"step {output.step} failed before the connector was told of it")
        self._reports.hold_pending(output, report.pending_block_ids)
        self._begin_doubt(output, report)
        self._end_doubt(output, report)

    def _begin_doubt(self, output: SchedulerOutput, report: KVConnectorOutput) -> None:
        """Before blocks of the step are given back: its loads may be ordered yet if they have not been now."""
        if report.fault is not None and (output.load_promises or output.async_load_req_ids):
            self.blocks.begin_doubt()
            for promise in output.load_promises:
                self.blocks.hold_in_doubt(output.step, promise.block_ids)

    def _end_doubt(self, output: SchedulerOutput, report: KVConnectorOutput) -> None:
        """After the report was acted on: loads that nobody will make fail, and those of a step in which all went well are no more in doubt."""
        if report.num_connector_faults:
            self.blocks.doubt_leases()
        if report.fault is None:
            self.blocks.end_doubt(output.step)
            return
        self.blocks.stop_expecting_sound_step(output.step)
        for req_id in output.async_load_req_ids & self._queues.loading.keys():
            self._lose_order(req_id, report.fault)

    def _lose_order(self, req_id: str, cause: str) -> None:
        """The connector raised when it was told of an asynchronous load; if it makes it all the same, it has to name it by its deadline."""
        self._reports.give_up(req_id, cause)

    def _land_step(self, output: SchedulerOutput) -> list[Request]:
        """Take the step's requests out of flight; returns those for whom it still counts."""
        stepped = []
        for req_id in output.num_scheduled_tokens:
            request = self._queues.requests.get(req_id)
            if request is not None and request.in_flight_step == output.step:
                request.in_flight_step = None
                if request.discard_in_flight:
                    request.discard_in_flight = False
                else:
                    stepped.append(request)
        return stepped

    def _take_step(self, request: Request, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> bool:
        """Take over what a step did for a request; returns whether it got a token."""
        request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
        if request.load_state is LoadState.LOADING:
            request.load_state = LoadState.SETTLED
        fault = result.failed_requests.get(request.request_id)
        if fault is not None:
            self._queues.end(request, RequestStatus.FINISHED_ERROR, fault)
            return False
        self.blocks.publish(request)
        token_id = result.sampled_token_ids.get(request.request_id)
        assert (token_id is None) == (request.num_computed_tokens < request.num_tokens), f"the runner sampled {token_id} for {request.request_id}"
        if token_id is None:
            return False
        request.token_ids.append(token_id)
        if request.sampling_params.logprobs is not None:
            request.logprobs.append(result.logprobs[request.request_id])
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        status = self._end_status(request, token_id)
        if status is not None:
            self._queues.finish(request, status)
        return True

    def _end_status(self, request: Request, token_id: int) -> RequestStatus | None:
        """How the request ends with its newest token; None if it goes on."""
        if token_id in self._eos_token_ids and not request.sampling_params.ignore_eos:
            return RequestStatus.FINISHED_STOPPED
        if token_id in request.stop_token_ids:
            request.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if request.num_tokens >= request.token_limit else None

    def _token_limit(self, request: Request) -> int:
        max_tokens = request.sampling_params.max_tokens
        return self._max_model_len if max_tokens is None else min(request.num_prompt_tokens + max_tokens, self._max_model_len)
