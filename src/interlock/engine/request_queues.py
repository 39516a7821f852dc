"""Where every request stands: waiting, loading, running; and its way out."""

import bisect
import operator
from collections.abc import Callable

from interlock.engine.block_manager import BlockManager
from interlock.engine.request import LoadState, Request, RequestStatus
from interlock.kv_transfer.scheduler_guard import EndedRequest, SchedulerGuard

MAX_FAILED_LOADS = 8  # of one request, after which a repeatable load is not asked for again

by_arrival = operator.attrgetter("arrival_index")


class RequestQueues:
    """The living requests, each in one place. `waiting` and `running` are in order of arrival; `loading` waits for remote KV by id.

    `ended` collects requests that end outside a step's result, `finished_req_ids` the ids whose end the runner has not heard of.
    step: the stamp of the step that was planned last. load_timeout: seconds until a load that a connector has not named is overdue,
    whatever has become of its request.
    """

    def __init__(self, blocks: BlockManager, connector: SchedulerGuard | None, clock: Callable[[], float], load_timeout: float) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.num_preemptions = 0
        self.step = 0
        self._arrivals = 0
        self._blocks = blocks
        self._connector = connector
        self._clock = clock
        self._load_timeout = load_timeout
        self._load_deadlines: dict[str, float] = {}

    def add(self, request: Request) -> None:
        """Take a new request in."""
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def run(self, request: Request) -> None:
        """A waiting request takes part in steps from now on."""
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=by_arrival)
        request.status = RequestStatus.RUNNING

    def park(self, request: Request) -> None:
        """A waiting request waits for remote KV from now on."""
        self.waiting.remove(request)
        self.loading[request.request_id] = request
        self.expect_load(request.request_id)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.metrics.num_parked_loads += 1
        request.metrics.parked_time = self._clock()

    def unpark(self, request: Request) -> None:
        """The load of a request has ended."""
        del self.loading[request.request_id]
        bisect.insort(self.waiting, request, key=by_arrival)
        request.status = RequestStatus.WAITING
        request.metrics.load_wait_seconds += self._clock() - request.metrics.parked_time

    def expect_load(self, req_id: str) -> None:
        """The connector has to name the load of `req_id`, from now on within `load_timeout`."""
        self._load_deadlines[req_id] = self._clock() + self._load_timeout

    def forget_load(self, req_id: str) -> None:
        """The connector has named the load of `req_id`: it has no deadline any more."""
        self._load_deadlines.pop(req_id, None)

    def take_overdue_loads(self) -> list[str]:
        """The ids whose load has passed its deadline since the last call, aborted ones included."""
        if not self._load_deadlines:
            return []
        now = self._clock()
        overdue = [req_id for req_id, deadline in self._load_deadlines.items() if deadline <= now]
        for req_id in overdue:
            del self._load_deadlines[req_id]
        return overdue

    def preempt(self, request: Request) -> None:
        """A running request, or one that waits with landed KV, gives up its blocks; it will be recomputed."""
        assert request.in_flight_step is None, f"{request.request_id} is preempted while step {request.in_flight_step} computes it"
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            bisect.insort(self.waiting, request, key=by_arrival)
        if self._connector is not None:
            self._connector.request_preempted(request)
            promising = self._connector.load_is_repeatable and request.metrics.num_failed_loads < MAX_FAILED_LOADS
            if promising and not self._blocks.knows(request.request_id):  # else two loads would have one name
                request.load_state = LoadState.UNASKED
        self._blocks.truncate(request, 0)
        request.status = RequestStatus.PREEMPTED
        request.replace_blocks = False
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def latest_holder(self, arrival_index: int, include_running: bool) -> Request | None:
        """The latest arrival behind `arrival_index` that can give up blocks: running and not in flight, or landed and waiting."""
        holders = [other for other in self.waiting if other.block_ids]
        if include_running:
            holders += [other for other in self.running if other.in_flight_step is None]
        return max((other for other in holders if other.arrival_index > arrival_index), key=by_arrival, default=None)

    def finish(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        """End a request: tell the connector once, then lease, quarantine or free its blocks."""
        req_id = request.request_id
        if req_id in self.loading:
            del self.loading[req_id]
            self._blocks.quarantine_transfer(req_id, request.block_ids)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            if request.load_state is LoadState.LOADING:
                request.num_computed_tokens -= request.num_external_tokens  # promised, not landed: nobody may be told that it is there
        else:
            self.waiting.remove(request)
        request.status = status
        request.error = error
        request.metrics.finished_time = self._clock()
        del self.requests[req_id]
        self.finished_req_ids.add(req_id)
        answer = EndedRequest()
        try:
            if self._connector is not None:
                answer = self._connector.request_finished(request, request.block_ids)
                request.output_kv_transfer_params = answer.params
        finally:
            if answer.keep:
                self._blocks.lease(request)
            else:
                if answer.fault is not None and request.block_ids:  # it may have ordered, for the next step, that they be saved
                    self._blocks.hold_in_doubt(self.step, request.block_ids)
                self._blocks.truncate(request, 0)

    def next_step(self) -> int:
        """The stamp of the step that is planned now."""
        self.step += 1
        return self.step

    def end(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        """End a request that gets no further token; it is noted in `ended`."""
        self.finish(request, status, error)
        self.ended.append(request)

    def take_ended(self) -> list[Request]:
        """The requests that have ended outside a step's result since the last call."""
        ended, self.ended = self.ended, []
        return ended
