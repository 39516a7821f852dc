"""Products of float32 rows with packed weights: `matmul` and `matmul_silu` (fields: `kernels/catalog.py`).

Threads split the panels of the weight. Each copies the input rows, block by block, into its own scratch in the form that tiles read (see
`cpu/tiles.py`), and walks its panels once per block, so that a panel serves all tiles of the block from the first-level caches. Where a
norm comes before the product the rows are normalised on the way: doing that in every thread costs less than a launch of its own.
A tile leaves its totals in scratch; the epilogue adds the residual, or applies the gate, and stores the live rows and columns.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit

from interlock.kernels.cpu.norm import rms_scale
from interlock.kernels.cpu.simd import load_f32, load_f64, load_i32, load_i64, reduce_add, splat, store_f32, vadd, vload, vmul, vstore
from interlock.kernels.cpu.tiles import FOUR_BITS, SUMS_BYTES, TileShape, chunk_bytes, input_scales, make_tile, prefetch_first, tile_shapes
from interlock.kernels.cpu.vector_math import vsilu
from interlock.kernels.formats import GROUP, INPUT_BLOCK_BYTES, LANES, PANEL, TOTALS_BYTES, group_nbytes
from interlock.kernels.slot import LOGITS_INDICES

_PANEL_BYTES = 4 * PANEL  # one row of totals


def matmul(fmt: Any) -> Callable[..., None]:
    """Factory of the product with an optional residual."""
    return _product(fmt, PANEL, _store_sum)


def matmul_silu(fmt: Any) -> Callable[..., None]:
    """Factory of the gated product of two weights whose halves alternate."""
    return _product(fmt, LANES, _store_gated)


def _product(fmt: Any, panel_outputs: int, store: Any) -> Callable[..., None]:
    record_bytes = group_nbytes(fmt)
    tile_rows, run_tile = _tile_runner(fmt)
    fill_inputs = _input_filler(fmt)
    main_rows = max(shape.rows for shape in tile_shapes(fmt))
    main_chunk_bytes = chunk_bytes(main_rows)

    def product(args, slot, thread_id, num_threads):
        x, x_stride, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        out, out_stride, residual = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
        rows, n, k = load_i64(slot + 8 * load_i64(args + 48)), load_i64(args + 56), load_i64(args + 64)
        totals = load_i64(args + 72) + thread_id * load_i64(args + 80)
        norm, eps = load_i64(args + 88), np.float32(load_f64(args + 96))
        indices = load_i64(slot + 8 * LOGITS_INDICES) if load_i64(args + 104) else 0
        inputs = totals + TOTALS_BYTES
        groups = (k + GROUP - 1) // GROUP
        panels = (n + panel_outputs - 1) // panel_outputs
        begin, end = panels * thread_id // num_threads, panels * (thread_id + 1) // num_threads
        prefetch_first(weight + begin * groups * record_bytes)
        block_rows = main_rows * max(1, INPUT_BLOCK_BYTES // (groups * main_chunk_bytes))
        for first in range(0, rows, block_rows):
            count = min(block_rows, rows - first)
            row, chunk = 0, inputs
            while row < count:
                height = tile_rows(count - row)
                fill_inputs(x, x_stride, indices, first + row, min(height, count - row), height, k, groups, chunk, norm, eps)
                row += height
                chunk += groups * (height * GROUP * 4 + SUMS_BYTES)
            for panel in range(begin, end):
                record = weight + panel * groups * record_bytes
                row, chunk = 0, inputs
                while row < count:
                    height = tile_rows(count - row)
                    run_tile(height, record, chunk, totals, groups)
                    offset = (first + row) * out_stride
                    store(totals, min(height, count - row), panel * panel_outputs, n, out + offset, out_stride, residual, offset)
                    row += height
                    chunk += groups * (height * GROUP * 4 + SUMS_BYTES)

    return product


def _tile_runner(fmt: Any) -> tuple[Any, Any]:
    """`tile_rows(remaining)`: rows of the next tile, which may be more than remain; `run_tile(rows, record, chunk, totals, groups)`."""

    def chain(shapes: tuple[TileShape, ...]) -> tuple[Any, Any]:
        rows, halves, width = shapes[0].rows, shapes[0].halves, shapes[0].width
        tile = make_tile(fmt, shapes[0])
        narrow_tile = make_tile(fmt, replace(shapes[0], width=1)) if width > 1 else tile

        @njit(error_model="numpy")
        def run_this(record, chunk, totals, groups):
            for half in range(0, 2, halves):
                if groups % width == 0:
                    tile(record, half, chunk, totals + half * 4 * LANES, groups)
                else:
                    narrow_tile(record, half, chunk, totals + half * 4 * LANES, groups)

        if len(shapes) == 1:

            @njit(error_model="numpy")
            def last_rows(remaining):
                return rows

            @njit(error_model="numpy")
            def run_last(height, record, chunk, totals, groups):
                run_this(record, chunk, totals, groups)

            return last_rows, run_last
        larger_rows, run_larger = chain(shapes[1:])

        @njit(error_model="numpy")
        def tile_rows(remaining):
            return rows if remaining <= rows else larger_rows(remaining)

        @njit(error_model="numpy")
        def run_tile(height, record, chunk, totals, groups):
            if height == rows:
                run_this(record, chunk, totals, groups)
            else:
                run_larger(height, record, chunk, totals, groups)

        return tile_rows, run_tile

    return chain(tile_shapes(fmt))


def _input_filler(fmt: Any) -> Any:
    """`fill(x, x_stride, indices, first, live, height, k, groups, chunk, norm, eps)`: the group chunks of one tile from its live rows,
    normalised if `norm` is not 0; the other rows are zero."""
    scaled = fmt in FOUR_BITS

    @njit(error_model="numpy")
    def fill(x, x_stride, indices, first, live, height, k, groups, chunk, norm, eps):
        group_bytes = height * GROUP * 4 + SUMS_BYTES
        for row in range(height):
            source = x + x_stride * (np.int64(load_i32(indices + 4 * (first + row))) if indices != 0 and row < live else first + row)
            scale = rms_scale(source, k, eps) if norm != 0 and row < live else np.float32(1.0)
            for group in range(groups):
                to = chunk + group * group_bytes
                here = to + row * GROUP * 4
                if row >= live:
                    vstore(here, splat(np.float32(0.0)))
                    vstore(here + 4 * LANES, splat(np.float32(0.0)))
                elif (group + 1) * GROUP > k:
                    for i in range(GROUP):
                        store_f32(here + 4 * i, _element(source, group * GROUP + i, scale, norm) if group * GROUP + i < k else np.float32(0.0))
                else:
                    vstore(here, _elements(source, group * GROUP, scale, norm))
                    vstore(here + 4 * LANES, _elements(source, group * GROUP + LANES, scale, norm))
                if scaled:
                    low, high = vload(here), vload(here + 4 * LANES)
                    store_f32(to + height * GROUP * 4 + 4 * row, reduce_add(vadd(low, high)))
                    vstore(here, vmul(low, input_scales()))
                    vstore(here + 4 * LANES, vmul(high, input_scales()))

    return fill


@njit(error_model="numpy")
def _elements(source, i, scale, norm):
    """Inputs i to i + 15 of a row."""
    value = vload(source + 4 * i)
    if norm != 0:
        value = vmul(vmul(value, splat(scale)), vload(norm + 4 * i))
    return value


@njit(error_model="numpy")
def _element(source, i, scale, norm):
    """Input i of a row."""
    value = load_f32(source + 4 * i)
    if norm != 0:
        value = value * scale * load_f32(norm + 4 * i)
    return value


@njit(error_model="numpy")
def _store_sum(totals, rows, column, n, out, out_stride, residual, offset):
    """Store rows of up to 32 columns from `column` on; out is the address of the first row, `offset` its distance in the residual."""
    for row in range(rows):
        source, to = totals + row * _PANEL_BYTES, out + row * out_stride + 4 * column
        added = residual + offset + row * out_stride + 4 * column
        for first in range(0, min(PANEL, n - column), LANES):
            if column + first + LANES <= n:
                value = vload(source + 4 * first)
                if residual != 0:
                    value = vadd(vload(added + 4 * first), value)
                vstore(to + 4 * first, value)
            else:
                for i in range(first, n - column):
                    single = load_f32(source + 4 * i)
                    if residual != 0:
                        single = load_f32(added + 4 * i) + single
                    store_f32(to + 4 * i, single)


@njit(error_model="numpy")
def _store_gated(totals, rows, column, n, out, out_stride, residual, offset):
    """As `_store_sum`, for 16 columns of silu(first half) * second half."""
    for row in range(rows):
        source, to = totals + row * _PANEL_BYTES, out + row * out_stride + 4 * column
        value = vmul(vsilu(vload(source)), vload(source + 4 * LANES))
        if column + LANES <= n:
            vstore(to, value)
        else:
            vstore(source, value)
            for i in range(n - column):
                store_f32(to + 4 * i, load_f32(source + 4 * i))
