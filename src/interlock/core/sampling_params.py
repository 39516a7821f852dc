"""How the tokens of a request are chosen, with vLLM's names."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlock.core.errors import RequestError

MAX_LOGPROBS = 20
MAX_MASKED_TOKENS = 128  # end and stop tokens that a request with min_tokens may have
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature 0 is greedy; top_k 0 or -1 means all tokens; top_p in (0, 1]; `seed` None draws one when the request arrives;
    `logprobs` n returns the sampled token's log-probability and those of the n most likely tokens, of the untempered distribution;
    `max_tokens` None means up to `max_model_len`; `stop_token_ids` None means none. Integers and floats may be NumPy's.
    Before `min_tokens` tokens are there, no stop token and (also with `ignore_eos`) no end-of-sequence token is drawn: as if its logit were
    -inf. Log-probabilities and ranks are those of the logits as the model gave them.
    `extra_args["kv_transfer_params"]` carries the hand-off, with the keys of vLLM's NIXL connector.
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
        self._read_int("n", 1, 1024)
        self._read_float("temperature", 0.0, 1e6)
        self._read_float("top_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, expected a number in (0, 1]; use temperature=0 for greedy decoding")
        self._read_int("top_k", -1, 2**31 - 1)
        self._read_int("min_tokens", 0, 2**31 - 1)
        for name, low, high in (("seed", 0, MAX_SEED), ("max_tokens", 1, 2**31 - 1), ("logprobs", 0, MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                self._read_int(name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected true or false")
        self._read_stop_token_ids()
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise RequestError(f"extra_args is {self.extra_args!r}, expected a mapping")

    def _read_stop_token_ids(self) -> None:
        given = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise RequestError(f"stop_token_ids is {given!r}, expected a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(_integer("stop_token_ids", token, 0, 2**31 - 1) for token in given))

    def _read_int(self, name: str, low: int, high: int) -> None:
        object.__setattr__(self, name, _integer(name, getattr(self, name), low, high))

    def _read_float(self, name: str, low: float, high: float) -> None:
        value: Any = getattr(self, name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise RequestError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}")
        object.__setattr__(self, name, float(value))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError(f"{name} is {value!r}, expected an integer from {low} to {high}")
    return int(value)
