"""From tensors in files to packed weights in memory: each parameter once, hashed on the way, its pages given back."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.config import WeightDType
from interlock.core.errors import CheckpointError
from interlock.kernels.formats import ELEMENT_BYTES, PackedWeight, WeightFormat, pack, pack_gate_up
from interlock.models.checkpoints import Checkpoint, TensorInfo
from interlock.models.layers import Embedding, GateUp, Linear, RMSNorm

Progress = Callable[[str, int, int], None]
"""(what is being done, done, total)"""

_CHUNK = 1 << 20  # elements converted at a time: the temporaries stay small


class ParameterLoader:
    """Takes parameters out of a checkpoint and packs them. A context manager: at its end its thread ends.

    dtype: the format that float weights are converted to (`auto`: their own).
    """

    def __init__(self, checkpoint: Checkpoint, dtype: WeightDType, progress: Progress | None = None) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._digests: dict[str, str] = {}
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="interlock-digest")

    def __enter__(self) -> "ParameterLoader":
        return self

    def __exit__(self, *exc: object) -> None:
        self._hasher.shutdown(cancel_futures=True)

    def linear(self, *names: str) -> Linear:
        """The named matrices as one product, their outputs side by side; neighbours of one format are packed together."""
        tensors = [self._take(name) for name in names]
        parts: list[tuple[int, PackedWeight]] = []
        first, k = 0, tensors[0].k
        for run in _runs(tensors):
            n = sum(tensor.n for tensor in run)
            parts.append((first, pack(run[0].fmt, n, k, [tensor.rows for tensor in run])))
            first += n
        self._done(tensors)
        return Linear(tuple(parts), in_features=k, out_features=first)

    def gate_up(self, gate_name: str, up_name: str) -> GateUp:
        """Gate and up projection of a gated MLP."""
        gate, up = self._info(gate_name), self._info(up_name)
        if self._target(gate) != self._target(up):
            return GateUp(None, self.linear(gate_name, up_name), in_features=gate.shape[1], intermediate_size=gate.shape[0])
        taken = [self._take(gate_name), self._take(up_name)]
        n, k = gate.shape
        packed = pack_gate_up(taken[0].fmt, n, k, taken[0].rows, taken[1].rows)
        self._done(taken)
        return GateUp(packed, None, in_features=k, intermediate_size=n)

    def embedding(self, name: str) -> Embedding:
        """The embedding table."""
        return Embedding(self.linear(name).parts[0][1])

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        """A norm; its weight is held as float32 whatever it was rounded to."""
        taken = self._take(name)
        weight = Buffer.zeros((taken.k,), "float32")
        weight.numpy()[:] = convert(taken.rows, taken.fmt, "float32").view(np.float32)[0]
        self._done([taken])
        return RMSNorm(weight, eps)

    def finish(self) -> str:
        """The weights digest: sha256 over the model's constants and each parameter's name, shape, format and bytes.

        Every parameter of the checkpoint must have been taken, exactly once.
        """
        assert self._digests.keys() == self._checkpoint.tensors.keys(), self._checkpoint.tensors.keys() - self._digests.keys()
        digest = hashlib.sha256(self._checkpoint.config.numerics.encode())
        for name in sorted(self._digests):
            digest.update(f"\n{name} {self._digests[name]}".encode())
        return digest.hexdigest()

    def _info(self, name: str) -> TensorInfo:
        return self._checkpoint.tensors[name]

    def _target(self, info: TensorInfo) -> WeightFormat:
        return info.fmt if self._dtype == "auto" or info.fmt not in ELEMENT_BYTES else self._dtype

    def _take(self, name: str) -> "_Taken":
        assert name not in self._digests, name
        info = self._info(name)
        fmt = self._target(info)
        rows = info.rows()
        if fmt != info.fmt:
            rows = convert(rows, info.fmt, fmt)
            _check_range(self._checkpoint, info, fmt, rows)
        self._digests[name] = ""
        return _Taken(info, fmt, rows, self._hasher.submit(lambda: hashlib.sha256(rows.data).hexdigest()))

    def _done(self, tensors: "list[_Taken]") -> None:
        for taken in tensors:
            shape = "x".join(map(str, taken.info.shape))
            self._digests[taken.info.name] = f"{shape} {taken.fmt} {taken.digest.result()}"
            taken.info.release()
        if self._progress is not None:
            self._progress("loading weights", sum(map(bool, self._digests.values())), len(self._checkpoint.tensors))


class _Taken:
    """One tensor on its way: rows uint8 `[n, bytes of a row]` in `fmt`, and the digest being computed of them."""

    __slots__ = ("digest", "fmt", "info", "k", "n", "rows")

    def __init__(self, info: TensorInfo, fmt: WeightFormat, rows: npt.NDArray[np.uint8], digest: "Future[str]") -> None:
        self.info, self.fmt, self.rows, self.digest = info, fmt, rows, digest
        self.n, self.k = rows.shape[0], info.shape[-1]


def convert(rows: npt.NDArray[np.uint8], source: WeightFormat, target: WeightFormat) -> npt.NDArray[np.uint8]:
    """Rows of float elements in another float format, rounded to nearest even; uint8 in and out, `[n, bytes of a row]`."""
    n, k = rows.shape[0], rows.shape[1] // ELEMENT_BYTES[source]
    result = np.empty((n, k * ELEMENT_BYTES[target]), np.uint8)
    step = max(1, _CHUNK // k)
    for start in range(0, n, step):
        values = _to_float32(rows[start : start + step], source)
        result[start : start + step] = _from_float32(values, target).view(np.uint8)
    return result


def _to_float32(rows: npt.NDArray[np.uint8], fmt: WeightFormat) -> npt.NDArray[np.float32]:
    if fmt == "bfloat16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(fmt).astype(np.float32, copy=False)


def _from_float32(values: npt.NDArray[np.float32], fmt: WeightFormat) -> npt.NDArray[Any]:
    if fmt == "float32":
        return values
    if fmt == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _check_range(checkpoint: Checkpoint, info: TensorInfo, fmt: WeightFormat, rows: npt.NDArray[np.uint8]) -> None:
    if fmt == "float16" and not np.isfinite(rows.view(np.float16)).all():
        raise CheckpointError(f"{checkpoint.path}: {info.source_name} has values that float16 cannot hold; use dtype bfloat16, float32 or auto")


def _runs(tensors: list[_Taken]) -> list[list[_Taken]]:
    runs: list[list[_Taken]] = []
    for tensor in tensors:
        if runs and runs[-1][0].fmt == tensor.fmt:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs
