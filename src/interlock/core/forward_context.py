"""What a step's forward pass is: its mode, its batch, and its attention metadata. Built once per step, passed explicitly, never ambient."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


class CUDAGraphMode(enum.Enum):
    """vLLM's graph modes. The pairs are configured modes only; at run time a step has NONE, PIECEWISE or FULL."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def decode_mode(self) -> "CUDAGraphMode":
        """The run-time mode of a uniform decode batch under this configured mode."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """The run-time mode of a prefill or mixed batch under this configured mode."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def has_full_cudagraphs(self) -> bool:
        """Whether any batch runs as a FULL replay."""
        return CUDAGraphMode.FULL in (self.decode_mode(), self.mixed_mode())

    def requires_piecewise_compilation(self) -> bool:
        """Whether any batch runs piecewise."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode(), self.mixed_mode())


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The captured shape that a step runs under. `num_tokens` and `num_reqs` are upper bounds; `uniform` says that every query has length 1."""

    num_tokens: int
    num_reqs: int
    uniform: bool
    cg_mode: CUDAGraphMode


@dataclass(frozen=True, slots=True)
class DPMetadata:
    """What the data-parallel ranks agreed in the step's one collective."""

    num_tokens_across_dp: tuple[int, ...]
    cudagraph_mode: CUDAGraphMode


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """The attention inputs of a step: live views into its step slot (vLLM's names).

    query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs], KV positions valid after this step's writes;
    block_table: int32 [num_reqs, max_blocks_per_req]; slot_mapping: int64 [num_actual_tokens], block * block_size + offset.
    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """One per step, for all modes. Field names are vLLM's; `step` is the step's stamp, which only grows."""

    step: int
    attn_metadata: AttentionMetadata | None
    cudagraph_runtime_mode: CUDAGraphMode
    batch_descriptor: BatchDescriptor | None
    dp_metadata: DPMetadata | None = None
    additional_kwargs: Mapping[str, Any] = field(default_factory=dict)
