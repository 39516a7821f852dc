"""The kernel fingerprint of a rank: what its kernels make of a fixed prompt, so that peers can tell whether they compute the same bits."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.sampling_params import SamplingParams
from interlock.core.step import NewRequestData, SchedulerOutput
from interlock.graphs.stream import Stream, raise_for_status
from interlock.runner.input_batch import InputBatch

PROBE_TOKENS = 24


def kernel_fingerprint(
    config: EngineConfig, shape: KVCacheConfig, stream: Stream, forward: Callable[[], Buffer], kv_layers: Sequence[Buffer], vocab_size: int
) -> KVCacheConfig:
    """`shape` with its fingerprint: sha256 over the logits and the KV, by position, of a probe prompt, run eagerly in the pool's first
    blocks. It does not depend on block size, chunks or threads.

    Runs before any request; the blocks are zeroed again. `forward` launches the model and returns the logits.
    """
    count = min(PROBE_TOKENS, shape.num_blocks * shape.block_size)
    blocks = list(range(-(-count // shape.block_size)))
    tokens = [(7919 * index + 1) % vocab_size for index in range(count)]
    batch = InputBatch(config, shape, count, stream.record)
    logits = None
    for start in range(0, count, config.max_num_batched_tokens):  # by the numerical law, chunks change nothing
        size = min(config.max_num_batched_tokens, count - start)
        request = NewRequestData("probe", tokens, count, SamplingParams(temperature=0.0), 0, blocks, start)
        output = SchedulerOutput(start + 1, [request], [], {"probe": size}, size)
        batch.update_states(output)
        prepared = batch.prepare(output)
        stream.bind_slot(prepared.slot.address, prepared.slot.status_buffer)
        logits = forward()
        stream.synchronize()
        raise_for_status(prepared.slot.status_buffer)
    assert logits is not None
    hasher = hashlib.sha256(logits.numpy()[0].tobytes())
    positions = np.arange(count)
    for layer in kv_layers:
        pool = layer.numpy()
        hasher.update(pool[positions // shape.block_size, :, :, positions % shape.block_size].tobytes())
        pool[: len(blocks)] = 0
    return dataclasses.replace(shape, kernel_fingerprint=hasher.hexdigest()[:32])
