"""A connector's scheduler half as the scheduler sees it: each call gives something that can be used, whatever the connector does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from interlock.core.errors import RequestError
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest, KVConnector
from interlock.kv_transfer.guard import Answer, ConnectorGuard, expect, read_bool, read_matched


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What a connector says to the end of a request. fault: it failed to say it, and may have ordered a save of the blocks before."""

    keep: bool = False
    params: dict[str, Any] | None = None
    fault: str | None = None


class SchedulerGuard:
    """The methods have the names of `KVConnector`'s, and cost at most the request they are about."""

    def __init__(self, connector: KVConnector) -> None:
        self._guard = ConnectorGuard(connector)
        self.name = self._guard.name
        self.hands_over = connector.hands_over
        self.load_is_repeatable = connector.load_is_repeatable

    def on_new_request(self, request: ConnectorRequest) -> str | None:
        """The fault: the request cannot be served then, since this call is also where the connector refuses some. Raises RequestError."""
        cost = "the request ends with an error"
        answer = self._guard.ask(
            "on_new_request", request, read=lambda _: None, otherwise=None, cost=cost, about=_request(request), passes=(RequestError,)
        )
        return answer.fault

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(0, False) for no answer."""
        nothing: tuple[int | None, bool] = (0, False)
        return self._guard.ask(
            "get_num_new_matched_tokens",
            request,
            num_computed_tokens,
            read=lambda answer: read_matched(answer, request.num_tokens - num_computed_tokens),
            otherwise=nothing,
            cost="it counts as no match",
            about=_request(request),
        ).value

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> str | None:
        """The fault: whether the load is ordered is not known then, and nothing of it may count."""
        cost = "its load counts as failed" if num_external_tokens else "nothing was to be loaded"
        return self._guard.tell("update_state_after_alloc", request, block_ids, num_external_tokens, cost=cost, about=_request(request))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Answer[Any]:
        """The step's metadata, which is for the worker half to judge."""
        cost = f"the loads and saves of step {scheduler_output.step} count as failed"
        return self._guard.ask("build_connector_meta", scheduler_output, read=lambda answer: answer, otherwise=None, cost=cost)

    def request_preempted(self, request: ConnectorRequest) -> None:
        """See `KVConnector.request_preempted`."""
        self._guard.tell("request_preempted", request, cost="it is preempted all the same", about=_request(request))

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int]) -> EndedRequest:
        """Nothing is kept or handed over where the connector does not say so."""
        cost = "nothing is handed over, and its blocks are given back"
        answer = self._guard.ask(
            "request_finished", request, block_ids, read=_read_ended, otherwise=EndedRequest(), cost=cost, about=_request(request)
        )
        return answer.value if answer.fault is None else EndedRequest(fault=answer.fault)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `KVConnector.update_connector_output`."""
        self._guard.tell("update_connector_output", connector_output, cost="what the worker half had to say to it is lost")

    def recomputes_load(self, req_id: str) -> bool:
        """False for no answer: then the policy holds."""
        cost = "kv_load_failure_policy decides"
        return self._guard.ask("recomputes_load", req_id, read=read_bool, otherwise=False, cost=cost, about=f"request {req_id}").value

    def has_pending_push_work(self) -> bool:
        """False for no answer."""
        return self._guard.ask("has_pending_push_work", read=read_bool, otherwise=False, cost="it counts as no").value

    def shutdown(self) -> None:
        """See `KVConnector.shutdown`."""
        self._guard.tell("shutdown", cost="everything else is given back all the same")


def _request(request: ConnectorRequest) -> str:
    return f"request {request.request_id}"


def _read_ended(answer: Any) -> EndedRequest:
    expected = "(keep the blocks, kv_transfer_params or None)"
    if not (isinstance(answer, tuple) and len(answer) == 2):
        expect(expected)
    keep, params = answer
    if not (params is None or (isinstance(params, dict) and all(isinstance(key, str) for key in params))):
        expect(expected)
    return EndedRequest(read_bool(keep), params)
