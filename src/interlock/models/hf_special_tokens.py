"""Special and added tokens that a Hugging Face directory names outside tokenizer.json, read as transformers reads them.

tokenizer_config.json names them. Where it has no `added_tokens_decoder`, the directory is an older one: special_tokens_map.json then has
the last word on special tokens, and added_tokens.json numbers the added ones.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from interlock.core.errors import CheckpointError
from interlock.models.json_file import is_there, read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_MAX_DIGITS = 10  # of a token id


def add_stated_tokens(backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Add to `backend`, which tokenizer.json gave, the tokens that it lacks. config: what tokenizer_config.json holds.

    Returns the special tokens, name (`bos_token`, …) → text. Raises CheckpointError, also where a token's id is not the one that is stated.
    """
    path = directory / "tokenizer_config.json"
    named, listed = _named(path, config), _listed(path, config)
    if "added_tokens_decoder" in config:
        numbered = _numbered(path, config["added_tokens_decoder"])
        known = {repr(token) for token in backend.get_added_tokens_decoder().values()}  # its text and its flags, which may be others here
        backend.add_tokens([token for token in numbered.values() if repr(token) not in known])
    else:
        path = directory / "special_tokens_map.json"
        if is_there(path):
            older = read_json(path)
            named, listed = {**named, **_named(path, older)}, [*listed, *_listed(path, older)]
        path = directory / "added_tokens.json"
        special = {token.content for token in (*named.values(), *listed)}
        numbered = _older_numbered(path, read_json(path), special) if is_there(path) else {}
        _add_unknown(backend, numbered.values())
    _check_ids(backend, path, numbered)
    _add_unknown(backend, (*named.values(), *listed))
    return {name: token.content for name, token in named.items()}


def _named(path: Path, config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    return {name: _token(path, name, config[name], special=True) for name in _NAMES if config.get(name) is not None}


def _listed(path: Path, config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Special tokens without a name. An object of named ones belongs to models that read more than text."""
    tokens = []
    for key in _LISTS:
        value = config.get(key)
        if not isinstance(value, list | dict | None):
            raise CheckpointError(f"{path}: {key} is {value!r:.200}, expected a list of tokens")
        tokens += [_token(path, f"{key}[{index}]", entry, special=True) for index, entry in enumerate(value if isinstance(value, list) else ())]
    return tokens


def _numbered(path: Path, decoder: Any) -> dict[int, tokenizers.AddedToken]:
    """The entries of added_tokens_decoder, id → token, ascending."""
    if not isinstance(decoder, dict) or not all(
        key.isdecimal() and len(key) <= _MAX_DIGITS and isinstance(value, dict) for key, value in decoder.items()
    ):
        raise CheckpointError(f"{path}: added_tokens_decoder is {decoder!r:.200}, expected an object from token ids to tokens")
    tokens = {int(key): _token(path, f"added_tokens_decoder[{key!r:.20}]", value) for key, value in decoder.items()}
    return dict(sorted(tokens.items()))


def _older_numbered(path: Path, ids: Mapping[str, Any], special: set[str]) -> dict[int, tokenizers.AddedToken]:
    """The entries of added_tokens.json (text → id), id → token, ascending."""
    if not all(type(token_id) is int and 0 <= token_id < 10**_MAX_DIGITS for token_id in ids.values()):
        raise CheckpointError(f"{path}: holds {ids!r:.200}, expected token ids by the tokens' texts")
    tokens = {token_id: _token(path, "a token", text, special=text in special) for text, token_id in ids.items()}
    return dict(sorted(tokens.items()))


def _token(path: Path, name: str, value: Any, special: bool = False) -> tokenizers.AddedToken:
    """The token that `name` has for its value. special: what it is where the value does not say so itself."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):  # JSON can spell halves of surrogate pairs
        raise CheckpointError(f"{path}: {name} is {value!r:.200}, expected text, an object with the text as its 'content', or null")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value} if isinstance(value, dict) else {}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"{path}: {name} is {value!r:.200}, expected true or false for each of {[*flags]}")
    flags["special"] = special or flags.get("special", False)
    return tokenizers.AddedToken(text, **{"normalized": not flags["special"], **flags})


def _check_ids(backend: tokenizers.Tokenizer, path: Path, numbered: Mapping[int, tokenizers.AddedToken]) -> None:
    for token_id, token in numbered.items():
        given = backend.token_to_id(token.content)
        if given != token_id:
            raise CheckpointError(
                f"{path}: states that {token.content!r:.200} is token {token_id}, but by tokenizer.json it is {given}; download both again"
            )


def _add_unknown(backend: tokenizers.Tokenizer, tokens: Iterable[tokenizers.AddedToken]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])
