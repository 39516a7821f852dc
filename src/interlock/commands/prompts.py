"""Where prompts come from: arguments, files, standard input, and the built-in ones of `interlock pd`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from interlock.core.errors import RequestError

Prompt = str | list[int]

_GOODS = ("oranges", "copper wire", "salted cod", "green tea", "roof slates", "lamp oil", "wool", "sailcloth", "clay pipes", "window glass")
_SHIPS = ("Petrel", "Albatross", "Curlew", "Sandpiper", "Gannet", "Kittiwake", "Plover")


def read_prompts(arguments: Sequence[str] | None, files: Sequence[Path] | None) -> list[Prompt]:
    """The prompts of the command line, arguments first.

    A file is one prompt, except that each line of a `.jsonl` file is one: a string, a list of token ids, or an object with `prompt` or
    `prompt_token_ids`. Raises RequestError.
    """
    prompts: list[Prompt] = list(arguments or ())
    for path in files or ():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the prompt file {path} cannot be read as UTF-8 text: {error}") from error
        prompts += _json_lines(path, text) if path.suffix == ".jsonl" else [text]
    if any(not prompt for prompt in prompts):
        raise RequestError("a prompt is empty, expected at least one character or token")
    return prompts


def read_standard_input() -> list[Prompt]:
    """Standard input as one prompt; nothing if it is a terminal, closed or empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    text = sys.stdin.read()
    return [text] if text.strip() else []


def _json_lines(path: Path, text: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise RequestError(f"line {number} of {path} is not JSON: {error}") from error
        if isinstance(value, dict):
            value = value.get("prompt_token_ids", value.get("prompt"))
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(token, int) for token in value)):
            prompts.append(value)
        else:
            raise RequestError(
                f"line {number} of {path} is no prompt, expected a string, a list of token ids, or an object with 'prompt' or 'prompt_token_ids'"
            )
    return prompts


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
