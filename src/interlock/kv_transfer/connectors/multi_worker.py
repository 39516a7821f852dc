"""The worker half of the multi connector: drives the children through a step, and lets each report only on what is its own."""

import dataclasses
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from interlock.core import interrupts
from interlock.core.errors import KVTransferError
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.core.step import LoadPromise
from interlock.kv_transfer.connector import KVConnector, KVConnectorTransferResults, may_wait
from interlock.kv_transfer.connectors.multi_calls import ask, call_all, describe
from interlock.kv_transfer.connectors.multi_messages import ChildReport, LostMetadata, MultiMetadata, MultiWorkerMeta, OwnedLoad
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.transports.repeats import FirstWarnings

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
        self._ordered: tuple[OwnedLoad, ...] = ()
        self._finished: set[str] = set()
        self._lost: dict[int, str] = {}
        self._owing: set[int] = set()
        self._late: set[int] = set()
        self._claimed: set[int] = set()
        self._stops: dict[int, Callable[[str], None]] = {}
        self._keepers: dict[str, set[int]] = {}
        self._results: list[KVConnectorTransferResults] = [KVConnectorTransferResults()] * len(children)
        self._stats: list[Mapping[str, float]] = [{}] * len(children)
        self._num_dropped = 0
        self._warnings = FirstWarnings(logger)

    # ---- a step

    def bind(self, metadata: MultiMetadata) -> None:
        """Each child gets its own metadata; note whose loads begin and who keeps what. A child that has none, or raises, has no part in the step
        but to report."""
        for load in metadata.loads:
            self._loads[load.req_id] = self._written[load.req_id] = load
            self._loads.move_to_end(load.req_id)
        while len(self._loads) > _REMEMBERED_LOADS:
            self._loads.popitem(last=False)
        for req_id, keepers in metadata.keepers:
            self._keepers[req_id] = set(keepers)
        for index, (child, meta) in enumerate(zip(self._children, metadata.children, strict=True)):
            if isinstance(meta, LostMetadata):
                self._lost[index] = meta.cause
                continue
            try:
                child.bind_connector_metadata(meta)
            except Exception as error:
                self._lost[index] = describe(child, "bind_connector_metadata", error)
                logger.exception("%s (child %d); its loads and saves of this step count as failed", self._lost[index], index)
        self._ordered = metadata.loads
        self._owing |= {load.child for load in metadata.loads if load.child in self._lost}

    def start_loads(self, forward_context: ForwardContext, arguments: Mapping[str, Any]) -> None:
        """Start each child's loads: first of those that return at once. What a child raises costs its own loads only, if these end with the
        step. Raises KVTransferError in the end for orders that a child has not taken and may take yet: all loads of the step are then void."""
        output, ledger, step = arguments["scheduler_output"], arguments["ledger"], forward_context.step
        order = sorted(range(len(self._children)), key=lambda index: not self._children[index].supports_timelines)
        causes = []
        for index in order:
            mine = tuple(promise for promise in output.load_promises if self._owner(promise.req_id) == index)
            if index in self._lost:
                _fail(ledger, step, mine, self._lost[index])
                causes += [self._lost[index]] if index in self._owing else []
                continue
            self._claimed.discard(index)  # by a hook before this: it has said nothing of what it begins now
            claims = self._claims(index, step, mine, ledger)
            self._stops[index] = partial(self._stop, index, step, mine, claims, ledger)
            try:
                with may_wait(self._children[index]):
                    share = dataclasses.replace(output, load_promises=mine)
                    self._children[index].start_load_kv(forward_context, **{**arguments, "scheduler_output": share})
                self._late |= self._owing & {index}
                self._owing.discard(index)
                self._await_claims(index, forward_context, claims, ledger)
            except Exception as error:
                if interrupts.caused(error):
                    raise
                self._has_failed(index, error)
                if any(load.child == index and not load.synchronous for load in self._ordered):
                    self._owing.add(index)
                if index in self._owing:
                    causes.append(describe(self._children[index], "start_load_kv", error))
        if causes:
            raise KVTransferError("; ".join(causes))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Ask every child that has not said so already. What a child raises costs its own loads only; but KVTransferError is raised in the end
        if it may have begun, with this step, what was ordered before."""
        causes = []
        for index, child in enumerate(self._children):
            if index not in self._claimed and index not in self._lost:
                try:
                    with may_wait(child):
                        child.wait_for_layer_load(layer_name)
                except Exception as error:
                    if interrupts.caused(error):
                        raise
                    self._has_failed(index, error)
                    if index in self._late:
                        self._owing.add(index)
                        causes.append(describe(child, "wait_for_layer_load", error))
        if causes:
            raise KVTransferError("; ".join(causes))

    def results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        """The children's results: of loads those of their owner, once; of kept blocks the last of those who keep them."""
        self._finished |= finished_req_ids
        sent: set[str] = set()
        for index, child in enumerate(self._children):
            reported = ask(child, partial(child.get_transfer_results, finished_req_ids), KVConnectorTransferResults())
            received = frozenset(req_id for req_id in reported.finished_recving | reported.failed_recving if self._ends(req_id, index))
            mine = frozenset(req_id for req_id in reported.finished_sending if self._lets_go(req_id, index))
            sent |= {req_id for req_id in mine if req_id not in self._keepers}
            errors = {req_id: error for req_id, error in reported.recving_errors.items() if req_id in received}
            self._results[index] = KVConnectorTransferResults(mine, received, reported.failed_recving & received, errors)
        return KVConnectorTransferResults(
            frozenset(sent),
            frozenset().union(*(result.finished_recving for result in self._results)),
            frozenset().union(*(result.failed_recving for result in self._results)),
            {req_id: error for result in self._results for req_id, error in result.recving_errors.items()},
        )

    def bad_blocks(self) -> set[int]:
        """Blocks whose load failed, as named by those who have loaded them for a request that lives; all of these, if they cannot say."""
        bad: set[int] = set()
        for index, child in enumerate(self._children):
            named = ask(child, partial(_named_blocks, child), None)
            if named == set():
                continue
            mine = {block for load in self._written.values() if load.child == index for block in load.block_ids}
            not_mine = {name for name in named or () if name not in mine or isinstance(name, bool)}
            if not_mine:
                self._drop(index, "load errors of blocks", sorted(map(repr, not_mine)), kind="blocks")
            bad |= mine if named is None else named - not_mine
        for req_id in list(self._finished):
            if req_id not in self._loads or self._loads[req_id].synchronous:
                self._finished.remove(req_id)
                self._written.pop(req_id, None)
        return bad

    def stats(self) -> dict[str, float]:
        """The children's counters, under their class names, and num_dropped_reports."""
        none: Mapping[str, float] = {}
        self._stats = [dict(ask(child, child.get_kv_connector_stats, none)) for child in self._children]
        dropped, self._num_dropped = self._num_dropped, 0
        named = {
            f"{type(child).__name__}.{index}.{name}": value
            for index, (child, stats) in enumerate(zip(self._children, self._stats, strict=True))
            for name, value in stats.items()
        }
        return {**named, "num_dropped_reports": float(dropped)}

    def worker_meta(self) -> MultiWorkerMeta:
        """The report of the step."""
        metas = [ask(child, child.build_connector_worker_meta, None) for child in self._children]
        return MultiWorkerMeta(tuple(map(ChildReport, self._results, metas, self._stats)))

    def clear(self) -> None:
        """The step is over."""
        self._claimed = set()
        self._stops = {}
        self._lost = {}
        self._late = set()
        self.for_each(lambda child: child.clear_connector_metadata())

    def for_each(self, call: Callable[[KVConnector], None]) -> None:
        """Call all children that have part in the step. See `call_all`."""
        call_all((child for index, child in enumerate(self._children) if index not in self._lost), call)

    # ---- below

    def _claims(self, index: int, step: int, mine: Iterable[LoadPromise], ledger: Ledger) -> list[list[int]]:
        """Enter what a child is about to load that does not report to the ledger itself: per layer, the transfers."""
        if not self._uses_ledger or self._children[index].supports_timelines:
            return []
        layers = range(len(self._layer_names))
        return [[ledger.begin_transfer(step, promise.req_id, layer, promise.start, promise.stop) for promise in mine] for layer in layers]

    def _await_claims(self, index: int, forward_context: ForwardContext, claims: list[list[int]], ledger: Ledger) -> None:
        """The child's return is its claim: under FULL from start_load_kv, otherwise from wait_for_layer_load of each layer."""
        child, asks = self._children[index], forward_context.cudagraph_runtime_mode is not CUDAGraphMode.FULL
        if not any(claims):
            return
        if asks:
            self._claimed.add(index)
        for layer_name, transfers in zip(self._layer_names, claims, strict=True):
            if asks:
                with may_wait(child):
                    child.wait_for_layer_load(layer_name)
            while transfers:
                ledger.end_transfer(transfers.pop())

    def _has_failed(self, index: int, error: Exception) -> None:
        """The child has raised while it loaded: whatever of its loads of this step has not landed has failed, and it is asked no more."""
        logger.error("%s (child %d) raised while it loaded; its loads of this step count as failed", self._name(index), index, exc_info=error)
        self._claimed.add(index)
        if index in self._stops:
            self._stops[index](_cause(error))

    def _stop(self, index: int, step: int, mine: tuple[LoadPromise, ...], claims: list[list[int]], ledger: Ledger, cause: str) -> None:
        """End the child's loads of the step, which have failed: they must not write blocks that are about to be given back. If the child
        cannot stop them, their transfers stay open, so that these blocks wait; without a ledger to say so, what it raises is raised."""
        try:
            if mine:
                with may_wait(self._children[index]):
                    self._children[index].abort_loads(step)
        except Exception as error:
            if interrupts.caused(error) or not self._uses_ledger:
                raise
            logger.exception("%s (child %d); the blocks of its loads of step %d stay quarantined", self._name(index), index, step)
        else:
            for transfer in itertools.chain(*claims):
                ledger.end_transfer(transfer, cause)
        _fail(ledger, step, mine, cause)

    def _name(self, index: int) -> str:
        return type(self._children[index]).__name__

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

    def _drop(self, index: int, what: str, value: object, kind: str | None = None) -> None:
        self._num_dropped += 1
        message = f"{self._name(index)} (child {index}) reports {what} {value}, which is not its own; dropped"
        self._warnings.warn(message, kind and f"{index} {kind}")


def _fail(ledger: Ledger, step: int, promises: Iterable[LoadPromise], cause: str) -> None:
    for promise in promises:
        ledger.fail_promise(step, promise.req_id, cause)


def _named_blocks(child: KVConnector) -> set[Any]:
    return set(child.get_block_ids_with_load_errors() or ())


def _cause(error: Exception) -> str:
    return f"the connector raised {type(error).__name__}: {error}"
