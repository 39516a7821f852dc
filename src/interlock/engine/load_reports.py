"""What the connector's worker half reports after a step: ends of transfers, and KV that did not land."""

import logging
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from typing import Any, NamedTuple

from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.engine.block_manager import BlockManager
from interlock.engine.block_pool import Hold
from interlock.engine.request import LoadState, Request, RequestStatus
from interlock.engine.request_queues import RequestQueues
from interlock.kv_transfer.transports.repeats import FirstWarnings

logger = logging.getLogger(__name__)

MAX_RECOMPUTES = 32  # of one request because of loads that failed; more are no bad luck


class _Loaded(NamedTuple):
    """Whose load a block's content came with. generation: of the block then; recomputes: what becomes of those who hold it if it is bad."""

    generation: int
    recomputes: bool


class LoadReports:
    """Acts on the reports, and on a load's missing one. recomputes: for a request that loads, whether it and those who share its blocks are
    computed anew if its KV does not land; False ends them with an error. load_timeout: seconds until an asynchronous load is overdue.

    What a connector names is outside input. A block can be named as not landed once per load, for as long as it holds what was loaded,
    whatever has become of the request that loaded it. All else is counted and dropped, so nothing is recomputed for ever.
    """

    def __init__(
        self, blocks: BlockManager, queues: RequestQueues, recomputes: Callable[[str], bool], bytes_per_token: int, load_timeout: float
    ) -> None:
        self.num_failed_loads = 0
        self.num_dropped_reports = 0
        self._blocks = blocks
        self._queues = queues
        self._recomputes = recomputes
        self._load_timeout = load_timeout
        self._bytes_per_token = bytes_per_token
        self._failed_blocks: dict[str, set[int]] = {}
        self._loaded: dict[int, _Loaded] = {}
        self._warnings = FirstWarnings(logger)

    def handle(self, output: SchedulerOutput, report: KVConnectorOutput) -> set[Request]:
        """Act on the report of a step. Returns the requests whose result of this step does not hold."""
        self.num_dropped_reports += report.num_dropped_reports
        self._account_loads(output, report)
        for promise in output.load_promises:
            self._note_loaded(promise.req_id, promise.block_ids)
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
            if req_id in self._queues.loading:
                cause = f"its connector did not report the end of the load within {self._load_timeout:g} s (kv_async_load_timeout)"
                logger.warning("request %s: %s", req_id, cause)
                self.give_up(req_id, cause)
            self._blocks.stop_expecting(req_id)

    def give_up(self, req_id: str, cause: str) -> None:
        """The asynchronous load that a request waits for has failed. It may still write: its blocks stay quarantined until the connector
        names it."""
        request = self._queues.loading[req_id]
        self._blocks.quarantine_transfer(req_id, request.block_ids[request.num_computed_tokens // self._blocks.block_size :])
        self._failed_blocks.pop(req_id, None)
        self._land(request, True, cause)

    def hold_pending(self, output: SchedulerOutput, pending_block_ids: Collection[int]) -> None:
        """What the step's loads may still write is held until the connector names them."""
        for promise in output.load_promises:
            pending = [block_id for block_id in promise.block_ids if block_id in pending_block_ids]
            if pending:
                self._blocks.quarantine_transfer(promise.req_id, pending)
                self._queues.expect_load(promise.req_id)

    def _account_loads(self, output: SchedulerOutput, report: KVConnectorOutput) -> None:
        promised = sum(promise.stop - promise.start for promise in output.load_promises)
        for promise in output.load_promises:
            request = self._queues.requests.get(promise.req_id)
            if request is not None:
                request.metrics.load_wait_seconds += report.load_wait_seconds
                request.metrics.loaded_bytes += report.loaded_bytes * (promise.stop - promise.start) // promised

    def _handle_invalid_blocks(self, output: SchedulerOutput, report: KVConnectorOutput) -> set[Request]:
        """Roll back, or fail, every request that holds a block whose KV did not land: who asked for it, and who shares it."""
        self.hold_pending(output, report.pending_block_ids)
        invalid = self._take_invalid(report.invalid_block_ids)
        holders = {
            owner: None for block_id in sorted(invalid) for owner, hold in self._blocks.pool.owners(block_id).items() if hold is Hold.REFERENCED
        }
        self._blocks.invalidate(invalid)
        thrown_away = set()
        for request in [self._queues.requests[owner] for owner in holders if owner in self._queues.requests]:
            if request.request_id in self._queues.loading:
                self._failed_blocks.setdefault(request.request_id, set()).update(invalid)
            else:
                thrown_away.add(request)
                recomputes = all(invalid[block_id] for block_id in request.block_ids if block_id in invalid)
                self._roll_back(request, invalid, report.load_errors.get(request.request_id), recomputes)
        return thrown_away

    def _note_loaded(self, req_id: str, block_ids: Iterable[int]) -> None:
        """A load of `req_id` has put content into these blocks, or says that it failed to."""
        recomputes = self._recomputes(req_id)
        for block_id in block_ids:
            self._loaded[block_id] = _Loaded(int(self._blocks.pool.generations[block_id]), recomputes)

    def _take_invalid(self, named: Iterable[Any]) -> dict[int, bool]:
        """Those of the named blocks that a load is filling, or that hold what one has brought; each with whether it is recomputed."""
        awaited = {}
        for req_id, request in self._queues.loading.items():
            failed = self._failed_blocks.get(req_id, set())
            awaited.update(dict.fromkeys(set(self._external_blocks(request)) - failed, req_id))
        invalid, dropped = {}, []
        for name in named:
            block_id = int(name) if isinstance(name, Integral) and not isinstance(name, bool) else -1
            loaded = self._loaded.pop(block_id, None)
            if block_id in awaited:
                invalid[block_id] = self._recomputes(awaited[block_id])
            elif loaded is not None and loaded.generation == self._blocks.pool.generations[block_id]:
                invalid[block_id] = loaded.recomputes
            else:
                dropped.append(name)
        if dropped:
            self._drop_blocks(dropped)
        return invalid

    def _external_blocks(self, request: Request) -> list[int]:
        """The blocks that a request waits for."""
        first, stop = request.num_computed_tokens, request.num_computed_tokens + request.num_external_tokens
        return request.block_ids[first // self._blocks.block_size : self._blocks.num_blocks_for(stop)]

    def _land(self, request: Request, failed: bool, cause: str | None) -> None:
        """An asynchronous load has ended: the request waits for its turn, with what has landed."""
        self._queues.unpark(request)
        self._note_loaded(request.request_id, self._external_blocks(request))
        recomputes = self._recomputes(request.request_id)
        invalid: Collection[int] = self._failed_blocks.get(request.request_id, set()) & set(request.block_ids)
        if failed and not invalid:
            invalid = request.block_ids[request.num_computed_tokens // self._blocks.block_size :]
        request.num_computed_tokens += request.num_external_tokens
        request.load_state = LoadState.SETTLED
        if invalid:
            for block_id in invalid:
                self._loaded.pop(block_id, None)
            self._roll_back(request, invalid, cause, recomputes)
        else:
            request.metrics.loaded_bytes += request.num_external_tokens * self._bytes_per_token
        if not request.finished:
            self._blocks.publish(request)

    def _roll_back(self, request: Request, invalid: Collection[int], cause: str | None, recomputes: bool) -> None:
        """From its first invalid block on, nothing of a request holds: recompute it in fresh blocks without asking again, or end it."""
        request.load_state = LoadState.SETTLED
        request.metrics.num_failed_loads += 1
        self.num_failed_loads += 1
        request.discard_in_flight = request.in_flight_step is not None
        request.replace_blocks = request.status is RequestStatus.RUNNING
        self._blocks.truncate(request, next(index for index, block_id in enumerate(request.block_ids) if block_id in invalid))
        cause = cause or f"the load of KV blocks {sorted(invalid)} failed"
        times = request.metrics.num_failed_loads
        if not recomputes:
            error = f"KV of request {request.request_id} did not land, and kv_load_failure_policy is 'fail': {cause}"
            self._queues.end(request, RequestStatus.FINISHED_ERROR, error)
        elif times > MAX_RECOMPUTES:
            error = f"KV of request {request.request_id} failed to land {times} times, it is recomputed at most {MAX_RECOMPUTES} times: {cause}"
            self._queues.end(request, RequestStatus.FINISHED_ERROR, error)

    def _drop_blocks(self, names: list[Any]) -> None:
        """Blocks that nobody has loaded, or no blocks at all: outside input, so they are counted, never fatal; the log says so once."""
        self.num_dropped_reports += len(names)
        some = ", ".join(sorted(map(repr, names))[:8])
        self._warnings.warn(
            f"the connector names {len(names)} blocks as not landed ({some}, …), expected ids, integers in [0, {self._blocks.pool.num_blocks}), of "
            "blocks that hold what it has loaded and that it has not named before; dropped, and only counted from here on (num_dropped_reports)",
            kind="blocks",
        )

    def _drop(self, kind: str, req_id: str) -> None:
        """An end of a transfer that nobody waits for: outside input, so it is counted, never fatal."""
        self.num_dropped_reports += 1
        logger.warning("%s names request %s, which waits for no transfer; dropped", kind, req_id)
