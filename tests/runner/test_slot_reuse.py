"""A step slot is refilled only after its step has retired, also when nobody has waited for that step (an interrupt)."""

import threading

import pytest

from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.sampling_params import SamplingParams
from interlock.core.step import NewRequestData, SchedulerOutput
from interlock.graphs import Stream, ThreadTeam, Timelines, gate
from interlock.graphs.stream import Event
from interlock.runner.input_batch import InputBatch

SHAPE = KVCacheConfig(
    num_blocks=8, block_size=4, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", layer_names=("layers.0",), identity="none"
)


@pytest.fixture
def stream():
    team = ThreadTeam(1)
    yield Stream(team)
    team.shutdown()


def make_batch(record):
    return InputBatch(EngineConfig(model="none", block_size=4, max_num_seqs=2, max_num_batched_tokens=8), SHAPE, 16, record)


def prepare(batch, step):
    """A step of one request, all of whose tokens are the step's number."""
    request = NewRequestData(str(step), [step] * 3, 3, SamplingParams(), 0, [0], 0)
    output = SchedulerOutput(step, [request], [], {str(step): 3}, 3)
    batch.update_states(output)
    return batch.prepare(output)


def launch_step_that_waits(stream, prepared, timelines):
    """A replay that is at work on the slot until layer 0 of the timelines reaches the step's stamp."""
    prepared.arm_gates()
    stream.bind_slot(prepared.slot.address, prepared.slot.status_buffer)
    stream.launch(gate(), timelines.gate_arguments(0))
    return stream.record()


def test_a_slot_is_not_refilled_while_its_step_runs(stream, monkeypatch):
    batch, timelines = make_batch(stream.record), Timelines(1)
    first = prepare(batch, 1)
    running = launch_step_that_waits(stream, first, timelines)
    assert prepare(batch, 2).slot is not first.slot
    waiting, real_wait = threading.Event(), Event.wait

    def wait(event, timeout=None):
        waiting.set()
        return real_wait(event, timeout)

    monkeypatch.setattr(Event, "wait", wait)
    refilled = []
    thread = threading.Thread(target=lambda: refilled.append(prepare(batch, 3)))
    thread.start()
    try:
        assert waiting.wait(60)
        assert not running.done
        assert first.slot.token_ids[:3].tolist() == [1, 1, 1]
        assert first.slot.step == 1
    finally:
        timelines.advance(0, 1)
        thread.join()
    assert refilled[0].slot is first.slot
    assert first.slot.token_ids[:3].tolist() == [3, 3, 3]


def test_a_slot_that_nobody_keeps_is_refilled_while_its_step_runs(stream):
    """The negative control: with events that are done from the start the running step reads the next one's tokens."""
    batch, timelines = make_batch(lambda: Event(stream.team, 0)), Timelines(1)
    first = prepare(batch, 1)
    running = launch_step_that_waits(stream, first, timelines)
    prepare(batch, 2)
    prepare(batch, 3)
    assert not running.done
    assert first.slot.token_ids[:3].tolist() == [3, 3, 3]
    timelines.advance(0, 1)
    running.wait()
