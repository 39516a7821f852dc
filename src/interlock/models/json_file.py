"""Small files of a checkpoint: JSON, and plain text."""

import json
from pathlib import Path
from typing import Any

from interlock.core.errors import CheckpointError


def is_there(path: Path) -> bool:
    """Whether there is anything of that name: a link to nothing (a download that did not end) too, which then cannot be read."""
    return path.exists() or path.is_symlink()


def read_text(path: Path) -> str:
    """The text of a file. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({error}); download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    if not is_there(path):
        raise CheckpointError(f"{path}: does not exist; expected a Hugging Face directory with config.json and *.safetensors, or a GGUF file")
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds {type(values).__name__}, expected an object")
    return values
