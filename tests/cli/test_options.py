"""Flags and what becomes of them."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from interlock.commands.options import EngineOptions, SamplingOptions, with_engine_options, with_sampling_options
from interlock.core.config import EngineConfig
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.sampling_params import SamplingParams


@pytest.fixture
def parse() -> Callable[..., tuple[EngineOptions, SamplingOptions]]:
    """Parse a command line with both groups of flags."""
    seen: list[tuple[EngineOptions, SamplingOptions]] = []
    app = typer.Typer()

    @app.command()
    @with_engine_options
    @with_sampling_options
    def command(*, engine: EngineOptions, sampling: SamplingOptions) -> None:
        seen.append((engine, sampling))

    def run(*arguments: str) -> tuple[EngineOptions, SamplingOptions]:
        result = CliRunner().invoke(app, list(arguments))
        if result.exit_code:
            raise ValueError(f"exit {result.exit_code}: {result.output}")
        return seen[-1]

    return run


def test_without_flags_every_option_keeps_its_default(parse: Any) -> None:
    engine, sampling = parse()
    assert engine.config() == EngineConfig(model="smollm2")
    assert sampling.params() == SamplingParams(temperature=0.0, max_tokens=128)


def test_each_engine_flag_sets_the_field_of_its_name(parse: Any) -> None:
    transfer = {"kv_connector": "peer", "kv_role": "kv_consumer", "engine_id": "a"}
    flags = {
        "--model": "some.gguf",
        "--dtype": "float32",
        "--max-model-len": "100",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "64",
        "--block-size": "8",
        "--kv-cache-dtype": "float16",
        "--kv-cache-memory-bytes": "1000000",
        "--cudagraph-mode": "full",
        "--cudagraph-capture-sizes": "1,8",
        "--threads": "2",
        "--kv-transfer-config": json.dumps(transfer),
        "--kv-load-wait": "barrier",
        "--kv-load-timeout": "2.5",
    }
    arguments = [word for pair in flags.items() for word in pair]
    config = parse(*arguments, "--enforce-eager", "--no-enable-prefix-caching")[0].config()
    assert config == EngineConfig.from_mapping(
        {
            "model": "some.gguf",
            "dtype": "float32",
            "max_model_len": 100,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "kv_cache_dtype": "float16",
            "kv_cache_memory_bytes": 1000000,
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": [1, 8],
            "threads": 2,
            "kv_transfer_config": transfer,
            "kv_load_wait": "barrier",
            "kv_load_timeout": 2.5,
            "enforce_eager": True,
            "enable_prefix_caching": False,
        }
    )
    assert config.cudagraph_mode is CUDAGraphMode.FULL


def test_each_sampling_flag_sets_the_field_of_its_name(parse: Any) -> None:
    words = "-n 2 --max-tokens 5 --min-tokens 1 --temperature 0.5 --top-p 0.9 --top-k 7 --seed 11 --logprobs 2 --ignore-eos"
    params = parse(*words.split(), "--stop-token-id", "3", "--stop-token-id", "4")[1].params()
    expected = SamplingParams(
        n=2, max_tokens=5, min_tokens=1, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop_token_ids=[3, 4], ignore_eos=True, logprobs=2
    )
    assert dataclasses.asdict(params) == dataclasses.asdict(expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cudagraph-mode", "HALF"], ["HALF", "FULL_AND_PIECEWISE"]),
        (["--kv-transfer-config", "{"], ["JSON"]),
        (["--kv-transfer-config", "[]"], ["object"]),
        (["--dtype", "int3"], ["int3", "bfloat16"]),
        (["--cudagraph-capture-sizes", "1;2"], ["1;2"]),
        (["--threads", "two"], ["--threads", "integer"]),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_was_expected(parse: Any, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError, match="exit 2") as error:
        parse(*arguments)
    assert all(word in str(error.value) for word in words)
