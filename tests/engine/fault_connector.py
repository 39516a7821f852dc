"""A connector that loads from the shelf on a thread of its own, layer by layer, and does to its loads what a fault plan says."""

import threading
from collections import deque
from typing import Any

from shelf_connector import POISON, ShelfConnector

from interlock.core.forward_context import ForwardContext

LOSSLESS = ("none", "delay", "reorder", "duplicate")
LOSING = ("drop", "error", "late", "die")
FAULTS: deque[str] = deque()  # one entry per load, in order; no entry is no fault


class FaultyConnector(ShelfConnector):
    """Faults of one load:

    delay: each layer takes a while. reorder: layers land last to first. duplicate: each end is reported twice, and ends of transfers
    that never were. drop: the last layer is read, and nobody is told. error: the last layer's read fails after it has written something.
    late: the last layer's end is reported after the step has given up. die: the reading thread ends after the first layer.
    """

    supports_timelines = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.readers: list[threading.Thread] = []
        self.open: list[tuple[Any, int]] = []
        self.late: list[tuple[str, int]] = []
        self.given_up = threading.Event()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders, ledger = self._get_connector_metadata(), kwargs["ledger"]
        self._report_late(ledger)
        self.given_up = threading.Event()
        for req_id, (block_ids, start, stop) in orders.loads.items():
            self.shelf.num_loads += 1
            transfers = [ledger.begin_transfer(forward_context.step, req_id, layer, start, stop) for layer in range(len(self.layers))]
            tokens = orders.saves[f"tokens {req_id}"][1]
            self.open += [(ledger, transfer) for transfer in transfers]
            fault = FAULTS.popleft() if FAULTS else "none"
            arguments = (req_id, ledger, transfers, block_ids, start, stop, tokens, fault, self.given_up)
            self.readers.append(threading.Thread(target=self._read, args=arguments, daemon=True))
            self.readers[-1].start()

    def abort_loads(self, step: int) -> None:
        """The readers have ended, so every transfer has, except those whose end comes late."""
        self.given_up.set()
        for reader in self.readers:
            reader.join()
        self.readers.clear()
        for ledger, transfer in self.open:
            if transfer not in [late for _, late in self.late]:
                ledger.end_transfer(transfer, "it was given up")
        self.open.clear()

    def shutdown(self) -> None:
        self.abort_loads(0)

    def _read(
        self, req_id: str, ledger: Any, transfers: list[int], block_ids: Any, start: int, stop: int, tokens: Any, fault: str, given_up: Any
    ) -> None:
        source = next(kv for entry, kv in self.shelf.entries.items() if entry[:stop] == tokens[:stop])
        last = len(transfers) - 1
        order = range(last, -1, -1) if fault == "reorder" else range(last + 1)
        for number, layer in enumerate(order):
            if fault == "die" and number == 1:
                return
            if fault == "delay":
                given_up.wait(0.02)
            lost = layer == last and fault in LOSING
            for position in range(start, stop):
                page = self.layers[layer][block_ids[position // self.block_size]]
                page[:, :, position % self.block_size] = POISON if lost and fault == "error" and position > start else source[layer][position]
            if lost and fault == "late":
                self.late.append((req_id, transfers[layer]))
            elif not (lost and fault == "drop"):
                ledger.end_transfer(transfers[layer], "the far side is broken" if lost and fault == "error" else None)
            if fault == "duplicate":
                ledger.end_transfer(transfers[layer])
                ledger.end_transfer(transfers[layer] + 10_000)

    def _report_late(self, ledger: Any) -> None:
        """The step that these belong to is over; the blocks that they could have written are held until now."""
        for req_id, transfer in self.late:
            ledger.end_transfer(transfer)
            self.loaded.add(req_id)
        self.late.clear()
