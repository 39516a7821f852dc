"""A drafter that keeps one layer of KV and writes it late, and a connector that publishes in the step that wrote."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import held_kernels
import outside_connector

from interlock.core.buffer import Buffer
from interlock.core.forward_context import ForwardContext
from interlock.graphs.stream import Stream
from interlock.kv_transfer.connector import KVConnector
from interlock.runner.input_batch import PreparedBatch

GARBAGE = 0x4E80  # bfloat16: a large finite number


class StandInDrafter:
    """Writes each token's id into its layer at the token's position, on the stream, once `may_draft` is not 0; and, at once, GARBAGE behind
    the last position of each request, as drafts that are rejected later leave it."""

    num_layers = 1
    identity = "stand-in"

    def __init__(self, *, held: bool = False) -> None:
        self.may_draft = Buffer.zeros((1,), "int64")
        self.drafting = threading.Event()
        self.landed: list[bool] = []
        if not held:
            self.release()

    def release(self) -> None:
        self.may_draft.numpy()[0] = 1

    def bind(self, stream: Stream, kv_layers: Sequence[Buffer]) -> None:
        self.stream, (self.layer,) = stream, kv_layers

    def propose(self, batch: PreparedBatch, sampled: dict[str, int]) -> None:
        if outside_connector.REMOTE:
            self.landed.append(outside_connector.REMOTE[-1].may_land[-1].is_set())
        _, two, heads, block_size, head_dim = self.layer.shape
        hold, write = held_kernels.hold_kernel(), held_kernels.draft_write_kernel()
        self.stream.launch(hold, hold.pack(word=self.may_draft))
        args = write.pack(kv_layer=self.layer, planes=two * heads, block_size=block_size, page_words=head_dim // 4)
        self.stream.launch(write, args)
        metadata, layer = batch.attn_metadata, self.layer.numpy()
        for table, length in zip(metadata.block_table, metadata.seq_lens, strict=True):
            if length % block_size:
                layer[table[length // block_size], :, :, length % block_size :] = GARBAGE
        self.drafting.set()


class PublishingConnector(KVConnector):
    """Publishes the step's blocks at the end of the step: a copy of each, per layer. Notes its calls."""

    saves_layers = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        MADE.append(self)
        self.calls: list[str] = []
        self.published: list[dict[int, Any]] = []
        self.sent: set[str] = set()
        self.blocks: set[int] = set()
        self.ended: list[tuple[int, int]] = []
        self.on_load: Callable[[ForwardContext], None] = lambda forward_context: None

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        self.names = list(kv_caches)
        self.layers = [buffer.numpy() for buffer in kv_caches.values()]
        self.published = [{} for _ in self.layers]

    def reset_capture_state(self) -> None:
        self.calls.append("reset_capture_state")

    def handle_preemptions(self, connector_metadata: Any) -> None:
        self.calls.append(f"handle_preemptions, metadata {self.has_connector_metadata()}")

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata or "metadata")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.calls.append(f"start_load_kv, metadata {self.has_connector_metadata()}")
        self.on_load(forward_context)
        metadata, size = kwargs["attn_metadata"], self.layers[0].shape[3]
        lengths = [] if metadata is None else zip(metadata.block_table, metadata.seq_lens, strict=True)
        self.blocks = {int(block) for table, length in lengths for block in table[: -(-int(length) // size)]}

    def finish_forward(self) -> None:
        self.calls.append("finish_forward")

    def wait_for_save(self) -> None:
        self.calls.append("wait_for_save")
        for layer, published in zip(self.layers, self.published, strict=True):
            published.update({block: layer[block].copy() for block in self.blocks})

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, self.sent = self.sent, set()
        return sent, None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.calls.append("clear")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"wait {self.names.index(layer_name)}")

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        self.ended.append((request.num_computed_tokens, request.num_published_blocks))
        return False, None


MADE: list[PublishingConnector] = []  # connectors are made by name, so the test finds them here
