"""What an engine gives back, in vLLM's shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interlock.core.step import Logprobs
from interlock.engine.request import RequestMetrics


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position. rank: 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt. `logprobs`: per output token, token id → `Logprob`; the sampled token first, then the most likely ones.

    `cumulative_logprob` is the sum over the sampled tokens. Both are None unless asked for. `finish_reason`: 'stop', 'length', 'abort'
    or 'error'; `stop_reason`: the stop token that ended it, None for the end-of-sequence token. The token that ended it is in `token_ids`,
    and not in `text`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples. `error` says what went wrong if a sample's finish_reason is 'error'.

    `kv_transfer_params`: what the next engine needs to load this prompt's KV, if this one was asked to keep it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step added to one sequence. `text` may be empty while a character is incomplete."""

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether it is the last."""
        return self.finish_reason is not None


def logprob_table(position: Logprobs, decode: Callable[[int], str]) -> dict[int, Logprob]:
    """vLLM's form of the log-probabilities at one position: the sampled token first, then the most likely ones, each token once."""
    sampled, *likely = zip(position.token_ids, position.logprobs, strict=True)
    table = {sampled[0]: Logprob(sampled[1], position.sampled_rank, decode(sampled[0]))}
    for rank, (token_id, logprob) in enumerate(likely, 1):
        table.setdefault(token_id, Logprob(logprob, rank, decode(token_id)))
    return table
