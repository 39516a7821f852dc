"""Text from tokens as they come. A character whose bytes have not all come is held back, so that what was sent never changes."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

_make_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an unknown id."""

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token."""


class Detokenizer:
    """The bytes of tokens, remembered for all requests of an engine. Without a tokenizer every token has no text."""

    def __init__(self, tokenizer: TokenTable | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[bool, dict[int, bytes]] = {False: {}, True: {}}

    def stream(self, skip_special_tokens: bool) -> "TextStream":
        """The text of a new sequence."""
        return TextStream(self, skip_special_tokens)

    def text(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The whole text of `token_ids`; incomplete characters are U+FFFD."""
        return b"".join(self.token_bytes(token_id, skip_special_tokens) for token_id in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """The bytes of one token; empty for a special one that is skipped."""
        known = self._bytes[skip_special_tokens]
        found = known.get(token_id)
        if found is None:
            table = self._tokenizer
            found = b"" if table is None or (skip_special_tokens and table.is_special(token_id)) else table.token_bytes(token_id)
            known[token_id] = found
        return found


class TextStream:
    """The text of one sequence. The pieces that `feed` and `finish` return, joined, are `Detokenizer.text` of all its tokens."""

    __slots__ = ("_decoder", "_detokenizer", "_pieces", "_skip_special_tokens")

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _make_decoder("replace")
        self._pieces: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that the next tokens complete."""
        data = b"".join([self._detokenizer.token_bytes(token_id, self._skip_special_tokens) for token_id in token_ids])
        text = self._decoder.decode(data)
        if text:
            self._pieces.append(text)
        return text

    def finish(self) -> str:
        """The end of the text: U+FFFD where it stops in mid-character."""
        text = self._decoder.decode(b"", True)
        if text:
            self._pieces.append(text)
        return text

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)
