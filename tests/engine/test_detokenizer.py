from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.detokenizer import Detokenizer


class ByteTokens:
    """Tokens 0 to 255 are bytes, then words of several bytes; 300 is special."""

    words = ("🙂".encode(), "日本".encode(), b"the ", b"\xf0\x9f", b"\x99\x82x")

    def token_bytes(self, token_id):
        if token_id < 256:
            return bytes([token_id])
        return b"<end>" if token_id == 300 else self.words[token_id - 256] if token_id - 256 < len(self.words) else b""

    def is_special(self, token_id):
        return token_id == 300


tokens = st.lists(st.one_of(st.integers(0, 260), st.sampled_from(list("é🙂日".encode())), st.just(300), st.just(999)), max_size=30)


@given(tokens, st.lists(st.integers(1, 4), max_size=30), st.booleans())
def test_joined_deltas_equal_the_whole_text_however_the_tokens_come(token_ids, sizes, skip):
    detokenizer = Detokenizer(ByteTokens())
    stream, pieces, start = detokenizer.stream(skip), [], 0
    for size in [*sizes, len(token_ids)]:
        pieces.append(stream.feed(token_ids[start : start + size]))
        start += size
    pieces.append(stream.finish())
    data = b"".join(ByteTokens().token_bytes(t) for t in token_ids if not (skip and t == 300))
    assert "".join(pieces) == stream.text == detokenizer.text(token_ids, skip) == data.decode("utf-8", "replace")


def test_a_character_is_held_back_until_it_is_complete():
    stream = Detokenizer(ByteTokens()).stream(True)
    assert [stream.feed([byte]) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert stream.finish() == ""


def test_an_end_in_mid_character_gives_one_replacement_mark():
    stream = Detokenizer(ByteTokens()).stream(True)
    assert stream.feed([97, 0xF0, 0x9F]) == "a"
    assert stream.finish() == "�"


def test_without_a_tokenizer_there_is_no_text():
    stream = Detokenizer(None).stream(True)
    assert stream.feed([1, 2, 3]) + stream.finish() == ""
