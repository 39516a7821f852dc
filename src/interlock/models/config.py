"""What a model is: the sizes and constants of one checkpoint, under the names of Hugging Face's config.json."""

from dataclasses import dataclass

from interlock.models.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model. `vocab_size` counts rows of the embedding table; a tokenizer may know fewer tokens.

    eos_token_ids: every token that ends a sequence, the tokenizer's own first; empty if the checkpoint names none. Ids beyond the
    vocabulary, which the model cannot produce, are left out, with a warning.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, or of all value heads, together."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys and values side by side."""
        return self.q_size + 2 * self.kv_size

    @property
    def numerics(self) -> str:
        """Everything beside the weights and the rotary table that a hidden state depends on, as canonical text."""
        sizes = (self.num_layers, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        return f"{self.architecture} {' '.join(map(str, sizes))} eps {self.rms_norm_eps!r}"
