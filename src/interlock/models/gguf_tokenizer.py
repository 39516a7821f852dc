"""The tokenizer inside a GGUF file: byte-level BPE (`tokenizer.ggml.model` = gpt2)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from interlock.core.errors import CheckpointError
from interlock.models.chat_template import check_template
from interlock.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before BPE: each pattern cuts the pieces of the one before it. `adds_bos`: the default of add_bos_token."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


# Patterns: llama.cpp, src/llama-vocab.cpp, and the tokenizer.json files that it converts.
_PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = {
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "default": _PreTokenizer(_DEFAULT),
    "llama-bpe": _PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "llama3": _PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
}


def load_gguf_tokenizer(path: Path, metadata: Mapping[str, Any], eos_token_ids: Sequence[int]) -> Tokenizer | None:
    """Build the tokenizer from a file's metadata; None if the file has none. Raises CheckpointError for a kind that is not supported."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model in ("none", "no_vocab"):
        return None
    if model != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {model!r:.200}, which is not supported; supported: 'gpt2' (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning("%s: tokenizer.ggml.pre is absent; text is cut as llama.cpp does by default, which may differ from the model's training", path)
        pre = "default"
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre is {pre!r:.200}, which is not supported; supported: {list(_PRE_TOKENIZERS)}")
    tokens = _array(path, metadata, "tokenizer.ggml.tokens", str)
    types = _array(path, metadata, "tokenizer.ggml.token_type", int) if "tokenizer.ggml.token_type" in metadata else [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type has {len(types)} entries, expected {len(tokens)}, one for each token")
    backend = _backend(path, tokens, types, _array(path, metadata, "tokenizer.ggml.merges", str), _PRE_TOKENIZERS[pre])
    special = _special_tokens(path, metadata, tokens, types)
    _add_bos_and_eos(path, backend, metadata, special, _PRE_TOKENIZERS[pre].adds_bos)
    return Tokenizer(backend, special_tokens=special, chat_templates=_chat_templates(path, metadata), eos_token_ids=eos_token_ids)


def _backend(path: Path, tokens: list[str], types: list[int], merges: list[str], pre: _PreTokenizer) -> tokenizers.Tokenizer:
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    if len(vocab) != sum(kind != _UNUSED for kind in types):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens names some token twice; the file is damaged")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
        raise CheckpointError(f"{path}: tokenizer.ggml.merges cannot be used ({error}); the file is damaged") from error
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    for kind in (_CONTROL, _USER_DEFINED):
        added = [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False) for token, t in zip(tokens, types, strict=True) if t == kind
        ]
        backend.add_special_tokens(added) if kind == _CONTROL else backend.add_tokens(added)
    return backend


def _special_tokens(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, str]:
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not _is_integer(token_id) or not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{key}_token_id is {token_id!r}, expected a token id below {len(tokens)}")
        if types[token_id] == _UNUSED:
            raise CheckpointError(f"{path}: tokenizer.ggml.{key}_token_id is {token_id}, but token {tokens[token_id]!r:.200} is marked as unused")
        special[f"{name}_token"] = tokens[token_id]
    return special


def _add_bos_and_eos(path: Path, backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], adds_bos: bool) -> None:
    wanted = {"bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos), "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    for name, add in wanted.items():
        if not isinstance(add, bool):
            raise CheckpointError(f"{path}: tokenizer.ggml.add_{name}_token is {add!r:.200}, expected true or false; the file is damaged")
    names = {name: special.get(f"{name}_token") for name, add in wanted.items() if add}
    absent = [name for name, token in names.items() if token is None]
    if absent:
        raise CheckpointError(f"{path}: tokenizer.ggml.add_{absent[0]}_token is true, but there is no tokenizer.ggml.{absent[0]}_token_id")
    tokens = {name: token for name, token in names.items() if token is not None}
    if tokens:
        template = [tokens[name] for name in ("bos",) if name in tokens] + ["$A"] + [tokens[name] for name in ("eos",) if name in tokens]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, backend.token_to_id(token)) for token in set(tokens.values())]
        )


def _chat_templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; the one without a name is `default`, whatever else is called so."""
    prefix = "tokenizer.chat_template"
    keys = [key for key in metadata if key == prefix or key.startswith(f"{prefix}.")]
    templates = {key: check_template(f"{path}: {key}", metadata[key]) for key in sorted(keys, reverse=True)}
    return {"default" if key == prefix else key.removeprefix(f"{prefix}."): source for key, source in templates.items()}


def _array(path: Path, metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) and not isinstance(item, bool) for item in value):
        raise CheckpointError(f"{path}: {key} is {type(value).__name__}, expected a list of {kind.__name__}; the file is damaged")
    return value


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
