"""Special and added tokens of a Hugging Face directory, wherever its files name them: the same prompts and ids as from transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from checkpoints import make_tiny_llama
from interlock.core.errors import CheckpointError
from interlock.models.checkpoints import open_checkpoint
from interlock.models.tokenizer import Tokenizer

SIZE = 259
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
NAMED: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", **FLAGS}}
MAP = {"bos_token": "<s>", "eos_token": {"content": "</s>", **FLAGS}}
TEXT = "a<s> <x> b</s>c <y>"
MESSAGES = [{"role": "user", "content": TEXT}]

FILES: dict[str, dict[str, Any]] = {
    "names in the map alone": {"tokenizer_config.json": {}, "special_tokens_map.json": MAP},
    "no tokenizer_config.json": {"tokenizer_config.json": None, "special_tokens_map.json": MAP},
    "the map has the last word": {"tokenizer_config.json": {"bos_token": "<unk>", "eos_token": "<unk>"}, "special_tokens_map.json": MAP},
    "the map does not count beside added_tokens_decoder": {
        "tokenizer_config.json": {"bos_token": "<unk>", "eos_token": "</s>", "added_tokens_decoder": {}},
        "special_tokens_map.json": MAP,
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": NAMED
        | {
            "added_tokens_decoder": {
                "260": {"content": "<y>", **FLAGS, "special": False},
                "259": {"content": "<x>", **FLAGS, "lstrip": True, "special": True},
            }
        }
    },
    "flags of known tokens": {"tokenizer_config.json": NAMED | {"added_tokens_decoder": {"2": {"content": "</s>", **FLAGS, "special": False}}}},
    "added_tokens.json": {"tokenizer_config.json": NAMED, "added_tokens.json": {"<y>": 260, "<x>": 259}},
    "additional_special_tokens": {"tokenizer_config.json": NAMED | {"additional_special_tokens": ["<x>", "<s>"]}},
    "additional_special_tokens of the map": {"tokenizer_config.json": NAMED, "special_tokens_map.json": {"additional_special_tokens": ["<x>"]}},
    "extra_special_tokens": {"tokenizer_config.json": NAMED | {"extra_special_tokens": ["<y>"]}},
    "an end token that tokenizer.json lacks": {"tokenizer_config.json": NAMED | {"eos_token": "<x>"}},
}


def open_with(directory: Path, files: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a tiny model with `files`: JSON by name, None for a file that is not there."""
    make_tiny_llama(directory, vocab_size=264, tokenizer_size=SIZE, eos_token_id=None)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_text(json.dumps(content))
    tokenizer = open_checkpoint(str(directory)).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_prompts_ids_text_and_end_tokens_are_those_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    ours = open_with(tmp_path, files)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_text(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)
    ids = ours.encode(TEXT)
    assert ids == theirs(TEXT).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


def test_a_special_token_of_the_vocabulary_is_one_also_where_tokenizer_json_does_not_mark_it(tmp_path: Path) -> None:
    open_with(tmp_path, {"tokenizer_config.json": NAMED})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": []}))
    ours = open_checkpoint(str(tmp_path)).tokenizer
    assert ours is not None
    assert ours.apply_chat_template([{"role": "user", "content": "a"}])[:1] == [1]
    assert ours.decode([1, 2]) == ""
    assert ours.encode(TEXT) == AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": {"content": "<x>"}}}, ["'<x>' is token 260", "is 259"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<s>"}}}, ["'<s>' is token 5", "is 1"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": ""}}}, ["'' is token 5", "is None"]),
        ("tokenizer_config.json", {"added_tokens_decoder": None}, ["added_tokens_decoder is None"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-1": {}}}, ["added_tokens_decoder is {'-1'"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {}}}, ["added_tokens_decoder is {'999"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": {"special": True}}}, ["added_tokens_decoder['259'] is {'special'"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": {"content": "x", "lstrip": 1}}}, ["'lstrip': 1", "true or false"]),
        ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, ["extra_special_tokens is '<x>'"]),
        ("tokenizer_config.json", {"additional_special_tokens": ["<x>", 5]}, ["additional_special_tokens[1] is 5"]),
        ("special_tokens_map.json", {"bos_token": 5}, ["bos_token is 5"]),
        ("special_tokens_map.json", {"additional_special_tokens": [None]}, ["additional_special_tokens[0] is None"]),
        ("special_tokens_map.json", [], ["holds list"]),
        ("added_tokens.json", {"<x>": 260}, ["'<x>' is token 260", "is 259"]),
        ("added_tokens.json", {"<x>": "259"}, ["holds {'<x>': '259'}"]),
        ("added_tokens.json", {"<x>": -1}, ["holds {'<x>': -1}"]),
        ("added_tokens.json", {"\ud800": 259}, ["a token is '\\ud800'"]),
    ],
)
def test_tokens_that_are_none_or_have_another_id_are_refused_by_file_and_value(tmp_path: Path, name: str, content: Any, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        open_with(tmp_path, {name: content})
    for word in [str(tmp_path / name), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_templates_see_absent_tools_and_documents_as_none(tmp_path: Path) -> None:
    open_with(tmp_path, {})
    template = "{% if tools is not none %}tools{% endif %}{% if documents is not none %}{{ documents | length }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    ours, theirs = open_checkpoint(str(tmp_path)).tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    assert ours.chat_text(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False) == ""
    assert ours.chat_text(MESSAGES, documents=[{"text": "x"}]) == "1"


def test_templates_in_a_directory_of_their_own_have_their_files_names(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=SIZE)
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    ours = open_checkpoint(str(tmp_path)).tokenizer
    assert ours is not None
    assert (ours.chat_text(MESSAGES), ours.chat_text(MESSAGES, tools=[{}])) == ("plain", "tools")
