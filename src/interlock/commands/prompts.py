"""Where prompts come from: arguments, files, standard input, and the built-in ones of `interlock pd`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from interlock.core.errors import RequestError

Prompt = str | list[int] | dict[str, Any]

_MAX_TOKEN_ID: Final = 2**31 - 1
_LINE: Final = 100  # characters of a prompt that is shown in one line

_GOODS = ("oranges", "copper wire", "salted cod", "green tea", "roof slates", "lamp oil", "wool", "sailcloth", "clay pipes", "window glass")
_SHIPS = ("Petrel", "Albatross", "Curlew", "Sandpiper", "Gannet", "Kittiwake", "Plover")


def read_prompts(arguments: Sequence[str] | None, files: Sequence[Path] | None) -> list[Prompt]:
    """The prompts of the command line, arguments first.

    A file is one prompt, except that each line of a `.jsonl` file is one: a string, a list of token ids, or an object with `prompt` or
    `prompt_token_ids` and perhaps `cache_salt`. Raises RequestError, also for a file without any prompt.
    """
    prompts: list[Prompt] = [_checked(argument, f"argument {number}") for number, argument in enumerate(arguments or (), 1)]
    for path in files or ():
        read = _json_lines(path) if path.suffix.lower() == ".jsonl" else [_checked(_read(path), f"the prompt file {path}")]
        if not read:
            raise RequestError(f"the prompt file {path} has no line that is a prompt, expected at least one")
        prompts += read
    return prompts


def read_standard_input() -> list[Prompt]:
    """Standard input as one prompt; nothing if it is a terminal, closed or empty. Raises RequestError."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"standard input cannot be read as text: {error}") from error
    text = text.removeprefix("\ufeff")  # the mark that some editors begin a file with
    return [_checked(text, "standard input")] if text.strip() else []


def shortened(prompt: Prompt) -> str:
    """A prompt in one line of the terminal."""
    if isinstance(prompt, dict):
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    if isinstance(prompt, list):
        return f"{len(prompt)} token ids"
    line = " ".join(str(prompt).split())
    return line if len(line) <= _LINE else f"{line[:60]} … {line[-36:]}"


def _read(path: Path, newline: str | None = None) -> str:
    """The text of a file, without the mark that some editors begin it with."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompt file {path} cannot be read as UTF-8 text: {error}") from error


def _json_lines(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(_read(path, newline="").split("\n"), 1):  # other ends of lines may stand inside JSON strings
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not JSON: {error}") from error
        prompts.append(_checked(value, where))
    return prompts


def _checked(value: Any, where: str) -> Prompt:
    """`value` if it has the form of a prompt. Raises RequestError that begins with `where` it stands."""
    if isinstance(value, dict):
        from interlock.engine.inputs import check_prompt_object

        try:
            check_prompt_object(value)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
    content = value.get("prompt_token_ids", value.get("prompt")) if isinstance(value, dict) else value
    if not isinstance(content, str) and not (
        isinstance(content, list) and all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in content)
    ):
        raise RequestError(f"{where} is no prompt, expected a string, a list of token ids, or an object with 'prompt' or 'prompt_token_ids'")
    if not content:
        raise RequestError(f"{where}: the prompt is empty, expected at least one character or token")
    if isinstance(content, str) and any("\ud800" <= char <= "\udfff" for char in content):
        raise RequestError(f"{where}: the prompt is not valid Unicode text: {content!r:.200}")
    return cast("Prompt", value)


def _harbour_log() -> str:
    """A long prompt: about 1,000 tokens."""
    days = [
        f"Day {day}: the {_SHIPS[day * 5 % 7]} brought {day * 37 % 90 + 8} crates of {_GOODS[day * 3 % 10]} and left before the evening tide."
        for day in range(1, 41)
    ]
    return "\n".join(["Here is the log of a harbour master.", "", *days, "", "Write a short story about this harbour."])


DEFAULT_PROMPTS: list[Prompt] = [
    _harbour_log(),
    "Write two sentences about a lighthouse.",
    "What is the capital of France?",
]
