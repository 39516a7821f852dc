"""Flags and what becomes of them."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from interlock.commands import app
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


LEFT_OUT = {
    "seed of the engine": "--seed is that of the requests, which then needs no other",
    "data_parallel_size": "a command is one engine; DataParallelLLM makes several, or a program of one's own for each rank",
    "data_parallel_rank": "as data_parallel_size",
    "data_parallel_lockstep": "as data_parallel_size",
    "data_parallel_master_ip": "as data_parallel_size",
    "data_parallel_master_port": "as data_parallel_size",
    "extra_args": "carries the hand-off of a request, which `interlock pd` makes",
}


@pytest.mark.parametrize("command", ["generate", "pd"])
def test_each_option_of_the_engine_and_of_a_request_has_a_flag_but_for_those_that_make_no_sense_there(command: str) -> None:
    group: Any = typer.main.get_command(app)
    flags = {parameter.name for parameter in group.commands[command].params}
    options = {("seed of the engine" if field.name == "seed" else field.name) for field in dataclasses.fields(EngineConfig)}
    options |= {field.name for field in dataclasses.fields(SamplingParams)}
    assert options - LEFT_OUT.keys() <= flags
    assert LEFT_OUT.keys() <= options - flags


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
        "--kv-async-load-timeout": "50",
        "--max-sync-load-seconds": "inf",
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
            "kv_async_load_timeout": 50.0,
            "max_sync_load_seconds": math.inf,
            "enforce_eager": True,
            "enable_prefix_caching": False,
        }
    )
    assert config.cudagraph_mode is CUDAGraphMode.FULL


def test_each_sampling_flag_sets_the_field_of_its_name(parse: Any) -> None:
    words = "-n 2 --max-tokens 5 --min-tokens 1 --temperature 0.5 --top-p 0.9 --top-k 7 --seed 11 --logprobs 2 --ignore-eos --no-skip-special-tokens"
    params = parse(*words.split(), "--stop-token-id", "3", "--stop-token-id", "4")[1].params()
    expected = SamplingParams(
        n=2,
        max_tokens=5,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=11,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=2,
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
        (["--max-sync-load-seconds", "soon"], ["soon", "no number"]),
        (["--threads", "two"], ["--threads", "integer"]),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_was_expected(parse: Any, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError, match="exit 2") as error:
        parse(*arguments)
    assert all(word in str(error.value) for word in words)
