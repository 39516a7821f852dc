"""Where prompts come from."""

import io
import json
from pathlib import Path

import pytest

from interlock.commands.prompts import DEFAULT_PROMPTS, read_prompts, read_standard_input, shortened
from interlock.core.errors import RequestError


def test_arguments_come_first_then_files_each_a_whole_prompt(tmp_path: Path) -> None:
    file = tmp_path / "poem.txt"
    file.write_text("two\nlines\n")
    assert read_prompts(["one"], [file]) == ["one", "two\nlines\n"]


@pytest.mark.parametrize("name", ["prompts.jsonl", "PROMPTS.JSONL"])
def test_each_line_of_a_jsonl_file_is_a_prompt_in_any_of_its_forms(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text('"text"\n\n[1, 2]\n{"prompt": "more", "cache_salt": "s"}\n{"prompt_token_ids": [3], "prompt": "its text"}\n')
    objects = [{"prompt": "more", "cache_salt": "s"}, {"prompt_token_ids": [3], "prompt": "its text"}]
    assert read_prompts(None, [file]) == ["text", [1, 2], *objects]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path, end: str, mark: str) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b\u2029c\x85d", "\x7f e"]
    file.write_bytes((mark + end.join([*(json.dumps(text, ensure_ascii=False) for text in texts), ""])).encode())
    assert read_prompts(None, [file]) == texts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('"a" "b"', "is not JSON: Extra data"),
        ("{}", "expected 'prompt' or 'prompt_token_ids'"),
        ("3", "is no prompt"),
        ('[1, "x"]', "is no prompt"),
        ("[1, true]", "is no prompt"),
        ("[-1]", "is no prompt"),
        ("[100000000000000000000]", "is no prompt"),
        ("null", "is no prompt"),
        ('{"prompt": 3}', "prompt is 3"),
        ('{"prompt_token_ids": null, "prompt": "x"}', "is no prompt"),
        ('{"prompt": "hi", "max_tokens": 3}', "unknown keys ['max_tokens'], expected some of ['prompt', 'prompt_token_ids', 'cache_salt']"),
        ('{"prompt": "hi", "cache_salt": 3}', "cache_salt is 3"),
        ('{"prompt": "hi", "cache_salt": "\\ud800"}', "cache_salt is '\\ud800'"),
        ('""', "is empty"),
        ('{"prompt": ""}', "is empty"),
        ("[]", "is empty"),
        ('{"prompt_token_ids": []}', "is empty"),
        ('"\\ud800"', "not valid Unicode"),
        ('{"prompt_token_ids": "abc"}', "prompt_token_ids is 'abc', expected a list of token ids"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    with pytest.raises(RequestError, match=r"line 2 of .*prompts\.jsonl") as error:
        read_prompts(None, [file])
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["", "\n \r\n"])
def test_a_file_without_prompts_is_refused_and_nothing_takes_its_place(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(RequestError, match=r"prompts\.jsonl has no line that is a prompt"):
        read_prompts(None, [file])


@pytest.mark.parametrize(
    ("stdin", "read"),
    [(b"two\nlines\xe2\x80\xa8\n", ["two\nlines\u2028\n"]), (b" \n", []), (b"", []), (b"\xef\xbb\xbfone", ["one"]), (b"\xef\xbb\xbf\n", [])],
)
def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch, stdin: bytes, read: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert read_standard_input() == read


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8", errors=errors))
    with pytest.raises(RequestError, match="standard input"):
        read_standard_input()


def test_an_empty_prompt_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="argument 2: the prompt is empty"):
        read_prompts(["a", ""], None)
    with pytest.raises(RequestError, match="argument 1: the prompt is not valid Unicode"):
        read_prompts(["\udcff"], None)
    with pytest.raises(RequestError, match="nothing-here"):
        read_prompts(None, [tmp_path / "nothing-here"])


def test_a_prompt_is_shown_in_one_line() -> None:
    assert shortened("two\nlines") == shortened({"prompt": "two\nlines"}) == "two lines"
    assert shortened([1, 2]) == shortened({"prompt_token_ids": [1, 2], "prompt": "x"}) == "2 token ids"
    assert len(shortened("long " * 100)) < 100


def test_the_built_in_prompts_are_one_long_and_two_short_ones() -> None:
    lengths = [len(prompt) for prompt in DEFAULT_PROMPTS]
    assert lengths[0] > 2500
    assert max(lengths[1:]) < 100
