"""What a checkpoint is to a model: its configuration, and raw tensors in mapped files, under Hugging Face's names."""

import itertools
import logging
import math
import mmap
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeGuard

import numpy as np
import numpy.typing as npt

from interlock.core.errors import CheckpointError
from interlock.kernels.formats import ELEMENT_BYTES, WeightFormat, row_nbytes
from interlock.models.config import ModelConfig
from interlock.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

MAX_FAULTS: Final = 20  # listed in one message; the others are counted
_MAX_CHARACTERS: Final = 300  # of one fault, or of one value: names and values come from files and may be of any size
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


class MappedFile:
    """A file mapped read-only. Pages come in when they are read, and leave again with `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); check that the download is complete") from error
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, nbytes: int) -> None:
        """Give the pages that lie wholly in `[start, start + nbytes)` back to the system; they are read again if needed."""
        if hasattr(self._map, "madvise"):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, first, length)


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """One tensor in a file: `name` as the model knows it, `source_name` as the file does, `shape` row-major with the contiguous axis last.

    interleaved_heads: if not 0, the rows are stored for rotation of neighbouring pairs, in that many heads.
    """

    name: str
    source_name: str
    shape: tuple[int, ...]
    fmt: WeightFormat
    file: MappedFile
    offset: int
    nbytes: int
    interleaved_heads: int = 0

    def rows(self) -> Bytes:
        """`[rows, bytes of a row]`, rows in the order of half-split rotation; a view of the file where the order allows it."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        stored = self.file.bytes[self.offset : self.offset + self.nbytes].reshape(rows, -1)
        if not self.interleaved_heads:
            return stored
        paired = stored.reshape(self.interleaved_heads, rows // self.interleaved_heads // 2, 2, -1)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, -1)

    def release(self) -> None:
        """Give the tensor's pages back to the system."""
        self.file.release(self.offset, self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open checkpoint. `path` is what was opened; `tokenizer` is None if it has none."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    tokenizer: Tokenizer | None


def tensor_bytes(fmt: WeightFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` in `fmt`. Raises ValueError if a row is not a whole number of blocks."""
    return math.prod(shape[:-1]) * row_nbytes(fmt, shape[-1])


def overlaps(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Faults: tensors of one file that begin inside another."""
    in_order = sorted((info for info in tensors.values() if info.nbytes), key=lambda info: info.offset)
    return [f"overlap: {b.name} begins inside {a.name}" for a, b in itertools.pairwise(in_order) if b.offset < a.offset + a.nbytes]


def check_num_layers(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the configuration states more layers than there are tensors of: whatever follows goes through all of them."""
    held = len({match[1] for name in checkpoint.tensors if (match := _LAYER.match(name))})
    stated = checkpoint.config.num_layers
    if stated > held:
        raise CheckpointError(
            f"{checkpoint.path}: states {stated} layers, but holds tensors of {held}; check that the download is complete and undamaged"
        )


def without_foreign_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Leave out end and begin tokens beyond the vocabulary, with a warning: the model can neither produce nor read them."""
    config = checkpoint.config
    end = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    begin = config.bos_token_id if config.bos_token_id is not None and config.bos_token_id < config.vocab_size else None
    if (end, begin) == (config.eos_token_ids, config.bos_token_id):
        return checkpoint
    logger.warning(
        "%s: of the end tokens %s and the begin token %s, those beyond the vocabulary of %d tokens are ignored; a sequence ends at %s",
        checkpoint.path,
        list(config.eos_token_ids),
        config.bos_token_id,
        config.vocab_size,
        list(end) or "max_tokens alone",
    )
    return replace(checkpoint, config=replace(config, eos_token_ids=end, bos_token_id=begin))


def match_parameters(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, with a list, unless the checkpoint holds exactly the `expected` names with these shapes."""
    tensors = checkpoint.tensors
    faults = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    faults += [f"unknown: {info.source_name} {list(info.shape)}" for name, info in tensors.items() if name not in expected]
    for name, shape in expected.items():
        info = tensors.get(name)
        if info is not None and info.shape != shape:
            faults.append(f"shape: {info.source_name} is {list(info.shape)}, expected {list(shape)}")
        elif info is not None and len(shape) == 1 and info.fmt not in ELEMENT_BYTES:
            faults.append(f"format: {info.source_name} is {info.fmt}, expected a float format for a vector")
    raise_faults(checkpoint.path, "does not hold exactly the parameters of the model", faults)


def raise_faults(path: Path, what: str, faults: Iterable[str]) -> None:
    """Raise CheckpointError if there is any fault: the first `MAX_FAULTS` on lines of their own, and how many there are beyond them."""
    found = list(faults)
    lines = [shortened(fault) for fault in found[:MAX_FAULTS]]
    if len(found) > MAX_FAULTS:
        lines.append(f"and {len(found) - MAX_FAULTS} more")
    if lines:
        raise CheckpointError(f"{path}: {what}; check that it is a complete Llama checkpoint:\n  " + "\n  ".join(lines))


def refuse(path: Path, key: str, value: object, supported: str) -> CheckpointError:
    """The error for a setting that is not supported: names file, key, value, and what is."""
    return CheckpointError(f"{path}: {key} is {shortened(repr(value))}, which is not supported; supported: {supported}")


def shortened(text: str) -> str:
    """`text`, cut to a length that a message can bear."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}… ({len(text)} characters)"


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a number, not a truth value, that a float can hold: neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
