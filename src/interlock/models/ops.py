"""The operations that models are written in: each packs the arguments of one or a few kernels and launches them on a stream.

Ops do not know whether the stream runs, captures pieces or captures a whole replay; that is the stream's matter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from interlock.core.buffer import Buffer, DType
from interlock.graphs import timeline
from interlock.graphs.stream import Stream
from interlock.graphs.timeline import Timelines
from interlock.kernels import catalog
from interlock.kernels.formats import PackedWeight
from interlock.kernels.native import Kernel
from interlock.kernels.slot import NUM_LOGITS, NUM_TOKENS
from interlock.models.config import ModelConfig
from interlock.models.layers import Embedding, GateUp, Linear, RMSNorm
from interlock.models.workspace import Workspace


class LayerHooks(Protocol):
    """What is called, on the Python thread, around each layer's attention; not called inside a FULL replay."""

    def before_layer(self, layer_index: int) -> None:
        """Called before the layer's keys and values are written."""

    def after_layer(self, layer_index: int) -> None:
        """Called after the layer's attention has been launched."""


class NoHooks:
    """Hooks of a step in which nobody waits."""

    def before_layer(self, layer_index: int) -> None:
        """Nothing."""

    def after_layer(self, layer_index: int) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class KVPool:
    """The paged cache that attention works on: one buffer `[num_blocks, 2, num_kv_heads, block_size, head_dim]` for each layer."""

    layers: Sequence[Buffer]

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer."""
        return self.layers[0].shape[0]

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        return self.layers[0].shape[3]

    @property
    def dtype(self) -> DType:
        """Element type of keys and values."""
        return self.layers[0].dtype


class Ops:
    """Operations of one model on one stream, KV pool and workspace. Activations are float32, one row for each live token of the step.

    rope_table: float32 `[max_model_len, rotary_dim]`. With `landed`, a gate stands before each layer's KV write, with `written` a
    signal after it: timelines with one word for each layer, for the ops that a FULL program is captured with.
    """

    def __init__(
        self,
        stream: Stream,
        config: ModelConfig,
        kv_layers: Sequence[Buffer],
        workspace: Workspace,
        rope_table: Buffer,
        *,
        hooks: LayerHooks | None = None,
        landed: Timelines | None = None,
        written: Timelines | None = None,
    ) -> None:
        self.workspace = workspace
        self._stream = stream
        self._config = config
        self._kv = KVPool(kv_layers)
        self._rope_table = rope_table
        self._hooks: LayerHooks = hooks or NoHooks()
        self._landed = landed
        self._written = written

    def embedding(self, embedding: Embedding, *, out: Buffer) -> None:
        """out `[tokens, hidden_size]`: the table's rows of the step's token ids."""
        weight = embedding.weight
        kernel = catalog.embedding(weight.fmt)
        self._stream.launch(kernel, kernel.pack(weight=weight.buffer, out=out, rows=NUM_TOKENS, vocab_size=weight.n, n=weight.k))

    def linear(
        self, x: Buffer, linear: Linear, *, out: Buffer, norm: RMSNorm | None = None, residual: Buffer | None = None, gather: bool = False
    ) -> None:
        """out `[rows, out_features]` = (residual or 0) + norm(x) @ W.T; residual may be out. With `gather` the rows are only those whose
        logits the step wants, in that order."""
        for first, weight in linear.parts:
            target, added = _columns(out, first), 0 if residual is None else _columns(residual, first)
            self._product(catalog.matmul(weight.fmt), x, weight, target, norm, added, gather)

    def gated_silu(self, x: Buffer, gate_up: GateUp, *, norm: RMSNorm, out: Buffer) -> None:
        """out `[tokens, intermediate_size]` = silu(norm(x) @ gate.T) * (norm(x) @ up.T)."""
        if gate_up.fused is not None:
            self._product(catalog.matmul_silu(gate_up.fused.fmt), x, gate_up.fused, out, norm)
            return
        assert gate_up.stacked is not None
        both = self.workspace.gate_up
        self.linear(x, gate_up.stacked, norm=norm, out=both)
        kernel = catalog.silu_mul()
        self._stream.launch(kernel, kernel.pack(gate_up=both, out=out, n=gate_up.intermediate_size, rows=NUM_TOKENS))

    def attention(self, layer_index: int, qkv: Buffer, *, out: Buffer) -> None:
        """out `[tokens, num_heads * head_dim]`: causal attention of the step's queries over their paged context.

        qkv `[tokens, qkv_size]`: queries are rotated in place; keys (rotated) and values go into the pool first, and are read from there.
        """
        self._stream.call(partial(self._hooks.before_layer, layer_index))
        if self._landed is not None:
            self._stream.launch(timeline.gate(), self._landed.gate_arguments(layer_index), barrier=False)
        self._rope_kv_write(layer_index, qkv)
        if self._written is not None:
            self._stream.launch(timeline.signal(), self._written.signal_arguments(layer_index), barrier=False)
        self._paged_attention(layer_index, qkv, out)
        self._stream.call(partial(self._hooks.after_layer, layer_index))

    def _rope_kv_write(self, layer_index: int, qkv: Buffer) -> None:
        kernel = catalog.rope_kv_write(self._kv.dtype)
        args = kernel.pack(
            qkv=qkv,
            rope_table=self._rope_table,
            kv_layer=self._kv.layers[layer_index],
            num_heads=self._config.num_heads,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            rotary_dim=self._config.rope.rotary_dim,
            block_size=self._kv.block_size,
            num_blocks=self._kv.num_blocks,
        )
        self._stream.launch(kernel, args)

    def _paged_attention(self, layer_index: int, qkv: Buffer, out: Buffer) -> None:
        config, work = self._config, self.workspace
        kernel = catalog.attention(self._kv.dtype, config.head_dim)
        args = kernel.pack(
            qkv=qkv,
            kv_layer=self._kv.layers[layer_index],
            out=out,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._kv.block_size,
            num_blocks=self._kv.num_blocks,
            scale=config.head_dim**-0.5,
            partials=work.partials,
            max_splits=work.max_splits,
            scratch=work.scratch,
            scratch_stride=work.scratch_stride,
        )
        self._stream.launch(kernel, args)
        merge = catalog.attention_merge(config.head_dim)
        merge_args = merge.pack(out=out, num_heads=config.num_heads, head_dim=config.head_dim, partials=work.partials, max_splits=work.max_splits)
        self._stream.launch(merge, merge_args)

    def _product(
        self, kernel: Kernel, x: Buffer, weight: PackedWeight, out: Buffer, norm: RMSNorm | None, residual: Buffer | int = 0, gather: bool = False
    ) -> None:
        args = kernel.pack(
            x=x,
            x_stride=4 * x.shape[1],
            weight=weight.buffer,
            out=out,
            out_stride=4 * out.shape[1],
            residual=residual,
            rows=NUM_LOGITS if gather else NUM_TOKENS,
            n=weight.n,
            k=weight.k,
            scratch=self.workspace.scratch,
            scratch_stride=self.workspace.scratch_stride,
            norm=norm.weight if norm else 0,
            norm_eps=norm.eps if norm else 0.0,
            gather=int(gather),
        )
        self._stream.launch(kernel, args)


def kernels(config: ModelConfig, embedding: Embedding, linears: Iterable[Linear], gate_ups: Iterable[GateUp], kv_dtype: DType) -> tuple[Kernel, ...]:
    """The kernels that these ops launch for the given weights, each once."""
    found = [
        catalog.embedding(embedding.weight.fmt),
        catalog.rope_kv_write(kv_dtype),
        catalog.attention(kv_dtype, config.head_dim),
        catalog.attention_merge(config.head_dim),
    ]
    gate_ups = list(gate_ups)
    stacked = [gate_up.stacked for gate_up in gate_ups if gate_up.stacked is not None]
    found += [catalog.matmul(weight.fmt) for linear in (*linears, *stacked) for _, weight in linear.parts]
    found += [catalog.matmul_silu(gate_up.fused.fmt) for gate_up in gate_ups if gate_up.fused is not None]
    found += [catalog.silu_mul()] if stacked else []
    return tuple({kernel.name: kernel for kernel in found}.values())


def _columns(matrix: Buffer, first: int) -> Buffer:
    """The matrix from column `first` on; rows keep their distance."""
    return matrix if first == 0 else Buffer(matrix.address + 4 * first, matrix.shape, matrix.dtype, matrix.owner)
