"""A connector's worker half as a step sees it: each call gives something that can be used, whatever the connector does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from interlock.core.buffer import Buffer
from interlock.core.forward_context import ForwardContext
from interlock.kv_transfer.connector import KVConnector, KVConnectorTransferResults, may_wait
from interlock.kv_transfer.guard import Answer, ConnectorGuard, expect, read_block_ids, read_stats, split_ids

_LOADS = "the loads of this step count as failed"
_SAVE = "what it was to save is lost"


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of transfers that the connector reports, and how many things in its report were no request ids."""

    results: KVConnectorTransferResults
    num_dropped: int


class WorkerGuard:
    """The methods have the names of `KVConnector`'s. Those that give a string or None give the fault, for whose cost the step has to care."""

    def __init__(self, connector: KVConnector) -> None:
        self._guard = ConnectorGuard(connector)
        self.connector = connector
        self.supports_timelines = connector.supports_timelines
        self.saves_layers = connector.saves_layers

    def handle_preemptions(self, connector_metadata: Any) -> str | None:
        """See `KVConnector.handle_preemptions`."""
        return self._guard.tell("handle_preemptions", connector_metadata, cost=_LOADS)

    def bind_connector_metadata(self, connector_metadata: Any) -> str | None:
        """See `KVConnector.bind_connector_metadata`."""
        return self._guard.tell("bind_connector_metadata", connector_metadata, cost="the loads and saves of this step count as failed")

    def clear_connector_metadata(self) -> None:
        """See `KVConnector.clear_connector_metadata`."""
        self._guard.tell("clear_connector_metadata", cost="the step has ended all the same")

    def start_load_kv(self, forward_context: ForwardContext, arguments: Mapping[str, Any]) -> str | None:
        """See `KVConnector.start_load_kv`."""
        with may_wait(self.connector):
            return self._guard.tell("start_load_kv", forward_context, keywords=arguments, cost=_LOADS)

    def wait_for_layer_load(self, layer_name: str) -> str | None:
        """See `KVConnector.wait_for_layer_load`."""
        with may_wait(self.connector):
            return self._guard.tell("wait_for_layer_load", layer_name, cost=_LOADS)

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any) -> str | None:
        """See `KVConnector.save_kv_layer`."""
        with may_wait(self.connector):
            return self._guard.tell("save_kv_layer", layer_name, kv_layer, attn_metadata, cost=f"no further layer of this step is saved; {_SAVE}")

    def wait_for_save(self) -> None:
        """See `KVConnector.wait_for_save`."""
        with may_wait(self.connector):
            self._guard.tell("wait_for_save", cost=_SAVE)

    def abort_loads(self, step: int) -> str | None:
        """See `KVConnector.abort_loads`."""
        with may_wait(self.connector):
            return self._guard.tell("abort_loads", step, cost="the blocks of loads that may not have ended stay quarantined")

    def finish_forward(self) -> None:
        """See `KVConnector.finish_forward`."""
        self._guard.tell("finish_forward", cost="the step goes on")

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> Ends:
        """See `KVConnector.get_transfer_results`. What is no request id is dropped, and counted."""
        cost = "the ends of transfers that it had to report are lost"
        answer = self._guard.ask("get_transfer_results", finished_req_ids, read=_read_results, otherwise=KVConnectorTransferResults(), cost=cost)
        given, dropped = answer.value, []
        named = {}
        for field in ("finished_sending", "finished_recving", "failed_recving"):
            named[field], strange = split_ids(getattr(given, field))
            dropped += [f"{field}: {entry!r}" for entry in strange]
        errors = given.recving_errors if isinstance(given.recving_errors, Mapping) else {}
        causes = {name: cause for name, cause in errors.items() if isinstance(name, str) and isinstance(cause, str)}
        if dropped:
            self._guard.warn(f"{self._guard.name}.get_transfer_results names {', '.join(dropped[:8])}, expected sets of request ids; dropped")
        return Ends(KVConnectorTransferResults(**named, recving_errors=causes), len(dropped) + (answer.fault is not None))

    def get_block_ids_with_load_errors(self) -> Answer[frozenset[int]]:
        """See `KVConnector.get_block_ids_with_load_errors`. After a fault any of its loads may have failed."""
        cost = "what it has loaded counts as failed, since it may have named it"
        return self._guard.ask("get_block_ids_with_load_errors", read=read_block_ids, otherwise=frozenset(), cost=cost)

    def get_kv_connector_stats(self) -> dict[str, float]:
        """See `KVConnector.get_kv_connector_stats`."""
        none: dict[str, float] = {}
        return self._guard.ask("get_kv_connector_stats", read=read_stats, otherwise=none, cost="its counters are lost").value

    def build_connector_worker_meta(self) -> Any:
        """See `KVConnector.build_connector_worker_meta`."""
        cost = "what it had to say to the scheduler half is lost"
        return self._guard.ask("build_connector_worker_meta", read=lambda answer: answer, otherwise=None, cost=cost).value

    def take_num_faults(self) -> int:
        """How many calls have had a fault since the last call of this."""
        return self._guard.take_num_faults()

    def shutdown(self) -> None:
        """See `KVConnector.shutdown`."""
        self._guard.tell("shutdown", cost="everything else is given back all the same")


def _read_results(answer: Any) -> KVConnectorTransferResults:
    return answer if isinstance(answer, KVConnectorTransferResults) else expect("KVConnectorTransferResults")
