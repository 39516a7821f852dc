"""GGUF files of the Llama architecture: metadata → ModelConfig, tensors under Hugging Face's names.

llama.cpp's converter reorders the rows of the query and key projections so that rotation acts on neighbouring pairs; such tensors are
marked here and read back in half-split order.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from interlock.core.errors import CheckpointError
from interlock.models.checkpoints.checkpoint import Checkpoint, TensorInfo, is_finite_number, raise_faults, refuse
from interlock.models.checkpoints.gguf_file import GGUFFile, read_gguf
from interlock.models.checkpoints.hf_config import check_heads, rope_parameters
from interlock.models.config import ModelConfig
from interlock.models.gguf_tokenizer import load_gguf_tokenizer
from interlock.models.rope import RopeConfig, RopeParameter

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM"}

_NAMES: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROPE_FREQS: Final = "rope_freqs.weight"

# Hyperparameters under the architecture's prefix whose presence changes nothing that is computed here, or that are read here.
_KNOWN_KEYS: Final = frozenset(
    {
        "block_count",
        "context_length",
        "vocab_size",
        "expert_count",
        "expert_used_count",
        "embedding_length",
        "feed_forward_length",
        *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon")),
        *(f"rope.{key}" for key in ("dimension_count", "freq_base", "scale_linear")),
        *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned", "attn_factor")),
        *(f"rope.scaling.yarn_{key}" for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
    }
)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Raises CheckpointError."""
    file = read_gguf(path)
    metadata = file.metadata
    if metadata.get("split.count", 1) not in (0, 1):
        raise refuse(path, "split.count", metadata["split.count"], "1; join the parts with llama-gguf-split --merge")
    if metadata.get("general.type", "model") != "model":
        raise refuse(path, "general.type", metadata["general.type"], "model")
    config = _model_config(file)
    tokenizer = load_gguf_tokenizer(path, metadata, config.eos_token_ids)
    return Checkpoint(path, config, _rename_all(file, config), tokenizer)


def _rename_all(file: GGUFFile, config: ModelConfig) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    faults = []
    for info in file.tensors.values():
        renamed = _rename(info, config)
        if renamed.name in tensors:
            faults.append(f"duplicate: {info.source_name} and {tensors[renamed.name].source_name} are the same parameter")
        if info.source_name != _ROPE_FREQS:
            tensors[renamed.name] = renamed
    raise_faults(file.path, "names parameters twice", faults)
    return tensors


def _rename(info: TensorInfo, config: ModelConfig) -> TensorInfo:
    match = _LAYER_TENSOR.fullmatch(info.source_name)
    if match and match[2] in _LAYER_NAMES:
        name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(match[2], 0)
    else:
        name, heads = _NAMES.get(info.source_name, info.source_name), 0
    return replace(info, name=name, interleaved_heads=heads)


def _model_config(file: GGUFFile) -> ModelConfig:
    path, metadata = file.path, file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise refuse(path, "general.architecture", architecture, ", ".join(ARCHITECTURES))
    values = _Values(path, metadata, architecture)
    unknown = [key for key in metadata if key.startswith(f"{architecture}.") and key.removeprefix(f"{architecture}.") not in _KNOWN_KEYS]
    raise_faults(path, "has hyperparameters that are not supported", [f"unknown: {key} = {metadata[key]!r}" for key in unknown])
    if values.integer("expert_count", 0):
        raise refuse(path, f"{architecture}.expert_count", metadata[f"{architecture}.expert_count"], "0 (dense models)")
    hidden_size, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    if "attention.key_length" not in values and hidden_size % num_heads:
        raise CheckpointError(
            f"{path}: embedding_length {hidden_size} is not a multiple of head_count {num_heads}, and no attention.key_length is stated"
        )
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise refuse(path, f"{architecture}.attention.value_length", values.integer("attention.value_length"), f"the key length, {head_dim}")
    num_kv_heads = values.integer("attention.head_count_kv", num_heads)
    check_heads(path, num_heads, num_kv_heads, head_dim)
    return ModelConfig(
        architecture=ARCHITECTURES[architecture],
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, values, head_dim),
        max_position_embeddings=values.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=_token_id(path, metadata, "bos"),
        eos_token_ids=_eos_token_ids(path, metadata),
    )


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: has no tensor token_embd.weight; check that it is a complete model")
    return embedding.shape[0]


def _eos_token_ids(path: Path, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [_token_id(path, metadata, name) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _token_id(path: Path, metadata: Mapping[str, Any], name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise refuse(path, key, value, "a token id")
    return value


def _rope(file: GGUFFile, values: "_Values", head_dim: int) -> RopeConfig:
    path = file.path
    if values.integer("rope.dimension_count", head_dim) != head_dim:
        raise refuse(
            path, "rope.dimension_count", values.integer("rope.dimension_count"), f"the head dimension, {head_dim} (whole heads are rotated)"
        )
    kind, parameters = _rope_scaling(path, values)
    divisors = _rope_divisors(file, head_dim)
    if divisors and kind not in ("default", "linear"):
        raise refuse(path, "rope.scaling.type", kind, f"none or linear together with the tensor {_ROPE_FREQS}")
    theta = values.number("rope.freq_base", 10000.0)
    if theta <= 1:
        raise refuse(path, "rope.freq_base", theta, "a number above 1")
    return RopeConfig(
        kind=kind,
        theta=theta,
        rotary_dim=head_dim,
        max_position_embeddings=values.integer("context_length"),
        parameters=rope_parameters(path, kind, parameters, head_dim),
        frequency_divisors=divisors,
    )


def _rope_scaling(path: Path, values: "_Values") -> tuple[str, dict[str, RopeParameter]]:
    """`rope.scaling.*`, with llama.cpp's meaning, as a kind and its parameters."""
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    scaling = values.get("rope.scaling.type")
    if scaling is None:
        scaling = "linear" if factor != 1.0 else "none"
    if scaling not in ("none", "linear", "yarn"):
        raise refuse(path, "rope.scaling.type", scaling, "none, linear, yarn")
    attention_factor = values.number("rope.scaling.attn_factor", 1.0) * values.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention_factor != 1.0 and scaling != "yarn":
        raise refuse(path, "rope.scaling.attn_factor", attention_factor, "1 unless rope.scaling.type is yarn")
    if scaling == "none":
        return "default", {}
    if scaling == "linear":
        return "linear", {"factor": factor}
    if values.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise refuse(path, "rope.scaling.yarn_ext_factor", values.get("rope.scaling.yarn_ext_factor"), "1")
    return "yarn", {
        "factor": factor,
        "original_max_position_embeddings": values.integer("rope.scaling.original_context_length", values.integer("context_length")),
        "attention_factor": attention_factor * (1 + 0.1 * math.log(factor)),
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _rope_divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    info = file.tensors.get(_ROPE_FREQS)
    if info is None:
        return ()
    if info.shape != (head_dim // 2,) or info.fmt != "float32":
        raise CheckpointError(f"{file.path}: tensor {_ROPE_FREQS} is {info.fmt} {list(info.shape)}, expected float32 [{head_dim // 2}]")
    divisors = tuple(map(float, info.rows().view(np.float32)[0]))
    if not all(is_finite_number(value) and value > 0 for value in divisors):
        raise CheckpointError(f"{file.path}: tensor {_ROPE_FREQS} holds values that are not finite and above 0; the file is damaged")
    return divisors


class _Values:
    """Typed access to the hyperparameters of one architecture."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self._path = path
        self._metadata = metadata
        self._prefix = f"{architecture}."

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def get(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default != 0 else 0):
            raise refuse(self._path, self._prefix + key, value, "an integer of at least 1, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not is_finite_number(value) or value <= 0:
            raise refuse(self._path, self._prefix + key, value, "a finite number above 0")
        return float(value)
