"""The flags that several commands share: engine options and sampling parameters, under vLLM's names, declared once.

A command takes `engine: EngineOptions` and `sampling: SamplingOptions`; the decorators put the flags in their place.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from interlock.commands import values
from interlock.core.config import EngineConfig, KVCacheDType, KVLoadWait, WeightDType
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.sampling_params import SamplingParams

Command = Callable[..., None]

_FILES_HELP = "A file that is a prompt, or a .jsonl file: in each line a text, token ids, or an object as LLM.generate takes it; may be repeated."
FilesOption = Annotated[list[Path] | None, typer.Option("--file", metavar="PATH", help=_FILES_HELP)]
ChatOption = Annotated[bool | None, typer.Option("--chat/--raw", help="Whether text goes through the chat template; yes if the model has one.")]

ENGINE_DEFAULTS: Mapping[str, Any] = {"model": "smollm2"}
SAMPLING_DEFAULTS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 128}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Engine options as plain JSON values, by field name of `EngineConfig`; what is not set keeps the default there."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> EngineConfig:
        """The checked configuration. Raises ConfigError."""
        return EngineConfig.from_mapping(self.plain())

    def plain(self) -> dict[str, Any]:
        """The plain values, with the command line's own defaults, for an engine in another process."""
        return {**ENGINE_DEFAULTS, **self.values}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters as plain JSON values, by field name of `SamplingParams`."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def params(self) -> SamplingParams:
        """The checked parameters. Raises RequestError."""
        return SamplingParams(**self.plain())

    def plain(self) -> dict[str, Any]:
        """The plain values, with the command line's own defaults."""
        return {**SAMPLING_DEFAULTS, **self.values}


def with_engine_options(command: Command) -> Command:
    """Replace the parameter `engine` of `command` by the engine's flags."""
    return _with_flags(command, "engine", _ENGINE_FLAGS, EngineOptions)


def with_sampling_options(command: Command) -> Command:
    """Replace the parameter `sampling` of `command` by the sampling flags."""
    return _with_flags(command, "sampling", _SAMPLING_FLAGS, SamplingOptions)


def _with_flags(command: Command, name: str, flags: Mapping[str, Any], options: Callable[[Mapping[str, Any]], object]) -> Command:
    own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values() if parameter.name != name]
    added = [inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation) for flag, annotation in flags.items()]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {flag: arguments.pop(flag) for flag in flags}
        command(**arguments, **{name: options({flag: value for flag, value in values.items() if value is not None})})

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + added
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(*names: str, help: str, metavar: str | None = None, parser: Callable[[str], Any] | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, parser=parser, show_default=False)


def _integer(*names: str, help: str, metavar: str = "N") -> Any:
    return _option(*names, help=help, metavar=metavar, parser=values.integer)


def _number(*names: str, help: str, metavar: str = "X") -> Any:
    return _option(*names, help=help, metavar=metavar, parser=values.number)


_MODES = ", ".join(mode.name for mode in CUDAGraphMode)
_KV_DTYPES, _DTYPES, _WAITS = get_args(KVCacheDType), get_args(WeightDType), get_args(KVLoadWait)

_ENGINE_FLAGS: dict[str, Any] = {
    "model": Annotated[
        str | None, _option("--model", metavar="MODEL", help="'smollm2' (the embedded model, the default), a GGUF file, or a Hugging Face directory.")
    ],
    "dtype": Annotated[
        str | None, _option("--dtype", metavar="|".join(_DTYPES), parser=values.choice("dtype", _DTYPES), help="How float weights are held; auto.")
    ],
    "max_model_len": Annotated[int | None, _integer("--max-model-len", help="Longest sequence, in tokens; the model's own limit.")],
    "max_num_seqs": Annotated[int | None, _integer("--max-num-seqs", help="Most requests in one step; 64, or the token budget if that is less.")],
    "max_num_batched_tokens": Annotated[int | None, _integer("--max-num-batched-tokens", help="Token budget of one step; 512.")],
    "block_size": Annotated[int | None, _integer("--block-size", help="Token positions in one KV block; 16.")],
    "kv_cache_dtype": Annotated[
        str | None,
        _option(
            "--kv-cache-dtype",
            metavar="|".join(_KV_DTYPES),
            parser=values.choice("kv_cache_dtype", _KV_DTYPES),
            help="Element type of the KV cache; bfloat16.",
        ),
    ],
    "kv_cache_memory_bytes": Annotated[int | None, _integer("--kv-cache-memory-bytes", help="Size of the KV pool, in bytes; 512 MiB.")],
    "enable_prefix_caching": Annotated[
        bool | None, _option("--enable-prefix-caching/--no-enable-prefix-caching", help="Whether KV of equal prefixes is shared; on.")
    ],
    "cudagraph_mode": Annotated[
        str | None, _option("--cudagraph-mode", "--mode", metavar="MODE", parser=values.mode, help=f"{_MODES}; FULL_AND_PIECEWISE.")
    ],
    "cudagraph_capture_sizes": Annotated[
        Any, _option("--cudagraph-capture-sizes", metavar="N,N,…", parser=values.sizes, help="Batch sizes, in tokens, that graphs are captured for.")
    ],
    "enforce_eager": Annotated[bool | None, _option("--enforce-eager/--no-enforce-eager", help="No graphs at all; off.")],
    "threads": Annotated[int | None, _integer("--threads", help="Size of the native thread team; the CPUs that this process may use.")],
    "kv_transfer_config": Annotated[
        Any, _option("--kv-transfer-config", metavar="JSON", parser=values.json_object, help="The KV connector and its role, as vLLM's option.")
    ],
    "kv_load_wait": Annotated[
        str | None,
        _option(
            "--kv-load-wait", metavar="|".join(_WAITS), parser=values.choice("kv_load_wait", _WAITS), help="Force one way of waiting for loads; auto."
        ),
    ],
    "kv_load_timeout": Annotated[float | None, _number("--kv-load-timeout", metavar="SECONDS", help="Deadline of one KV load, in seconds; 10.")],
    "kv_async_load_timeout": Annotated[
        float | None, _number("--kv-async-load-timeout", metavar="SECONDS", help="Deadline of one KV load that no step waits for, in seconds; 120.")
    ],
    "max_sync_load_seconds": Annotated[
        float | None,
        _number(
            "--max-sync-load-seconds",
            metavar="SECONDS",
            help="A load predicted to take longer waits outside the steps; 'inf': none does. The connector decides.",
        ),
    ],
}

_SAMPLING_FLAGS: dict[str, Any] = {
    "n": Annotated[int | None, _integer("-n", "--n", help="Outputs per prompt; 1.")],
    "max_tokens": Annotated[int | None, _integer("--max-tokens", help="Most tokens per output; 128.")],
    "min_tokens": Annotated[int | None, _integer("--min-tokens", help="Until so many are there, no end or stop token is drawn; 0.")],
    "temperature": Annotated[float | None, _number("--temperature", help="0 takes the most likely token; 0.")],
    "top_p": Annotated[float | None, _number("--top-p", help="Draw from the smallest set of tokens with this probability; 1.")],
    "top_k": Annotated[int | None, _integer("--top-k", help="Draw from the K most likely tokens; all.")],
    "seed": Annotated[int | None, _integer("--seed", help="Seed of each request's draws.")],
    "stop_token_ids": Annotated[list[int] | None, _integer("--stop-token-id", metavar="ID", help="End at this token; may be given several times.")],
    "ignore_eos": Annotated[bool | None, _option("--ignore-eos/--no-ignore-eos", help="Go on past the model's end token; off.")],
    "skip_special_tokens": Annotated[
        bool | None, _option("--skip-special-tokens/--no-skip-special-tokens", help="Whether control tokens are left out of the text; yes.")
    ],
    "logprobs": Annotated[int | None, _integer("--logprobs", help="Log-probabilities of the sampled and the K most likely tokens (in --json).")],
}
