"""The KV pool of a rank: its size, its identity, its memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from interlock.core.buffer import ITEM_SIZES, Buffer, DType
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import ConfigError
from interlock.kv_transfer.transports.shared_memory import KVPool, allocate_pool
from interlock.models.config import ModelConfig
from interlock.models.registry import LoadedModel
from interlock.models.rope import rope_identity

KERNEL_VERSION = 2  # part of the KV identity: raise it when a kernel's results change by a single bit


def kv_dtype(config: EngineConfig) -> DType:
    """The element type of the pool: bfloat16 unless the options say otherwise."""
    return "bfloat16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def fit_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence: `max_model_len`, or what the model and the pool allow. Raises ConfigError if the given one does not fit."""
    capacity = _num_blocks(config, model) * config.block_size
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_position_embeddings, capacity)
    if wanted > model.max_position_embeddings:
        raise ConfigError(f"max_model_len is {wanted}, expected at most the model's {model.max_position_embeddings} positions")
    if wanted > capacity:
        raise ConfigError(
            f"max_model_len is {wanted}, but the KV pool of kv_cache_memory_bytes = {config.kv_cache_memory_bytes} holds {capacity} tokens; "
            f"raise it to {wanted * _bytes_per_token(config, model)} or lower max_model_len"
        )
    return wanted


def kv_cache_config(config: EngineConfig, model: ModelConfig, identity: str) -> KVCacheConfig:
    """The pool's shape. Raises ConfigError if the memory does not hold a single block."""
    return KVCacheConfig(
        num_blocks=_num_blocks(config, model),
        block_size=config.block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype(config),
        layer_names=tuple(f"model.layers.{index}.self_attn.attn" for index in range(model.num_layers)),
        identity=identity,
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """The pool's memory, layer outermost. `layers`: one buffer `[num_blocks, 2, num_kv_heads, block_size, head_dim]` each.
    `shared`: the shared segment that it lies in, if a connector may hand it to other processes."""

    layers: Sequence[Buffer]
    shared: KVPool | None

    @classmethod
    def allocate(cls, shape: KVCacheConfig, *, shared: bool) -> "KVCache":
        """Allocate the pool; private memory is touched page by page on first use, shared memory is prefaulted."""
        nbytes = shape.num_layers * shape.layer_bytes
        pool = allocate_pool(nbytes) if shared else None
        memory = Buffer.zeros((nbytes,), "uint8") if pool is None else pool.buffer
        layer = (shape.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        assert math.prod(layer) * ITEM_SIZES[shape.dtype] == shape.layer_bytes
        layers = [Buffer(memory.address + index * shape.layer_bytes, layer, shape.dtype, memory.owner) for index in range(shape.num_layers)]
        return cls(layers, pool)

    def close(self) -> None:
        """Give the shared segment back."""
        if self.shared is not None:
            self.shared.close()


def kv_identity(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> str:
    """What the KV of a token sequence depends on, as readable text: equal text, equal bits."""
    rope = rope_identity(loaded.config.rope, max_model_len)
    return f"weights={loaded.weights_digest[:32]} rope={rope} kv_dtype={kv_dtype(config)} kernels={KERNEL_VERSION}"


def _bytes_per_token(config: EngineConfig, model: ModelConfig) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * ITEM_SIZES[kv_dtype(config)]


def _num_blocks(config: EngineConfig, model: ModelConfig) -> int:
    block_bytes = _bytes_per_token(config, model) * config.block_size
    if config.kv_cache_memory_bytes < block_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, expected at least {block_bytes}, the size of one block of all layers"
        )
    return config.kv_cache_memory_bytes // block_bytes
