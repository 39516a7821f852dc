"""The GGUF container: metadata and a table of tensors, read through a memory map with every bound checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. It is read here rather than by the gguf library because that
builds an array per vocabulary entry (two seconds and 150 MB for 49,152 tokens) and stops at the first faulty tensor.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from interlock.core.errors import CheckpointError
from interlock.kernels.formats import WeightFormat
from interlock.models.checkpoints.checkpoint import MappedFile, TensorInfo, overlaps, raise_faults, shortened, tensor_bytes

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH: Final = 4  # of arrays in arrays

_FORMATS: Final[Mapping[int, WeightFormat]] = {0: "float32", 1: "float16", 30: "bfloat16", 8: "q8_0", 2: "q4_0", 3: "q4_1"}
"""ggml_type → format."""


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """The contents of one file: `metadata` as Python values, and tensors under the names that the file gives them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: Path) -> GGUFFile:
    """Read metadata and tensor table. Raises CheckpointError, for faulty tensors with the full list."""
    file = MappedFile(path)
    reader = _Reader(file)
    if bytes(reader.take(4)) != MAGIC:
        raise CheckpointError(f"{path}: does not begin with 'GGUF'; expected a GGUF file")
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version is {version}, supported: {VERSIONS}, little-endian; convert the file with a current converter")
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {shortened(repr(key))} appears twice")
        metadata[key] = reader.value(reader.scalar("I"))
    entries = [reader.tensor_entry() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    return GGUFFile(path, metadata, _tensors(file, entries, -(-reader.position // alignment) * alignment, alignment))


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class _Reader:
    """A cursor over the file; reading past its end is a CheckpointError."""

    def __init__(self, file: MappedFile) -> None:
        self._path = file.path
        self._view = file.bytes.data
        self.position = 0

    def take(self, nbytes: int) -> memoryview:
        start, stop = self.position, self.position + nbytes
        if stop > len(self._view):
            raise CheckpointError(f"{self._path}: is truncated: its header goes on past the end at byte {len(self._view)}; download it again")
        self.position = stop
        return self._view[start:stop]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.scalar("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: a string before byte {self.position} is not UTF-8; the file is damaged") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise CheckpointError(
                f"{self._path}: metadata before byte {self.position} has the unknown type {kind}, or arrays {depth} deep; the file is damaged"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))
        return [self.value(item, depth + 1) for _ in range(count)]

    def tensor_entry(self) -> _Entry:
        name, num_dims = self.string(), self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise CheckpointError(f"{self._path}: tensor {shortened(repr(name))} has {num_dims} dimensions, expected 1 to 4")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        return _Entry(name, dims[::-1], self.scalar("I"), self.scalar("Q"))


def _tensors(file: MappedFile, entries: list[_Entry], data: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    faults = []
    for entry in entries:
        fmt = _FORMATS.get(entry.ggml_type)
        label = f"{entry.name} {list(entry.shape)}"
        if entry.name in tensors:
            faults.append(f"duplicate: {label}")
        elif fmt is None:
            faults.append(f"unsupported: {label} has type {_type_name(entry.ggml_type)}, supported: {', '.join(_FORMATS.values())}")
        elif 0 in entry.shape or entry.offset % alignment:
            faults.append(f"malformed: {label} at offset {entry.offset}, expected sizes of at least 1 and a multiple of {alignment}")
        elif entry.shape[-1] % 32 and fmt.startswith("q"):
            faults.append(f"malformed: {label} has rows that are not whole {fmt} blocks of 32")
        elif math.prod(entry.shape) > file.size * 8 or data + entry.offset + tensor_bytes(fmt, entry.shape) > file.size:
            faults.append(f"truncated: {label} lies past the end of the file at byte {file.size}")
        else:
            nbytes = tensor_bytes(fmt, entry.shape)
            tensors[entry.name] = TensorInfo(entry.name, entry.name, entry.shape, fmt, file, data + entry.offset, nbytes)
    raise_faults(file.path, "has faulty tensors", faults or overlaps(tensors))
    return tensors


def _type_name(ggml_type: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return f"number {ggml_type}"
