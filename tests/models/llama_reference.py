"""Llama in plain NumPy, float64, one sequence at a time, from Hugging Face's formulas; shares no code with the package."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def llama_logits(
    weights: Mapping[str, npt.NDArray[Any]], token_ids: Sequence[int], *, num_heads: int, num_kv_heads: int, theta: float, eps: float
) -> F64:
    """Logits at every position, `[len(token_ids), vocab_size]`, with plain rotary embedding. Sizes follow from the weights' shapes."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    hidden = w["model.embed_tokens.weight"][list(token_ids)]
    head_dim = w["model.layers.0.self_attn.q_proj.weight"].shape[0] // num_heads
    angles = np.arange(len(token_ids))[:, None] * theta ** -(np.arange(0, head_dim, 2) / head_dim)
    num_layers = 1 + max(int(name.split(".")[2]) for name in w if name.startswith("model.layers."))
    for layer in range(num_layers):
        p = f"model.layers.{layer}"
        normed = _rms_norm(hidden, w[f"{p}.input_layernorm.weight"], eps)
        q, k, v = (_heads(normed @ w[f"{p}.self_attn.{name}_proj.weight"].T, head_dim) for name in "qkv")
        attended = _attention(_rotate(q, angles), _rotate(k, angles), v, num_heads // num_kv_heads)
        hidden = hidden + attended @ w[f"{p}.self_attn.o_proj.weight"].T
        normed = _rms_norm(hidden, w[f"{p}.post_attention_layernorm.weight"], eps)
        gate, up = normed @ w[f"{p}.mlp.gate_proj.weight"].T, normed @ w[f"{p}.mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}.mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _rms_norm(hidden, w["model.norm.weight"], eps) @ head.T


def _rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _heads(x: F64, head_dim: int) -> F64:
    return x.reshape(len(x), -1, head_dim).swapaxes(0, 1)


def _rotate(x: F64, angles: F64) -> F64:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _attention(q: F64, k: F64, v: F64, group: int) -> F64:
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).swapaxes(0, 1).reshape(q.shape[1], -1)
