"""What the connector's worker half reports after a step: ends of transfers, and KV that did not land."""

import logging
from collections.abc import Collection

from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.engine.block_manager import BlockManager
from interlock.engine.request import LoadState, Request, RequestStatus
from interlock.engine.request_queues import RequestQueues

logger = logging.getLogger(__name__)


class LoadReports:
    """Acts on the reports, and on a load's missing one. recompute: what becomes of a request whose KV did not land; False ends it with an error.
    load_timeout: seconds until an asynchronous load is overdue."""

    def __init__(self, blocks: BlockManager, queues: RequestQueues, recompute: bool, bytes_per_token: int, load_timeout: float) -> None:
        self.num_failed_loads = 0
        self.num_dropped_reports = 0
        self._blocks = blocks
        self._queues = queues
        self._recompute = recompute
        self._load_timeout = load_timeout
        self._bytes_per_token = bytes_per_token
        self._failed_blocks: dict[str, set[int]] = {}

    def handle(self, output: SchedulerOutput, report: KVConnectorOutput) -> set[Request]:
        """Act on the report of a step. Returns the requests whose result of this step does not hold."""
        self._account_loads(output, report)
        thrown_away = self._handle_invalid_blocks(output, report) if report.invalid_block_ids else set()
        for req_id in report.finished_recving | report.failed_recving:
            if req_id in self._queues.loading:
                self._land(self._queues.loading[req_id], req_id in report.failed_recving, report.load_errors.get(req_id))
            elif not self._blocks.end_transfer(req_id):
                self._drop("finished_recving", req_id)
            self._failed_blocks.pop(req_id, None)
            self._queues.forget_load(req_id)
        for req_id in report.finished_sending:
            if not self._blocks.end_lease(req_id):
                self._drop("finished_sending", req_id)
        return thrown_away

    def expire(self) -> None:
        """An asynchronous load that its connector has not named by its deadline has failed. It may still write: its blocks stay
        quarantined until the connector does name it."""
        for req_id in self._queues.take_overdue_loads():
            request = self._queues.loading.get(req_id)
            if request is not None:
                cause = f"its connector did not report the end of the load within {self._load_timeout:g} s (kv_async_load_timeout)"
                logger.warning("request %s: %s", req_id, cause)
                self._blocks.quarantine_transfer(req_id, request.block_ids[request.num_computed_tokens // self._blocks.block_size :])
                self._failed_blocks.pop(req_id, None)
                self._land(request, True, cause)
            self._blocks.stop_expecting(req_id)

    def _account_loads(self, output: SchedulerOutput, report: KVConnectorOutput) -> None:
        promised = sum(promise.stop - promise.start for promise in output.load_promises)
        for promise in output.load_promises:
            request = self._queues.requests.get(promise.req_id)
            if request is not None:
                request.metrics.load_wait_seconds += report.load_wait_seconds
                request.metrics.loaded_bytes += report.loaded_bytes * (promise.stop - promise.start) // promised

    def _handle_invalid_blocks(self, output: SchedulerOutput, report: KVConnectorOutput) -> set[Request]:
        """Roll back, or fail, every request that holds a block whose KV did not land: who asked for it, and who shares it."""
        invalid = report.invalid_block_ids
        for promise in output.load_promises:
            pending = [block_id for block_id in promise.block_ids if block_id in report.pending_block_ids]
            if pending:
                self._blocks.quarantine_transfer(promise.req_id, pending)
                self._queues.expect_load(promise.req_id)
        owners = {owner: None for block_id in sorted(invalid) for owner in self._blocks.pool.owners(block_id)}
        self._blocks.invalidate(invalid)
        thrown_away = set()
        for request in [self._queues.requests[owner] for owner in owners if owner in self._queues.requests]:
            if request.request_id in self._queues.loading:
                self._failed_blocks.setdefault(request.request_id, set()).update(invalid)
            else:
                thrown_away.add(request)
                self._roll_back(request, invalid, report.load_errors.get(request.request_id))
        return thrown_away

    def _land(self, request: Request, failed: bool, cause: str | None) -> None:
        """An asynchronous load has ended: the request waits for its turn, with what has landed."""
        self._queues.unpark(request)
        invalid: Collection[int] = self._failed_blocks.get(request.request_id, set()) & set(request.block_ids)
        if failed and not invalid:
            invalid = request.block_ids[request.num_computed_tokens // self._blocks.block_size :]
        request.num_computed_tokens += request.num_external_tokens
        request.load_state = LoadState.SETTLED
        if invalid:
            self._roll_back(request, invalid, cause)
        else:
            request.metrics.loaded_bytes += request.num_external_tokens * self._bytes_per_token
        if not request.finished:
            self._blocks.publish(request)

    def _roll_back(self, request: Request, invalid: Collection[int], cause: str | None) -> None:
        """From its first invalid block on, nothing of a request holds: recompute it in fresh blocks without asking again, or end it."""
        request.load_state = LoadState.SETTLED
        request.metrics.num_failed_loads += 1
        self.num_failed_loads += 1
        request.discard_in_flight = request.in_flight_step is not None
        request.replace_blocks = request.status is RequestStatus.RUNNING
        self._blocks.truncate(request, next(index for index, block_id in enumerate(request.block_ids) if block_id in invalid))
        if not self._recompute:
            cause = cause or f"the load of KV blocks {sorted(invalid)} failed"
            error = f"KV of request {request.request_id} did not land, and kv_load_failure_policy is 'fail': {cause}"
            self._queues.end(request, RequestStatus.FINISHED_ERROR, error)

    def _drop(self, kind: str, req_id: str) -> None:
        """An end of a transfer that nobody waits for: outside input, so it is counted, never fatal."""
        self.num_dropped_reports += 1
        logger.warning("%s names request %s, which waits for no transfer; dropped", kind, req_id)
