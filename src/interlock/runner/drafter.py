"""Drafting: what runs after sampling and writes KV of its own, before the step's KV is handed to the connector."""

from collections.abc import Sequence
from typing import Protocol

from interlock.core.buffer import Buffer
from interlock.graphs import timeline
from interlock.graphs.stream import Stream, raise_for_status
from interlock.graphs.timeline import Timelines
from interlock.kv_transfer.connector_step import KVStep
from interlock.kv_transfer.inert_lifecycle import InertKVStep
from interlock.runner.input_batch import PreparedBatch


class Drafter(Protocol):
    """Proposes tokens after those that a step has sampled. Its layers lie in the KV pool behind the model's and are transferred with them."""

    @property
    def num_layers(self) -> int:
        """Layers of KV that it keeps."""

    @property
    def identity(self) -> str:
        """What its KV depends on beside the model (its weights), as readable text: equal text, equal bits."""

    def bind(self, stream: Stream, kv_layers: Sequence[Buffer]) -> None:
        """Once: where it launches its kernels, and its layers, `[num_blocks, 2, num_kv_heads, block_size, head_dim]` each."""

    def propose(self, batch: PreparedBatch, sampled: dict[str, int]) -> None:
        """Launch the drafting of a step whose tokens are `sampled`, by request. The step's slot is bound; returns without waiting."""


class DraftStage:
    """A drafter's part of each step. layers: the indices of its layers in the pool."""

    def __init__(self, drafter: Drafter, stream: Stream, kv_layers: Sequence[Buffer], written: Timelines) -> None:
        self._layers = range(len(kv_layers) - drafter.num_layers, len(kv_layers))
        self._drafter = drafter
        self._stream = stream
        self._written = written
        drafter.bind(stream, [kv_layers[layer] for layer in self._layers])

    def run(self, kv: KVStep | InertKVStep, batch: PreparedBatch, sampled: dict[str, int]) -> None:
        """Draft, and wait for it: on return all KV of the step is written. Raises KernelError if one of its kernels reported a fault."""
        kv.wait_layers(self._layers)
        self._drafter.propose(batch, sampled)
        for layer in self._layers:
            self._stream.launch(timeline.signal(), self._written.signal_arguments(layer))
        self._stream.synchronize()
        raise_for_status(batch.slot.status_buffer)
