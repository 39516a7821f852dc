"""The scheduler half of the multi connector: asks the children, and remembers who owns which load."""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from interlock.core.errors import RequestError
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest, KVConnector
from interlock.kv_transfer.connectors.multi_calls import ask, call_all, describe
from interlock.kv_transfer.connectors.multi_messages import ChildReport, LostMetadata, MultiMetadata, MultiWorkerMeta, OwnedLoad

logger = logging.getLogger(__name__)


class _Match(NamedTuple):
    num_tokens: int | None
    is_async: bool


class MultiSchedulerHalf:
    """What `MultiConnector` does with role SCHEDULER. A load belongs to one child from its allocation to the end of its request, also
    across preemptions; every child hears of every request."""

    def __init__(self, children: Sequence[KVConnector], block_size: int) -> None:
        self._children = children
        self._block_size = block_size
        self._answers: dict[str, tuple[int, dict[int, _Match]]] = {}
        self._offers: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._allocated: set[str] = set()
        self._loads: list[OwnedLoad] = []
        self._keepers: list[tuple[str, frozenset[int]]] = []

    def new_request(self, request: ConnectorRequest) -> None:
        """See `KVConnector.on_new_request`. A child that refuses the request speaks for all."""
        for index, child in enumerate(self._children):
            try:
                child.on_new_request(request)
            except RequestError:
                for told in self._children[:index]:
                    told.request_finished(request, [])
                raise

    def num_matched(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The longest of the children's hits; of equal ones the first. A request that has loaded before is not brought to a child whose
        loads cannot be repeated. A hit that was found before all others knew theirs is asked for again before it is relied upon."""
        req_id = request.request_id
        asked_from, answers = self._answers.pop(req_id, (num_computed_tokens, {}))
        if asked_from != num_computed_tokens:
            answers = {}
        best: int | None = None
        to_ask = {index for index, child in enumerate(self._children) if req_id not in self._allocated or child.load_is_repeatable} - set(answers)
        asked: set[int] = set()
        while to_ask:
            asked |= to_ask
            answers = {**answers, **{index: self._match(index, request, num_computed_tokens) for index in sorted(to_ask)}}
            known = {index: answer for index, answer in answers.items() if answer.num_tokens is not None}
            if len(known) < len(answers):
                self._answers[req_id] = num_computed_tokens, known  # these are not asked again until all have answered
                return None, False
            best = min(answers, key=lambda index: (-(answers[index].num_tokens or 0), index))
            to_ask = {best} - asked if answers[best].num_tokens else set()
        if best is None or not answers[best].num_tokens:
            self._offers.pop(req_id, None)
            return 0, False
        self._offers[req_id] = best
        return answers[best]

    def allocated(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The owner loads; the others hear of the blocks and load nothing."""
        req_id = request.request_id
        self._allocated.add(req_id)
        offer = self._offers.pop(req_id, None)
        if num_external_tokens:
            assert offer is not None, f"request {req_id} is to load {num_external_tokens} tokens that no child has offered"
            self._owners[req_id] = offer
            start = request.num_computed_tokens
            blocks = block_ids[start // self._block_size : -(-(start + num_external_tokens) // self._block_size)]
            self._loads.append(OwnedLoad(req_id, offer, tuple(blocks)))
        loader = None if offer is None else self._children[offer]
        call_all(self._children, lambda child: child.update_state_after_alloc(request, block_ids, num_external_tokens if child is loader else 0))

    def owner(self, req_id: str) -> int | None:
        """The child that made the request's last load."""
        return self._owners.get(req_id)

    def recomputes_load(self, req_id: str) -> bool:
        """As the child says that made the request's last load."""
        owner = self._owners.get(req_id)
        return owner is not None and self._children[owner].recomputes_load(req_id)

    def build_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        """Each child sees the promises that are its own. What one raises loses no other's orders: nobody would give them a second time."""
        children = tuple(self._child_meta(index, scheduler_output) for index in range(len(self._children)))
        loads, self._loads = self._loads, []
        keepers, self._keepers = self._keepers, []
        promised = {promise.req_id for promise in scheduler_output.load_promises}
        owned = tuple(dataclasses.replace(load, synchronous=load.req_id in promised) for load in loads)
        return MultiMetadata(children, owned, tuple(keepers))

    def share(self, scheduler_output: SchedulerOutput, child: int) -> SchedulerOutput:
        """The step as a child sees it."""
        mine = tuple(promise for promise in scheduler_output.load_promises if self._owners.get(promise.req_id) == child)
        return dataclasses.replace(scheduler_output, load_promises=mine)

    def preempted(self, request: ConnectorRequest) -> None:
        """See `KVConnector.request_preempted`."""
        call_all(self._children, lambda child: child.request_preempted(request))

    def finished(self, request: ConnectorRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are kept until all children that want them have let go. The answer's parameters are those of the first that has some."""
        nothing: tuple[bool, dict[str, Any] | None] = (False, None)
        answers = [ask(child, partial(child.request_finished, request, block_ids), nothing) for child in self._children]
        keepers = frozenset(index for index, (keep, _) in enumerate(answers) if keep)
        if keepers:
            self._keepers.append((request.request_id, keepers))
        params = [given for _, given in answers if given is not None]
        if len(params) > 1:
            logger.warning("%d connectors answer request %s with kv_transfer_params; the first one's are sent", len(params), request.request_id)
        self._answers.pop(request.request_id, None)
        self._offers.pop(request.request_id, None)
        self._owners.pop(request.request_id, None)
        self._allocated.discard(request.request_id)
        return bool(keepers), params[0] if params else None

    def update(self, output: KVConnectorOutput) -> None:
        """Each child takes its own report in."""
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, MultiWorkerMeta):
            return
        reports = dict(zip(self._children, meta.children, strict=True))
        call_all(self._children, lambda child: child.update_connector_output(_seen_by(reports[child], output)))

    def _child_meta(self, index: int, scheduler_output: SchedulerOutput) -> Any:
        child = self._children[index]
        try:
            return child.build_connector_meta(self.share(scheduler_output, index))
        except Exception as error:
            cause = describe(child, "build_connector_meta", error)
            logger.exception("%s (child %d); its loads and saves of step %d count as failed", cause, index, scheduler_output.step)
            return LostMetadata(cause)

    def _match(self, index: int, request: ConnectorRequest, num_computed_tokens: int) -> _Match:
        child = self._children[index]
        return ask(child, partial(_matched, child, request, num_computed_tokens), _Match(0, False))

    @property
    def has_news(self) -> bool:
        """Whether steps are needed even if no request runs."""
        return bool(self._loads or self._keepers) or any(ask(child, child.has_pending_push_work, False) for child in self._children)


def _matched(child: KVConnector, request: ConnectorRequest, num_computed_tokens: int) -> _Match:
    found, is_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
    return _Match(None if found is None else max(0, found), is_async)


def _seen_by(report: ChildReport, output: KVConnectorOutput) -> KVConnectorOutput:
    """The output of a step as the child sees it: what it reported, and what has become of all loads."""
    return dataclasses.replace(
        output,
        finished_sending=report.results.finished_sending,
        finished_recving=report.results.finished_recving,
        failed_recving=report.results.failed_recving,
        kv_connector_stats=report.stats,
        kv_connector_worker_meta=report.worker_meta,
    )
