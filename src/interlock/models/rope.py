"""Rotary position embedding: the angles of every position, fixed when the model is loaded.

Each scaling kind follows `modeling_rope_utils.py` of Hugging Face transformers, whose parameter names are used. Kinds that depend on
the length of the sequence (dynamic, longrope) take the model's `max_model_len`, so that a position's angle never changes.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from interlock.core.errors import CheckpointError

F64 = npt.NDArray[np.float64]
_DIGEST_ROWS = 1 << 15
_ROWS_AT_ONCE = 1 << 12
RopeParameter = float | bool | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """kind: a key of `ROPE_KINDS`. rotary_dim: how many elements of a head are rotated (half split).

    parameters: those of the kind; see `ROPE_KINDS`. frequency_divisors: `[rotary_dim / 2]` or empty; each frequency is divided by its entry
    (the `rope_freqs` tensor of a GGUF file).
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    parameters: Mapping[str, RopeParameter] = field(default_factory=dict)
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeKind:
    """Parameters of a scaling kind, and its formula: (config, sequence length) → (frequencies, factor of cosine and sine)."""

    required: frozenset[str]
    optional: frozenset[str]
    formula: Callable[[RopeConfig, int], tuple[F64, float]]


def rope_table(rope: RopeConfig, max_model_len: int) -> npt.NDArray[np.float32]:
    """`[max_model_len, rotary_dim]`: a row holds a position's cosines, then its sines; computed in float64, rounded once.

    Raises CheckpointError if the parameters give angles that are not finite.
    """
    try:
        with np.errstate(all="ignore"):
            table = _rows(np.arange(max_model_len), *_formula(rope, max_model_len))
        if np.isfinite(table).all():
            return table
        cause = "some are not finite"
    except (ArithmeticError, ValueError) as error:
        cause = str(error)
    stated = f"theta {rope.theta:g}, {dict(rope.parameters)}"
    raise CheckpointError(f"rope type {rope.kind!r} with {stated} gives no usable angles ({cause}); check the model's rotary parameters")


def rope_identity(rope: RopeConfig, max_model_len: int) -> str:
    """What tells tables apart, as text, whatever their number of rows: equal text, equal rows. `rope_table` accepts the arguments.

    It digests what the rows are computed from and, since another machine's cosine may round otherwise, the rows of the model's first positions,
    also those beyond `max_model_len`. Where the angles depend on `max_model_len`, it says how.
    """
    with np.errstate(all="ignore"):
        frequencies, factor = _formula(rope, max_model_len)
        hasher = hashlib.sha256(frequencies.tobytes() + np.float64(factor).tobytes())
        stop = min(rope.max_position_embeddings, _DIGEST_ROWS)
        for start in range(0, stop, _ROWS_AT_ONCE):
            hasher.update(_rows(np.arange(start, min(start + _ROWS_AT_ONCE, stop)), frequencies, factor).tobytes())
    rule = ""
    if rope.kind == "longrope":
        rule = f" max_model_len{'>' if max_model_len > _original_length(rope) else '<='}{_original_length(rope):g}"
    return hasher.hexdigest()[:16] + rule


def _formula(rope: RopeConfig, max_model_len: int) -> tuple[F64, float]:
    frequencies, factor = ROPE_KINDS[rope.kind].formula(rope, max_model_len)
    if rope.frequency_divisors:
        frequencies = frequencies / np.asarray(rope.frequency_divisors, np.float64)
    return frequencies, factor


def _rows(positions: npt.NDArray[np.int64], frequencies: F64, factor: float) -> npt.NDArray[np.float32]:
    angles = positions.astype(np.float64)[:, None] * frequencies
    return np.concatenate((np.cos(angles) * factor, np.sin(angles) * factor), axis=1).astype(np.float32)


def _plain_frequencies(rope: RopeConfig, theta: float | None = None) -> F64:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies: F64 = (rope.theta if theta is None else theta) ** -exponents
    return frequencies


def _number(rope: RopeConfig, name: str, default: float | None = None) -> float:
    value = rope.parameters.get(name, default)
    assert isinstance(value, int | float), (name, value)
    return float(value)


def _numbers(rope: RopeConfig, name: str) -> F64:
    value = rope.parameters[name]
    assert isinstance(value, tuple), (name, value)
    return np.asarray(value, np.float64)


def _original_length(rope: RopeConfig) -> float:
    return _number(rope, "original_max_position_embeddings", rope.max_position_embeddings)


def _default(rope: RopeConfig, _length: int) -> tuple[F64, float]:
    return _plain_frequencies(rope), 1.0


def _linear(rope: RopeConfig, _length: int) -> tuple[F64, float]:
    return _plain_frequencies(rope) / _number(rope, "factor"), 1.0


def _dynamic(rope: RopeConfig, length: int) -> tuple[F64, float]:
    factor, dim = _number(rope, "factor"), rope.rotary_dim
    stretch = factor * max(length, rope.max_position_embeddings) / rope.max_position_embeddings - (factor - 1)
    return _plain_frequencies(rope, rope.theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(rope: RopeConfig, _length: int) -> tuple[F64, float]:
    factor, low, high = _number(rope, "factor"), _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    frequencies = _plain_frequencies(rope)
    wavelengths = 2 * math.pi / frequencies
    rotations = _original_length(rope) / wavelengths
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0


def _yarn(rope: RopeConfig, _length: int) -> tuple[F64, float]:
    factor, dim = _number(rope, "factor"), rope.rotary_dim

    def correction(rotations: float) -> float:
        return dim * math.log(_original_length(rope) / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(_number(rope, "beta_fast", 32.0)), correction(_number(rope, "beta_slow", 1.0))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
    frequencies = _plain_frequencies(rope)
    return frequencies / factor * interpolated + frequencies * (1 - interpolated), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in rope.parameters:
        return _number(rope, "attention_factor")
    mscale, mscale_all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def _longrope(rope: RopeConfig, length: int) -> tuple[F64, float]:
    original = _original_length(rope)
    stretch = _numbers(rope, "long_factor" if length > original else "short_factor")
    factor = _number(rope, "factor", rope.max_position_embeddings / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _plain_frequencies(rope) / stretch, _number(rope, "attention_factor", attention_factor)


def _kind(required: str, optional: str, formula: Callable[[RopeConfig, int], tuple[F64, float]]) -> RopeKind:
    return RopeKind(frozenset(required.split()), frozenset(optional.split()), formula)


ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": _kind("", "", _default),
    "linear": _kind("factor", "", _linear),
    "dynamic": _kind("factor", "", _dynamic),
    "yarn": _kind("factor", "attention_factor beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings truncate finetuned", _yarn),
    "llama3": _kind("factor low_freq_factor high_freq_factor", "original_max_position_embeddings", _llama3),
    "longrope": _kind("short_factor long_factor", "factor attention_factor original_max_position_embeddings", _longrope),
}
