"""Runs a model on a stream without a runner: fills a step slot by hand, one or more sequences a step, and returns logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer, DType
from interlock.graphs.program import Program
from interlock.graphs.stream import Stream, raise_for_status
from interlock.graphs.threads import ThreadTeam
from interlock.graphs.timeline import Timelines
from interlock.kernels import slot as words
from interlock.models.ops import LayerHooks, Ops
from interlock.models.registry import LoadedModel
from interlock.models.rope import rope_table
from interlock.models.workspace import Workspace

MAX_REQS = 4


class ModelDriver:
    """Sequence i owns the blocks from i * blocks_per_seq on, in reverse order, so that physical and logical order differ."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_dtype: DType = "float32",
        max_model_len: int = 128,
        block_size: int = 16,
        num_threads: int = 2,
        hooks: LayerHooks | None = None,
    ) -> None:
        config = loaded.config
        self.loaded, self.block_size = loaded, block_size
        self.blocks_per_seq = -(-max_model_len // block_size)
        self.team = ThreadTeam(num_threads)
        self.stream = Stream(self.team)
        shape = (MAX_REQS * self.blocks_per_seq, 2, config.num_kv_heads, block_size, config.head_dim)
        self.kv = [Buffer.zeros(shape, kv_dtype) for _ in range(config.num_layers)]
        work = Workspace.allocate(config, max_num_tokens=max_model_len, max_num_reqs=MAX_REQS, max_model_len=max_model_len, num_threads=num_threads)
        table = Buffer.from_numpy(rope_table(config.rope, max_model_len))
        self.ops = Ops(self.stream, config, self.kv, work, table, hooks=hooks)
        self._rope_table = table
        self.steps = 0
        self._arrays: dict[int, Buffer] = {
            words.STATUS: Buffer.zeros((4,), "int64"),
            words.TOKEN_IDS: Buffer.zeros((max_model_len,), "int32"),
            words.POSITIONS: Buffer.zeros((max_model_len,), "int32"),
            words.SLOT_MAPPING: Buffer.zeros((max_model_len,), "int64"),
            words.QUERY_START_LOC: Buffer.zeros((MAX_REQS + 1,), "int32"),
            words.SEQ_LENS: Buffer.zeros((MAX_REQS,), "int32"),
            words.BLOCK_TABLE: Buffer.zeros((MAX_REQS, self.blocks_per_seq), "int32"),
            words.GATE_TARGETS: Buffer.zeros((config.num_layers,), "int64"),
            words.LOGITS_INDICES: Buffer.zeros((max_model_len,), "int32"),
        }
        self._header = Buffer.zeros((words.NUM_WORDS,), "int64")
        for word, buffer in self._arrays.items():
            self._header.numpy()[word] = buffer.address
        self._header.numpy()[words.BLOCK_TABLE_STRIDE] = self.blocks_per_seq
        self.stream.bind_slot(self._header.address, self._arrays[words.STATUS])

    def step(self, queries: Sequence[tuple[int, Sequence[int], int]], program: Program | None = None) -> npt.NDArray[np.float32]:
        """Run (sequence, token ids, number of tokens before them) together; logits `[len(queries), vocab_size]` of their last tokens."""
        self._fill(queries)
        if program is None:
            self.loaded.model.forward(self.ops)
        else:
            self.stream.replay(program)
        self.stream.synchronize()
        raise_for_status(self._arrays[words.STATUS])
        return self.ops.workspace.logits.numpy()[: len(queries)].copy()

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits at every position of one sequence, `[len(token_ids), vocab_size]`: a prefill of one token, then decode steps."""
        return np.concatenate([self.step([(0, [token], i)]) for i, token in enumerate(token_ids)])

    def capture(self, *, breaks: bool = False) -> Program:
        """Capture the forward pass."""
        with self.stream.capture(Program(), breaks=breaks) as program:
            self.loaded.model.forward(self.ops)
        return program

    def use_timelines(self, landed: Timelines, written: Timelines) -> None:
        """Put gates before and signals after the KV writes of what is captured from now on."""
        self.ops = Ops(self.stream, self.loaded.config, self.kv, self.ops.workspace, self._rope_table, landed=landed, written=written)

    def close(self) -> None:
        self.team.shutdown()

    def _fill(self, queries: Sequence[tuple[int, Sequence[int], int]]) -> None:
        view: dict[int, Any] = {word: buffer.numpy() for word, buffer in self._arrays.items()}
        view[words.STATUS][:] = 0
        row = 0
        for request, (sequence, token_ids, start) in enumerate(queries):
            table = (sequence + 1) * self.blocks_per_seq - 1 - np.arange(self.blocks_per_seq)
            view[words.BLOCK_TABLE][request] = table
            positions = start + np.arange(len(token_ids))
            stop = row + len(token_ids)
            view[words.TOKEN_IDS][row:stop] = token_ids
            view[words.POSITIONS][row:stop] = positions
            view[words.SLOT_MAPPING][row:stop] = table[positions // self.block_size] * self.block_size + positions % self.block_size
            view[words.QUERY_START_LOC][request : request + 2] = (row, stop)
            view[words.SEQ_LENS][request] = start + len(token_ids)
            view[words.LOGITS_INDICES][request] = stop - 1
            row = stop
        header = self._header.numpy()
        self.steps += 1
        header[words.NUM_TOKENS], header[words.NUM_REQS], header[words.NUM_LOGITS], header[words.STEP] = row, len(queries), len(queries), self.steps
