"""The memory between a model's ops: one arena, allocated once, shared by all programs, since only one runs at a time."""

from dataclasses import dataclass

from interlock.core.buffer import Buffer
from interlock.kernels import catalog
from interlock.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Activations, float32, for the largest step: rows for its tokens, or for the requests that sample.

    hidden `[tokens, hidden_size]`; qkv `[tokens, qkv_size]`; attended `[tokens, num_heads * head_dim]`; gate_up
    `[tokens, 2 * intermediate_size]`; activated `[tokens, intermediate_size]`; logits
    `[requests, vocab_size]`. scratch: `scratch_stride` bytes for each thread. partials: attention's states of `max_splits` splits.
    """

    hidden: Buffer
    qkv: Buffer
    attended: Buffer
    gate_up: Buffer
    activated: Buffer
    logits: Buffer
    scratch: Buffer
    scratch_stride: int
    partials: Buffer
    max_splits: int

    @classmethod
    def allocate(cls, config: ModelConfig, *, max_num_tokens: int, max_num_reqs: int, max_model_len: int, num_threads: int) -> "Workspace":
        """Allocate for steps of up to `max_num_tokens` tokens and `max_num_reqs` requests, zeroed and page by page on first use."""

        def rows(count: int, width: int) -> Buffer:
            return Buffer.zeros((count, width), "float32")

        stride = scratch_bytes(config)
        partials = catalog.attention_partials_bytes(max_num_reqs, config.num_heads, config.head_dim, max_model_len)
        return cls(
            hidden=rows(max_num_tokens, config.hidden_size),
            qkv=rows(max_num_tokens, config.qkv_size),
            attended=rows(max_num_tokens, config.q_size),
            gate_up=rows(max_num_tokens, 2 * config.intermediate_size),
            activated=rows(max_num_tokens, config.intermediate_size),
            logits=rows(max_num_reqs, config.vocab_size),
            scratch=Buffer.zeros((num_threads, stride), "uint8"),
            scratch_stride=stride,
            partials=Buffer.zeros((partials,), "uint8"),
            max_splits=catalog.attention_max_splits(max_model_len),
        )


def scratch_bytes(config: ModelConfig) -> int:
    """Scratch of one thread, for any kernel that the model launches."""
    widths = (config.hidden_size, config.q_size, config.intermediate_size)
    attention = catalog.attention_scratch_bytes(config.num_heads, config.num_kv_heads, config.head_dim)
    return max(attention, *(catalog.matmul_scratch_bytes(width) for width in widths))
