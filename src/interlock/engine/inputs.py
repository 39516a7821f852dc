"""Prompts as they come from users, checked and turned into token ids."""

import hashlib
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from interlock.core.errors import RequestError
from interlock.core.sampling_params import MAX_MASKED_TOKENS, SamplingParams
from interlock.kv_transfer.transfer_params import read_transfer_params

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Encoder(Protocol):
    """What the inputs need of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt that can be computed. `text` is None if it came as token ids alone."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None


class InputProcessor:
    """Checks prompts against one model: its tokenizer (None if it has none), the rows of its embedding table, its longest sequence, its
    end tokens."""

    def __init__(self, tokenizer: Encoder | None, vocab_size: int, max_model_len: int, eos_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)

    def process(self, prompt: Prompt) -> TokenizedPrompt:
        """Read a prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids` and perhaps `cache_salt`. Raises RequestError."""
        if isinstance(prompt, str):
            return self._tokenize(prompt, None)
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt)
        if isinstance(prompt, np.ndarray) or (isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)):
            return TokenizedPrompt(None, self._check_ids(prompt), None)
        raise RequestError(f"prompt is {prompt!r}, expected text, a list of token ids, or an object with some of {list(_PROMPT_KEYS)}")

    def check_params(self, params: SamplingParams) -> None:
        """Check what sampling parameters say about tokens and hand-offs. Raises RequestError."""
        read_transfer_params(params.extra_args)
        for token_id in params.stop_token_ids:
            if token_id >= self._vocab_size:
                raise RequestError(f"stop_token_ids has {token_id}, expected token ids below {self._vocab_size}, the model's vocabulary")
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise RequestError(f"logprobs is {params.logprobs}, expected at most {self._vocab_size}, the model's vocabulary")
        if params.min_tokens:
            self._check_all_stop_tokens(params)

    def _check_all_stop_tokens(self, params: SamplingParams) -> None:
        """What is not drawn before min_tokens tokens are there must leave something to draw, and have room in a step slot."""
        count = len(self._eos_token_ids.union(params.stop_token_ids))
        most = min(MAX_MASKED_TOKENS, self._vocab_size - 1)
        if count > most:
            raise RequestError(
                f"stop_token_ids and the model's end tokens are {count} tokens, expected at most {most} with min_tokens, which is "
                f"{params.min_tokens}; give fewer stop_token_ids, or min_tokens=0"
            )

    def _read_mapping(self, prompt: Mapping[str, Any]) -> TokenizedPrompt:
        check_prompt_object(prompt)
        salt, text = prompt.get("cache_salt"), prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(text, self._check_ids(prompt["prompt_token_ids"]), salt)
        return self._tokenize(prompt["prompt"], salt)

    def _tokenize(self, text: str, salt: str | None) -> TokenizedPrompt:
        if self._tokenizer is None:
            raise RequestError("prompt is text, but the model's files have no tokenizer; give prompt_token_ids")
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            raise RequestError(f"prompt is {text!r}, which has no tokens; expected at least one")
        return TokenizedPrompt(text, self._check_ids(token_ids), salt)

    def _check_ids(self, token_ids: object) -> list[int]:
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
            raise RequestError(f"prompt_token_ids is {token_ids!r}, expected a list of token ids")
        if not token_ids:
            raise RequestError("prompt_token_ids is empty, expected at least one token id")
        size = self._vocab_size
        for index, token_id in enumerate(token_ids):
            whole = type(token_id) is int or (isinstance(token_id, numbers.Integral) and not isinstance(token_id, bool))
            if not whole or not 0 <= token_id < size:
                raise RequestError(f"prompt_token_ids[{index}] is {token_id!r}, expected an integer from 0 to {size - 1}, the model's vocabulary")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens, expected fewer than max_model_len, which is {self._max_model_len}; "
                "shorten the prompt or raise max_model_len"
            )
        return [int(token_id) for token_id in token_ids]


def check_prompt_object(prompt: Mapping[str, Any]) -> None:
    """Raise RequestError unless `prompt` has the keys of one and its texts are texts; only the model can tell whether its tokens are tokens."""
    unknown = sorted(set(prompt) - set(_PROMPT_KEYS), key=str)
    if unknown:
        raise RequestError(f"prompt has unknown keys {unknown}, expected some of {list(_PROMPT_KEYS)}")
    salt, text = prompt.get("cache_salt"), prompt.get("prompt")
    if salt is not None and (not isinstance(salt, str) or not _is_unicode(salt)):
        raise RequestError(f"cache_salt is {salt!r}, expected a string")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt is {text!r}, expected text")
    if "prompt_token_ids" in prompt and isinstance(prompt["prompt_token_ids"], str):
        raise RequestError(f"prompt_token_ids is {prompt['prompt_token_ids']!r}, expected a list of token ids")
    if text is None and "prompt_token_ids" not in prompt:
        raise RequestError(f"prompt has keys {sorted(prompt)}, expected 'prompt' or 'prompt_token_ids' among them")


def as_user_message(prompt: Prompt, chat_prompt: Callable[[Messages], dict[str, Any]]) -> Prompt:
    """`prompt`, with its text as the only message of a chat, which `chat_prompt` puts through the template; as it is if it has token ids."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else None
    if not isinstance(text, str):
        return prompt
    return {**(prompt if isinstance(prompt, Mapping) else {}), **chat_prompt([{"role": "user", "content": text}])}


def _is_unicode(text: str) -> bool:
    """Whether `text` can be encoded: half of a surrogate pair, which JSON can spell, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def draw_seed(engine_seed: int, arrival: int) -> int:
    """The seed (64 bits) of the request that arrived as number `arrival` without one: the same in each run of an engine with this seed."""
    return int.from_bytes(hashlib.sha256(f"interlock seed {engine_seed} {arrival}".encode()).digest()[:8], "little")


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of prompts, as a list. A list (or array) that begins with an integer is one prompt of token ids."""
    if isinstance(prompts, np.ndarray) and prompts.ndim == 2:
        return list(prompts)
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        return [cast("Prompt", prompts)]
    if prompts and isinstance(prompts[0], numbers.Integral):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def list_params(prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """Parameters for each of `prompts`: given for each, one for all, or the default ones. Raises RequestError."""
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams | Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"sampling_params is {params!r}, expected SamplingParams, or a list of them, one for each prompt")
    listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    for entry in listed:
        if not isinstance(entry, SamplingParams):
            raise RequestError(f"sampling_params has {entry!r}, expected SamplingParams")
    if len(listed) != len(prompts):
        raise RequestError(f"sampling_params has {len(listed)} entries for {len(prompts)} prompts, expected one for each, or one for all")
    return listed


def list_chats(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One chat, or a list of chats, as a list. Raises RequestError for what is neither."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is {messages!r}, expected a list of objects with 'role' and 'content', or a list of such lists")
    if messages and not (isinstance(messages[0], Sequence) and not isinstance(messages[0], str | bytes)):
        return [cast("Messages", messages)]
    return list(cast("Sequence[Messages]", messages))
