"""How the tokens of a request are chosen, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlock.core.errors import RequestError

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature 0 is greedy; top_k 0 or -1 means all tokens; top_p in (0, 1]; `seed` None draws one when the request arrives;
    `logprobs` n returns the sampled token's log-probability and those of the n most likely tokens, of the untempered distribution;
    `max_tokens` None means up to `max_model_len`. `extra_args["kv_transfer_params"]` carries the hand-off (anchors: NIXL shape).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, 1024)
        _check_float("temperature", self.temperature, 0.0, 1e6)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, expected a number in (0, 1]; use temperature=0 for greedy decoding")
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(self.stop_token_ids, Sequence):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}, expected a list of token ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise RequestError(f"extra_args is {self.extra_args!r}, expected a mapping")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, expected an integer from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}")
