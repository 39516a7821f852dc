"""The worker half of the multi connector: drives the children through a step, and lets each report only on what is its own."""

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.core.step import LoadPromise
from interlock.kv_transfer.connector import KVConnector, KVConnectorTransferResults
from interlock.kv_transfer.connectors.multi_messages import ChildReport, MultiMetadata, MultiWorkerMeta, OwnedLoad
from interlock.kv_transfer.ledger import Ledger

logger = logging.getLogger(__name__)

_REMEMBERED_LOADS = 65536  # a synchronous load ends in its step, and may still be reported much later


class MultiWorkerHalf:
    """What `MultiConnector` does with role WORKER.

    uses_ledger: some child reports to the ledger. What the others load is then entered there too: their claim is awaited before the
    forward begins, in every mode, because nobody asks them layer by layer.
    """

    def __init__(self, children: Sequence[KVConnector], layer_names: Sequence[str], *, uses_ledger: bool) -> None:
        self._children = children
        self._layer_names = layer_names
        self._uses_ledger = uses_ledger
        self._loads: OrderedDict[str, OwnedLoad] = OrderedDict()
        self._written: dict[str, OwnedLoad] = {}
        self._finished: set[str] = set()
        self._claimed: set[int] = set()
        self._keepers: dict[str, set[int]] = {}
        self._results: list[KVConnectorTransferResults] = [KVConnectorTransferResults()] * len(children)
        self._stats: list[Mapping[str, float]] = [{}] * len(children)
        self._num_dropped = 0

    # ---- a step

    def bind(self, metadata: MultiMetadata) -> None:
        """Each child gets its own metadata; note whose loads begin and who keeps what."""
        for load in metadata.loads:
            self._loads[load.req_id] = self._written[load.req_id] = load
            self._loads.move_to_end(load.req_id)
        while len(self._loads) > _REMEMBERED_LOADS:
            self._loads.popitem(last=False)
        for req_id, keepers in metadata.keepers:
            self._keepers[req_id] = set(keepers)
        for child, meta in zip(self._children, metadata.children, strict=True):
            child.bind_connector_metadata(meta)

    def start_loads(self, forward_context: ForwardContext, arguments: Mapping[str, Any]) -> None:
        """Start each child's loads: first of those that return at once. What a child raises costs its own loads only."""
        output, ledger = arguments["scheduler_output"], arguments["ledger"]
        order = sorted(range(len(self._children)), key=lambda index: not self._children[index].supports_timelines)
        for index in order:
            child = self._children[index]
            mine = tuple(promise for promise in output.load_promises if self._owner(promise.req_id) == index)
            try:
                child.start_load_kv(forward_context, **{**arguments, "scheduler_output": dataclasses.replace(output, load_promises=mine)})
                if mine and self._uses_ledger and not child.supports_timelines:
                    self._await_claim(index, forward_context, mine, ledger)
            except Exception as error:
                logger.exception("%s raised while it loaded; its loads of step %d count as failed", type(child).__name__, forward_context.step)
                for promise in mine:
                    ledger.fail_promise(forward_context.step, promise.req_id, f"the connector raised {type(error).__name__}: {error}")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Ask every child that has not said so already."""
        for index, child in enumerate(self._children):
            if index not in self._claimed:
                child.wait_for_layer_load(layer_name)

    def results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        """The children's results: of loads those of their owner, once; of kept blocks the last of those who keep them."""
        self._finished |= finished_req_ids
        sent: set[str] = set()
        for index, child in enumerate(self._children):
            reported = child.get_transfer_results(finished_req_ids)
            received = frozenset(req_id for req_id in reported.finished_recving | reported.failed_recving if self._ends(req_id, index))
            mine = frozenset(req_id for req_id in reported.finished_sending if self._lets_go(req_id, index))
            sent |= {req_id for req_id in mine if req_id not in self._keepers}
            self._results[index] = KVConnectorTransferResults(mine, received, reported.failed_recving & received)
        return KVConnectorTransferResults(
            frozenset(sent),
            frozenset().union(*(result.finished_recving for result in self._results)),
            frozenset().union(*(result.failed_recving for result in self._results)),
        )

    def bad_blocks(self) -> set[int]:
        """Blocks whose load failed, as named by those who have loaded them for a request that lives."""
        bad: set[int] = set()
        for index, child in enumerate(self._children):
            named = child.get_block_ids_with_load_errors()
            mine = {block for load in self._written.values() if load.child == index for block in load.block_ids} if named else set()
            if named - mine:
                self._drop(index, "load errors of blocks", sorted(named - mine))
            bad |= named & mine
        for req_id in list(self._finished):
            if req_id not in self._loads or self._loads[req_id].synchronous:
                self._finished.remove(req_id)
                self._written.pop(req_id, None)
        return bad

    def stats(self) -> dict[str, float]:
        """The children's counters, under their class names, and num_dropped_reports."""
        self._stats = [dict(child.get_kv_connector_stats()) for child in self._children]
        dropped, self._num_dropped = self._num_dropped, 0
        named = {
            f"{type(child).__name__}.{index}.{name}": value
            for index, (child, stats) in enumerate(zip(self._children, self._stats, strict=True))
            for name, value in stats.items()
        }
        return {**named, "num_dropped_reports": float(dropped)}

    def worker_meta(self) -> MultiWorkerMeta:
        """The report of the step."""
        reports = zip(self._results, self._children, self._stats, strict=True)
        return MultiWorkerMeta(tuple(ChildReport(results, child.build_connector_worker_meta(), stats) for results, child, stats in reports))

    def clear(self) -> None:
        """The step is over."""
        self._claimed = set()
        self.for_each(lambda child: child.clear_connector_metadata())

    def for_each(self, call: Callable[[KVConnector], None]) -> None:
        """Call all children."""
        for child in self._children:
            call(child)

    # ---- below

    def _await_claim(self, index: int, forward_context: ForwardContext, mine: Iterable[LoadPromise], ledger: Ledger) -> None:
        """The child's return is its claim: under FULL from start_load_kv, otherwise from wait_for_layer_load of each layer."""
        child, step = self._children[index], forward_context.step
        if forward_context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
            self._claimed.add(index)
        for layer, layer_name in enumerate(self._layer_names):
            transfers = [ledger.begin_transfer(step, promise.req_id, layer, promise.start, promise.stop) for promise in mine]
            if forward_context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
                child.wait_for_layer_load(layer_name)
            for transfer in transfers:
                ledger.end_transfer(transfer)

    def _owner(self, req_id: str) -> int | None:
        load = self._loads.get(req_id)
        return None if load is None else load.child

    def _ends(self, req_id: str, index: int) -> bool:
        """Whether this is the end of a load that belongs to the child; it is reported once."""
        if self._owner(req_id) != index:
            self._drop(index, "finished_recving of request", req_id)
            return False
        del self._loads[req_id]
        return True

    def _lets_go(self, req_id: str, index: int) -> bool:
        """Whether the child keeps the blocks of the request; it does so no longer."""
        keepers = self._keepers.get(req_id, set())
        if index not in keepers:
            self._drop(index, "finished_sending of request", req_id)
            return False
        keepers.remove(index)
        if not keepers:
            del self._keepers[req_id]
        return True

    def _drop(self, index: int, what: str, value: object) -> None:
        self._num_dropped += 1
        logger.warning("%s (child %d) reports %s %s, which is not its own; dropped", type(self._children[index]).__name__, index, what, value)
