"""The messages of one step: what the scheduler asks for, and what the runner answers. Names are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from interlock.core.forward_context import CUDAGraphMode
from interlock.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that the runner sees for the first time, or again after a preemption: everything about it.

    token_ids: all known tokens (prompt and output so far); num_prompt_tokens of them are the prompt. seed: fixed when it arrived.
    sample_index: which of the prompt's n samples it is; part of the key of its randomness (seed, sample index, output index).
    all_stop_token_ids: what is not drawn before `min_tokens` tokens are there, at most MAX_MASKED_TOKENS ids, each once; none without min_tokens.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed_tokens: int
    sample_index: int = 0
    all_stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """A request that the runner knows: what changed. `num_tokens` is how many of its tokens still hold (a rollback shortens it);
    `num_computed_tokens` is where its KV ends before this step; `block_ids`, if not None, replaces the request's whole block list,
    otherwise `new_block_ids` is appended to it."""

    req_id: str
    new_block_ids: list[int]
    num_computed_tokens: int
    num_tokens: int
    block_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class LoadPromise:
    """KV that the step which carries it will consume: positions [start, stop) of a request, for every layer.

    block_ids: the local blocks that hold these positions, first to last (the first may begin before `start`).
    void: why it will not be kept, if that is known when the step is planned; it counts as failed from the start.
    """

    req_id: str
    start: int
    stop: int
    block_ids: tuple[int, ...]
    void: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `step` is its stamp; stamps only grow. `load_promises` are the synchronous loads of this step.

    async_load_req_ids: requests that wait outside the steps for a load that this step's metadata orders. connector_fault: why the
    connector has no metadata for the step; its loads have failed then.
    """

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    kv_connector_metadata: Any = None
    load_promises: tuple[LoadPromise, ...] = ()
    async_load_req_ids: frozenset[str] = frozenset()
    connector_fault: str | None = None

    @property
    def has_sync_kv_loads(self) -> bool:
        """Whether the step consumes KV that it loads itself."""
        return bool(self.load_promises)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at one output position: the sampled token first, then the n most likely ones, descending."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int


@dataclass(frozen=True, slots=True)
class KVConnectorOutput:
    """What the worker half of a connector reports after a step. `load_wait_seconds`: how long the step waited for loads.

    `pending_block_ids`: those of the invalid blocks that a transfer may still write; they stay quarantined until
    `finished_recving` (or `failed_recving`) names the request. `num_dropped_reports`: things in the reports that could not be read.
    `num_connector_faults`: calls that raised or gave no answer; what they had to say is lost.
    `fault`: why not all that the step's metadata ordered has begun, or may have; None: it has.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    pending_block_ids: frozenset[int] = frozenset()
    load_errors: Mapping[str, str] = field(default_factory=dict)
    kv_connector_stats: Mapping[str, float] = field(default_factory=dict)
    kv_connector_worker_meta: Any = None
    load_wait_seconds: float = 0.0
    loaded_bytes: int = 0
    num_dropped_reports: int = 0
    num_connector_faults: int = 0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The answer to one SchedulerOutput. A request appears in `sampled_token_ids` only if its last known token was computed.

    `failed_requests`: requests whose own result cannot be used (nothing could be drawn from their logits), with the cause; the others of the
    step are good.
    """

    step: int
    sampled_token_ids: Mapping[str, int] = field(default_factory=dict)
    logprobs: Mapping[str, Logprobs] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    failed_requests: Mapping[str, str] = field(default_factory=dict)
