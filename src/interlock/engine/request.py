"""A request, from its arrival to its last token."""

import enum
from dataclasses import dataclass, field
from typing import Any

from interlock.core.sampling_params import SamplingParams
from interlock.core.step import Logprobs
from interlock.kv_transfer.transfer_params import read_transfer_params


class RequestStatus(enum.IntEnum):
    """Where a request stands. All states from FINISHED_STOPPED on are final."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def finished(self) -> bool:
        """Whether the state is final."""
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """'stop', 'length', 'abort' or 'error'; None while the request is unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class LoadState(enum.Enum):
    """Where a request stands with the KV that a connector may have for it. A load is asked for at most once in a request's life,
    unless the connector's loads are repeatable: a preempted request is then UNASKED again."""

    UNASKED = enum.auto()
    LOADING = enum.auto()
    SETTLED = enum.auto()


@dataclass(slots=True)
class RequestMetrics:
    """What happened to a request, and when. Times are seconds of `time.monotonic`; `cudagraph_modes` counts its steps by run-time mode.

    parked_time: when it last began to wait outside the steps for a load; num_parked_loads: how often it did.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_preemptions: int = 0
    num_failed_loads: int = 0
    num_parked_loads: int = 0
    parked_time: float = 0.0
    load_wait_seconds: float = 0.0
    loaded_bytes: int = 0
    cudagraph_modes: dict[str, int] = field(default_factory=dict)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class Request:
    """One sequence of tokens: a prompt and what was sampled behind it.

    `token_ids` holds both; `num_computed_tokens` of them have KV in `block_ids` (position p in block p // block_size).
    `block_keys` are the prefix-cache keys of its full blocks, computed so far, behind `block_root`. `in_flight_step` is the step that
    computes it now. `token_limit` is the length at which it ends. `all_stop_token_ids` are not drawn before `min_tokens` tokens are there.
    `asked_time` is when its connector was first asked and did not know.
    Only the scheduler changes a request.
    Raises RequestError for `kv_transfer_params` (among the `extra_args`) that cannot be used.
    """

    __slots__ = (
        "all_stop_token_ids",
        "arrival_index",
        "asked_time",
        "block_ids",
        "block_keys",
        "block_root",
        "cache_salt",
        "discard_in_flight",
        "error",
        "in_flight_step",
        "kv_transfer_params",
        "load_state",
        "logprobs",
        "metrics",
        "num_computed_tokens",
        "num_external_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_taken_tokens",
        "output_kv_transfer_params",
        "prompt",
        "replace_blocks",
        "request_id",
        "sample_index",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "token_limit",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        arrival_time: float,
        sample_index: int = 0,
        prompt: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.seed = seed
        self.sample_index = sample_index
        self.cache_salt = cache_salt
        self.kv_transfer_params: dict[str, Any] | None = read_transfer_params(sampling_params.extra_args)
        self.output_kv_transfer_params: dict[str, Any] | None = None
        self.arrival_index = -1
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_external_tokens = 0
        self.block_ids: list[int] = []
        self.block_root = b""
        self.block_keys: list[bytes] = []
        self.num_published_blocks = 0
        self.num_taken_tokens = len(self.token_ids)
        self.load_state = LoadState.UNASKED
        self.asked_time: float | None = None
        self.logprobs: list[Logprobs] = []
        self.token_limit = 0
        self.stop_token_ids: frozenset[int] = frozenset()
        self.all_stop_token_ids: tuple[int, ...] = ()
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.in_flight_step: int | None = None
        self.discard_in_flight = False
        self.replace_blocks = False
        self.metrics = RequestMetrics(arrival_time)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt's tokens."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the sampled tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def take_new_tokens(self) -> list[int]:
        """The tokens sampled since the last call."""
        fresh = self.token_ids[self.num_taken_tokens :]
        self.num_taken_tokens = len(self.token_ids)
        return fresh

    @property
    def all_token_ids(self) -> list[int]:
        """All known tokens (vLLM's name); not to be changed."""
        return self.token_ids

    @property
    def block_hashes(self) -> list[bytes]:
        """The content keys of its full blocks (vLLM's name); not to be changed."""
        return self.block_keys

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """'stop', 'length', 'abort' or 'error'; None while unfinished."""
        return self.status.finish_reason
