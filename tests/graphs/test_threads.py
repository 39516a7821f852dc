import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import graph_kernels as k
import numpy as np
import pytest

from children import as_a_child
from interlock.core.buffer import Buffer
from interlock.core.errors import KernelError, StreamError
from interlock.graphs import Program, Stream, ThreadTeam, Timelines, gate, raise_for_status
from interlock.kernels.slot import GATE_TARGETS

HEADER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import graph_kernels as k
from interlock.core.buffer import Buffer
from interlock.core.errors import KernelError, StreamError
from interlock.graphs import Program, Stream, ThreadTeam, Timelines, gate, raise_for_status
from interlock.kernels.slot import GATE_TARGETS
team = ThreadTeam(2)
stream = Stream(team)
slot, status = k.step_slot()
stream.bind_slot(slot.address, status)
timelines, targets = Timelines(1), Buffer.zeros((1,), "int64")
targets.numpy()[0] = 1
slot.numpy()[GATE_TARGETS] = targets.address
"""

FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000, "arm64": 0x400000}.get(platform.machine())


def run_script(body):
    return subprocess.run([sys.executable, "-c", HEADER + body], capture_output=True, text=True, timeout=120, check=False)


def bound_stream(team):
    stream = Stream(team)
    slot, status = k.step_slot()
    stream.bind_slot(slot.address, status)
    return stream, slot, status


def close_gate(slot):
    targets = Buffer.zeros((1,), "int64")
    targets.numpy()[0] = 1
    slot.numpy()[GATE_TARGETS] = targets.address
    return targets


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="gives a team one CPU")
def test_a_team_whose_threads_share_one_cpu_notices_and_goes_on():
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})  # threads that are started from here on inherit it
    try:
        team = ThreadTeam(3)
    finally:
        os.sched_setaffinity(0, cpus)
    stream, _, _ = bound_stream(team)
    program, counter = Program(), Buffer.zeros((1,), "int64")
    add = k.count_kernel()
    with stream.capture(program, breaks=False):
        for _ in range(50):
            stream.launch(add, add.pack(counter=counter))
    for _ in range(20):
        stream.replay(program)
    stream.synchronize()
    assert counter.numpy()[0] == 3 * 50 * 20
    assert set(team.cpus) == {min(cpus)}
    team.shutdown()


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError("can't start new thread"), StreamError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_team_whose_threads_cannot_all_be_started_starts_none(monkeypatch, error, raised):
    before, start = set(threading.enumerate()), threading.Thread.start

    def start_two(thread):
        if thread.name == "interlock-team-2":
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(raised):
        ThreadTeam(4)
    assert set(threading.enumerate()) == before


def test_shutdown_joins_the_team_and_later_use_is_a_clear_error():
    before = set(threading.enumerate())
    team = ThreadTeam(3)
    stream, _slot, _status = bound_stream(team)
    assert len(set(threading.enumerate()) - before) == 3
    stream.launch(k.count_kernel(), k.count_kernel().pack(counter=Buffer.zeros((1,), "int64")))
    team.shutdown()
    team.shutdown()
    assert set(threading.enumerate()) == before
    for use in (lambda: stream.launch(k.count_kernel(), k.count_kernel().pack(counter=0)), lambda: team.wait_slice(10**6)):
        with pytest.raises(StreamError, match="shut down"):
            use()


def test_shutdown_aborts_what_is_running():
    team = ThreadTeam(2)
    stream, slot, status = bound_stream(team)
    _targets, timelines = close_gate(slot), Timelines(1)
    stream.launch(gate(), timelines.gate_arguments(0))
    event = stream.record()
    team.shutdown()
    assert event.wait()
    with pytest.raises(KernelError, match="aborted"):
        raise_for_status(status)


def test_a_team_that_nobody_refers_to_ends_its_threads():
    before = set(threading.enumerate())
    team = ThreadTeam(2)
    assert set(threading.enumerate()) != before
    del team
    gc.collect()
    assert set(threading.enumerate()) == before


def test_a_process_ends_cleanly_while_a_replay_waits_at_a_gate():
    result = run_script("stream.launch(gate(), timelines.gate_arguments(0)); print('end')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_an_exception_at_the_top_level_ends_the_process_while_a_replay_waits_at_a_gate():
    result = run_script("stream.launch(gate(), timelines.gate_arguments(0)); raise SystemExit(7)")
    assert (result.returncode, result.stderr) == (7, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_has_no_team_and_says_so_and_the_parent_goes_on():
    result = run_script("""
import os
counter = Buffer.zeros((1,), "int64")
stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
stream.launch(gate(), timelines.gate_arguments(0))
event = stream.record()
child = os.fork()
if child == 0:
    for use in (lambda: stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter)), event.wait, stream.synchronize):
        try:
            use()
        except StreamError as error:
            assert "forked" in str(error)
        else:
            raise SystemExit("no error in the child")
    team.shutdown()
    fresh = Stream(ThreadTeam(2))
    fresh.bind_slot(slot.address, status)
    fresh.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
    fresh.synchronize()
    raise SystemExit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
timelines.advance(0, 1)
stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
stream.synchronize()
print(counter.numpy()[0])
""")
    assert (result.returncode, result.stdout, result.stderr) == (0, "4\n", "")


def test_ctrl_c_is_served_during_a_replay_that_does_not_end():
    body = """
program = Program()
with stream.capture(program, breaks=False):
    stream.launch(gate(), timelines.gate_arguments(0))
stream.replay(program)
try:
    print("waiting", flush=True)
    stream.synchronize()
except KeyboardInterrupt:
    stream.abort()
    stream.synchronize()
    try:
        raise_for_status(status)
    except KernelError as error:
        print(error)
"""
    command = as_a_child([sys.executable, "-c", HEADER + body])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "kernel gate, launch 0 of its program, failed at row 0: the stream was aborted\n", "")


def test_two_teams_with_four_times_more_threads_than_cores_make_progress():
    num_threads = 4 * (os.cpu_count() or 1)
    teams = [ThreadTeam(num_threads) for _ in range(2)]
    counters, events = [], []
    for team in teams:
        stream, _slot, _status = bound_stream(team)
        counter = Buffer.zeros((1,), "int64")
        program = Program()
        with stream.capture(program, breaks=False):
            for i in range(1, 21):
                stream.launch(k.count_kernel(), k.count_kernel().pack(counter=counter))
                stream.launch(k.expect_kernel(), k.expect_kernel().pack(counter=counter, least=i * num_threads))
        for _ in range(5):
            stream.replay(program)
        events.append((stream.record(), _slot, _status))
        counters.append(counter)
    for event, _slot, status in events:
        assert event.wait(120)
        raise_for_status(status)
    assert [int(counter.numpy()[0]) for counter in counters] == [5 * 20 * num_threads] * 2
    for team in teams:
        team.shutdown()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_results_do_not_depend_on_the_number_of_threads(num_threads):
    team = ThreadTeam(num_threads)
    stream, _slot, _status = bound_stream(team)
    x = Buffer.zeros((101,), "float32")
    for term in (0.1, 0.2, 0.3):
        stream.launch(k.affine_kernel(), k.affine_kernel().pack(x=x, n=101, factor=0.7, term=term))
    stream.synchronize()
    team.shutdown()
    expected = np.float32(0)
    for term in (0.1, 0.2, 0.3):
        expected = np.float32(np.float64(expected) * np.float64(np.float32(0.7)) + np.float64(np.float32(term)))
    assert x.numpy().view(np.int32).tolist() == [int(expected.view(np.int32))] * 101


@pytest.mark.skipif(FE_UPWARD is None, reason="the rounding-mode constant of this machine is not known here")
def test_the_team_rounds_to_nearest_and_keeps_subnormals_whatever_the_thread_that_created_it_does():
    libm = ctypes.CDLL(None)
    x, out = Buffer.zeros((1,), "float32"), Buffer.zeros((3,), "float32")
    x.numpy()[0] = np.frombuffer(np.int32(3).tobytes(), np.float32)[0]  # half of it lies between subnormals 1 and 2
    args = k.subnormal_kernel().pack(x=x, out=out)
    here = k.subnormal_kernel().function.callable()
    libm.fesetround(FE_UPWARD)
    try:
        team = ThreadTeam(2)
        out.numpy()[0] = -3
        x.numpy().view(np.int32)[0] = 5
        here(args.address, 0, 2, 3)
    finally:
        libm.fesetround(0)
    stream, _slot, _status = bound_stream(team)
    stream.launch(k.subnormal_kernel(), args)
    stream.synchronize()
    team.shutdown()
    assert out.numpy().view(np.int32).tolist() == [2, 2, 3]  # nearest even in the team; upward on the thread that was told so
