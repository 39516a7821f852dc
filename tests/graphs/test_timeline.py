import threading

import graph_kernels as k
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.core.buffer import Buffer
from interlock.core.errors import KernelError, StreamError
from interlock.graphs import Program, Timelines, gate, raise_for_status, signal
from interlock.kernels.slot import ERROR_SLOT_MAPPING, GATE_TARGETS, STEP

LAYERS = 3
advances = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(1, 12), st.booleans()), max_size=30)


def set_targets(machine, targets):
    words = Buffer.zeros((len(targets),), "int64")
    words.numpy()[:] = targets
    machine.slot.numpy()[GATE_TARGETS] = words.address
    return words


def test_timelines_lie_on_cache_lines_of_their_own():
    timelines = Timelines(LAYERS)
    lines = {timelines.address(layer) // 64 for layer in range(LAYERS)}
    assert len(lines) == LAYERS
    assert all(timelines.address(layer) % 64 == 0 for layer in range(LAYERS))


@settings(deadline=None)
@given(advances)
def test_stamps_only_grow_and_a_reached_stamp_keeps_its_error_bit(calls):
    timelines = Timelines(LAYERS)
    model = dict.fromkeys(range(LAYERS), (0, False))
    for layer, stamp, error in calls:
        moved = timelines.advance(layer, stamp, error=error)
        assert moved == (stamp > model[layer][0])
        if moved:
            model[layer] = (stamp, error)
        assert [(timelines.value(i), timelines.failed(i)) for i in range(LAYERS)] == list(model.values())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(advances, st.lists(st.integers(0, 6), min_size=LAYERS, max_size=LAYERS))
def test_a_replay_passes_its_gates_exactly_when_every_target_is_reached(machine, calls, targets):
    timelines = Timelines(LAYERS)
    words = set_targets(machine, targets)
    program = Program()
    with machine.stream.capture(program, breaks=False):
        for layer in range(LAYERS):
            machine.stream.launch(gate(), timelines.gate_arguments(layer), barrier=layer == 0)
    machine.stream.replay(program)
    event = machine.stream.record()
    for layer, stamp, error in calls:
        if any(timelines.value(i) < target for i, target in enumerate(targets)):
            assert not event.done
        timelines.advance(layer, stamp, error=error)
    for layer, target in enumerate(targets):
        if timelines.value(layer) < target:
            assert not event.done
            assert timelines.advance(layer, target, error=True)
    assert event.wait(60)
    raise_for_status(machine.status)
    assert len(words.numpy()) == LAYERS


@pytest.mark.parametrize("gated", [True, False])
def test_a_gate_holds_back_the_launch_behind_it_until_the_load_has_landed(machine, gated):
    """Without the gate (negative control) the launch runs before the load and reports the stale value."""
    timelines = Timelines(1)
    _targets = set_targets(machine, [7 if gated else 0])
    landed = Buffer.zeros((1,), "int64")
    program = Program()
    with machine.stream.capture(program, breaks=False):
        machine.stream.launch(gate(), timelines.gate_arguments(0), barrier=False)
        machine.stream.launch(k.expect_kernel(), k.expect_kernel().pack(counter=landed, least=1))
    machine.stream.replay(program)
    event = machine.stream.record()
    if not gated:
        assert event.wait(60)
    timelines.advance(0, 6)
    assert event.done is not gated
    landed.numpy()[0] = 1
    timelines.advance(0, 7)
    assert event.wait(60)
    if gated:
        raise_for_status(machine.status)
    else:
        with pytest.raises(KernelError) as caught:
            raise_for_status(machine.status)
        assert caught.value.code == ERROR_SLOT_MAPPING


def test_a_gate_that_is_released_with_an_error_lets_the_replay_run_to_its_end(machine):
    timelines = Timelines(1)
    _targets = set_targets(machine, [2])
    counter = Buffer.zeros((1,), "int64")
    machine.stream.launch(gate(), timelines.gate_arguments(0))
    machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    timelines.advance(0, 2, error=True)
    machine.stream.synchronize()
    raise_for_status(machine.status)
    assert counter.numpy()[0] == 2
    assert timelines.failed(0)
    assert timelines.advance(0, 3)
    assert not timelines.failed(0)


def test_a_slot_without_targets_has_open_gates(machine):
    machine.stream.launch(gate(), Timelines(1).gate_arguments(0))
    assert machine.stream.record().wait(60)


def test_signals_follow_what_was_launched_before_them_and_never_go_back(machine):
    timelines = Timelines(1)
    counter = Buffer.zeros((1,), "int64")
    seen = []
    for step in (3, 5, 4):
        machine.slot.numpy()[STEP] = step
        for _ in range(50):
            machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
        machine.stream.launch(signal(), timelines.signal_arguments(0))
        assert timelines.wait(0, min(step, 5), 60)
        seen.append((timelines.value(0), int(counter.numpy()[0]) >= 100 * len(seen)))
        machine.stream.synchronize()
    assert seen == [(3, True), (5, True), (5, True)]


def test_one_of_several_writers_of_a_stamp_moves_the_timeline():
    timelines = Timelines(1)
    moved = []
    start = threading.Barrier(4)

    def write():
        start.wait()
        moved.extend(stamp for stamp in range(1, 200) if timelines.advance(0, stamp))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timelines.value(0) == 199
    assert len(moved) == len(set(moved))


def test_wait_sees_a_stamp_that_another_thread_reaches():
    timelines = Timelines(2)
    assert not timelines.wait(1, 1, 0)
    thread = threading.Thread(target=lambda: timelines.wait(0, 1) and timelines.advance(1, 9))
    thread.start()
    timelines.advance(0, 1)
    assert timelines.wait(1, 9)
    thread.join()


def test_bad_layers_and_stamps_are_errors():
    timelines = Timelines(2)
    with pytest.raises(StreamError, match="layer is 2"):
        timelines.advance(2, 1)
    with pytest.raises(StreamError, match="stamp is 0"):
        timelines.advance(0, 0)
    with pytest.raises(StreamError, match="stamp is"):
        timelines.advance(0, 2**62)
