"""What moves KV in and out of an engine: one class with a scheduler half and a worker half, under vLLM's method names.

The engine creates an instance with role SCHEDULER, the runner one with role WORKER. The halves meet only in the metadata of a step
(`build_connector_meta` → `bind_connector_metadata`) and in the worker's report (`build_connector_worker_meta`, `get_finished`, …
→ `update_connector_output`).
"""

# ruff: noqa: B027 (optional methods do nothing on purpose)

import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from interlock.core import interrupts
from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig, KVTransferConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.core.forward_context import ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.graphs.timeline import Timelines

if TYPE_CHECKING:
    from interlock.kv_transfer.transports.shared_memory import KVPool


class KVConnectorRole(enum.Enum):
    """Which half an instance is."""

    SCHEDULER = 0
    WORKER = 1


@dataclass(frozen=True, slots=True)
class KVConnectorTransferResults:
    """Ends of transfers since the last report, as request ids. An id in `failed_recving` is also in `finished_recving`.

    recving_errors: causes of failures, by request, where they are known.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    recving_errors: Mapping[str, str] = field(default_factory=dict)


class ConnectorRequest(Protocol):
    """What a connector may read of the engine's request.

    num_tokens: all known tokens (prompt and output); num_computed_tokens: positions that have KV; finish_reason: 'stop', 'length',
    'abort' or 'error' once finished. A tier may keep a request until `request_finished` and look at it again in each step.
    """

    @property
    def request_id(self) -> str:
        """The engine's id."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens."""

    @property
    def num_tokens(self) -> int:
        """Length of `all_token_ids`."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Positions [0, n) that have KV here."""

    @property
    def block_ids(self) -> Sequence[int]:
        """Its blocks: position p lies in `block_ids[p // block_size]`. They change from step to step."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Content keys of its full blocks, 32 bytes each: a chain over the KV identity, the cache salt and all tokens up to the block's
        last. Equal keys, equal KV, in any process. There are at least `num_published_blocks`; when a load is asked for, all full blocks."""

    @property
    def num_published_blocks(self) -> int:
        """Its first n blocks are full and have KV, and the steps and loads that wrote it have retired: what may be saved."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The hand-off parameters that came with the request; untrusted."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it runs."""


class KVConnector(ABC):
    """The connector interface. All methods run on the engine's thread; none may block without a bound.

    While they run, interrupts (whatever a Python signal handler raises) are held off, but for `may_wait`.
    """

    supports_timelines: bool = False
    """True: the worker half reports the end of each transfer to the `ledger` that `start_load_kv` receives, from a thread of its own,
    and returns before landing in every mode. False: its return is its claim, and what `get_block_ids_with_load_errors` names afterwards
    counts as not landed."""

    progresses_by_itself: bool = True
    """With timelines. False: its transport moves bytes only while the step's thread calls into it, so a replay cannot wait for it."""

    load_is_repeatable: bool = False
    """True: what was loaded once can be loaded again, so a request that was preempted asks again. False: a load is asked for once."""

    recomputes_failed_loads: bool = False
    """True: this connector is a cache, so what it fails to load is recomputed, whatever `kv_load_failure_policy` says."""

    hands_over: bool = False
    """True: it serves requests whose `kv_transfer_params` ask for a remote prefill or decode. False: the engine refuses them."""

    saves_layers: bool = True
    """False: `save_kv_layer` does nothing, so the step need not wait for a layer's kernels before it calls it."""

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if config.kv_transfer_config is None:
            raise ConfigError("kv_transfer_config is None, expected the configuration of the connector that is being created")
        self.check_options(config, kv_cache_config)
        self.config = config
        self.kv_transfer_config: KVTransferConfig = config.kv_transfer_config
        self.role = role
        self.kv_cache_config = kv_cache_config
        self._connector_metadata: Any = None

    @classmethod
    def check_options(cls, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        """Raise ConfigError for options that this connector cannot be used with. Called before a pool of this shape is allocated (its
        fingerprint is still empty), and again by the constructor; it makes nothing."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """True: this connector cannot serve a FULL replay, so FULL falls back to PIECEWISE."""
        return False

    # ---- scheduler half

    @abstractmethod
    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`(n, is_async)`: positions [num_computed_tokens, num_computed_tokens + n) can be loaded now. n None: not known yet, ask again.
        At most `request.num_tokens - num_computed_tokens`; the request's last token is computed here in any case.

        No side effects: the allocation may still fail. `is_async` is False when n is 0.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """`block_ids` (all blocks of the request) are allocated and `num_external_tokens` positions are to be loaded (0: none)."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """The step's metadata for the worker half; clears what was collected. `scheduler_output.load_promises` is already filled in."""

    def on_new_request(self, request: ConnectorRequest) -> None:
        """A request has arrived. Raises RequestError if its `kv_transfer_params` cannot be used; the engine then refuses the request."""

    def request_finished(self, request: ConnectorRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Called once per request, before its blocks are freed, also on abort: `(keep the blocks, kv_transfer_params of the answer)`.

        Kept blocks are freed when a later report names the request in `finished_sending`.
        """
        return False, None

    def request_preempted(self, request: ConnectorRequest) -> None:
        """A running request, or one that waits with landed KV, is about to give up its blocks; it goes on later, with others."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The worker half's report of a step, before the scheduler acts on it."""

    def recomputes_load(self, req_id: str) -> bool:
        """Whether the request's load, should it fail, is recomputed whatever `kv_load_failure_policy` says. Asked of a request that has
        one, before the failure is acted on."""
        return self.recomputes_failed_loads

    def has_pending_push_work(self) -> bool:
        """True keeps the engine stepping (without tokens) although it has no requests."""
        return False

    def bind_block_pool(self, block_pool: Any) -> None:
        """Once, after the block pool was built."""

    # ---- worker half

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's loads. The keyword arguments are the same in all modes: `scheduler_output`, `request_ids`, `num_tokens`,
        `attn_metadata`, `ledger`. Without timelines every read has landed or failed on return if
        `forward_context.cudagraph_runtime_mode` is FULL, because no `wait_for_layer_load` follows then."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's part of the step's loads has landed or failed. Not called in a FULL replay."""

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        """The layer's KV of this step is written (`kv_layer`: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`). Not called in a FULL replay."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Once per step, also empty ones, after everything that writes KV: submit saves; synchronous ones end here."""

    def register_timelines(self, written: Timelines) -> None:
        """Once. A layer's timeline reaches a step's stamp (`forward_context.step`) as soon as the step has written the layer's KV,
        in every mode and also inside a FULL replay; a thread of the connector may wait for it."""

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        """Once, after the pool was allocated: per layer name `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""

    def register_pool(self, pool: "KVPool") -> None:
        """Once, before `register_kv_caches`: the memory that the layers lie in."""

    def get_handshake_metadata(self) -> Any:
        """Connection information of this rank, or None."""
        return None

    def handle_preemptions(self, connector_metadata: Any) -> None:
        """The first call of a step, before the metadata is bound: finish saves from blocks that are about to be overwritten."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The step's metadata is visible from here to `clear_connector_metadata`."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step's metadata is bound."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        if self._connector_metadata is None:
            raise LifecycleError(f"{type(self).__name__}: no connector metadata is bound; it exists from pre_forward to post_forward of a step")
        return self._connector_metadata

    def abort_loads(self, step: int) -> None:
        """The step gave its loads up (deadline, or a failed forward). Stop them, and return when no byte of them can be written any more."""

    def finish_forward(self) -> None:
        """The forward pass was launched."""

    def reset_capture_state(self) -> None:
        """Graphs were captured; forget whatever that changed."""

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str] | None, set[str] | None]:
        """`(finished_sending, finished_recving)` since the last call; `finished_req_ids` ended in the scheduler."""
        return None, None

    def get_transfer_results(self, finished_req_ids: frozenset[str]) -> KVConnectorTransferResults:
        """As `get_finished`, and can name failures."""
        answer: Any = self.get_finished(finished_req_ids)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise TypeError(f"get_finished returned {answer!r}, expected (finished_sending, finished_recving)")
        sending, recving = (frozenset() if ids is None else ids for ids in answer)
        return KVConnectorTransferResults(sending, recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Local blocks whose load failed since the last call."""
        return set()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """Counters by name since the last call."""
        return {}

    def build_connector_worker_meta(self) -> Any:
        """A message for the scheduler half, or None."""
        return None

    def shutdown(self) -> None:
        """Stop threads, give memory and sockets back. May be called twice."""


def may_wait(connector: KVConnector) -> contextlib.AbstractContextManager[None]:
    """Around a call in which `connector` may wait, to start or stop a load, for one, or for a save. One without timelines does so in a way of its
    own, which knows no safe points, so an interrupt comes as it would anywhere. One with timelines returns at once."""
    return contextlib.nullcontext() if connector.supports_timelines else interrupts.served()
