"""Connectors whose loads never land by themselves: one that claims by returning, and one that reports to the ledger."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from interlock.core.buffer import Buffer
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.kv_transfer.connector import KVConnector
from interlock.kv_transfer.ledger import Ledger


@dataclass
class Loads:
    """offered: positions that every new prompt is promised. stubborn: they cannot be stopped. waiting: set when the step's thread waits, or
    is about to."""

    offered: int = 0
    stubborn: bool = False
    waiting: threading.Event = field(default_factory=threading.Event)
    transfers: list[tuple[Ledger, int]] = field(default_factory=list)

    def end(self) -> None:
        """All reads come to their end, without having landed."""
        for ledger, transfer in self.transfers:
            ledger.end_transfer(transfer, "given up")
        self.transfers.clear()


LOADS: list[Loads] = []  # the test's; connectors are made by name, so they find it here


class ClaimingConnector(KVConnector):
    """Without timelines: waits for ever in a way of its own, in `start_load_kv` under FULL, otherwise in its hook."""

    saves_layers = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loads = LOADS[-1]
        self.loading = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return max(0, min(self.loads.offered, request.num_prompt_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, *_: Any) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.loading = bool(kwargs["scheduler_output"].load_promises)
        if forward_context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
            self.wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.wait()

    def abort_loads(self, step: int) -> None:
        self.loading = self.loading and self.loads.stubborn

    def clear_connector_metadata(self) -> None:
        self.loading = False

    def wait(self) -> None:
        if self.loading:
            self.loads.waiting.set()
            while True:  # a signal that comes just before a wait in C begins does not end it
                time.sleep(0.01)

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class ReportingConnector(ClaimingConnector):
    """With timelines: begins transfers that end when they are stopped, and returns; the step waits at its gates, or at the ledger."""

    supports_timelines = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        ledger: Ledger = kwargs["ledger"]
        for promise in kwargs["scheduler_output"].load_promises:
            for layer in range(ledger.num_layers):
                transfer = ledger.begin_transfer(forward_context.step, promise.req_id, layer, promise.start, promise.stop)
                self.loads.transfers.append((ledger, transfer))
            self.loads.waiting.set()

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def abort_loads(self, step: int) -> None:
        self.loads.end()
