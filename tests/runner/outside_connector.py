"""A connector as an author outside the project would write it: a Python thread does the reads; under FULL all are awaited in
`start_load_kv`, otherwise each layer in `wait_for_layer_load`. The remote side is a dictionary, and the test decides when bytes arrive."""

import threading
from collections.abc import Mapping
from typing import Any

from interlock.core.buffer import Buffer
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.kv_transfer.connector import KVConnector


class Remote:
    """The far side. pages: per layer, what each loaded block must hold. `land` lets the reads of a layer go through."""

    def __init__(self, num_layers: int) -> None:
        self.pages: list[dict[int, Any]] = [{} for _ in range(num_layers)]
        self.may_land = [threading.Event() for _ in range(num_layers)]
        self.started = threading.Event()
        self.waiting_for: list[str] = []
        self.reached = [threading.Event() for _ in range(num_layers)]
        self.modes: list[CUDAGraphMode] = []
        self.arguments: list[frozenset[str]] = []
        self.calls: list[str] = []

    def land(self, *layers: int) -> None:
        for layer in layers:
            self.may_land[layer].set()

    def land_all(self) -> None:
        self.land(*range(len(self.may_land)))


REMOTE: list[Remote] = []  # the test's remote; connectors are made by name, so they find it here


class OutsideConnector(KVConnector):
    """Honest: what it returns from has landed."""

    sees_context = True
    saves_layers = False

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        self.names = list(kv_caches)
        self.layers = list(kv_caches.values())
        self.remote = REMOTE[-1]
        self.done = [threading.Event() for _ in self.layers]
        self.reader: threading.Thread | None = None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        mode = forward_context.cudagraph_runtime_mode if self.sees_context else CUDAGraphMode.NONE
        self.remote.modes.append(mode)
        self.remote.arguments.append(frozenset(kwargs))
        if not kwargs["scheduler_output"].load_promises:
            return
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.remote.started.set()
        if mode is CUDAGraphMode.FULL:
            for done in self.done:
                done.wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.remote.calls.append(layer_name)
        if self.reader is not None:
            layer = self.names.index(layer_name)
            self.remote.reached[layer].set()
            self.done[layer].wait()

    def _read(self) -> None:
        for layer, (pages, may_land, done) in enumerate(zip(self.remote.pages, self.remote.may_land, self.done, strict=True)):
            may_land.wait()
            target = self.layers[layer].numpy()
            for block, page in pages.items():
                for positions, value in page:
                    target[block, :, :, positions] = value
            self._landed(layer)
            done.set()

    def _landed(self, layer: int) -> None:
        """Nobody is told; who waits for the layer sees its event."""

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        self.remote.calls.append(f"save {layer_name}")

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None


class BlindConnector(OutsideConnector):
    """The negative control: the forward context is withheld from it, so that it counts on a per-layer wait that a replay never makes."""

    sees_context = False


class ForgetfulConnector(OutsideConnector):
    """Reports through the ledger, and never issues its reads."""

    supports_timelines = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.remote.modes.append(forward_context.cudagraph_runtime_mode)
        if kwargs["scheduler_output"].load_promises:
            self.remote.started.set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass


class StallingConnector(ForgetfulConnector):
    """Issues every read in the ledger, and none of them ever ends."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        output, ledger = kwargs["scheduler_output"], kwargs["ledger"]
        for promise in output.load_promises:
            for layer in range(len(self.layers)):
                ledger.begin_transfer(output.step, promise.req_id, layer, promise.start, promise.stop)


class GatedConnector(OutsideConnector):
    """Reports each layer's read to the ledger from a thread of its own, so that a FULL replay can wait for it at its gates."""

    supports_timelines = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.remote.modes.append(forward_context.cudagraph_runtime_mode)
        output, self.ledger = kwargs["scheduler_output"], kwargs["ledger"]
        if not output.load_promises:
            return
        self.transfers = [
            [self.ledger.begin_transfer(output.step, promise.req_id, layer, promise.start, promise.stop) for promise in output.load_promises]
            for layer in range(len(self.layers))
        ]
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.remote.started.set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def _landed(self, layer: int) -> None:
        for transfer in self.transfers[layer]:
            self.ledger.end_transfer(transfer)


class FailingGatedConnector(GatedConnector):
    """The read of the last layer fails, after it has written something."""

    def _landed(self, layer: int) -> None:
        for transfer in self.transfers[layer]:
            self.ledger.end_transfer(transfer, "the peer is gone" if layer == len(self.layers) - 1 else None)
