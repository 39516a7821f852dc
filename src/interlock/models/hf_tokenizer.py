"""The tokenizer of a Hugging Face directory: tokenizer.json, with tokenizer_config.json and chat_template.jinja beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from interlock.core.errors import CheckpointError
from interlock.models.json_file import read_json
from interlock.models.tokenizer import Tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_hf_tokenizer(directory: Path, eos_token_ids: Sequence[int]) -> Tokenizer | None:
    """Load the tokenizer; None if the directory has none. `eos_token_ids`: what the model's configuration says. Raises CheckpointError."""
    path = directory / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / name).exists()]
        if others:
            raise CheckpointError(
                f"{directory}: has {others} but no tokenizer.json; convert it with transformers: AutoTokenizer(…).save_pretrained(…)"
            )
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: cannot be read as a tokenizer ({error}); download it again") from error
    backend.no_padding()
    backend.no_truncation()
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos = dict.fromkeys([*([own_eos] if own_eos is not None else []), *eos_token_ids])
    return Tokenizer(backend, special_tokens=special, chat_templates=_chat_templates(directory, config), eos_token_ids=tuple(eos))


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the first place that has any, in the order in which transformers looks."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    file = directory / "chat_template.json"
    value = read_json(file).get("chat_template") if file.exists() else config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict) and {"name", "template"} <= entry.keys()}
    return {}
