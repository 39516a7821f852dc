"""Which tokens of which requests the next step computes.

Running requests get their next tokens first, then waiting ones are admitted, in order of arrival, within a budget of tokens and seats.
A request is computed in chunks; decode is a chunk of one. When blocks run out, the request that arrived last gives up its blocks and
is recomputed later, so the oldest always goes on and nobody starves.
"""

import enum
import logging
from collections.abc import Callable

from interlock.core.config import EngineConfig
from interlock.core.step import CachedRequestData, LoadPromise, NewRequestData, SchedulerOutput
from interlock.engine.block_manager import BlockManager
from interlock.engine.request import LoadState, Request, RequestStatus
from interlock.engine.request_queues import RequestQueues
from interlock.kv_transfer.scheduler_guard import SchedulerGuard

logger = logging.getLogger(__name__)


class _Plan:
    """A step while it is being planned. parked: the requests whose asynchronous load it orders. admitting: the request that is
    just getting its place."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.new: list[NewRequestData] = []
        self.cached: list[CachedRequestData] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted: set[str] = set()
        self.promises: list[LoadPromise] = []
        self.parked: set[str] = set()
        self.admitting: Request | None = None

    def add(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens
        request.in_flight_step = self.step


class _Admission(enum.Enum):
    ADMITTED = enum.auto()
    UNKNOWN = enum.auto()  # its connector does not know yet what it has
    NO_ROOM = enum.auto()  # neither for it nor for anybody behind it


class StepPlanner:
    """Plans steps over the queues. External KV is asked for once in a request's life, from where its local prefix ends;
    a connector whose loads are repeatable is asked again after a preemption."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, queues: RequestQueues, connector: SchedulerGuard | None, clock: Callable[[], float]
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._load_timeout = config.kv_async_load_timeout
        self._blocks = blocks
        self._queues = queues
        self._connector = connector
        self._clock = clock
        self._blocked: tuple[str, int] | None = None
        self._starving: tuple[str, float] | None = None
        self._failed_orders: dict[str, str] = {}

    def plan(self) -> SchedulerOutput:
        """The next step, without connector metadata. It may have no tokens. If it cannot be made, what it was about to compute ends."""
        plan = _Plan(self._queues.next_step(), self._max_num_batched_tokens)
        finished = frozenset(self._queues.finished_req_ids)
        self._queues.finished_req_ids.clear()
        try:
            self._plan_running(plan)
            if self._queues.waiting and not plan.preempted:
                self._plan_waiting(plan, finished)
        except BaseException:
            self._abandon(plan, finished)
            raise
        return SchedulerOutput(
            step=plan.step,
            scheduled_new_reqs=plan.new,
            scheduled_cached_reqs=plan.cached,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=self._max_num_batched_tokens - plan.budget,
            finished_req_ids=finished,
            preempted_req_ids=frozenset(plan.preempted),
            load_promises=tuple(plan.promises),
            async_load_req_ids=frozenset(plan.parked),
        )

    def take_failed_orders(self) -> dict[str, str]:
        """The requests, and the causes, whose asynchronous load the connector refused to take since the last call."""
        failed, self._failed_orders = self._failed_orders, {}
        return failed

    def _abandon(self, plan: _Plan, finished: frozenset[str]) -> None:
        """Nobody will execute this plan; what the connector was told for it may come to it yet."""
        self._queues.finished_req_ids |= finished
        told = [block_id for promise in plan.promises for block_id in promise.block_ids]
        told += plan.admitting.block_ids if plan.admitting is not None and plan.admitting.request_id not in plan.parked else []
        if self._connector is not None and (told or plan.parked):
            self._blocks.begin_doubt()
            self._blocks.hold_in_doubt(plan.step, told)
        for request in list(self._queues.requests.values()):
            if request.in_flight_step == plan.step or request is plan.admitting or request.request_id in plan.parked:
                request.in_flight_step = None
                self._queues.end(request, RequestStatus.FINISHED_ERROR, f"step {plan.step}, of which it was to be a part, could not be planned")

    def _plan_running(self, plan: _Plan) -> None:
        running, index = self._queues.running, 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            if request.in_flight_step is None:
                count = min(len(request.token_ids) - request.num_computed_tokens, plan.budget)
                if self._make_room(request, request.num_computed_tokens + count, plan):
                    self._continue(request, count, plan)
            if request.status is RequestStatus.RUNNING:
                index += 1

    def _continue(self, request: Request, count: int, plan: _Plan) -> None:
        computed = request.num_computed_tokens
        fresh = self._blocks.grow(request, computed + count)
        self._blocks.assert_writable(request, count)
        replaced = None
        if request.replace_blocks:
            request.replace_blocks = False
            fresh, replaced = [], list(request.block_ids)
        plan.cached.append(CachedRequestData(request.request_id, fresh, computed, len(request.token_ids), replaced))
        plan.add(request, count)

    def _make_room(self, request: Request, num_tokens: int, plan: _Plan) -> bool:
        """Preempt later arrivals until the running `request` can grow to `num_tokens` positions; if none is left, preempt itself.
        With a later arrival in flight, whose blocks come back soon, the request only sits out this step."""
        while self._blocks.missing(request, num_tokens) > self._blocks.pool.num_free_blocks:
            victim = self._queues.latest_holder(request.arrival_index, include_running=True)
            if victim is None:
                if self._queues.running[-1] is not request:
                    return False
                victim = request
            if victim.status is RequestStatus.RUNNING:
                plan.preempted.add(victim.request_id)
            self._queues.preempt(victim)
            if victim is request:
                return False
        return True

    def _plan_waiting(self, plan: _Plan, finished: frozenset[str]) -> None:
        waiting, index = self._queues.waiting, 0
        while index < len(waiting) and plan.budget > 0 and len(self._queues.running) < self._max_num_seqs:
            request = waiting[index]
            if request.request_id in finished:
                index += 1  # the runner and the connector hear of the former owner's end first
                continue
            if self._is_still_blocked(request):
                return
            plan.admitting = request
            admission = self._admit(request, plan)
            plan.admitting = None
            if admission is _Admission.NO_ROOM and self._is_starved(request):
                self._end_for_want_of_blocks(request)
                continue
            if admission is _Admission.NO_ROOM:
                self._blocked = (request.request_id, self._blocks.pool.num_free_blocks)
                return
            if admission is _Admission.UNKNOWN:
                index += 1

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether the request found no room before and no block has become free since; asking again would cost time in every step."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked[0] == request.request_id
            and self._blocks.pool.num_free_blocks <= blocked[1]
            and bool(self._queues.running)
        )

    def _admit(self, request: Request, plan: _Plan) -> _Admission:
        """Give a waiting request its place in this step, or start its asynchronous load."""
        num_external, is_async = 0, False
        asks = self._connector is not None and request.load_state is LoadState.UNASKED
        resumes = bool(request.block_ids)
        matched = [] if resumes else self._blocks.match(request)
        computed = request.num_computed_tokens if resumes else len(matched) * self._blocks.block_size
        if self._connector is not None and asks and self._blocks.may_load:
            found, is_async = self._connector.get_num_new_matched_tokens(request, computed)
            if found is None and not self._gives_up_asking(request):
                return _Admission.UNKNOWN
            num_external = max(0, min(found or 0, request.num_tokens - 1 - computed))
        if not self._fits_whole(request, matched):
            return _Admission.NO_ROOM
        start = computed + num_external
        loads_first = is_async and num_external > 0
        count = 0 if loads_first else min(request.num_tokens - start, plan.budget)
        if resumes:
            self._blocks.grow(request, start + count)
        else:
            self._blocks.start(request, matched, start + count)
        if request.load_state is LoadState.UNASKED:
            self._note_hits(request, computed, num_external)
        if loads_first:
            self._queues.park(request)
            plan.parked.add(request.request_id)
        fault = None
        if self._connector is not None and (asks or resumes):
            fault = self._connector.update_state_after_alloc(request, request.block_ids, num_external)
        if not loads_first:
            self._start(request, computed, start, count, plan, fault)
        elif fault is not None:
            self._failed_orders[request.request_id] = fault
        return _Admission.ADMITTED

    def _gives_up_asking(self, request: Request) -> bool:
        """Whether the connector, which does not know yet what it has of a request, has been asked for longer than a load may take."""
        now = self._clock()
        if request.asked_time is None:
            request.asked_time = now
        if now - request.asked_time < self._load_timeout:
            return False
        logger.warning(
            "%s has not known for %g s (kv_async_load_timeout) what it has of request %s; nothing is loaded for it",
            self._connector.name if self._connector is not None else "the connector",
            self._load_timeout,
            request.request_id,
        )
        return True

    def _is_starved(self, request: Request) -> bool:
        """Whether a request that finds no room waits for nothing but the outside, which may never give it blocks."""
        if self._queues.running or self._queues.loading:
            self._starving = None
            return False
        if self._starving is None or self._starving[0] != request.request_id:
            self._starving = (request.request_id, self._clock())
        for_long = self._clock() - self._starving[1] >= self._load_timeout
        return self._blocks.is_starved(request, beside_leases=for_long)

    def _end_for_want_of_blocks(self, request: Request) -> None:
        """Everything else has ended, and the request finds no room beside the blocks of loads that nobody hears of."""
        needed, free = self._blocks.num_blocks_for(request.num_tokens), self._blocks.pool.num_free_blocks
        error = (
            f"request {request.request_id} needs {needed} KV blocks, {free} are free: the others belong to loads whose end the connector "
            "has not reported within kv_async_load_timeout, and it may still write them, or to ended requests whose KV it keeps since it raised"
        )
        self._queues.end(request, RequestStatus.FINISHED_ERROR, error)

    def _fits_whole(self, request: Request, matched: list[int]) -> bool:
        """Whether all known tokens of a waiting request fit. With nothing running, later arrivals that hold landed KV make room for it."""
        while not self._blocks.fits(request.num_tokens, request.block_ids, matched):
            victim = None if self._queues.running else self._queues.latest_holder(request.arrival_index, include_running=False)
            if victim is None:
                return False
            self._queues.preempt(victim)
        return True

    def _note_hits(self, request: Request, num_cached: int, num_external: int) -> None:
        request.num_external_tokens = num_external
        request.load_state = LoadState.LOADING if num_external else LoadState.SETTLED
        request.asked_time = None
        if request.metrics.num_preemptions:
            return  # it asks again; its prompt has been counted
        request.metrics.num_external_tokens = num_external
        request.metrics.num_cached_tokens = num_cached
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += num_cached
        self.num_external_tokens += num_external

    def _start(self, request: Request, computed: int, start: int, count: int, plan: _Plan, fault: str | None) -> None:
        """Put an admitted request into the step: KV up to `computed` is there, up to `start` is promised, `count` tokens are computed.
        fault: why the promise will not be kept, if that is so."""
        self._queues.run(request)
        if start > computed:
            first = computed // self._blocks.block_size
            block_ids = tuple(request.block_ids[first : self._blocks.num_blocks_for(start)])
            plan.promises.append(LoadPromise(request.request_id, computed, start, block_ids, fault))
        request.num_computed_tokens = start
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
        self._blocks.assert_writable(request, count)
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
                all_stop_token_ids=request.all_stop_token_ids,
            )
        )
        plan.add(request, count)
