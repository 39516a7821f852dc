"""The ledger: what each step was promised, and what of it has landed.

Promises come from the scheduler, never from the transfers that happen to exist: a read that was never issued counts as not landed.
Transports report ends of transfers from any thread; the ledger alone says that a layer of a step has landed.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from interlock.core import interrupts
from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import Clock, MonotonicClock
from interlock.kv_transfer.promises import Piece, StepRecord, Transfer, Verdict

logger = logging.getLogger(__name__)

LayerLanded = Callable[[int, int, bool], None]


@dataclass(slots=True)
class LedgerCounters:
    """Reports that were dropped: ids never given out, ids that had ended, ids whose step gave up or is over."""

    unknown: int = 0
    duplicate: int = 0
    late: int = 0


class Ledger:
    """The promises of the open steps. All methods may be called from any thread.

    on_layer_landed(layer, step, error): called once per layer that a step was promised something of, when all of that has ended,
    in the order of the steps; it runs under the ledger's lock, so it must neither block nor call back.
    """

    def __init__(self, num_layers: int, block_size: int, clock: Clock | None = None, on_layer_landed: LayerLanded | None = None) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self.clock: Clock = clock or MonotonicClock()
        self.counters = LedgerCounters()
        self._on_layer_landed = on_layer_landed
        self._condition = threading.Condition(threading.RLock())
        self._steps: dict[int, StepRecord] = {}
        self._transfers: dict[int, Transfer] = {}
        self._next_transfer = 1
        self._last_step = -1

    # ---- the step's side

    def open_step(self, step: int, promises: Collection[LoadPromise], timeout: float) -> None:
        """Begin a step: everything in `promises` must land within `timeout` seconds. Stamps only grow."""
        with self._condition:
            if step <= self._last_step:
                raise KVTransferError(f"step {step} opened after step {self._last_step}; stamps of steps only grow")
            record = StepRecord(step, self.clock.now() + timeout, timeout, [[] for _ in range(self.num_layers)], [0] * self.num_layers)
            for promise in promises:
                self._add_promise(record, promise)
            self._last_step = step
            self._steps[step] = record
            for promise in promises:
                if promise.void is not None:
                    self.fail_promise(step, promise.req_id, promise.void)

    def wait_layer(self, step: int, layer: int) -> bool:
        """Wait until all that `step` was promised of `layer` has ended, or the deadline. True: all of it landed.

        At the deadline whatever is outstanding in the step is failed; that is never permission to use it.
        """
        return self._wait(step, range(layer, layer + 1))

    def wait_step(self, step: int) -> bool:
        """As `wait_layer`, for all layers."""
        return self._wait(step, range(self.num_layers))

    def expire(self, step: int, cause: str) -> None:
        """Give up: whatever of the step has not landed has failed; reports for it that come now are late."""
        with self._condition:
            self._expire(self._step(step), cause)

    def expire_if_due(self, step: int) -> bool:
        """`expire` the step if its deadline has passed and something is outstanding. Whether it has given up, now or before."""
        with self._condition:
            record = self._step(step)
            if self.clock.now() >= record.deadline:
                self._expire(record, record.timeout_cause)
            return record.expired

    def is_expired(self, step: int) -> bool:
        """Whether the step gave up on something at its deadline."""
        with self._condition:
            return self._step(step).expired

    def unfinished_block_ids(self, step: int) -> frozenset[int]:
        """Local blocks that a read of the step whose end has not been reported may still write."""
        with self._condition:
            unfinished = [t.piece.promise for t in self._transfers.values() if t.step == step and not t.ended]
            return frozenset(block for promise in unfinished for block in promise.block_ids)

    def has_promises(self, step: int) -> bool:
        """Whether the step was promised anything."""
        with self._condition:
            return bool(self._step(step).by_request)

    def close_step(self, step: int) -> Verdict:
        """End the step. What has not landed by now has failed."""
        with self._condition:
            record = self._step(step)
            self._expire(record, "it was never read")
            del self._steps[step]
            self._transfers = {i: t for i, t in self._transfers.items() if t.step != step}
            return record.verdict(self.block_size)

    def abandon_step(self, step: int) -> None:
        """End the step, if it is open, without a verdict: its forward failed."""
        with self._condition:
            if step in self._steps:
                self.close_step(step)

    # ---- the connector's side

    def begin_transfer(self, step: int, req_id: str, layer: int, start: int, stop: int) -> int:
        """A read of positions [start, stop) of one layer of a promise is about to be issued. Returns its transfer id, never used again.

        Ranges of one promise must not overlap. Raises KVTransferError when nothing like it was promised.
        """
        with self._condition:
            pieces = self._step(step).by_request.get(req_id)
            if pieces is None or not 0 <= layer < self.num_layers:
                raise KVTransferError(f"step {step} was promised nothing of request {req_id!r}, layer {layer}")
            piece = pieces[layer]
            piece.issue(start, stop)
            transfer_id = self._next_transfer
            self._next_transfer += 1
            self._transfers[transfer_id] = Transfer(step, piece, start, stop)
            return transfer_id

    def end_transfer(self, transfer_id: int, error: str | None = None) -> bool:
        """Report the end of a transfer: landed and confirmed, or failed with a cause. False: the report was dropped (and counted)."""
        with self._condition:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.ended:
                self._drop(transfer_id, transfer)
                return False
            record = self._steps[transfer.step]
            transfer.ended = True
            if transfer.piece.closed:
                self._drop(transfer_id, None)
                return False
            if error is None:
                transfer.piece.landed.append((transfer.start, transfer.stop))
            else:
                transfer.piece.cause = transfer.piece.cause or error
            transfer.piece.ended += transfer.stop - transfer.start
            self._settle(record, transfer.piece)
            return True

    def fail_promise(self, step: int, req_id: str, cause: str) -> None:
        """Nothing more will be read for this request in this step (its peer refused, its reference is void, …)."""
        with self._condition:
            record = self._step(step)
            for piece in record.by_request.get(req_id, ()):
                if not piece.closed:
                    piece.cause = piece.cause or cause
                    self._close(record, piece)

    # ---- on behalf of a connector that does not report

    def claim_layer(self, step: int, layer: int) -> None:
        """The connector's return is its claim that the layer has landed. A claim after the deadline is too late."""
        with self._condition:
            record = self._step(step)
            if self.clock.now() > record.deadline:
                self._expire(record, record.timeout_cause)
            for piece in record.by_layer[layer]:
                if not piece.closed:
                    piece.landed = [(piece.start, piece.stop)]
                    self._close(record, piece)

    def fail_layer(self, step: int, layer: int, cause: str) -> None:
        """Whatever the layer was promised must count as not landed, reports notwithstanding (its wait was never made)."""
        with self._condition:
            record = self._step(step)
            for piece in record.by_layer[layer]:
                piece.landed = []
                piece.cause = cause
                self._close(record, piece)

    def retract_blocks(self, step: int, block_ids: Iterable[int], cause: str) -> None:
        """The connector names local blocks whose load failed: their positions count as not landed, in every layer."""
        bad = set(block_ids)
        if not bad:
            return
        with self._condition:
            record = self._step(step)
            for piece in record.all_pieces():
                positions = [p for p in piece.block_positions(self.block_size) if p[0] in bad]
                if positions:
                    piece.cut(min(position for _, position in positions))
                    piece.cause = piece.cause or cause

    # ---- below: with the lock held

    def _add_promise(self, record: StepRecord, promise: LoadPromise) -> None:
        if not 0 <= promise.start <= promise.stop:
            raise KVTransferError(f"request {promise.req_id!r} was promised positions [{promise.start}, {promise.stop}), expected 0 <= start <= stop")
        if promise.start == promise.stop:
            return
        expected = (promise.stop - 1) // self.block_size - promise.start // self.block_size + 1
        if len(promise.block_ids) != expected:
            raise KVTransferError(
                f"request {promise.req_id!r}: positions [{promise.start}, {promise.stop}) lie in {expected} blocks of {self.block_size}, "
                f"the promise names {len(promise.block_ids)}"
            )
        if promise.req_id in record.by_request:
            raise KVTransferError(f"request {promise.req_id!r} has two load promises in step {record.step}, expected one")
        pieces = record.by_request[promise.req_id] = [Piece(promise, layer) for layer in range(self.num_layers)]
        for piece in pieces:
            record.by_layer[piece.layer].append(piece)
            record.open_pieces[piece.layer] += 1

    def _step(self, step: int) -> StepRecord:
        record = self._steps.get(step)
        if record is None:
            raise KVTransferError(f"step {step} is not open in the ledger; open steps: {sorted(self._steps)}")
        return record

    def _wait(self, step: int, layers: Sequence[int]) -> bool:
        with self._condition:
            record = self._step(step)
            record.awaited.append(layers)
            try:
                while record.is_open(layers):
                    if self.clock.now() >= record.deadline:
                        self._expire(record, record.timeout_cause)
                        break
                    self.clock.wait_until(self._condition, min(record.deadline, self.clock.now() + interrupts.SLICE_SECONDS))
                    interrupts.deliver()
            finally:
                record.awaited.remove(layers)
            return all(piece.complete for layer in layers for piece in record.by_layer[layer])

    def _expire(self, record: StepRecord, cause: str) -> None:
        for piece in record.all_pieces():
            if not piece.closed:
                record.expired = True
                piece.cause = piece.cause or cause
                self._close(record, piece)

    def _settle(self, record: StepRecord, piece: Piece) -> None:
        if piece.ended == piece.stop - piece.start:
            self._close(record, piece)

    def _close(self, record: StepRecord, piece: Piece) -> None:
        if piece.closed:
            return
        piece.closed = True
        record.open_pieces[piece.layer] -= 1
        if record.open_pieces[piece.layer] == 0:
            self._publish(piece.layer)
            if any(piece.layer in layers and not record.is_open(layers) for layers in record.awaited):
                self._condition.notify_all()  # not for every layer: a waiter that wakes takes the interpreter from the copy thread

    def _publish(self, layer: int) -> None:
        """Tell the callback of every step whose layer has ended, oldest first, up to the first that is still waiting."""
        for record in self._steps.values():
            if record.open_pieces[layer]:
                return
            if layer not in record.published and record.by_layer[layer]:
                record.published.add(layer)
                error = not all(piece.complete for piece in record.by_layer[layer])
                if self._on_layer_landed is not None:
                    self._on_layer_landed(layer, record.step, error)

    def _drop(self, transfer_id: int, transfer: Transfer | None) -> None:
        if transfer is not None:
            kind = "duplicate"
        elif 0 < transfer_id < self._next_transfer:
            kind = "late"
        else:
            kind = "unknown"
        setattr(self.counters, kind, getattr(self.counters, kind) + 1)
        logger.warning("dropped a %s report for transfer %d", kind, transfer_id)
