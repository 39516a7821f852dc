"""From a SchedulerOutput to the inputs of a step: the runner's view of each request, and the step slot filled from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.forward_context import AttentionMetadata
from interlock.core.sampling_params import SamplingParams
from interlock.core.step import CachedRequestData, NewRequestData, SchedulerOutput
from interlock.graphs.stream import Event
from interlock.runner.step_slot import StepSlot


class RequestState:
    """What the runner knows of a request: its tokens, its blocks, and where its KV ends."""

    def __init__(self, data: NewRequestData, max_model_len: int, max_blocks: int) -> None:
        self.token_ids: npt.NDArray[np.int32] = np.empty(max_model_len, np.int32)
        self.token_ids[: len(data.token_ids)] = data.token_ids
        self.num_tokens = len(data.token_ids)
        self.num_prompt_tokens = data.num_prompt_tokens
        self.num_computed_tokens = data.num_computed_tokens
        self.sampling_params: SamplingParams = data.sampling_params
        self.all_stop_token_ids = data.all_stop_token_ids
        self.seed = data.seed
        self.sample_key = data.sample_index << 32
        self.blocks: npt.NDArray[np.int32] = np.empty(max_blocks, np.int32)
        self.num_blocks = 0
        self.append_blocks(data.block_ids)

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of the request's block list."""
        end = self.num_blocks + len(block_ids)
        self.blocks[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def update(self, data: CachedRequestData) -> None:
        """Take over what the scheduler says; tokens beyond `num_tokens` no longer hold."""
        if data.block_ids is not None:
            self.num_blocks = 0
            self.append_blocks(data.block_ids)
        if data.new_block_ids:
            self.append_blocks(data.new_block_ids)
        self.num_computed_tokens = data.num_computed_tokens
        self.num_tokens = data.num_tokens

    def append_token(self, token_id: int) -> None:
        """Add a sampled token, if the model's length has room for it."""
        if self.num_tokens < len(self.token_ids):
            self.token_ids[self.num_tokens] = token_id
            self.num_tokens += 1


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A filled slot: the requests in row order, and those that sample (one logits row each, in order)."""

    slot: StepSlot
    req_ids: list[str]
    sampling_req_ids: list[str]
    attn_metadata: AttentionMetadata

    @property
    def num_tokens(self) -> int:
        """Live token rows."""
        return self.attn_metadata.num_actual_tokens

    def arm_gates(self) -> None:
        """From here on every layer's gate waits for its timeline to reach this step's stamp."""
        self.slot.gate_targets[:] = self.slot.step

    @property
    def gate_wait_seconds(self) -> float:
        """How long the step has waited at gates."""
        return self.slot.gate_wait_seconds

    @property
    def uniform(self) -> bool:
        """Whether every query has length 1."""
        return self.attn_metadata.max_query_len == 1


class InputBatch:
    """Request states and the ring of step slots. A slot is refilled only after its step has retired (`depth` steps may be in flight).

    record: gives an event for all that was launched so far (`Stream.record`).
    """

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int, record: Callable[[], Event], depth: int = 1) -> None:
        self._max_model_len = max_model_len
        self._block_size = kv_cache_config.block_size
        self._max_blocks = -(-max_model_len // self._block_size)
        self._states: dict[str, RequestState] = {}
        self._slots = [
            StepSlot(
                max_num_tokens=config.max_num_batched_tokens,
                max_num_reqs=config.max_num_seqs,
                max_blocks_per_req=self._max_blocks,
                num_layers=kv_cache_config.num_layers,
            )
            for _ in range(depth + 1)
        ]
        self._next_slot = 0
        self._record = record
        self._ends: list[Event | None] = [None] * len(self._slots)  # of the last step of each slot

    def update_states(self, output: SchedulerOutput) -> None:
        """Forget finished and preempted requests, take in new ones, update known ones."""
        for req_id in output.finished_req_ids:
            self._states.pop(req_id, None)
        for req_id in output.preempted_req_ids:
            self._states.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self._states[new.req_id] = RequestState(new, self._max_model_len, self._max_blocks)
        for cached in output.scheduled_cached_reqs:
            self._states[cached.req_id].update(cached)

    def prepare(self, output: SchedulerOutput) -> PreparedBatch:
        """Fill the next slot for the step, when the slot's last step has retired: nobody need have waited for that (an interrupt).
        `update_states` comes first."""
        slot = self._take_slot()
        req_ids: list[str] = []
        sampling: list[str] = []
        start = max_query_len = max_seq_len = 0
        for row, (req_id, count) in enumerate(output.num_scheduled_tokens.items()):
            state = self._states[req_id]
            stop, first, last = start + count, state.num_computed_tokens, state.num_computed_tokens + count
            slot.token_ids[start:stop] = state.token_ids[first:last]
            self._fill_positions(slot, state, start, first, count)
            slot.block_table[row, : state.num_blocks] = state.blocks[: state.num_blocks]
            slot.seq_lens[row] = last
            slot.query_start_loc[row + 1] = stop
            if last == state.num_tokens:
                self._fill_sampling(slot, state, len(sampling), stop - 1)
                sampling.append(req_id)
            req_ids.append(req_id)
            start, max_query_len, max_seq_len = stop, max(max_query_len, count), max(max_seq_len, last)
        num_reqs = len(req_ids)
        slot.begin(step=output.step, num_tokens=start, num_reqs=num_reqs, num_logits=len(sampling))
        metadata = AttentionMetadata(
            num_actual_tokens=start,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc=slot.query_start_loc[: num_reqs + 1],
            seq_lens=slot.seq_lens[:num_reqs],
            block_table=slot.block_table[:num_reqs],
            slot_mapping=slot.slot_mapping[:start],
        )
        return PreparedBatch(slot, req_ids, sampling, metadata)

    def _take_slot(self) -> StepSlot:
        number = self._next_slot
        self._ends[number - 1] = self._record()  # whatever was launched by now belongs to earlier steps
        end = self._ends[number]
        if end is not None:
            end.wait()
        self._next_slot = (number + 1) % len(self._slots)
        return self._slots[number]

    def append_sampled(self, sampled: dict[str, int]) -> None:
        """Add the tokens that a step sampled."""
        for req_id, token_id in sampled.items():
            self._states[req_id].append_token(token_id)

    def _fill_positions(self, slot: StepSlot, state: RequestState, start: int, first: int, count: int) -> None:
        size = self._block_size
        if count == 1:
            slot.positions[start] = first
            slot.slot_mapping[start] = int(state.blocks[first // size]) * size + first % size
            return
        positions = np.arange(first, first + count, dtype=np.int32)
        slot.positions[start : start + count] = positions
        slot.slot_mapping[start : start + count] = state.blocks[positions // size].astype(np.int64) * size + positions % size

    @staticmethod
    def _fill_sampling(slot: StepSlot, state: RequestState, row: int, token_row: int) -> None:
        params = state.sampling_params
        slot.logits_indices[row] = token_row
        slot.temperature[row] = params.temperature
        slot.top_k[row] = max(params.top_k, 0)
        slot.top_p[row] = params.top_p
        slot.seed[row] = state.seed
        num_output_tokens = state.num_tokens - state.num_prompt_tokens
        slot.output_index[row] = state.sample_key + num_output_tokens
        slot.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        slot.num_masked[row] = num_masked = len(state.all_stop_token_ids) if num_output_tokens < params.min_tokens else 0
        if num_masked:
            slot.masked_tokens[row, :num_masked] = state.all_stop_token_ids
