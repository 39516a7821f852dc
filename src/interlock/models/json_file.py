"""JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from interlock.core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: does not exist; expected a Hugging Face directory with config.json and *.safetensors, or a GGUF file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds {type(values).__name__}, expected an object")
    return values
