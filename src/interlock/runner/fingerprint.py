"""The kernel fingerprint of a rank: what its kernels make of a fixed prompt, so that peers can tell whether they compute the same bits."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

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
    """`shape` with its fingerprint: sha256 over the logits and the KV of a probe prompt, run eagerly in the pool's first blocks.

    Runs before any request; the blocks are zeroed again. `forward` launches the model and returns the logits.
    """
    count = min(PROBE_TOKENS, shape.num_blocks * shape.block_size, config.max_num_batched_tokens)
    blocks = list(range(-(-count // shape.block_size)))
    request = NewRequestData(
        "probe", [(7919 * index + 1) % vocab_size for index in range(count)], count, SamplingParams(temperature=0.0), 0, blocks, 0
    )
    batch = InputBatch(config, shape, count)
    batch.update_states(output := SchedulerOutput(1, [request], [], {"probe": count}, count))
    prepared = batch.prepare(output)
    stream.bind_slot(prepared.slot.address, prepared.slot.status_buffer)
    logits = forward()
    stream.synchronize()
    raise_for_status(prepared.slot.status_buffer)
    hasher = hashlib.sha256(logits.numpy()[0].tobytes())
    for layer in kv_layers:
        probed = layer.numpy()[: len(blocks)]
        hasher.update(probed.tobytes())
        probed[:] = 0
    return dataclasses.replace(shape, kernel_fingerprint=hasher.hexdigest()[:32])
