"""The parts of a rank, in the order in which they are made: the model as it is run, then its memory and threads."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from interlock.core import interrupts
from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.graphs import NATIVE_FUNCTIONS
from interlock.graphs.stream import Stream
from interlock.graphs.threads import ThreadTeam
from interlock.kernels import native
from interlock.kernels.native import Kernel
from interlock.kv_transfer.registry import check_connector
from interlock.models.ops import Ops
from interlock.models.registry import LoadedModel, load_model
from interlock.models.rope import rope_table
from interlock.models.workspace import Workspace
from interlock.runner.drafter import Drafter
from interlock.runner.fingerprint import kernel_fingerprint
from interlock.runner.kv_cache import KVCache, fit_max_model_len, kv_cache_config, kv_dtype, kv_identity

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """A model with what it needs to be run here. rope: float32 `[max_model_len, rotary_dim]`. kv_shape: of the pool, in which the layers
    of a drafter lie behind the model's."""

    loaded: LoadedModel
    max_model_len: int
    rope: Buffer
    workspace: Workspace
    kv_shape: KVCacheConfig

    @classmethod
    def load(cls, config: EngineConfig, drafter: Drafter | None, progress: Progress | None) -> "RankModel":
        """Load the model. Raises CheckpointError, and ConfigError for options, the connector's among them, that do not go with it."""
        loaded = load_model(config.model, config.dtype, progress)
        num_layers = loaded.config.num_layers + (drafter.num_layers if drafter is not None else 0)
        kv_model = dataclasses.replace(loaded.config, num_layers=num_layers)
        max_model_len = fit_max_model_len(config, kv_model)
        rope = Buffer.from_numpy(rope_table(loaded.config.rope, max_model_len))
        identity = kv_identity(config, loaded, max_model_len) + (f" drafter={drafter.identity}" if drafter is not None else "")
        kv_shape = kv_cache_config(config, kv_model, identity)
        check_connector(config, kv_shape)
        workspace = Workspace.allocate(
            loaded.config,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_reqs=config.max_num_seqs,
            max_model_len=max_model_len,
            num_threads=config.num_threads,
        )
        return cls(loaded, max_model_len, rope, workspace, kv_shape)

    def load_kernels(self, config: EngineConfig, sampling: Kernel, progress: Progress | None) -> None:
        """Have every native function compiled or loaded, all at once. Raises CompileError."""
        kernels = (*self.loaded.model.kernels(kv_dtype(config)), sampling)
        functions = [*NATIVE_FUNCTIONS, *(kernel.function for kernel in kernels)]
        native.load(functions, progress and (lambda name, done, total: progress(f"compiling {name}", done, total)))


@dataclass(frozen=True, slots=True, eq=False)
class RankDevice:
    """The pool, and a stream on a thread team of its own. kv_shape: the pool's, with the kernel fingerprint where a connector compares it."""

    kv_cache: KVCache
    stream: Stream
    kv_shape: KVCacheConfig

    @classmethod
    def open(cls, config: EngineConfig, model: RankModel, resources: ExitStack) -> "RankDevice":
        """Allocate and start; `resources` gives all of it back. The kernels are loaded. Raises KVTransferError and KernelError."""
        shared = config.kv_transfer_config is not None
        kv_cache = KVCache.allocate(model.kv_shape, shared=shared)
        resources.callback(kv_cache.close)
        interrupts.deliver()
        team = ThreadTeam(config.num_threads)
        resources.callback(team.shutdown)
        stream = Stream(team)
        kv_shape = model.kv_shape
        if shared:
            loaded, layers = model.loaded, kv_cache.layers
            probe = Ops(stream, loaded.config, layers, model.workspace, model.rope)
            kv_shape = kernel_fingerprint(config, kv_shape, stream, lambda: loaded.model.forward(probe), layers, loaded.config.vocab_size)
        return cls(kv_cache, stream, kv_shape)
