"""Timelines on the CPU: the kernels that wait for one and advance one, and what Python threads do to them.

A timeline is a cache line: its word (a stamp, with GATE_ERROR in it if the stamp was reached by a failure) and the number of
threads that sleep on it. Stamps only grow, and one that was reached keeps the bit that it was reached with.
"""

from typing import Final

from numba import njit

from interlock.kernels.control import ABORTED_UP_TO, RETIRED, TIMELINE_ERROR, TIMELINE_SLEEPERS
from interlock.kernels.cpu.simd import load_i64, store_i64
from interlock.kernels.cpu.sync import (
    atomic_add,
    compare_and_swap,
    fence_full,
    futex_wait,
    futex_wake_all,
    load_acquire,
    monotonic_ns,
    report_error,
    spin_hint,
)
from interlock.kernels.cpu.team import SPIN_NANOSECONDS, SPINS_PER_CLOCK
from interlock.kernels.slot import CONTROL, ERROR_ABORTED, GATE_TARGETS, GATE_WAIT, STEP

_STAMP: Final = TIMELINE_ERROR - 1
_ABORT_NANOSECONDS: Final = 20_000_000  # how often a sleeping gate looks for an abort


@njit(error_model="numpy", inline="always")
def spin_until_reached(timeline, stamp):
    """Spin for a short while; whether the timeline has reached `stamp`."""
    begin = monotonic_ns()
    reached = (load_acquire(timeline) & _STAMP) >= stamp
    while not reached and monotonic_ns() - begin < SPIN_NANOSECONDS:
        for _ in range(SPINS_PER_CLOCK):
            spin_hint()
            reached = (load_acquire(timeline) & _STAMP) >= stamp
            if reached:
                break
    return reached


@njit(error_model="numpy", inline="always")
def sleep_until_reached(timeline, stamp, nanoseconds):
    """Sleep until the timeline has reached `stamp`, at most `nanoseconds`; may wake early. Whether it has."""
    atomic_add(timeline + 8 * TIMELINE_SLEEPERS, 1)
    fence_full()
    word = load_acquire(timeline)
    if (word & _STAMP) < stamp:
        futex_wait(timeline, word, nanoseconds)
    atomic_add(timeline + 8 * TIMELINE_SLEEPERS, -1)
    return (load_acquire(timeline) & _STAMP) >= stamp


@njit(error_model="numpy", inline="always")
def move_to(timeline, word):
    """Advance a timeline to `word` (stamp and error bit) and wake its sleepers; 0 if it had reached that stamp before."""
    seen = load_acquire(timeline)
    moved = 0
    while moved == 0 and (seen & _STAMP) < (word & _STAMP):
        found = compare_and_swap(timeline, seen, word)
        moved = 1 if found == seen else 0
        seen = found
    if moved == 1:
        fence_full()
        if load_acquire(timeline + 8 * TIMELINE_SLEEPERS) > 0:
            futex_wake_all(timeline)
    return moved


@njit(error_model="numpy", inline="always")
def is_aborted(slot):
    """Whether the running command was aborted; never, for a kernel that no team runs."""
    control = load_i64(slot + 8 * CONTROL)
    return control != 0 and load_acquire(control + 8 * ABORTED_UP_TO) > load_acquire(control + 8 * RETIRED)


def gate():
    """Wait until the timeline has reached this step's target for the layer. Ends early, with ERROR_ABORTED, at an abort."""

    def wait_at_gate(args, slot, thread_id, num_threads):
        timeline = load_i64(args)
        layer = load_i64(args + 8)
        targets = load_i64(slot + 8 * GATE_TARGETS)
        target = 0
        if targets != 0:
            target = load_i64(targets + 8 * layer)
        if (load_acquire(timeline) & _STAMP) < target:
            begin = monotonic_ns()
            waiting = not spin_until_reached(timeline, target)
            while waiting:
                if is_aborted(slot):
                    report_error(slot, ERROR_ABORTED, layer)
                    waiting = False
                elif sleep_until_reached(timeline, target, _ABORT_NANOSECONDS):
                    waiting = False
            if thread_id == 0:
                store_i64(slot + 8 * GATE_WAIT, load_i64(slot + 8 * GATE_WAIT) + monotonic_ns() - begin)

    return wait_at_gate


def signal():
    """Advance the timeline to the step's stamp: all that was launched before is written."""

    def advance_to_step(args, slot, thread_id, num_threads):
        if thread_id == 0:
            move_to(load_i64(args), load_i64(slot + 8 * STEP))

    return advance_to_step


def advance():
    """Advance the timeline at an address from any thread; 0 if it had reached that stamp before."""

    def advance_to(timeline, word):
        return move_to(timeline, word)

    return advance_to


def wait_reached():
    """Wait until the timeline has reached `stamp`, at most `nanoseconds`; may return early. 1 if it has, else 0."""

    def wait(timeline, stamp, nanoseconds):
        return 1 if sleep_until_reached(timeline, stamp, nanoseconds) else 0

    return wait
