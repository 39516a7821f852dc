"""Hugging Face directories: config.json, and safetensors files read through a memory map.

The safetensors format: eight bytes with the length of a JSON header, the header (name → dtype, shape, offsets), then the data.
The header is read here rather than by the safetensors library because every faulty tensor has to be named, not only the first.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlock.core.errors import CheckpointError
from interlock.kernels.formats import WeightFormat
from interlock.models.checkpoints.checkpoint import MAX_FAULTS, Checkpoint, MappedFile, TensorInfo, overlaps, raise_faults, tensor_bytes
from interlock.models.checkpoints.hf_config import read_model_config
from interlock.models.hf_tokenizer import load_hf_tokenizer
from interlock.models.json_file import read_json

logger = logging.getLogger(__name__)

_DTYPES: Mapping[str, WeightFormat] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_safetensors(directory: Path) -> Checkpoint:
    """Open a Hugging Face directory. Raises CheckpointError."""
    config = read_model_config(directory)
    tensors = {name: info for name, info in _read_tensors(directory).items() if not _is_rotary_buffer(name)}
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        _drop_tied_head(directory, tensors)
    tokenizer = load_hf_tokenizer(directory, config.eos_token_ids)
    if tokenizer is not None:
        config = replace(config, eos_token_ids=tokenizer.eos_token_ids)
    return Checkpoint(directory, config, tensors, tokenizer)


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, by name. Raises CheckpointError with the list of all that are faulty."""
    file = MappedFile(path)
    length = int.from_bytes(file.bytes[:8].tobytes(), "little")
    if file.size < 8 or length > file.size - 8:
        raise CheckpointError(f"{path}: is {file.size} bytes, which does not even hold its header; download it again")
    header = _parse_header(path, file.bytes[8 : 8 + length].tobytes())
    tensors, faults = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info = _tensor(file, 8 + length, name, entry)
        if isinstance(info, TensorInfo):
            tensors[name] = info
        else:
            faults.append(info)
    faults += overlaps(tensors)
    raise_faults(path, "has faulty tensors", faults or _unclaimed_bytes(file, 8 + length, tensors))
    return tensors


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    duplicates: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            duplicates.extend(sorted(name for name, count in counts.items() if count > 1))
        return result

    try:
        header = json.loads(text, object_pairs_hook=collect)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); expected a safetensors file") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is {type(header).__name__}, expected an object; is this a safetensors file?")
    raise_faults(path, "names tensors twice", [f"duplicate: {name}" for name in duplicates])
    return header


def _tensor(file: MappedFile, data: int, name: str, entry: Any) -> TensorInfo | str:
    """The tensor, or what is wrong with it."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole_numbers = isinstance(dtype, str) and all(isinstance(value, int) and value >= 0 for value in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        return f"malformed: {name}: {entry!r}"
    if not whole_numbers or not shape:
        return f"malformed: {name}: dtype {dtype!r}, shape {list(shape)}, data_offsets {[start, stop]}"
    if dtype not in _DTYPES:
        return f"unsupported: {name} has dtype {dtype}, expected one of {list(_DTYPES)}"
    expected = tensor_bytes(_DTYPES[dtype], shape)
    if stop - start != expected:
        return f"malformed: {name} {list(shape)} {dtype} occupies {stop - start} bytes, expected {expected}"
    if data + stop > file.size:
        return f"truncated: {name} ends at byte {data + stop}, the file at {file.size}"
    return TensorInfo(name, name, shape, _DTYPES[dtype], file, data + start, expected)


def _unclaimed_bytes(file: MappedFile, data: int, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Faults: bytes that belong to no tensor. The format has none, so their presence says that header and data are not of one file."""
    faults, end = [], data
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset > end:
            faults.append(f"gap: {info.offset - end} bytes before {info.name} belong to no tensor")
        end = max(end, info.offset + info.nbytes)
    if file.size > end:
        faults.append(f"trailing: {file.size - end} bytes behind the last tensor, which ends at byte {end}, belong to none")
    return faults


def _read_tensors(directory: Path) -> dict[str, TensorInfo]:
    index = directory / INDEX_FILE
    if index.exists():
        return _read_sharded(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        formats = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in directory.glob(pattern))
        raise CheckpointError(
            f"{directory}: holds no *.safetensors file (found {formats or 'no other weights'}); supported: safetensors, or a GGUF file"
        )
    chosen = directory / SINGLE_FILE if (directory / SINGLE_FILE) in files else files[0] if len(files) == 1 else None
    if chosen is None:
        raise CheckpointError(
            f"{directory}: holds {[path.name for path in files]} but no {INDEX_FILE} that assigns tensors to them; download the index as well"
        )
    _note_strays(directory, {chosen.name})
    return read_safetensors(chosen)


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is {type(weight_map).__name__}, expected an object from tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: weight_map names {outside[:MAX_FAULTS]}, expected names of files in the same directory")
    raise_faults(directory, "lacks shards that its index names", [f"absent: {name}" for name in names if not (directory / name).exists()])
    _note_strays(directory, set(names))
    shards = {name: read_safetensors(directory / name) for name in names}
    for name in names:
        extras = [tensor for tensor in shards[name] if weight_map.get(tensor) != name]
        if extras:
            logger.info("%s: ignored %d tensors that the index does not assign to this file: %s", directory / name, len(extras), extras[:MAX_FAULTS])
    raise_faults(
        directory,
        "has shards without tensors that the index assigns to them",
        [f"missing: {tensor} in {name}" for tensor, name in weight_map.items() if tensor not in shards[name]],
    )
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def _note_strays(directory: Path, used: set[str]) -> None:
    strays = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in used)
    if strays:
        logger.warning("%s: ignored %s, which hold no tensor of this model by its index or name", directory, strays)


def _is_rotary_buffer(name: str) -> bool:
    # Old Llama checkpoints carry the frequencies as a tensor; they follow from config.json.
    return name.endswith(".self_attn.rotary_emb.inv_freq")


def _drop_tied_head(directory: Path, tensors: dict[str, TensorInfo]) -> None:
    head, embedding = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if embedding is not None and (head.fmt, head.shape) == (embedding.fmt, embedding.shape) and bool((head.rows() == embedding.rows()).all()):
        return
    logger.warning(
        "%s: lm_head.weight differs from the embedding, but config.json has tie_word_embeddings = true; the embedding is used as the head", directory
    )
