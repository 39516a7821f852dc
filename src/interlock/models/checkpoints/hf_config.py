"""config.json of a Hugging Face directory → ModelConfig. What is not supported is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlock.core.errors import CheckpointError
from interlock.models.checkpoints.checkpoint import is_finite_number, refuse
from interlock.models.config import ModelConfig
from interlock.models.json_file import is_there, read_json
from interlock.models.rope import ROPE_KINDS, RopeConfig, RopeParameter

ARCHITECTURES = ("LlamaForCausalLM",)

_MAX_SIZE = 2**31 - 1

_MUST_BE_OFF = ("attention_bias", "mlp_bias", "sliding_window", "quantization_config", "num_experts", "num_local_experts", "logit_scale")


def read_model_config(directory: Path) -> ModelConfig:
    """Read config.json and, if there is one, generation_config.json. Raises CheckpointError."""
    path = directory / "config.json"
    values = _Values(path, read_json(path))
    _refuse_unsupported(path, values.raw)
    hidden_size, num_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    head_dim = values.raw.get("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise CheckpointError(f"{path}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, and no head_dim is stated")
    head_dim = hidden_size // num_heads if head_dim is None else values.integer("head_dim")
    num_kv_heads = values.integer("num_key_value_heads", num_heads)
    check_heads(path, num_heads, num_kv_heads, head_dim)
    max_position_embeddings = values.integer("max_position_embeddings", 2048)
    tie = values.raw.get("tie_word_embeddings", False)
    if not isinstance(tie, bool):
        raise refuse(path, "tie_word_embeddings", tie, "true or false")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_layers=values.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=read_rope(path, values.raw, head_dim, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        bos_token_id=_first(_token_ids(path, "bos_token_id", values.raw.get("bos_token_id"))),
        eos_token_ids=_eos_token_ids(directory, path, values.raw),
    )


def check_heads(path: Path, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise CheckpointError unless the heads can be grouped and a head can be rotated by halves."""
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{path}: {num_heads} attention heads cannot be shared out over {num_kv_heads} key-value heads; expected a multiple")
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim is {head_dim}, expected an even number: rotary embedding turns pairs")


def read_rope(path: Path, config: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """`rope_scaling`, `rope_parameters` and `rope_theta` in any of the ways that transformers has written them."""
    scaling = _rope_object(path, config)
    kind = _rope_kind(path, scaling)
    theta = _agreed(path, "rope_theta", config.get("rope_theta"), scaling.pop("rope_theta", None))
    theta = 10000.0 if theta is None else theta
    partial = _agreed(path, "partial_rotary_factor", config.get("partial_rotary_factor"), scaling.pop("partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise refuse(path, "partial_rotary_factor", partial, "1.0 (whole heads are rotated)")
    if not is_finite_number(theta) or theta <= 1:
        raise refuse(path, "rope_theta", theta, "a number above 1")
    original = config.get("original_max_position_embeddings")
    if original is not None and "original_max_position_embeddings" in ROPE_KINDS[kind].optional:
        scaling["original_max_position_embeddings"] = original
    parameters = rope_parameters(path, kind, scaling, head_dim)
    return RopeConfig(kind=kind, theta=float(theta), rotary_dim=head_dim, max_position_embeddings=max_position_embeddings, parameters=parameters)


def rope_parameters(path: Path, kind: str, values: Mapping[str, Any], rotary_dim: int) -> dict[str, RopeParameter]:
    """Check the parameters of a scaling kind; raises CheckpointError for one that is missing, unknown or of the wrong type."""
    known = ROPE_KINDS[kind]
    given = {name: value for name, value in values.items() if value is not None}
    missing, unknown = sorted(known.required - given.keys()), sorted(given.keys() - known.required - known.optional)
    if missing or unknown:
        expected = f"{sorted(known.required)} and optionally {sorted(known.optional)}"
        raise CheckpointError(f"{path}: rope type {kind!r} has unknown parameters {unknown} and lacks {missing}; expected {expected}")
    parameters: dict[str, RopeParameter] = {}
    for name, value in given.items():
        if name in ("truncate", "finetuned"):
            valid, expected = isinstance(value, bool), "true or false"
        elif name in ("short_factor", "long_factor"):
            expected = f"{rotary_dim // 2} positive numbers"
            valid = isinstance(value, list) and len(value) == rotary_dim // 2 and all(is_finite_number(v) and v > 0 for v in value)
        else:
            valid, expected = is_finite_number(value) and value > 0, "a positive number"
        if not valid:
            raise refuse(path, f"{name} of rope type {kind!r}", value, expected)
        parameters[name] = tuple(map(float, value)) if isinstance(value, list) else value
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise refuse(path, "high_freq_factor of rope type 'llama3'", values["high_freq_factor"], f"a number above {values['low_freq_factor']}")
    return parameters


def _rope_object(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise refuse(path, key, value, "null or an object with rope_type")
    found = {key: value for key, value in found.items() if value}
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise CheckpointError(
            f"{path}: rope_scaling is {found['rope_scaling']!r} but rope_parameters is {found['rope_parameters']!r}; keep one of them"
        )
    return dict(next(iter(found.values()), {}))


def _rope_kind(path: Path, scaling: dict[str, Any]) -> str:
    if not scaling:
        return "default"
    kinds = [scaling.pop(key) for key in ("rope_type", "type") if scaling.get(key) is not None]
    if not kinds and set(scaling) <= {"rope_theta", "partial_rotary_factor"}:
        return "default"
    if not kinds:
        raise CheckpointError(f"{path}: rope_scaling {scaling!r} states no rope_type; supported: {list(ROPE_KINDS)}")
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise CheckpointError(f"{path}: rope_scaling has rope_type {kinds[0]!r} but type {kinds[1]!r}; keep one of them")
    if not isinstance(kinds[0], str) or kinds[0] not in ROPE_KINDS:
        raise refuse(path, "rope type", kinds[0], ", ".join(ROPE_KINDS))
    return kinds[0]


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    if architectures is None and config.get("model_type") == "llama":
        architectures = list(ARCHITECTURES)
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise refuse(path, "architectures", architectures, ", ".join(ARCHITECTURES))
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise refuse(path, key, config[key], "false, null or absent")
    if config.get("hidden_act", "silu") != "silu":
        raise refuse(path, "hidden_act", config["hidden_act"], "silu")
    if config.get("pretraining_tp", 1) not in (1, None):
        raise refuse(path, "pretraining_tp", config["pretraining_tp"], "1")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise refuse(path, "layer_types", layer_types, "a list of full_attention")


def _agreed(path: Path, key: str, *values: Any) -> Any:
    stated = [value for value in values if value is not None]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise CheckpointError(f"{path}: {key} is stated as {stated[0]!r} and as {stated[1]!r}; keep one of them")
    return stated[0] if stated else None


def _eos_token_ids(directory: Path, path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = _token_ids(path, "eos_token_id", config.get("eos_token_id"))
    generation = directory / "generation_config.json"
    if is_there(generation):
        ids += _token_ids(generation, "eos_token_id", read_json(generation).get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def _token_ids(path: Path, key: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise refuse(path, key, value, "a token id, a list of token ids, or null")
    return tuple(ids)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


class _Values:
    """Typed access to the keys of a parsed file."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
            raise refuse(self.path, key, value, f"an integer from 1 to {_MAX_SIZE}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if not is_finite_number(value) or value <= 0:
            raise refuse(self.path, key, value, "a finite number above 0")
        return float(value)
