"""Llama through the kernels: close to the plain NumPy reference and to transformers; bit-equal to itself however it is run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from llama_reference import llama_logits
from model_driver import ModelDriver
from transformers import AutoModelForCausalLM

from checkpoints import make_tiny_llama, make_tiny_llama_gguf, permute_for_gguf, random_weights, to_dtype
from interlock.core.errors import KernelError
from interlock.graphs.timeline import Timelines
from interlock.models.registry import load_model

# float32 sums in another order, over two layers and logits of a magnitude up to 20; observed: at most 3e-5.
TOLERANCE = 1e-4

TOKENS = [1, 5, 77, 200, 3, 9, 255, 17, 17, 4, 0, 128, 64, 31, 7, 250, 2, 99, 98, 97]
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}

Drive = Callable[..., ModelDriver]


@pytest.fixture
def drive() -> Iterator[Drive]:
    """Makes drivers for a model path, and shuts their teams down."""
    drivers: list[ModelDriver] = []

    def make(path: str, **options: Any) -> ModelDriver:
        drivers.append(ModelDriver(load_model(path, options.pop("dtype", "auto")), **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


def bits(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return logits.view(np.uint32)


def reference(weights: dict[str, npt.NDArray[Any]], tokens: list[int], num_heads: int = 4, num_kv_heads: int = 2) -> npt.NDArray[np.float64]:
    return llama_logits(weights, tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, theta=1e4, eps=1e-5)


def transformers_logits(directory: str, token_ids: list[int]) -> npt.NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tie": False},
        {"head_dim": 24},
        {"vocab_size": 251, "tie": False},
        {"vocab_size": 300},
        {"hidden_size": 60, "num_heads": 8, "num_kv_heads": 8, "head_dim": 16, "intermediate_size": 100},
        {"num_kv_heads": 1, "num_layers": 3},
    ],
)
def test_logits_match_the_reference_for_sizes_as_stated(tmp_path: Path, drive: Drive, sizes: dict[str, Any]) -> None:
    merged = SIZES | {"tie": True} | sizes
    head_dim = merged.setdefault("head_dim", merged["hidden_size"] // merged["num_heads"])
    driver = drive(make_tiny_llama(tmp_path, **merged))
    tokens = [token % merged["vocab_size"] for token in TOKENS]
    expected = reference(random_weights(seed=0, **merged), tokens, merged["num_heads"], merged["num_kv_heads"])
    np.testing.assert_allclose(driver.logits(tokens), expected, atol=TOLERANCE, rtol=0)
    assert driver.loaded.config.kv_size == merged["num_kv_heads"] * head_dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tie", [True, False])
def test_logits_match_transformers_for_each_checkpoint_dtype(tmp_path: Path, drive: Drive, dtype: str, tie: bool) -> None:
    directory = make_tiny_llama(tmp_path, dtype=dtype, tie=tie, shards=2)
    np.testing.assert_allclose(drive(directory).logits(TOKENS), transformers_logits(directory, TOKENS), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("head_dim", [4, 20, 100])
def test_heads_of_any_even_size_match_transformers_in_the_three_modes(tmp_path: Path, drive: Drive, head_dim: int) -> None:
    directory = make_tiny_llama(tmp_path, head_dim=head_dim)
    driver = drive(directory)
    eager = driver.logits(TOKENS)
    np.testing.assert_allclose(eager, transformers_logits(directory, TOKENS), atol=TOLERANCE, rtol=0)
    for breaks in (True, False):
        assert np.array_equal(bits(driver.step([(1, TOKENS, 0)], driver.capture(breaks=breaks)))[0], bits(eager)[-1])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8, "original_max_position_embeddings": 16},
    ],
)
def test_logits_beyond_the_original_length_match_transformers(tmp_path: Path, drive: Drive, scaling: dict[str, Any]) -> None:
    plain = make_tiny_llama(tmp_path / "plain", max_position_embeddings=16)
    directory = make_tiny_llama(tmp_path / "scaled", rope_scaling=scaling, max_position_embeddings=16 if scaling["rope_type"] == "dynamic" else 64)
    tokens = (TOKENS * 4)[:64]
    expected = transformers_logits(directory, tokens)
    ours = drive(directory, max_model_len=64).step([(0, tokens, 0)])[0]
    np.testing.assert_allclose(ours, expected[-1], atol=TOLERANCE, rtol=0)
    assert abs(transformers_logits(plain, tokens)[-1] - ours).max() > 100 * TOLERANCE


@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1"])
def test_gguf_logits_match_the_reference_on_dequantised_weights(tmp_path: Path, drive: Drive, fmt: str) -> None:
    driver = drive(make_tiny_llama_gguf(tmp_path / "x.gguf", fmt=fmt))
    np.testing.assert_allclose(driver.logits(TOKENS), reference(rounded_weights(fmt), TOKENS), atol=TOLERANCE, rtol=0)


def test_formats_may_differ_from_matrix_to_matrix(tmp_path: Path, drive: Drive) -> None:
    formats = {"attn_v": "q8_0", "ffn_up": "q4_1", "token_embd": "float16", "attn_q": "q4_0"}
    driver = drive(make_tiny_llama_gguf(tmp_path / "x.gguf", fmt="q4_0", formats=formats))
    layer = driver.loaded.model.layers[0]
    assert [(first, weight.fmt) for first, weight in layer.qkv_proj.parts] == [(0, "q4_0"), (96, "q8_0")]
    assert layer.gate_up_proj.fused is None
    weights = rounded_weights("q4_0")
    for module, name in {"v_proj": "q8_0", "up_proj": "q4_1", "embed_tokens": "float16"}.items():
        weights |= {key: value for key, value in rounded_weights(name).items() if module in key}
    np.testing.assert_allclose(driver.logits(TOKENS), reference(weights, TOKENS), atol=TOLERANCE, rtol=0)


def rounded_weights(fmt: str) -> dict[str, npt.NDArray[Any]]:
    """The tiny model's matrices as they come out of a format; query and key rows are rounded in the order of the file."""
    weights = dict(random_weights(seed=0, tie=True, head_dim=16, **SIZES))
    for name, value in weights.items():
        if value.ndim == 1:
            continue
        if fmt == "bfloat16":
            weights[name] = (to_dtype(value, fmt).astype(np.uint32) << 16).view(np.float32)
        elif fmt.startswith("float"):
            weights[name] = to_dtype(value, fmt).astype(np.float32)
        else:
            kind = gguf.GGMLQuantizationType[fmt.upper()]
            weights[name] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    return weights


def test_rounding_by_rows_does_not_depend_on_the_order_of_rows() -> None:
    value = random_weights(seed=0, tie=True, head_dim=16, **SIZES)["model.layers.0.self_attn.q_proj.weight"]
    kind = gguf.GGMLQuantizationType.Q4_1
    permuted = permute_for_gguf("q_proj", value, 4, 2)
    assert not np.array_equal(permuted, value)
    assert sorted(map(bytes, gguf.quants.quantize(permuted, kind))) == sorted(map(bytes, gguf.quants.quantize(value, kind)))


def test_prefill_chunks_and_decode_steps_give_the_same_bits(tmp_path: Path, drive: Drive) -> None:
    driver = drive(make_tiny_llama(tmp_path, dtype="bfloat16"), kv_dtype="bfloat16")
    one_by_one = driver.logits(TOKENS)
    for cut in (1, 7, 16, 19):
        driver.step([(1, TOKENS[:cut], 0)])
        assert np.array_equal(bits(driver.step([(1, TOKENS[cut:], cut)]))[0], bits(one_by_one)[-1])
    assert np.array_equal(bits(driver.step([(2, TOKENS, 0)]))[0], bits(one_by_one)[-1])


def test_batch_companions_threads_and_block_size_do_not_change_a_bit(tmp_path: Path, drive: Drive) -> None:
    path = make_tiny_llama_gguf(tmp_path / "x.gguf", fmt="q4_1", formats={"token_embd": "q8_0"})
    alone = drive(path, num_threads=1, block_size=4).step([(0, TOKENS, 0)])[0]
    driver = drive(path, num_threads=3)
    driver.step([(3, TOKENS[:11], 0)])
    batch = driver.step([(1, TOKENS[::-1], 0), (0, TOKENS, 0), (3, TOKENS[11:], 11), (2, [7], 0)])
    assert np.array_equal(bits(batch)[1], bits(alone))
    assert np.array_equal(bits(batch)[2], bits(alone))


def test_eager_pieces_and_full_replay_give_the_same_bits(tmp_path: Path, drive: Drive) -> None:
    driver = drive(make_tiny_llama(tmp_path))
    eager = driver.logits(TOKENS)
    for breaks in (False, True):
        program = driver.capture(breaks=breaks)
        driver.step([(1, TOKENS[:9], 0)], program)
        assert np.array_equal(bits(driver.step([(1, TOKENS[9:], 9)], program))[0], bits(eager)[-1])


class RecordingHooks:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before_layer(self, layer_index: int) -> None:
        self.calls.append(("before", layer_index))

    def after_layer(self, layer_index: int) -> None:
        self.calls.append(("after", layer_index))


def test_hooks_run_around_each_layer_eagerly_and_in_pieces_and_never_in_a_full_replay(tmp_path: Path, drive: Drive) -> None:
    hooks = RecordingHooks()
    driver = drive(make_tiny_llama(tmp_path), hooks=hooks)
    expected = [("before", 0), ("after", 0), ("before", 1), ("after", 1)]
    driver.step([(0, TOKENS, 0)])
    assert hooks.calls == expected
    pieces, full = driver.capture(breaks=True), driver.capture()
    assert hooks.calls == expected
    driver.step([(0, TOKENS, 0)], full)
    assert hooks.calls == expected
    driver.step([(0, TOKENS, 0)], pieces)
    assert hooks.calls == expected * 2


def test_a_gate_stands_before_each_layers_kv_write_and_a_signal_after_it(tmp_path: Path, drive: Drive) -> None:
    driver = drive(make_tiny_llama(tmp_path))
    expected = driver.step([(0, TOKENS, 0)])
    plain = driver.capture().kernel_names
    landed, written = Timelines(2), Timelines(2)
    driver.use_timelines(landed, written)
    program = driver.capture()
    names = iter(program.kernel_names)
    assert [name for name in program.kernel_names if name not in ("gate", "signal")] == list(plain)
    for _ in range(2):
        assert next(name for name in names if name == "gate")
        assert next(names) == "rope_kv_write_float32"
        assert next(names) == "signal"
    assert np.array_equal(bits(driver.step([(1, TOKENS, 0)], program)), bits(expected))
    assert [written.value(layer) for layer in range(2)] == [driver.steps, driver.steps]
    assert [landed.value(layer) for layer in range(2)] == [0, 0]


@pytest.mark.parametrize("formats", [{}, {"ffn_up": "q8_0"}])
def test_the_kernels_that_a_model_names_are_those_that_it_launches(tmp_path: Path, drive: Drive, formats: dict[str, str]) -> None:
    driver = drive(make_tiny_llama_gguf(tmp_path / "x.gguf", fmt="q4_1", formats=formats))
    assert set(driver.capture().kernel_names) == {kernel.name for kernel in driver.loaded.model.kernels("float32")}


def test_a_token_id_outside_the_table_is_an_error_that_names_the_row(tmp_path: Path, drive: Drive) -> None:
    driver = drive(make_tiny_llama(tmp_path))
    with pytest.raises(KernelError, match="embedding"):
        driver.step([(0, [1, 256], 0)])
    assert np.isfinite(driver.step([(0, [1, 255], 0)])).all()
