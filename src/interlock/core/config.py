"""Engine options, under vLLM's names where vLLM has one, checked when they are set."""

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from interlock.core.buffer import ITEM_SIZES, DType
from interlock.core.errors import ConfigError
from interlock.core.forward_context import CUDAGraphMode

KVCacheDType = Literal["auto", "bfloat16", "float16", "float32"]
WeightDType = Literal["auto", "float32", "bfloat16", "float16"]
KVLoadWait = Literal["auto", "barrier", "hook", "gate"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVLoadFailurePolicy = Literal["recompute", "fail"]

DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_MAX_NUM_SEQS = 64

MAX_NUM_BATCHED_TOKENS = 2**20  # of one step; its activations alone are tens of kilobytes per token
MAX_THREADS = 1024
MAX_DATA_PARALLEL_SIZE = 1024
MAX_SECONDS = 86400.0
MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Which KV connector is used, and how: the fields of vLLM's `--kv-transfer-config`."""

    kv_connector: str
    kv_role: KVRole = "kv_both"
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: KVLoadFailurePolicy = "fail"

    def __post_init__(self) -> None:
        if not isinstance(self.kv_connector, str) or not self.kv_connector:
            raise ConfigError(f"kv_connector is {self.kv_connector!r}, expected the name of a registered connector or 'package.module:Class'")
        if not isinstance(self.engine_id, str) or not self.engine_id:
            raise ConfigError(f"engine_id is {self.engine_id!r}, expected a text that no other engine has, or leave it out")
        if self.kv_connector_module_path is not None and not isinstance(self.kv_connector_module_path, str):
            raise ConfigError(f"kv_connector_module_path is {self.kv_connector_module_path!r}, expected the name of a Python module")
        _check_choice("kv_role", self.kv_role, get_args(KVRole))
        _check_choice("kv_load_failure_policy", self.kv_load_failure_policy, get_args(KVLoadFailurePolicy))
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise ConfigError(f"kv_connector_extra_config is {self.kv_connector_extra_config!r}, expected an object")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "KVTransferConfig":
        """Build from a parsed JSON object; an unknown key is an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known, key=str)
        if unknown:
            raise ConfigError(f"kv_transfer_config has unknown keys {unknown}, expected some of {sorted(known)}")
        if "kv_connector" not in values:
            raise ConfigError("kv_transfer_config has no kv_connector; name a registered connector or 'package.module:Class'")
        return cls(**values)

    @property
    def is_producer(self) -> bool:
        """Whether this engine may hand its KV to others."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_consumer(self) -> bool:
        """Whether this engine may load KV of others."""
        return self.kv_role in ("kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is built from. Sizes are tokens, requests or bytes as the name says; times are seconds.

    model: 'smollm2' (the embedded model), a GGUF file, or a Hugging Face directory. dtype: how float weights are held
    ('auto' keeps the checkpoint's; quantised weights always stay as they are). kv_cache_memory_bytes: size of the KV pool.
    kv_load_wait: force one rung of the ladder: 'hook' makes FULL steps piecewise; 'gate' needs a mode in which decode steps are FULL replays, and
    steps that such a mode runs otherwise still use hooks. kv_load_timeout: the deadline of one load that a step consumes.
    kv_async_load_timeout: the engine's deadline of a load outside the steps, and of a connector that does not know yet what it has;
    generous, since a connector has deadlines of its own.
    max_sync_load_seconds: a load predicted to be slower than this waits outside the steps, if the connector can.
    data_parallel_size: engines (ranks) with the same model, of which this is number `data_parallel_rank`. data_parallel_lockstep: they
    make their steps together, with one collective each; rank 0 listens for the others at data_parallel_master_ip and _port.
    """

    model: str
    dtype: WeightDType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_memory_bytes: int = 512 * 2**20
    enable_prefix_caching: bool = True
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    enforce_eager: bool = False
    seed: int = 0
    threads: int | None = None
    kv_transfer_config: KVTransferConfig | None = None
    kv_load_wait: KVLoadWait = "auto"
    kv_load_timeout: float = 10.0
    kv_async_load_timeout: float = 120.0
    max_sync_load_seconds: float | None = None
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_lockstep: bool = False
    data_parallel_master_ip: str = "127.0.0.1"
    data_parallel_master_port: int = 29500

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model is {self.model!r}, expected 'smollm2', the path of a GGUF file, or of a Hugging Face directory")
        _check_choice("dtype", self.dtype, get_args(WeightDType))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        _check_choice("kv_load_wait", self.kv_load_wait, get_args(KVLoadWait))
        for name in ("enable_prefix_caching", "enforce_eager", "data_parallel_lockstep"):
            _check_bool(name, getattr(self, name))
        for name, low, high in _INTEGERS:
            _check_integer(name, getattr(self, name), low, high)
        for name, high in (("max_model_len", MAX_INT), ("threads", MAX_THREADS)):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, high)
        self._check_graphs()
        self._check_data_parallel()
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}, expected a power of two up to 256")
        for name in ("kv_load_timeout", "kv_async_load_timeout"):
            seconds = getattr(self, name)
            if not _is_number(seconds) or not 0 < seconds <= MAX_SECONDS:
                raise ConfigError(f"{name} is {seconds!r}, expected a number of seconds above 0 and up to {MAX_SECONDS:g}")
        if self.max_sync_load_seconds is not None and (not _is_number(self.max_sync_load_seconds) or not self.max_sync_load_seconds >= 0):
            raise ConfigError(f"max_sync_load_seconds is {self.max_sync_load_seconds!r}, expected a number of seconds of at least 0, or None")
        if self.kv_transfer_config is not None and not isinstance(self.kv_transfer_config, KVTransferConfig):
            raise ConfigError(f"kv_transfer_config is {self.kv_transfer_config!r}, expected an object with 'kv_connector'")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs is {self.max_num_seqs}, expected at most max_num_batched_tokens, which is {self.max_num_batched_tokens}: "
                "each running request takes at least one token of a step; lower max_num_seqs or raise max_num_batched_tokens"
            )

    def _check_graphs(self) -> None:
        if not isinstance(self.cudagraph_mode, CUDAGraphMode):
            raise ConfigError(f"cudagraph_mode is {self.cudagraph_mode!r}, expected one of {[m.name for m in CUDAGraphMode]}")
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and (not isinstance(sizes, tuple) or not sizes):
            raise ConfigError(f"cudagraph_capture_sizes is {sizes!r}, expected a list of at least one token count, or None for the usual ones")
        for size in sizes or ():
            _check_integer("cudagraph_capture_sizes", size, 1, MAX_INT)
        if sizes is not None and min(sizes) > self.max_num_batched_tokens:
            raise ConfigError(
                f"cudagraph_capture_sizes is {list(sizes)}, expected one size of at most max_num_batched_tokens, which is "
                f"{self.max_num_batched_tokens}: no step is larger; use enforce_eager for no graphs at all"
            )
        if self.kv_load_wait == "gate" and self.graph_mode.decode_mode() is not CUDAGraphMode.FULL:
            eager = " with enforce_eager" if self.enforce_eager else ""
            raise ConfigError(
                f"kv_load_wait is 'gate', but under cudagraph_mode {self.cudagraph_mode.name}{eager} no step is a FULL replay, "
                "and gates are nodes of FULL replays; use FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE, or kv_load_wait 'auto'"
            )

    def _check_data_parallel(self) -> None:
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank is {self.data_parallel_rank}, expected less than data_parallel_size, which is {self.data_parallel_size}"
            )
        if not isinstance(self.data_parallel_master_ip, str) or not self.data_parallel_master_ip:
            raise ConfigError(f"data_parallel_master_ip is {self.data_parallel_master_ip!r}, expected the address that rank 0 listens on")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "EngineConfig":
        """Build from plain JSON values by option name: a mode is its name, `kv_transfer_config` an object; the model may be a path object. An
        unknown name is an error.
        `max_num_seqs`, if it is not given, is at most the token budget of a step."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known, key=str)
        if unknown:
            raise ConfigError(f"unknown engine options {unknown}, expected some of {sorted(known)}")
        parsed = dict(values)
        if isinstance(parsed.get("model"), os.PathLike):
            parsed["model"] = os.fspath(parsed["model"])
        if isinstance(parsed.get("cudagraph_mode"), str):
            parsed["cudagraph_mode"] = parse_cudagraph_mode(parsed["cudagraph_mode"])
        if isinstance(parsed.get("kv_transfer_config"), Mapping):
            parsed["kv_transfer_config"] = KVTransferConfig.from_mapping(parsed["kv_transfer_config"])
        if isinstance(parsed.get("cudagraph_capture_sizes"), list):
            parsed["cudagraph_capture_sizes"] = tuple(parsed["cudagraph_capture_sizes"])
        budget = parsed.get("max_num_batched_tokens")
        if "max_num_seqs" not in parsed and isinstance(budget, int) and 1 <= budget < DEFAULT_MAX_NUM_SEQS:
            parsed["max_num_seqs"] = int(budget)
        return cls(**parsed)

    @property
    def num_threads(self) -> int:
        """Size of the native thread team: `threads`, or the CPUs that this process may use."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def graph_mode(self) -> CUDAGraphMode:
        """The configured graph mode after `enforce_eager`."""
        return CUDAGraphMode.NONE if self.enforce_eager else self.cudagraph_mode

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Capture sizes (tokens), ascending. By default the largest is `max_num_batched_tokens`; of sizes that are given, those
        above it are dropped. A batch larger than the largest size runs eagerly."""
        sizes = self.cudagraph_capture_sizes or (*DEFAULT_CAPTURE_SIZES, self.max_num_batched_tokens)
        return tuple(sorted({size for size in sizes if size <= self.max_num_batched_tokens}))


def parse_cudagraph_mode(name: str) -> CUDAGraphMode:
    """The mode called `name` (case does not matter). Raises ConfigError with the known names."""
    try:
        return CUDAGraphMode[name.upper()]
    except KeyError:
        raise ConfigError(f"cudagraph_mode is {name!r}, expected one of {[m.name for m in CUDAGraphMode]}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The shape of one rank's KV pool, and its identity. Per layer the pool is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

    identity: what the KV of a token sequence depends on (weights, RoPE, dtype, …); kernel_fingerprint: the kernels' output on a fixed
    probe. Peers compare both.
    """

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    layer_names: tuple[str, ...]
    identity: str
    kernel_fingerprint: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer (keys and values)."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * ITEM_SIZES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's pool."""
        return self.num_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return self.num_layers * self.block_bytes // self.block_size


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {list(choices)}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected true or false")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        too_large = isinstance(value, int) and value > high
        expected = f"of at least {low}" if high == MAX_INT and not too_large else f"from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}, expected an integer {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_INTEGERS = (
    ("max_num_seqs", 1, MAX_NUM_BATCHED_TOKENS),
    ("max_num_batched_tokens", 1, MAX_NUM_BATCHED_TOKENS),
    ("block_size", 1, 256),
    ("kv_cache_memory_bytes", 1, MAX_INT),
    ("seed", 0, 2**64 - 1),
    ("data_parallel_size", 1, MAX_DATA_PARALLEL_SIZE),
    ("data_parallel_rank", 0, MAX_DATA_PARALLEL_SIZE),
    ("data_parallel_master_port", 1, 65535),
)
