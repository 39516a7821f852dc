"""Rotary tables equal those of Hugging Face transformers, for each scaling kind, also beyond the original length."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpoints import make_tiny_llama, make_tiny_llama_gguf
from interlock.models.checkpoints import open_checkpoint
from interlock.models.rope import ROPE_KINDS, RopeConfig, rope_identity, rope_table

LENGTH = 512  # eight times the original length of the scaled kinds
# transformers computes angles in float32: an angle of up to 512 radians is off by up to 512 * 2**-24, and the frequencies by as much again.
TOLERANCE = 1e-4

YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "type": "linear", "factor": 2},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", **YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
    {"type": "yarn", "factor": 8.0, "finetuned": True},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", **LONG, "factor": 4.0},
    {"rope_type": "longrope", **LONG, "attention_factor": 1.5},
]


def transformers_table(directory: str, length: int) -> np.ndarray:
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(directory))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).numpy()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_those_of_transformers(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    directory = make_tiny_llama(tmp_path, rope_scaling=scaling, max_position_embeddings=64 if scaling is None or len(scaling) < 4 else LENGTH)
    ours = rope_table(open_checkpoint(directory).config.rope, LENGTH)
    assert ours.dtype == np.float32
    assert ours.shape == (LENGTH, 16)
    np.testing.assert_allclose(ours, transformers_table(directory, LENGTH), atol=TOLERANCE, rtol=0)


def test_parameters_as_transformers_5_writes_them_are_read(tmp_path: Path) -> None:
    plain = make_tiny_llama(tmp_path / "old", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    renamed = make_tiny_llama(tmp_path / "new", config_overrides={"rope_theta": None, "rope_scaling": None, "rope_parameters": parameters})
    assert open_checkpoint(renamed).config.rope == open_checkpoint(plain).config.rope
    default = make_tiny_llama(
        tmp_path / "default", config_overrides={"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}}
    )
    assert open_checkpoint(default).config.rope.theta == 5e5


@pytest.mark.parametrize(("kind", "factor"), [("dynamic", {"factor": 3.0}), ("longrope", {k: v for k, v in LONG.items() if k != "factor"})])
def test_kinds_that_depend_on_length_are_fixed_by_the_model_length(tmp_path: Path, kind: str, factor: dict[str, Any]) -> None:
    rope = open_checkpoint(make_tiny_llama(tmp_path, max_position_embeddings=64, rope_scaling={"rope_type": kind, **factor})).config.rope
    short, long = rope_table(rope, 64), rope_table(rope, 256)
    assert not np.array_equal(short, long[:64])
    assert np.array_equal(short[:32], rope_table(rope, 32))


def test_tables_of_any_length_have_one_identity_exactly_if_their_rows_are_equal(tmp_path: Path) -> None:
    lengths = [1, 63, 64, 65, 300, LENGTH]
    rows, texts = {}, {}
    for number, scaling in enumerate(SCALINGS):
        rope = open_checkpoint(make_tiny_llama(tmp_path / str(number), rope_scaling=scaling, max_position_embeddings=LENGTH)).config.rope
        for length in lengths:
            table = rope_table(rope, length)
            assert np.array_equal(table, _first_rows(rope, length, LENGTH)[:length])
            rows[number, length], texts[number, length] = _first_rows(rope, length, LENGTH).tobytes(), rope_identity(rope, length)
    for one, other in itertools.combinations(texts, 2):
        assert (texts[one] == texts[other]) == (rows[one] == rows[other]), (one, other)


def _first_rows(rope: RopeConfig, max_model_len: int, count: int) -> np.ndarray:
    """The table's first rows, and those that it would have if it were longer, by the angles of `max_model_len`."""
    frequencies, factor = ROPE_KINDS[rope.kind].formula(rope, max_model_len)
    angles = np.arange(count)[:, None] * frequencies
    return np.concatenate((np.cos(angles) * factor, np.sin(angles) * factor), axis=1).astype(np.float32)


def test_where_the_angles_depend_on_max_model_len_the_identity_names_it(tmp_path: Path) -> None:
    rope = open_checkpoint(make_tiny_llama(tmp_path, rope_scaling={"rope_type": "longrope", **LONG}, max_position_embeddings=LENGTH)).config.rope
    assert rope_identity(rope, 64).endswith(" max_model_len<=64")
    assert rope_identity(rope, 65).endswith(" max_model_len>64")
    assert " " not in rope_identity(dataclasses.replace(rope, kind="default", parameters={}), 64)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0, "llama.rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", **YARN},
        ),
    ],
)
def test_gguf_scaling_equals_the_same_scaling_in_a_config(tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    ours = open_checkpoint(make_tiny_llama_gguf(tmp_path / "x.gguf", metadata=metadata)).config.rope
    theirs = open_checkpoint(make_tiny_llama(tmp_path / "hf", rope_scaling=scaling)).config.rope
    np.testing.assert_allclose(rope_table(ours, LENGTH), rope_table(theirs, LENGTH), atol=1e-7, rtol=0)


def test_the_frequency_tensor_of_a_gguf_file_equals_llama3_scaling(tmp_path: Path) -> None:
    theirs = make_tiny_llama(tmp_path / "hf", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    scaled = LlamaRotaryEmbedding(AutoConfig.from_pretrained(theirs)).inv_freq.numpy()
    plain = 5e5 ** -(np.arange(0, 16, 2) / 16)
    ours = make_tiny_llama_gguf(tmp_path / "x.gguf", rope_theta=5e5, rope_freqs=(plain / scaled).astype(np.float32))
    np.testing.assert_allclose(
        rope_table(open_checkpoint(ours).config.rope, LENGTH), rope_table(open_checkpoint(theirs).config.rope, LENGTH), atol=TOLERANCE, rtol=0
    )
