"""What flags may be set to: each parser refuses what it cannot use with the value and what was expected."""

import json
from collections.abc import Callable
from typing import Any

import typer

from interlock.core.config import parse_cudagraph_mode
from interlock.core.errors import ConfigError


def integer(value: str) -> int:
    """A whole number."""
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r:.100} is no integer") from None


def positive(value: str) -> int:
    """A whole number of at least 1."""
    number = integer(value)
    if number < 1:
        raise typer.BadParameter(f"{number} is too small, expected an integer of at least 1")
    return number


def number(value: str) -> float:
    """A number; 'inf' is one."""
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r:.100} is no number") from None


def choice(name: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    """One of `choices`."""

    def parse(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{name} is {value!r:.100}, expected one of {', '.join(choices)}")
        return value

    return parse


def mode(value: str) -> str:
    """The name of a `CUDAGraphMode`, in any case."""
    try:
        return parse_cudagraph_mode(value).name
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def sizes(value: str) -> list[int]:
    """Token counts, separated by commas."""
    try:
        return [int(size) for size in value.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{value!r:.100} is not a list of token counts, expected for example 1,8,64") from None


def json_object(value: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f'not JSON ({error}), expected for example \'{{"kv_connector": "PeerConnector"}}\'') from None
    if not isinstance(parsed, dict):
        raise typer.BadParameter(f"{value!r:.100} is not a JSON object")
    return parsed
