import gc
import threading
import weakref

import graph_kernels as k
import numpy as np
import pytest

from interlock.core.buffer import Buffer
from interlock.core.errors import KernelError, StreamError
from interlock.graphs import Program, Stream, Timelines, gate, profile_buffer, raise_for_status
from interlock.kernels.control import RING_SIZE
from interlock.kernels.slot import ERROR_ABORTED, ERROR_BLOCK_TABLE, ERROR_TOKEN_ID, GATE_TARGETS, NUM_TOKENS

STEPS = [(1.5, 0.25), (0.333, -1.0), (1.01, 7.0), (-0.7, 0.1)] * 5


def launch_affine(stream, x):
    for factor, term in STEPS:
        stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=x.shape[0], factor=factor, term=term))


def new_values():
    x = Buffer.zeros((1000,), "float32")
    x.numpy()[:] = np.linspace(-3, 3, 1000, dtype=np.float32)
    return x


def closed_gate(machine):
    """Timelines whose layer 0 is closed for the machine's slot, and what must stay alive for it."""
    timelines = Timelines(1)
    targets = Buffer.zeros((1,), "int64")
    targets.numpy()[0] = 1
    machine.slot.numpy()[GATE_TARGETS] = targets.address
    return timelines, targets


def launch_gate(stream, timelines):
    stream.launch(gate(), timelines.gate_arguments(0))


def test_launches_run_in_order_and_the_event_covers_them_all(machine):
    x = new_values()
    expected = x.numpy().astype(np.float64)
    launch_affine(machine.stream, x)
    assert machine.stream.record().wait()
    for factor, term in STEPS:
        expected = (expected * np.float64(np.float32(factor)) + np.float64(np.float32(term))).astype(np.float32).astype(np.float64)
    assert x.numpy().view(np.int32).tolist() == expected.astype(np.float32).view(np.int32).tolist()
    raise_for_status(machine.status)


def test_capture_runs_nothing_and_its_replay_equals_eager_bit_for_bit(machine):
    eager, full, pieces = new_values(), new_values(), new_values()
    launch_affine(machine.stream, eager)
    programs = []
    for x, breaks in ((full, False), (pieces, True)):
        program = Program()
        with machine.stream.capture(program, breaks=breaks):
            launch_affine(machine.stream, x)
            machine.stream.call(lambda: None)
            launch_affine(machine.stream, x)
        assert program.num_launches == 2 * len(STEPS)
        assert x.numpy().tobytes() == new_values().numpy().tobytes()
        programs.append(program)
    launch_affine(machine.stream, eager)
    for program in programs:
        machine.stream.replay(program)
    machine.stream.synchronize()
    assert eager.numpy().tobytes() == full.numpy().tobytes() == pieces.numpy().tobytes() != new_values().numpy().tobytes()


def test_a_launch_begins_only_after_every_thread_has_ended_the_one_before(machine):
    counter = Buffer.zeros((1,), "int64")
    for step in range(1, 200):
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
        machine.stream.launch(k.expect_kernel(), k.expect_kernel().pack(counter=counter, least=2 * step))
    program = Program()
    with machine.stream.capture(program, breaks=False):
        for step in range(200, 400):
            machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
            machine.stream.launch(k.expect_kernel(), k.expect_kernel().pack(counter=counter, least=2 * step))
    machine.stream.replay(program)
    machine.stream.synchronize()
    raise_for_status(machine.status)
    assert counter.numpy()[0] == 2 * 399


def test_without_a_barrier_the_next_launch_begins_while_a_thread_is_still_in_this_one(machine):
    """The negative control of the barrier: with one between the two launches this program would never end."""
    word = Buffer.zeros((1,), "int64")
    program = Program()
    with machine.stream.capture(program, breaks=False):
        machine.stream.launch(k.last_thread_waits_kernel(), k.last_thread_waits_kernel().pack(word=word), barrier=False)
        machine.stream.launch(k.first_thread_sets_kernel(), k.first_thread_sets_kernel().pack(word=word))
    machine.stream.replay(program)
    assert machine.stream.record().wait(60)
    assert word.numpy()[0] == 2


def test_a_slot_travels_with_each_launch(machine):
    timelines, _targets = closed_gate(machine)
    launch_gate(machine.stream, timelines)
    results, slots = [], []
    for tokens in (3, 5, 8):
        slot, status = k.step_slot()
        slot.numpy()[NUM_TOKENS] = tokens
        machine.stream.bind_slot(slot.address, status)
        results.append(Buffer.zeros((1,), "int64"))
        slots.append((slot, status))
        machine.stream.launch(k.copy_token_kernel(), k.copy_token_kernel().pack(out=results[-1]))
    assert not machine.stream.record().done
    timelines.advance(0, 1)
    machine.stream.synchronize()
    assert [int(result.numpy()[0]) for result in results] == [3, 5, 8]


def test_a_program_is_replayed_for_whichever_slot_is_bound(machine):
    out = Buffer.zeros((1,), "int64")
    program = Program()
    with machine.stream.capture(program, breaks=False):
        machine.stream.launch(k.copy_token_kernel(), k.copy_token_kernel().pack(out=out))
    for tokens in (4, 9):
        slot, status = k.step_slot()
        slot.numpy()[NUM_TOKENS] = tokens
        machine.stream.bind_slot(slot.address, status)
        machine.stream.replay(program)
        machine.stream.synchronize()
        assert out.numpy()[0] == tokens


def test_an_eager_call_runs_at_once_and_does_not_wait_for_the_stream(machine):
    timelines, _targets = closed_gate(machine)
    launch_gate(machine.stream, timelines)
    called = []
    machine.stream.call(lambda: called.append(machine.stream.record().done))
    assert called == [False]
    timelines.advance(0, 1)
    machine.stream.synchronize()


def test_a_replay_with_breaks_alternates_pieces_and_calls_in_order(machine):
    counter = Buffer.zeros((1,), "int64")
    calls = []
    program = Program()
    with machine.stream.capture(program, breaks=True):
        machine.stream.call(lambda: calls.append(("before", machine.team.submitted)))
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
        machine.stream.call(lambda: calls.append(("between", machine.team.submitted)))
        machine.stream.call(lambda: calls.append(("and", machine.team.submitted)))
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
        machine.stream.call(lambda: calls.append(("after", machine.team.submitted)))
    assert calls == []
    machine.stream.replay(program)
    assert calls == [("before", 0), ("between", 1), ("and", 1), ("after", 2)]
    machine.stream.synchronize()
    assert counter.numpy()[0] == 6


def test_a_full_capture_drops_calls(machine):
    program = Program()
    with machine.stream.capture(program, breaks=False):
        machine.stream.call(lambda: pytest.fail("a FULL replay runs no Python"))
    machine.stream.replay(program)
    machine.stream.synchronize()


def test_the_first_error_wins_skips_the_rest_and_names_launch_and_row(machine):
    x = new_values()
    program = Program()
    report = k.report_kernel()
    with machine.stream.capture(program, breaks=True):
        machine.stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=1000, factor=1.0, term=1.0))
        machine.stream.call(lambda: None)
        machine.stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=1000, factor=1.0, term=1.0))
        machine.stream.launch(report, report.pack(code=ERROR_TOKEN_ID, row=17))
        machine.stream.launch(report, report.pack(code=ERROR_BLOCK_TABLE, row=4))
        machine.stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=1000, factor=0.0, term=0.0))
        machine.stream.call(lambda: None)
        machine.stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=1000, factor=0.0, term=0.0))
    machine.stream.replay(program)
    machine.stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=1000, factor=0.0, term=0.0))
    machine.stream.synchronize()
    with pytest.raises(KernelError, match=r"kernel test_report, launch 2 .* at row 17: a token id lies outside") as caught:
        raise_for_status(machine.status)
    assert (caught.value.code, caught.value.launch, caught.value.row) == (ERROR_TOKEN_ID, 2, 17)
    assert x.numpy().tobytes() == (new_values().numpy() + np.float32(1) + np.float32(1)).tobytes()


def test_a_step_after_a_failed_one_runs_again(machine):
    report = k.report_kernel()
    machine.stream.launch(report, report.pack(code=ERROR_TOKEN_ID, row=0))
    machine.stream.synchronize()
    machine.status.numpy()[:] = 0
    counter = Buffer.zeros((1,), "int64")
    machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    machine.stream.synchronize()
    raise_for_status(machine.status)
    assert counter.numpy()[0] == 2


def test_an_error_before_a_launch_without_barrier_keeps_its_thread_from_the_next(machine):
    x = new_values()
    report = k.report_kernel()
    program = Program()
    with machine.stream.capture(program, breaks=False):
        machine.stream.launch(report, report.pack(code=ERROR_TOKEN_ID, row=2), barrier=False)
        machine.stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=1000, factor=0.0, term=0.0))
    machine.stream.replay(program)
    machine.stream.synchronize()
    assert x.numpy().tobytes() == new_values().numpy().tobytes()


def test_abort_ends_what_is_queued_and_leaves_the_stream_usable(machine):
    timelines, _targets = closed_gate(machine)
    counter = Buffer.zeros((1,), "int64")
    launch_gate(machine.stream, timelines)
    machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    event = machine.stream.record()
    assert not event.wait(0.01)
    machine.stream.abort()
    assert event.wait(60)
    with pytest.raises(KernelError, match=r"kernel gate, launch 0 .*: the stream was aborted") as caught:
        raise_for_status(machine.status)
    assert caught.value.code == ERROR_ABORTED
    assert counter.numpy()[0] == 0
    slot, status = k.step_slot()
    machine.stream.bind_slot(slot.address, status)
    machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    machine.stream.synchronize()
    raise_for_status(status)
    assert counter.numpy()[0] == 2


def test_a_full_ring_makes_the_launching_thread_wait_and_loses_nothing(machine):
    timelines, _targets = closed_gate(machine)
    counter = Buffer.zeros((1,), "int64")
    launch_gate(machine.stream, timelines)

    def launch_many():
        for _ in range(3 * RING_SIZE):
            machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))

    thread = threading.Thread(target=launch_many)
    thread.start()
    while machine.team.submitted < RING_SIZE:
        thread.join(0.001)
    assert thread.is_alive()
    timelines.advance(0, 1)
    thread.join()
    machine.stream.synchronize()
    assert counter.numpy()[0] == 2 * 3 * RING_SIZE


def test_arguments_stay_alive_until_their_launch_has_retired(machine):
    timelines, _targets = closed_gate(machine)
    launch_gate(machine.stream, timelines)
    x = new_values()
    launch_affine(machine.stream, x)
    program = Program()
    y = new_values()
    with machine.stream.capture(program, breaks=False):
        launch_affine(machine.stream, y)
    machine.stream.replay(program)
    del program
    noise = [np.full(4, 2**60, np.int64) for _ in range(1000)]
    timelines.advance(0, 1)
    machine.stream.synchronize()
    assert x.numpy().tobytes() == y.numpy().tobytes()
    assert len(noise) == 1000


def interrupt_behind_submit(monkeypatch, team):
    """From here on Ctrl-C comes right behind each native submit, before its answer is looked at."""
    submit = team._submit

    def submit_and_raise(*words):
        submit(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(team, "_submit", submit_and_raise)


def test_an_interrupt_right_behind_the_submit_of_a_launch_frees_nothing_that_is_queued(machine, monkeypatch):
    timelines, _targets = closed_gate(machine)
    launch_gate(machine.stream, timelines)
    counter = Buffer.zeros((1,), "int64")
    args = k.count_kernel().pack(counter=counter)
    words = weakref.ref(args.words)
    with monkeypatch.context() as patch:
        interrupt_behind_submit(patch, machine.team)
        with pytest.raises(KeyboardInterrupt):
            machine.stream.launch(k.count_kernel(), args)
    del args
    gc.collect()
    assert words() is not None
    event = machine.stream.record()
    assert not event.done
    timelines.advance(0, 1)
    assert event.wait()
    assert counter.numpy()[0] == 2
    machine.stream.synchronize()
    assert words() is None


def test_an_interrupt_right_behind_the_submit_of_a_replay_frees_nothing_that_is_queued(machine, monkeypatch):
    timelines, _targets = closed_gate(machine)
    launch_gate(machine.stream, timelines)
    counter = Buffer.zeros((1,), "int64")
    program = Program()
    with machine.stream.capture(program, breaks=False):
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    kept = weakref.ref(program)
    with monkeypatch.context() as patch:
        interrupt_behind_submit(patch, machine.team)
        with pytest.raises(KeyboardInterrupt):
            machine.stream.replay(program)
    del program
    gc.collect()
    assert kept() is not None
    timelines.advance(0, 1)
    machine.stream.synchronize()
    assert counter.numpy()[0] == 2
    machine.stream.synchronize()
    assert kept() is None


def test_profile_has_nanoseconds_of_every_launch_in_every_thread(machine):
    x = new_values()
    program = Program()
    with machine.stream.capture(program, breaks=True):
        launch_affine(machine.stream, x)
        machine.stream.call(lambda: None)
        launch_affine(machine.stream, x)
    profile = profile_buffer(program, machine.team.num_threads)
    machine.stream.replay(program, profile)
    machine.stream.synchronize()
    assert profile.shape == (2 * len(STEPS), 2)
    assert (profile.numpy() > 0).all()
    with pytest.raises(StreamError, match="expected"):
        machine.stream.replay(program, Buffer.zeros((3, 2), "int64"))


def test_misuse_is_an_error_that_says_so(machine):
    stream = machine.stream
    with pytest.raises(StreamError, match="not captured to its end"):
        stream.replay(Program())
    program = Program()
    with stream.capture(program, breaks=False):
        for misuse in (lambda: stream.replay(program), stream.record, stream.synchronize):
            with pytest.raises(StreamError, match="capturing"):
                misuse()
        with pytest.raises(StreamError, match="capturing already"), stream.capture(Program(), breaks=False):
            pass
    with pytest.raises(StreamError, match="captured already"), stream.capture(program, breaks=False):
        pass
    broken = Program()
    with pytest.raises(ZeroDivisionError), stream.capture(broken, breaks=False):
        raise ZeroDivisionError
    with pytest.raises(StreamError, match="not captured to its end"):
        stream.replay(broken)
    assert not stream.capturing


def capture_and_break_off(stream, program, record):
    with stream.capture(program, breaks=True):
        record()
        raise ZeroDivisionError


@pytest.mark.parametrize("recorded", ["a call", "a launch", "nothing"])
def test_nothing_of_a_capture_that_broke_off_gets_into_another(machine, recorded):
    stream, program, called = machine.stream, Program(), []
    record = {
        "a call": lambda: stream.call(lambda: called.append("broken off")),
        "a launch": lambda: stream.launch(k.count_kernel(), k.count_kernel().pack(counter=0)),
        "nothing": lambda: None,
    }[recorded]
    with pytest.raises(ZeroDivisionError):
        capture_and_break_off(stream, program, record)
    with pytest.raises(StreamError, match="captured already"), stream.capture(program, breaks=True):
        pass
    with pytest.raises(StreamError, match="not captured to its end"):
        stream.replay(program)
    assert not called


def test_two_streams_do_not_capture_into_one_program(machine):
    other, program, called = Stream(machine.team), Program(), []
    with machine.stream.capture(program, breaks=True):
        machine.stream.call(lambda: called.append("ours"))
        with pytest.raises(StreamError, match="being captured"), other.capture(program, breaks=True):
            other.call(lambda: called.append("theirs"))
    assert not other.capturing
    machine.stream.replay(program)
    assert called == ["ours"]


def test_a_launch_without_a_slot_is_an_error(machine):
    with pytest.raises(StreamError, match="bind_slot"):
        Stream(machine.team).launch(k.count_kernel(), k.count_kernel().pack(counter=0))


def test_a_hook_that_blocks_does_not_keep_earlier_pieces_from_running(machine):
    counter = Buffer.zeros((1,), "int64")
    program = Program()
    with machine.stream.capture(program, breaks=True):
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
        machine.stream.call(lambda: machine.stream.record().wait(60) or pytest.fail("the piece before the call did not run"))
        machine.stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    machine.stream.replay(program)
    machine.stream.synchronize()
    assert counter.numpy()[0] == 4
