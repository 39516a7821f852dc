"""A piece of memory that kernels work on: an address, a shape, an element type, and the object that keeps it alive."""

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

DType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]

ITEM_SIZES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}

_NUMPY_DTYPES: dict[DType, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
}

ALIGNMENT = 64  # bytes: one cache line, and one 16-lane float32 vector


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Contiguous, row-major memory at `address`. `owner` is whatever must stay referenced while the address is in use."""

    address: int
    shape: tuple[int, ...]
    dtype: DType
    owner: object

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def numpy(self) -> npt.NDArray[Any]:
        """A view (no copy) as a NumPy array; bfloat16 is seen as uint16 bit patterns."""
        memory = memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        flat: npt.NDArray[Any] = np.frombuffer(memory, dtype=np.dtype(_NUMPY_DTYPES[self.dtype]))
        return flat.reshape(self.shape)

    def torch(self) -> Any:
        """A view (no copy) as a torch tensor. torch is imported here and nowhere else on the CPU path."""
        import torch

        raw = torch.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(self.address), dtype=torch.uint8)
        return raw.view(getattr(torch, self.dtype)).reshape(self.shape)

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any], dtype: DType | None = None) -> "Buffer":
        """A buffer over the memory of a C-contiguous `array`, which it keeps alive; `dtype` renames the elements (uint16 → bfloat16)."""
        if not array.flags.c_contiguous:
            raise ValueError(f"Buffer.from_numpy needs a C-contiguous array, got strides {array.strides} for shape {array.shape}")
        names = {np.dtype(v): k for k, v in _NUMPY_DTYPES.items() if k != "bfloat16"}
        return cls(array.ctypes.data, tuple(array.shape), dtype or names[array.dtype], array)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: DType) -> "Buffer":
        """New zeroed memory, aligned to a cache line."""
        nbytes = math.prod(shape) * ITEM_SIZES[dtype]
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        return cls(raw.ctypes.data + (-raw.ctypes.data) % ALIGNMENT, shape, dtype, raw)
