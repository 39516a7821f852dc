"""Weight formats, and the packed form in which kernels read them.

A weight W [n, k] is cut into panels of 32 outputs, and a panel into groups of 32 inputs. A panel is one run of group records, so that
a product walks memory in one direction. A group record holds, for 2 halves of 16 outputs (lanes):

| format | quants | then |
| --- | --- | --- |
| float32, float16, bfloat16 | `[k = 32][half][lane]` elements | |
| q8_0 | `[k = 32][half][lane]` int8 | scales float16 `[half][lane]` |
| q4_0, q4_1 | `[word = 4][half][lane]` uint32: bits 4j to 4j + 3 are input 8 word + j | scales float16 `[half][lane]`; q4_1: minima likewise |

Outputs past n and inputs past k are zero. Quantised values, scales and minima are those of the GGUF block, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.kernels.native import NativeFunction

WeightFormat = Literal["float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1"]

WEIGHT_FORMATS: Final[tuple[WeightFormat, ...]] = get_args(WeightFormat)

LANES: Final = 16
PANEL: Final = 2 * LANES  # outputs
GROUP: Final = 32  # inputs

ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
BLOCK_BYTES: Final[dict[str, int]] = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # GGUF: 32 inputs of one row
QUANT_BYTES: Final[dict[str, int]] = {"q8_0": PANEL * GROUP, "q4_0": PANEL * GROUP // 2, "q4_1": PANEL * GROUP // 2}  # of one group record
SCALE_BYTES: Final = 2 * PANEL

# A thread's scratch in a product: the totals of one tile, then input rows.
MAX_TILE_ROWS: Final = 12  # on any CPU
TOTALS_BYTES: Final = MAX_TILE_ROWS * PANEL * 4
INPUT_BLOCK_BYTES: Final = 256 * 1024  # half of a small second-level cache

Raw = npt.NDArray[Any] | memoryview | bytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A packed weight: `buffer` is uint8 [packed_nbytes]. With `gate_up`, n counts the outputs of each of two weights whose halves
    alternate: lanes 0 to 15 of a panel are the gate, lanes 16 to 31 the up projection."""

    buffer: Buffer
    fmt: WeightFormat
    n: int
    k: int
    gate_up: bool = False


def group_nbytes(fmt: WeightFormat) -> int:
    """Size of one group record."""
    if fmt in ELEMENT_BYTES:
        return PANEL * GROUP * ELEMENT_BYTES[fmt]
    return QUANT_BYTES[fmt] + SCALE_BYTES * (2 if fmt == "q4_1" else 1)


def row_nbytes(fmt: WeightFormat, k: int) -> int:
    """Size of one row of k inputs in the checkpoint. Raises ValueError if a quantised row does not consist of whole blocks."""
    if fmt in ELEMENT_BYTES:
        return k * ELEMENT_BYTES[fmt]
    if k % GROUP:
        raise ValueError(f"a {fmt} row has {k} inputs, expected a multiple of {GROUP}")
    return k // GROUP * BLOCK_BYTES[fmt]


def packed_nbytes(fmt: WeightFormat, n: int, k: int) -> int:
    """Size of a packed weight [n, k]; for gate and up together n is twice the intermediate size, rounded up to a multiple of 32."""
    return -(-n // PANEL) * -(-k // GROUP) * group_nbytes(fmt)


def pack(
    fmt: WeightFormat, n: int, k: int, raw: Raw | Sequence[Raw], *, row_order: npt.NDArray[np.int64] | None = None, buffer: Buffer | None = None
) -> PackedWeight:
    """Pack rows of GGUF blocks or of elements (little-endian, row-major, C-contiguous).

    raw: one array of n rows, or several whose rows are stacked. row_order [n]: which stacked row becomes each output (default: as they
    come). buffer: where to write (uint8, packed_nbytes, aligned to 64 bytes; default: new memory). Runs without the GIL.
    Raises ValueError if sizes do not fit.
    """
    addresses = _row_addresses(fmt, k, raw)
    if row_order is not None:
        addresses = addresses[row_order]
    if addresses.size != n:
        raise ValueError(f"the weight has {addresses.size} rows, expected {n}")
    table = np.zeros(-(-n // PANEL) * PANEL, np.int64)
    table[:n] = addresses
    return PackedWeight(_pack_rows(fmt, k, table, buffer), fmt, n, k)


def pack_gate_up(fmt: WeightFormat, n: int, k: int, gate: Raw, up: Raw, *, buffer: Buffer | None = None) -> PackedWeight:
    """Pack the two weights [n, k] of a gated MLP for `matmul_silu`; otherwise as `pack`."""
    panels = -(-n // LANES)
    table = np.zeros((panels, 2, LANES), np.int64)
    for half, raw in enumerate((gate, up)):
        addresses = _row_addresses(fmt, k, raw)
        if addresses.size != n:
            raise ValueError(f"the {('gate', 'up')[half]} weight has {addresses.size} rows, expected {n}")
        padded = np.zeros(panels * LANES, np.int64)
        padded[:n] = addresses
        table[:, half] = padded.reshape(panels, LANES)
    return PackedWeight(_pack_rows(fmt, k, table.reshape(-1), buffer), fmt, n, k, gate_up=True)


def dequantize_rows(packed: PackedWeight, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The given rows as float32 [len(rows), k], by NumPy: value * scale + minimum, each operation rounded. For gate and up packed
    together, rows n to 2n - 1 are those of the up projection."""
    if packed.gate_up:
        is_up, index = np.divmod(rows, packed.n)
        panel, lane = np.divmod(index, LANES)
        half = is_up
    else:
        panel, within = np.divmod(rows, PANEL)
        half, lane = np.divmod(within, LANES)
    groups = -(-packed.k // GROUP)
    records = packed.buffer.numpy().reshape(-1)[: packed_nbytes(packed.fmt, packed.n * (1 + packed.gate_up), packed.k)]
    return _values(packed.fmt, records.reshape(-1, groups, group_nbytes(packed.fmt)), panel, half, lane)[:, : packed.k]


def unpack_reference(packed: PackedWeight) -> npt.NDArray[np.float32]:
    """All rows as float32 [n, k] ([2n, k], gate then up, for gate and up packed together): the slow, plain oracle for tests."""
    return dequantize_rows(packed, np.arange(packed.n * (1 + packed.gate_up)))


def _row_addresses(fmt: WeightFormat, k: int, raw: Raw | Sequence[Raw]) -> npt.NDArray[np.int64]:
    """The address of every row; good for as long as the caller holds `raw`."""
    sources = [raw] if isinstance(raw, np.ndarray | memoryview | bytes) else list(raw)
    stride = row_nbytes(fmt, k)
    tables = []
    for view in map(_bytes_of, sources):
        if view.size % stride:
            raise ValueError(f"a {fmt} weight has {view.size} bytes, expected a multiple of {stride}, the size of a row of {k} inputs")
        tables.append(view.ctypes.data + stride * np.arange(view.size // stride, dtype=np.int64))
    return np.concatenate(tables)


def _bytes_of(source: Raw) -> npt.NDArray[np.uint8]:
    if not isinstance(source, np.ndarray):
        return np.frombuffer(source, np.uint8)
    if not source.flags.c_contiguous:
        raise ValueError(f"a weight must be C-contiguous, got strides {source.strides} for shape {source.shape}")
    return source.reshape(-1).view(np.uint8)


def _pack_rows(fmt: WeightFormat, k: int, table: npt.NDArray[np.int64], buffer: Buffer | None) -> Buffer:
    """table [outputs, a multiple of 32]: the address of each output's row, 0 for zeros."""
    nbytes = packed_nbytes(fmt, table.size, k)
    if buffer is None:
        buffer = Buffer.zeros((nbytes,), "uint8")
    if buffer.nbytes < nbytes:
        raise ValueError(f"the buffer has {buffer.nbytes} bytes, expected {nbytes} for {table.size} outputs and {k} inputs in {fmt}")
    pack_function(fmt).callable()(table.ctypes.data, buffer.address, table.size // PANEL, k)
    return buffer


def pack_function(fmt: WeightFormat) -> NativeFunction:
    """The native function (row addresses, target, panels, k) that packs; listed so that it can be compiled with the kernels."""
    return NativeFunction(f"pack_{fmt}", ("void", "i64", "i64", "i64", "i64"), "interlock.kernels.cpu.packing:pack", (fmt,))


def _values(fmt: WeightFormat, records: npt.NDArray[np.uint8], panel: Any, half: Any, lane: Any) -> npt.NDArray[np.float32]:
    """records [panels, groups, group_nbytes] → float32 [rows, groups * 32]."""
    rows, groups = panel.size, records.shape[1]
    if fmt in ELEMENT_BYTES:
        dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[fmt]
        elements = records.view(dtype).reshape(-1, groups, GROUP, 2, LANES)[panel, :, :, half, lane].reshape(rows, -1)
        return _bfloat16_values(elements) if fmt == "bfloat16" else elements.astype(np.float32)
    size = QUANT_BYTES[fmt]
    scales = records[:, :, size : size + SCALE_BYTES].copy().view(np.float16).reshape(-1, groups, 2, LANES)[panel, :, half, lane]
    quants = records[:, :, :size].copy()
    if fmt == "q8_0":
        values = quants.view(np.int8).reshape(-1, groups, GROUP, 2, LANES)[panel, :, :, half, lane].astype(np.float32)
    else:
        words = quants.view(np.uint32).reshape(-1, groups, 4, 2, LANES)[panel, :, :, half, lane]
        values = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(rows, groups, GROUP).astype(np.float32)
        if fmt == "q4_0":
            values -= 8
    result = values * scales.astype(np.float32)[..., None]
    if fmt == "q4_1":
        result += (
            records[:, :, size + SCALE_BYTES :]
            .copy()
            .view(np.float16)
            .reshape(-1, groups, 2, LANES)[panel, :, half, lane]
            .astype(np.float32)[..., None]
        )
    return result.reshape(rows, -1)


def _bfloat16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
