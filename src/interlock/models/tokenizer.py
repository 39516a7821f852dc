"""Text to token ids and back, and chats to prompts, whatever file the tokenizer came from."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers

from interlock.core.errors import RequestError
from interlock.models.chat_template import check_messages, render_chat

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A tokenizer with its chat templates.

    special_tokens: names as templates use them (`bos_token`, …) → text. chat_templates: name → Jinja source; `default` is the usual one.
    eos_token_ids: every token that ends a sequence, the tokenizer's own first.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_templates = dict(chat_templates)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.bos_token_id: int | None = backend.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added: Mapping[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(backend.decoder)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return "default" in self._chat_templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in the text are recognised. Raises RequestError if it cannot be encoded."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the prompt cannot be tokenized ({error}); expected valid Unicode text") from error
        except Exception as error:  # the library raises plain Exception, for one where a tokenizer has no token for unknown text
            raise RequestError(f"the prompt cannot be tokenized: {error}") from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know (a padded vocabulary) give no text."""
        known = [token for token in token_ids if 0 <= token < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id that the tokenizer does not know."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            return _byte_level_bytes(token)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which `decode` leaves out by default."""
        return token_id in self._added and bool(self._added[token_id].special)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a chat. `variables` (tools, documents, …) are passed to the template.

        Raises RequestError if there is no template, if the messages are none, or if the template refuses them.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            raise RequestError("the model has no chat template; send a plain prompt, or token ids, instead of messages")
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}  # templates ask whether they are none
        context |= {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
        return render_chat(self._chat_templates[name], context)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a chat's prompt; see `chat_text`."""
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables), add_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of GPT-2's byte-level alphabet: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    return bytes(_BYTES[char] for char in token) if all(char in _BYTES for char in token) else token.encode()
