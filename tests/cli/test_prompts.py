"""Where prompts come from."""

from pathlib import Path

import pytest

from interlock.commands.prompts import DEFAULT_PROMPTS, read_prompts
from interlock.core.errors import RequestError


def test_arguments_come_first_then_files_each_a_whole_prompt(tmp_path: Path) -> None:
    file = tmp_path / "poem.txt"
    file.write_text("two\nlines\n")
    assert read_prompts(["one"], [file]) == ["one", "two\nlines\n"]


def test_each_line_of_a_jsonl_file_is_a_prompt_in_any_of_its_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"text"\n\n[1, 2]\n{"prompt": "more"}\n{"prompt_token_ids": [3], "prompt": "not this"}\n')
    assert read_prompts(None, [file]) == ["text", [1, 2], "more", [3]]


@pytest.mark.parametrize("line", ["{", "{}", "3", '[1, "x"]', "null"])
def test_a_line_that_is_no_prompt_is_refused_by_file_and_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    with pytest.raises(RequestError, match=r"line 2 of .*prompts\.jsonl"):
        read_prompts(None, [file])


def test_an_empty_prompt_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="empty"):
        read_prompts([""], None)
    with pytest.raises(RequestError, match="nothing-here"):
        read_prompts(None, [tmp_path / "nothing-here"])


def test_the_built_in_prompts_are_one_long_and_two_short_ones() -> None:
    lengths = [len(prompt) for prompt in DEFAULT_PROMPTS]
    assert lengths[0] > 2500
    assert max(lengths[1:]) < 100
