"""A step slot: the memory behind one slot address (see `kernels.slot`), as NumPy views."""

from typing import Any

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer, DType
from interlock.core.sampling_params import MAX_LOGPROBS, MAX_MASKED_TOKENS
from interlock.kernels import slot as words

_ARRAYS: dict[int, tuple[str, DType]] = {
    words.STATUS: ("status", "int64"),
    words.TOKEN_IDS: ("token_ids", "int32"),
    words.POSITIONS: ("positions", "int32"),
    words.SLOT_MAPPING: ("slot_mapping", "int64"),
    words.QUERY_START_LOC: ("query_start_loc", "int32"),
    words.SEQ_LENS: ("seq_lens", "int32"),
    words.BLOCK_TABLE: ("block_table", "int32"),
    words.LOGITS_INDICES: ("logits_indices", "int32"),
    words.GATE_TARGETS: ("gate_targets", "int64"),
    words.TEMPERATURE: ("temperature", "float32"),
    words.TOP_K: ("top_k", "int32"),
    words.TOP_P: ("top_p", "float32"),
    words.SEED: ("seed", "int64"),
    words.OUTPUT_INDEX: ("output_index", "int64"),
    words.NUM_LOGPROBS: ("num_logprobs", "int32"),
    words.NUM_MASKED: ("num_masked", "int32"),
    words.MASKED_TOKENS: ("masked_tokens", "int32"),
    words.SAMPLED: ("sampled", "int32"),
    words.SAMPLED_LOGPROB: ("sampled_logprob", "float32"),
    words.SAMPLED_RANK: ("sampled_rank", "int32"),
    words.TOP_TOKENS: ("top_tokens", "int32"),
    words.TOP_LOGPROBS: ("top_logprobs", "float32"),
}


class StepSlot:
    """One slot, sized for the largest step. Every array of `kernels.slot` is a NumPy view under its name; `header` holds the words."""

    def __init__(self, *, max_num_tokens: int, max_num_reqs: int, max_blocks_per_req: int, num_layers: int) -> None:
        shapes = {
            words.STATUS: (4,),
            words.TOKEN_IDS: (max_num_tokens,),
            words.POSITIONS: (max_num_tokens,),
            words.SLOT_MAPPING: (max_num_tokens,),
            words.QUERY_START_LOC: (max_num_reqs + 1,),
            words.BLOCK_TABLE: (max_num_reqs, max_blocks_per_req),
            words.GATE_TARGETS: (num_layers,),
            words.MASKED_TOKENS: (max_num_reqs, MAX_MASKED_TOKENS),
            words.TOP_TOKENS: (max_num_reqs, MAX_LOGPROBS),
            words.TOP_LOGPROBS: (max_num_reqs, MAX_LOGPROBS),
        }
        header = Buffer.zeros((words.NUM_WORDS,), "int64")
        self.header: npt.NDArray[np.int64] = header.numpy()
        self.address = header.address
        self._buffers = {word: Buffer.zeros(shapes.get(word, (max_num_reqs,)), dtype) for word, (_, dtype) in _ARRAYS.items()}
        self._owner = header
        for word, buffer in self._buffers.items():
            self.header[word] = buffer.address
        self.header[words.BLOCK_TABLE_STRIDE] = max_blocks_per_req
        self.status_buffer = self._buffers[words.STATUS]
        views = {name: self._buffers[word].numpy() for word, (name, _) in _ARRAYS.items()}
        self.status: npt.NDArray[np.int64] = views["status"]
        self.token_ids: npt.NDArray[np.int32] = views["token_ids"]
        self.positions: npt.NDArray[np.int32] = views["positions"]
        self.slot_mapping: npt.NDArray[np.int64] = views["slot_mapping"]
        self.query_start_loc: npt.NDArray[np.int32] = views["query_start_loc"]
        self.seq_lens: npt.NDArray[np.int32] = views["seq_lens"]
        self.block_table: npt.NDArray[np.int32] = views["block_table"]
        self.logits_indices: npt.NDArray[np.int32] = views["logits_indices"]
        self.gate_targets: npt.NDArray[np.int64] = views["gate_targets"]
        self.temperature: npt.NDArray[np.float32] = views["temperature"]
        self.top_k: npt.NDArray[np.int32] = views["top_k"]
        self.top_p: npt.NDArray[np.float32] = views["top_p"]
        self.seed: npt.NDArray[np.uint64] = views["seed"].view(np.uint64)
        self.output_index: npt.NDArray[np.int64] = views["output_index"]
        self.num_logprobs: npt.NDArray[np.int32] = views["num_logprobs"]
        self.num_masked: npt.NDArray[np.int32] = views["num_masked"]
        self.masked_tokens: npt.NDArray[np.int32] = views["masked_tokens"]
        self.sampled: npt.NDArray[np.int32] = views["sampled"]
        self.sampled_logprob: npt.NDArray[np.float32] = views["sampled_logprob"]
        self.sampled_rank: npt.NDArray[np.int32] = views["sampled_rank"]
        self.top_tokens: npt.NDArray[np.int32] = views["top_tokens"]
        self.top_logprobs: npt.NDArray[np.float32] = views["top_logprobs"]

    def begin(self, *, step: int, num_tokens: int, num_reqs: int, num_logits: int) -> None:
        """Set the live counts and the stamp, and clear the status and the gate targets."""
        header: Any = self.header
        header[words.NUM_TOKENS] = num_tokens
        header[words.NUM_REQS] = num_reqs
        header[words.NUM_LOGITS] = num_logits
        header[words.STEP] = step
        header[words.GATE_WAIT] = 0
        self.status[:] = 0
        self.gate_targets[:] = 0

    @property
    def step(self) -> int:
        """The stamp of the step that the slot is filled for."""
        return int(self.header[words.STEP])

    @property
    def gate_wait_seconds(self) -> float:
        """How long the step has waited at gates."""
        return float(self.header[words.GATE_WAIT]) * 1e-9
