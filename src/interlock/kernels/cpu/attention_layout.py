"""The constants of attention's arithmetic, and how its workspaces are laid out. Imports no Numba.

TILE and SPLIT are part of the numerical law: changing one changes bits. QUERY_ROWS and ROW_BLOCK only change speed.
"""

from typing import Final

from interlock.core.buffer import ALIGNMENT

LANES: Final = 16
TILE: Final = 64  # keys
SPLIT: Final = 256  # keys; whole tiles
QUERY_ROWS: Final = 64  # query rows that share one pass over the keys
ROW_BLOCK: Final = 4  # query rows that the inner loops hold in registers

STATE_HEADER: Final = 64  # bytes from a row's state to its sums
FACTORS: Final = 4 * ROW_BLOCK * TILE  # bytes from a row block's weights to the factors of its sums so far


def padded(head_dim: int) -> int:
    """`head_dim` rounded up to whole vectors."""
    return -(-head_dim // LANES) * LANES


def state_bytes(head_dim: int) -> int:
    """Bytes of one query row's state: `[maximum, denominator, padding | sums]`, header and sums each on a vector's boundary."""
    return STATE_HEADER + 4 * padded(head_dim)


def num_splits(length: int) -> int:
    """Splits that `length` positions take."""
    return -(-length // SPLIT)


def weights_bytes() -> int:
    """Bytes of the weights of a row block for one tile, and behind them a vector with the factor of each row's sums so far."""
    return FACTORS + 4 * LANES


def scratch_bytes(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Scratch of one thread: a row's limit, query, total and state; addresses (of two tiles), keys and values of a tile; weights."""
    rows = -(-max(QUERY_ROWS, num_heads // num_kv_heads) // ROW_BLOCK) * ROW_BLOCK
    tile = 16 * TILE + 4 * TILE * (head_dim + padded(head_dim)) + weights_bytes()
    return tile + rows * (8 + 4 * head_dim + 2 * state_bytes(head_dim)) + 2 * ALIGNMENT
