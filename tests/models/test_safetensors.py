"""Hugging Face directories: each parameter is set once from the file that the index names; anything else stops the load."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from checkpoints import make_tiny_llama, random_weights, write_safetensors
from interlock.core.errors import CheckpointError
from interlock.models.checkpoints import open_checkpoint
from interlock.models.registry import load_model

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def weights_of(**changes: Any) -> dict[str, Any]:
    return dict(random_weights(seed=0, tie=True, **SIZES) | changes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_are_those_that_the_safetensors_library_reads(tmp_path: Path, dtype: str) -> None:
    directory = make_tiny_llama(tmp_path, dtype=dtype)
    ours = open_checkpoint(directory).tensors
    with safe_open(Path(directory) / "model.safetensors", "pt") as theirs:
        assert set(ours) == set(theirs.keys())
        for name, info in ours.items():
            tensor = theirs.get_tensor(name)
            assert info.shape == tuple(tensor.shape)
            assert f"torch.{info.fmt}" == str(tensor.dtype)
            assert info.rows().tobytes() == tensor.contiguous().view(-1).view(__import__("torch").uint8).numpy().tobytes()


def test_shards_and_a_single_file_give_the_same_model(tmp_path: Path) -> None:
    single, sharded = make_tiny_llama(tmp_path / "single"), make_tiny_llama(tmp_path / "sharded", shards=3)
    assert load_model(single).weights_digest == load_model(sharded).weights_digest


def test_the_digest_changes_with_weights_dtype_and_constants(tmp_path: Path) -> None:
    digests = [
        load_model(make_tiny_llama(tmp_path / "a")).weights_digest,
        load_model(make_tiny_llama(tmp_path / "b", seed=1)).weights_digest,
        load_model(make_tiny_llama(tmp_path / "a"), "bfloat16").weights_digest,
        load_model(make_tiny_llama(tmp_path / "c", config_overrides={"rms_norm_eps": 1e-6})).weights_digest,
        load_model(make_tiny_llama(tmp_path / "d", num_heads=8, num_kv_heads=4, head_dim=8)).weights_digest,
    ]
    assert len(set(digests)) == len(digests)


def test_conversion_at_load_equals_a_checkpoint_of_that_dtype(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        converted = load_model(make_tiny_llama(tmp_path / "float32"), dtype)
        assert converted.weights_digest == load_model(make_tiny_llama(tmp_path / dtype, dtype=dtype)).weights_digest


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    big = np.full((64, 128), 1e6, np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights_of(**{"model.layers.1.mlp.down_proj.weight": big}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight has values that float16 cannot hold"):
        load_model(str(tmp_path), "float16")


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"absent: model-00002-of-00003\.safetensors"):
        open_checkpoint(str(tmp_path))


def test_tensors_outside_the_index_are_ignored_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_llama(tmp_path, shards=2)
    expected = load_model(str(tmp_path)).weights_digest
    file = tmp_path / "model-00001-of-00002.safetensors"
    mine = {name: random for i, (name, random) in enumerate(weights_of().items()) if i % 2 == 0}
    stale = {name: value + 1 for i, (name, value) in enumerate(weights_of().items()) if i % 2 == 1}
    write_safetensors(file, mine | stale)
    with caplog.at_level(logging.INFO):
        assert load_model(str(tmp_path)).weights_digest == expected
    assert f"ignored {len(stale)} tensors" in caplog.text


def test_a_stray_second_model_file_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_llama(tmp_path)
    expected = load_model(str(tmp_path)).weights_digest
    write_safetensors(tmp_path / "consolidated.safetensors", {"stale": np.ones((2, 2), np.float32)})
    assert load_model(str(tmp_path)).weights_digest == expected
    assert "consolidated.safetensors" in caplog.text


def test_a_single_file_under_another_name_is_found(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert len(open_checkpoint(str(tmp_path)).tensors) == 20


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_that_the_index_assigns_but_the_shard_lacks_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, shards=2)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.\d\.\S+ in model-00002-of-00002\.safetensors"):
        open_checkpoint(str(tmp_path))


def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00002.safetensors", "../secret.safetensors"))
    with pytest.raises(CheckpointError, match=r"\.\./secret\.safetensors"):
        open_checkpoint(str(tmp_path))


def test_missing_unknown_and_misshaped_tensors_are_all_listed(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    weights = weights_of(**{"model.layers.0.mlp.up_proj.weight": np.ones((64, 128), np.float32)})
    weights["model.layers.1.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    del weights["model.norm.weight"]
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(CheckpointError) as error:
        load_model(str(tmp_path))
    assert sorted(line.strip() for line in str(error.value).splitlines()[1:]) == [
        "missing: model.norm.weight [64]",
        "shape: model.layers.0.mlp.up_proj.weight is [64, 128], expected [128, 64]",
        "unknown: model.layers.1.self_attn.q_norm.weight [16]",
    ]


def test_a_truncated_file_lists_every_tensor_that_is_cut(tmp_path: Path) -> None:
    file = Path(make_tiny_llama(tmp_path)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(tmp_path))
    names = re.findall(r"truncated: (\S+)", str(error.value))
    assert names == ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="does not even hold its header"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_named_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    file = Path(make_tiny_llama(tmp_path)) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"model.layers.1.self_attn.k_proj', b'"model.layers.0.self_attn.k_proj'))
    with pytest.raises(CheckpointError, match=r"duplicate: model\.layers\.0\.self_attn\.k_proj\.weight"):
        open_checkpoint(str(tmp_path))


def test_unsupported_dtypes_and_overlaps_are_named(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
        "c": {"dtype": "F32", "shape": [4, 4], "data_offsets": [32, 96]},
        "d": {"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 96]},
    }
    make_tiny_llama(tmp_path)
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(96))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(tmp_path))
    for fault in ("a has dtype F8_E4M3", "c begins inside b", "d [4, 4] F32 occupies 32 bytes, expected 64"):
        assert fault in str(error.value)


def test_rotary_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", weights_of(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}))
    load_model(str(tmp_path))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight \[256, 64\]"):
        load_model(make_tiny_llama(tmp_path, config_overrides={"tie_word_embeddings": False}))


def test_a_tied_model_with_a_different_head_follows_the_config_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_model(make_tiny_llama(tmp_path / "tied")).weights_digest
    make_tiny_llama(tmp_path / "both", tie=False, config_overrides={"tie_word_embeddings": True})
    write_safetensors(tmp_path / "both" / "model.safetensors", weights_of(**{"lm_head.weight": np.ones((256, 64), np.float32)}))
    assert load_model(str(tmp_path / "both")).weights_digest == expected
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_a_directory_with_other_weights_says_what_it_found(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file \(found \['pytorch_model\.bin'\]\)"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures", "MistralForCausalLM", "supported: LlamaForCausalLM"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"sliding_window": 1024}, ["sliding_window", "1024"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value heads"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({"hidden_size": 62}, ["hidden_size 62", "num_attention_heads 4"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"rope_theta": -1}, ["rope_theta", "-1"]),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, ["rope type", "'foo'", "default, linear, dynamic, yarn, llama3, longrope"]),
        ({"rope_scaling": {"factor": 2.0}}, ["no rope_type"]),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, ["'linear'", "'dynamic'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "lacks ['factor']"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}}, ["unknown parameters ['alpha']"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, ["factor of rope type 'linear'", "'two'"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}}, ["short_factor", "8 positive numbers"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4}}, ["high_freq_factor", "above 4.0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}}, ["high_freq_factor", "above 4"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
    ],
)
def test_what_is_not_supported_is_refused_by_file_key_and_value(tmp_path: Path, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(make_tiny_llama(tmp_path, config_overrides=overrides))
    for word in ["config.json", *words]:
        assert word in str(error.value)


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        open_checkpoint(str(tmp_path))


def test_end_tokens_come_from_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, eos_token_id=7, tokenizer_size=250)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.eos_token_ids == (2, 7, 9)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos_token_ids == (2, 7, 9)
