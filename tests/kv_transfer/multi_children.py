"""Children of a multi connector under the test's control; they are made by name, so the test finds them in `MADE`."""

from collections.abc import Mapping, Sequence
from typing import Any

from interlock.core.errors import RequestError
from interlock.core.forward_context import ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole, KVConnectorTransferResults

MADE: list["Child"] = []


class Child(KVConnector):
    """Offers what the test says, and reports what the test says."""

    saves_layers = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.offer: tuple[int | None, bool] = (0, False)
        self.keeps = self.refuses = False
        self.params: dict[str, Any] | None = None
        self.reports = KVConnectorTransferResults()
        self.bad_blocks: set[int] = set()
        self.calls: list[Any] = []
        self.outputs: list[KVConnectorOutput] = []
        MADE.append(self)

    def on_new_request(self, request: Any) -> None:
        if self.refuses:
            raise RequestError("not this one")
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("asked", request.request_id))
        return self.offer

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self.calls.append(("allocated", request.request_id, list(block_ids), num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return [promise.req_id for promise in scheduler_output.load_promises]

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("finished", request.request_id))
        return self.keeps, self.params

    def request_preempted(self, request: Any) -> None:
        self.calls.append(("preempted", request.request_id))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.outputs.append(connector_output)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        promised = [promise.req_id for promise in kwargs["scheduler_output"].load_promises]
        assert promised == self._get_connector_metadata()
        self.calls.append(("start_load_kv", promised))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(("wait_for_layer_load", layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.calls.append(("save_kv_layer", layer_name))

    def wait_for_save(self) -> None:
        self.calls.append(("wait_for_save",))

    def abort_loads(self, step: int) -> None:
        self.calls.append(("abort_loads", step))

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        reports, self.reports = self.reports, KVConnectorTransferResults()
        return reports

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> Any:
        return f"meta of {id(self)}"

    def named(self, name: str) -> list[Any]:
        return [call for call in self.calls if call[0] == name]


class Repeatable(Child):
    load_is_repeatable = True
    recomputes_failed_loads = True


class SavesLayers(Child):
    saves_layers = True


class NeedsPiecewise(Child):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        return bool(extra_config.get("needs_it"))


class WithTimelines(Child):
    """Enters its loads into the ledger; the test ends them."""

    supports_timelines = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        promises = kwargs["scheduler_output"].load_promises
        self.ledger = kwargs["ledger"]
        step = forward_context.step
        layers = range(self.kv_cache_config.num_layers)
        self.transfers = [self.ledger.begin_transfer(step, p.req_id, layer, p.start, p.stop) for p in promises for layer in layers]
        for transfer in self.transfers:
            self.ledger.end_transfer(transfer)


class Raises(Child):
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        raise OSError("the cache server is gone")


class RaisesOnce(Child):
    """Raises in the method of the half that the test names, once."""

    raising: tuple[KVConnectorRole, str] | None = None

    def __getattribute__(self, name: str) -> Any:
        if RaisesOnce.raising != (object.__getattribute__(self, "__dict__").get("role"), name):
            return super().__getattribute__(name)

        def fail(*arguments: Any, **options: Any) -> Any:
            RaisesOnce.raising = None
            raise OSError(f"no {name}")

        return fail


class CannotStop(RaisesOnce):
    def abort_loads(self, step: int) -> None:
        super().abort_loads(step)
        raise OSError("it goes on")
