"""The tokenizer of a Hugging Face directory: tokenizer.json, with its special tokens and chat templates from the files beside it."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from interlock.core.errors import CheckpointError
from interlock.models.chat_template import check_template
from interlock.models.hf_special_tokens import add_stated_tokens
from interlock.models.json_file import is_there, read_json, read_text
from interlock.models.tokenizer import Tokenizer


def load_hf_tokenizer(directory: Path, eos_token_ids: Sequence[int]) -> Tokenizer | None:
    """Load the tokenizer; None if the directory has none. `eos_token_ids`: what the model's configuration says. Raises CheckpointError."""
    path = directory / "tokenizer.json"
    if not is_there(path):
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / name).exists()]
        if others:
            raise CheckpointError(
                f"{directory}: has {others} but no tokenizer.json; convert it with transformers: AutoTokenizer(…).save_pretrained(…)"
            )
        return None
    backend = _read_backend(path)
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if is_there(config_path) else {}
    special = add_stated_tokens(backend, directory, config)
    own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos = dict.fromkeys([*([own_eos] if own_eos is not None else []), *eos_token_ids])
    return Tokenizer(backend, special_tokens=special, chat_templates=_chat_templates(directory, config), eos_token_ids=tuple(eos))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        with contextlib.suppress(Exception):  # it need not have tokens for this text, but it must not panic
            backend.decode(backend.encode("Any text.").ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception, and a BaseException of its own where its code panics
        raise CheckpointError(f"{path}: cannot be read as a tokenizer ({error!s:.200}); download it again") from error
    return backend


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the first place that has any, in the order in which transformers looks."""
    files = [directory / "chat_template.jinja", *sorted(directory.glob("additional_chat_templates/*.jinja"))]
    if found := [file for file in files if is_there(file)]:
        return {"default" if file == files[0] else file.stem: check_template(f"{file}: the text", read_text(file)) for file in found}
    file = directory / "chat_template.json"
    in_own_file = is_there(file)
    where = f"{file if in_own_file else directory / 'tokenizer_config.json'}: chat_template"
    value = (read_json(file) if in_own_file else config).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, list):
        return dict(_named_template(f"{where}[{index}]", entry) for index, entry in enumerate(value))
    return {"default": check_template(where, value)}


def _named_template(where: str, entry: Any) -> tuple[str, str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "template" not in entry:
        raise CheckpointError(f"{where} is {entry!r:.200}, expected an object with a 'name' and a 'template'")
    return entry["name"], check_template(f"{where}: the template {entry['name']!r:.200}", entry["template"])
