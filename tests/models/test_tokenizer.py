"""Tokenizers: text survives the round trip, special tokens keep their meaning, chats become the prompts that the template says."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from checkpoints import make_tiny_llama, make_tiny_llama_gguf
from interlock.core.errors import CheckpointError, RequestError
from interlock.models.checkpoints import open_checkpoint
from interlock.models.tokenizer import Tokenizer

TEXTS = ["", " ", "Hello, world", "don't  stop\n\n\t12345 x2", "naïve ﬁancé – 東京 😀👩‍👩‍👧 \u00a0", "a" * 300, "\r\n \r\n", "   indent\n      more"]


def tokenizer_of(path: str) -> Tokenizer:
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return _smollm2()


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A tokenizer of 3 special, 256 byte, 2 merged, 1 user-defined and 1 unused token, as GGUF metadata."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "th", "the", "<tool>", "[PAD]"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 258, 4, 5],
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in changes.items()}


def gguf_tokenizer(tmp_path: Path, **changes: Any) -> Tokenizer:
    return tokenizer_of(make_tiny_llama_gguf(tmp_path / "x.gguf", vocab_size=264, metadata=byte_level_metadata(**changes)))


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert open_checkpoint(make_tiny_llama(tmp_path / "hf")).tokenizer is None
    assert open_checkpoint(make_tiny_llama_gguf(tmp_path / "x.gguf")).tokenizer is None


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_text_survives_the_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@given(st.text())
def test_smollm2_any_text_of_bytes_that_it_has_tokens_for_survives_the_round_trip(text: str) -> None:
    tokenizer = _smollm2()
    assume(set(text.encode()) <= _single_bytes())
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@functools.cache
def _single_bytes() -> set[int]:
    tokenizer = _smollm2()
    return {raw[0] for raw in map(tokenizer.token_bytes, range(tokenizer.vocab_size)) if len(raw) == 1}


@functools.cache
def _smollm2() -> Tokenizer:
    return tokenizer_of("smollm2")


def test_smollm2_chat_prompt_is_that_of_its_template(smollm2: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "12"}]
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n12<|im_end|>\n"
    )
    assert smollm2.chat_text(messages, add_generation_prompt=False) == text
    ids = smollm2.apply_chat_template(messages)
    assert ids == smollm2.encode(text + "<|im_start|>assistant\n")
    assert ids[:3] == [1, 9690, 198]
    assert ids.count(1) == 5
    assert ids.count(2) == 4
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert smollm2.vocab_size == 49152


def test_smollm2_cuts_digits_one_by_one_and_adds_no_special_tokens(smollm2: Tokenizer) -> None:
    assert [smollm2.token_bytes(token) for token in smollm2.encode("x 2024")] == [b"x", b" ", b"2", b"0", b"2", b"4"]


def test_special_tokens_are_left_out_unless_wanted(smollm2: Tokenizer) -> None:
    ids = [1, 9690, 2]
    assert smollm2.decode(ids) == "system"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>system<|im_end|>"
    assert [smollm2.is_special(token) for token in ids] == [True, False, True]


def test_ids_outside_the_tokenizer_are_empty_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([9690, 49152, 10**9, 9690]) == "systemsystem"
    assert smollm2.token_bytes(49152) == b""
    assert not smollm2.is_special(10**9)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_text_is_cut_as_the_digits_and_byte_level_steps_of_smollm2s_tokenizer_json_do(text: str) -> None:
    reference = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    ours = _smollm2()._backend.pre_tokenizer
    assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text)


def test_merges_user_defined_and_unused_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path)
    ids = tokenizer.encode("the<tool>[PAD]")
    assert ids[:2] == [260, 261]
    assert tokenizer.decode(ids) == "the<tool>[PAD]"
    assert 262 not in ids
    assert tokenizer.decode([262]) == ""
    assert tokenizer.eos_token_ids == (2, 0)
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("pre", "add", "expected"), [("smollm", None, []), ("smollm", True, [1]), ("llama-bpe", None, [1]), ("llama-bpe", False, [])]
)
def test_the_first_token_follows_the_file_or_the_pre_tokenizer(tmp_path: Path, pre: str, add: bool | None, expected: list[int]) -> None:
    changes: dict[str, Any] = {"ggml.pre": pre} | ({} if add is None else {"ggml.add_bos_token": add})
    tokenizer = gguf_tokenizer(tmp_path, **changes)
    assert tokenizer.encode("") == expected
    assert tokenizer.encode("the") == [*expected, 260]
    assert tokenizer.encode("the", add_special_tokens=False) == [260]


def test_an_end_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    assert gguf_tokenizer(tmp_path, **{"ggml.add_bos_token": True, "ggml.add_eos_token": True}).encode("the") == [1, 260, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml.model": "llama"}, ["tokenizer.ggml.model", "'llama'"]),
        ({"ggml.pre": "tekken"}, ["tokenizer.ggml.pre", "'tekken'", "smollm"]),
        ({"ggml.merges": ["t h", "q zz"]}, ["tokenizer.ggml.merges"]),
        ({"ggml.merges": ["t h e"]}, ["tokenizer.ggml.merges"]),
        ({"ggml.token_type": [1, 2]}, ["token_type has 2 entries", "263"]),
        ({"ggml.tokens": ["<unk>"] * 263}, ["names some token twice"]),
        ({"ggml.tokens": "none"}, ["tokenizer.ggml.tokens", "list of str"]),
        ({"ggml.eos_token_id": 263}, ["eos_token_id is 263", "below 263"]),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        gguf_tokenizer(tmp_path, **changes)
    for word in ["x.gguf", *words]:
        assert word in str(error.value)


def test_a_hugging_face_tokenizer_gives_the_ids_of_the_tokenizers_library(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, tokenizer_size=259)
    ours, theirs = tokenizer_of(directory), tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == 259
    assert ours.bos_token_id == 1


def test_a_padded_vocabulary_decodes_to_empty_text(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, vocab_size=260, tokenizer_size=250))
    assert checkpoint.config.vocab_size == 260
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.vocab_size == 250
    assert checkpoint.tokenizer.decode([255]) == ""
    assert checkpoint.tokenizer.token_bytes(255) == b""


def test_templates_get_the_helpers_of_transformers(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'stop' %}{% break %}{% endif %}\n  {{ m.content | tojson }}{% endfor %}"
        "{% generation %}{{ tools | length }}{% endgeneration %}{{ strftime_now('%%') }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_of(str(tmp_path))
    messages = [{"role": "user", "content": [{"ü": "<a>"}]}, {"role": "stop", "content": "no"}]
    assert tokenizer.chat_text(messages, tools=[1, 2]) == '<s>  [{"ü": "<a>"}]2%'


def test_a_template_may_refuse_messages_in_its_own_words_but_not_reach_the_system(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    for template, words in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content.missing.deeper }}", "refuses the messages"),
    ]:
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(RequestError, match=words):
            tokenizer_of(str(tmp_path)).chat_text([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ 'x' * 10 ** 30 }}", "{% for i in range(10 ** 30) %}{% endfor %}", "{{ messages[5].role.x }}"]
)
def test_a_template_that_fails_in_any_way_is_one_clear_error(tmp_path: Path, template: str) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="the chat template"):
        tokenizer_of(str(tmp_path)).chat_text([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"messages is \[\], expected"),
        ("hi", "messages is 'hi'"),
        (None, "messages is None"),
        ([5], r"messages\[0\] is 5"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": 5, "content": "x"}], r"messages\[0\] has role 5"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] has keys \['role'\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has content 5"),
    ],
)
def test_messages_that_are_none_are_refused_by_place_and_value(smollm2: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        smollm2.chat_text(messages)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer_of(str(tmp_path)).apply_chat_template([{"role": "user", "content": "x"}])


def test_named_templates_are_chosen_by_what_is_passed(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "eos_token": {"content": "</s>", "special": True}}))
    tokenizer = tokenizer_of(str(tmp_path))
    messages = [{"role": "user", "content": "x"}]
    assert (tokenizer.chat_text(messages), tokenizer.chat_text(messages, tools=[{}])) == ("plain", "tools")
    assert tokenizer.eos_token_ids == (2,)


def test_a_sentencepiece_model_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"\['tokenizer\.model'\] but no tokenizer\.json"):
        open_checkpoint(str(tmp_path))


def test_text_that_is_not_unicode_is_a_request_error(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        smollm2.encode("\ud800")
