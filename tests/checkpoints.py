"""Small random Llama checkpoints, written the way Hugging Face and llama.cpp write them.

All writers draw the same float32 weights for the same sizes and seed, so a GGUF file and a safetensors directory of one seed
are the same model up to rounding.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_GGUF_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tiny_llama(
    path: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    vocab_size: int = 256,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    tie: bool = True,
    max_position_embeddings: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    eos_token_id: int | None = 2,
    shards: int = 1,
    tokenizer_size: int | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> str:
    """Write a Hugging Face directory (config.json and safetensors, `shards` files) at `path` and return the path.

    dtype: float32, bfloat16 or float16. tokenizer_size: also write a byte-level tokenizer with that many tokens and a chat template.
    config_overrides: keys set in config.json last (a value of None removes the key).
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    weights = random_weights(
        seed=seed,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or hidden_size // num_heads,
        tie=tie,
    )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    for key, value in (config_overrides or {}).items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
    else:
        write_sharded(directory, weights, dtype, shards)
    if tokenizer_size is not None:
        write_tokenizer(directory, tokenizer_size)
    return str(directory)


def make_tiny_llama_gguf(
    path: str | Path,
    *,
    seed: int = 0,
    fmt: str = "float32",
    formats: Mapping[str, str] | None = None,
    vocab_size: int = 256,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    tie: bool = True,
    max_position_embeddings: int = 512,
    rope_theta: float = 10000.0,
    rope_freqs: F32 | None = None,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, F32] | None = None,
    drop_tensors: tuple[str, ...] = (),
) -> str:
    """Write a GGUF file at `path` and return the path. fmt: format of the matrices; `formats` overrides it by the
    name of the module (`token_embd`, `attn_v`, …).

    rope_freqs: per-frequency divisors `[head_dim / 2]`. metadata: further keys (a tokenizer, for one), written as they are, or replaced.
    """
    head_size = head_dim or hidden_size // num_heads
    weights = random_weights(
        seed=seed,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        tie=tie,
    )
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(max_position_embeddings)
    writer.add_embedding_length(hidden_size)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(rope_theta)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(vocab_size)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        _add_metadata(writer, key, value)
    tensors = {gguf_name(name): permute_for_gguf(name, value, num_heads, num_kv_heads) for name, value in weights.items()}
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = rope_freqs
    for name, value in {**tensors, **(extra_tensors or {})}.items():
        if name not in drop_tensors:
            wanted = (formats or {}).get(name.split(".")[-2], fmt)
            kind = _GGUF_TYPES[wanted] if value.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def random_weights(
    *,
    seed: int,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tie: bool,
) -> dict[str, F32]:
    """Random weights under their Hugging Face names, scaled so that logits differ clearly from token to token."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> F32:
        return (rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def norm() -> F32:
        return (1 + 0.1 * rng.standard_normal(hidden_size)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, hidden_size, 0.5 * hidden_size**0.5)}
    for layer in range(num_layers):
        weights |= {
            f"model.layers.{layer}.{name}.weight": value
            for name, value in {
                "input_layernorm": norm(),
                "self_attn.q_proj": matrix(num_heads * head_dim, hidden_size, 2.0),
                "self_attn.k_proj": matrix(num_kv_heads * head_dim, hidden_size, 2.0),
                "self_attn.v_proj": matrix(num_kv_heads * head_dim, hidden_size),
                "self_attn.o_proj": matrix(hidden_size, num_heads * head_dim),
                "post_attention_layernorm": norm(),
                "mlp.gate_proj": matrix(intermediate_size, hidden_size, 1.5),
                "mlp.up_proj": matrix(intermediate_size, hidden_size),
                "mlp.down_proj": matrix(hidden_size, intermediate_size),
            }.items()
        }
    weights["model.norm.weight"] = norm()
    if not tie:
        weights["lm_head.weight"] = matrix(vocab_size, hidden_size, 4.0)
    return weights


def write_safetensors(path: Path, weights: Mapping[str, F32], dtype: str = "float32") -> None:
    """Write `weights`, rounded to `dtype` (nearest even), as one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, value in weights.items():
        raw = to_dtype(value, dtype).tobytes()
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(value.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        chunks.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def write_sharded(directory: Path, weights: Mapping[str, F32], dtype: str, shards: int) -> None:
    """Write `weights` as `shards` safetensors files with their index."""
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = names[shard::shards]
        write_safetensors(directory / file, {name: weights[name] for name in members}, dtype)
        weight_map |= dict.fromkeys(members, file)
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path, size: int) -> None:
    """Write a byte-level tokenizer: ids 0 to 2 are special, then one token for each byte until `size` tokens are there."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - len(special)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}:{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}))


def to_dtype(value: F32, dtype: str) -> npt.NDArray[Any]:
    """`value` rounded to `dtype` (nearest even); bfloat16 as uint16 bit patterns."""
    if dtype == "bfloat16":
        bits = value.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return value.astype(dtype)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face Llama tensor."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in outer:
        return outer[name]
    layer, _, module = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[module]}.weight"


def permute_for_gguf(name: str, value: F32, num_heads: int, num_kv_heads: int) -> F32:
    """Rows of the query and key projections in the order of interleaved rotation, as llama.cpp's converter writes them."""
    heads = num_heads if "q_proj" in name else num_kv_heads if "k_proj" in name else 0
    if not heads:
        return value
    rows, columns = value.shape
    return np.ascontiguousarray(value.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns))


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
