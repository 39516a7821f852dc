"""The native loops of a thread team, and what its callers do to the control block. Layout and words: `kernels/control.py`.

The barrier is Mellor-Crummey and Scott's centralised one with a generation in place of the sense; the ring is Vyukov's bounded queue
with every thread reading every entry. Waits spin for a short while, then sleep on a futex: engines may share few cores. A thread never
yields while it spins: beside a busy process of somebody else's that would give a whole time slice away at each barrier.
"""

from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from interlock.kernels.control import (
    ABORTED_UP_TO,
    ARGUMENTS,
    BARRIER_COUNT,
    BARRIER_DECISION,
    BARRIER_GENERATION,
    BARRIER_SLEEPERS,
    BELL,
    ENTRY_WORDS,
    EVENT_BELL,
    FIRST_LAUNCH,
    KERNEL,
    LAUNCHES,
    NEVER,
    NO_BARRIER,
    NUM_LAUNCHES,
    PROFILE,
    PUBLISHED,
    RETIRED,
    RING,
    RING_SIZE,
    SLEEPERS,
    SLOT,
    STOP,
    STOPPED,
    TAIL,
    THREAD_CPUS,
    WAIT_DONE,
    WAIT_STOPPED,
    WAIT_TIMED_OUT,
    WAKE_AT,
)
from interlock.kernels.cpu.simd import load_i64, pointer, store_i64
from interlock.kernels.cpu.sync import (
    atomic_add,
    atomic_exchange,
    compare_and_swap,
    current_cpu,
    fence_full,
    futex_wait,
    futex_wake_all,
    load_acquire,
    monotonic_ns,
    report_error,
    set_float_control,
    spin_hint,
    store_release,
)
from interlock.kernels.slot import CONTROL, ERROR_ABORTED, STATUS, STATUS_CODE, STATUS_KERNEL, STATUS_LAUNCH

SPIN_NANOSECONDS: Final = 20_000
LOOK_NANOSECONDS: Final = 2_000  # from here on a thread that waits for others of the team looks whether one of them needs its CPU
SPINS_PER_CLOCK: Final = 32
_SLEEP_NANOSECONDS: Final = 1_000_000_000

_i32, _i64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def call_kernel(typingctx: Any, kernel: Any, arguments: Any, slot: Any, thread_id: Any, num_threads: Any) -> Any:
    """Call the kernel at address `kernel`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = pointer(builder, args[0], ir.FunctionType(ir.VoidType(), [_i64, _i64, _i32, _i32]))
        builder.call(function, args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int32, types.int32), generate


@njit(error_model="numpy", inline="always")
def spin_until_equal(address, value):
    """Spin for a short while; whether the word at `address` became `value`."""
    begin = monotonic_ns()
    equal = load_acquire(address) == value
    while not equal and monotonic_ns() - begin < SPIN_NANOSECONDS:
        for _ in range(SPINS_PER_CLOCK):
            spin_hint()
            equal = load_acquire(address) == value
            if equal:
                break
    return equal


@njit(error_model="numpy", inline="always")
def shares_cpu(control, thread_id, num_threads):
    """Whether another thread of the team was last seen on this thread's CPU, where it cannot go on while this one spins."""
    cpus = control + 8 * THREAD_CPUS
    cpu = load_i64(cpus + 8 * thread_id)
    shared = False
    for other in range(num_threads):
        if other != thread_id and load_i64(cpus + 8 * other) == cpu and cpu >= 0:
            shared = True
    return shared


@njit(error_model="numpy", inline="always")
def spin_at_barrier(control, generation, thread_id, num_threads):
    """Spin for a short while, unless that keeps another thread from arriving; whether the barrier's generation is still `generation`."""
    address = control + 8 * BARRIER_GENERATION
    begin = monotonic_ns()
    elapsed = 0
    closed = load_acquire(address) == generation
    while closed and elapsed < SPIN_NANOSECONDS:
        for _ in range(SPINS_PER_CLOCK):
            spin_hint()
            closed = load_acquire(address) == generation
            if not closed:
                break
        elapsed = monotonic_ns() - begin
        if closed and elapsed > LOOK_NANOSECONDS and shares_cpu(control, thread_id, num_threads):
            elapsed = SPIN_NANOSECONDS
    return closed


@njit(error_model="numpy", inline="always")
def note_cpu(control, thread_id):
    """Publish this thread's CPU. Nothing is written while it stays, so the others' copies of the line stay valid."""
    word = control + 8 * (THREAD_CPUS + thread_id)
    cpu = current_cpu()
    if load_i64(word) != cpu:
        store_i64(word, cpu)


@njit(error_model="numpy", inline="always")
def wait_for_command(control, entry, sequence):
    """Return when the ring holds command `sequence` in `entry`."""
    published = entry + 8 * PUBLISHED
    if not spin_until_equal(published, sequence):
        while load_acquire(published) != sequence:
            atomic_add(control + 8 * SLEEPERS, 1)
            fence_full()
            bell = load_acquire(control + 8 * BELL)
            if load_acquire(published) != sequence:
                futex_wait(control + 8 * BELL, bell, _SLEEP_NANOSECONDS)
            atomic_add(control + 8 * SLEEPERS, -1)


@njit(error_model="numpy", inline="always")
def retire(control, sequence):
    """Announce that the command has retired; wake those who sleep for it."""
    atomic_exchange(control + 8 * RETIRED, sequence)
    fence_full()
    if load_acquire(control + 8 * WAKE_AT) <= sequence:
        atomic_exchange(control + 8 * WAKE_AT, NEVER)
        atomic_add(control + 8 * EVENT_BELL, 1)
        futex_wake_all(control + 8 * EVENT_BELL)


@njit(error_model="numpy", inline="always")
def decide(control, slot, sequence, launch, kernel, last):
    """Whether the command ends after this launch; the last thread to arrive decides for all. Completes the status block of a failed launch."""
    status = load_i64(slot + 8 * STATUS)
    if load_acquire(control + 8 * ABORTED_UP_TO) >= sequence:
        report_error(slot, ERROR_ABORTED, -1)
    failed = load_acquire(status + 8 * STATUS_CODE) != 0
    if failed and load_i64(status + 8 * STATUS_KERNEL) == 0:
        store_i64(status + 8 * STATUS_LAUNCH, launch)
        store_i64(status + 8 * STATUS_KERNEL, kernel)
    return 1 if failed or last else 0


@njit(error_model="numpy", inline="always")
def barrier(control, thread_id, num_threads, slot, sequence, launch, kernel, last):
    """Wait until every thread has arrived; whether the command ends here. Retires it if so."""
    note_cpu(control, thread_id)
    generation = load_acquire(control + 8 * BARRIER_GENERATION)
    if atomic_add(control + 8 * BARRIER_COUNT, 1) == num_threads - 1:
        decision = decide(control, slot, sequence, launch, kernel, last)
        store_i64(control + 8 * BARRIER_DECISION, decision)
        store_i64(control + 8 * BARRIER_COUNT, 0)
        if decision == 1:
            retire(control, sequence)
        atomic_add(control + 8 * BARRIER_GENERATION, 1)
        fence_full()
        if load_acquire(control + 8 * BARRIER_SLEEPERS) > 0:
            futex_wake_all(control + 8 * BARRIER_GENERATION)
    elif spin_at_barrier(control, generation, thread_id, num_threads):
        atomic_add(control + 8 * BARRIER_SLEEPERS, 1)
        fence_full()
        while load_acquire(control + 8 * BARRIER_GENERATION) == generation:
            futex_wait(control + 8 * BARRIER_GENERATION, generation, _SLEEP_NANOSECONDS)
        atomic_add(control + 8 * BARRIER_SLEEPERS, -1)
    return load_i64(control + 8 * BARRIER_DECISION)


@njit(error_model="numpy", inline="always")
def run_command(control, entry, sequence, thread_id, num_threads):
    """Run one command's launches, with a barrier after each that wants one, up to its end or to the first error."""
    slot = load_i64(entry + 8 * SLOT)
    launches = load_i64(entry + 8 * LAUNCHES)
    if launches == 0:
        launches = entry + 8 * KERNEL
    num_launches = load_i64(entry + 8 * NUM_LAUNCHES)
    profile = load_i64(entry + 8 * PROFILE)
    first = load_i64(entry + 8 * FIRST_LAUNCH)
    if load_i64(slot + 8 * CONTROL) != control:
        store_i64(slot + 8 * CONTROL, control)
    status = load_i64(slot + 8 * STATUS) + 8 * STATUS_CODE
    failed = load_acquire(status) != 0 or load_acquire(control + 8 * ABORTED_UP_TO) >= sequence
    kernel = 0
    ended = 0
    i = 0
    while ended == 0:
        last = i + 1 >= num_launches
        no_barrier = False
        if i < num_launches:
            kernel = load_i64(launches + 16 * i)
            arguments = load_i64(launches + 16 * i + 8)
            no_barrier = arguments & NO_BARRIER != 0
            if not failed:
                begin = monotonic_ns() if profile != 0 else 0
                call_kernel(kernel, arguments & ~NO_BARRIER, slot, thread_id, num_threads)
                if profile != 0:
                    store_i64(profile + 8 * ((first + i) * num_threads + thread_id), monotonic_ns() - begin)
        if no_barrier and not last:
            failed = failed or load_acquire(status) != 0
        else:
            ended = barrier(control, thread_id, num_threads, slot, sequence, first + i, kernel, last)
        i += 1


def team_loop():
    """The life of one thread of the team: run commands until one says stop."""

    def loop(control, thread_id, num_threads):
        set_float_control()
        sequence = 1
        running = True
        while running:
            entry = control + 8 * (RING + ((sequence - 1) & (RING_SIZE - 1)) * ENTRY_WORDS)
            wait_for_command(control, entry, sequence)
            if load_i64(entry + 8 * NUM_LAUNCHES) == STOP:
                running = False
            else:
                run_command(control, entry, sequence, thread_id, num_threads)
                sequence += 1
        atomic_add(control + 8 * STOPPED, 1)
        atomic_add(control + 8 * EVENT_BELL, 1)
        futex_wake_all(control + 8 * EVENT_BELL)

    return loop


def submit():
    """Put a command into the ring and wake the team if it sleeps.

    Returns its sequence number, or, when the ring is full, minus the sequence number whose retirement makes room. Any thread may call it.
    """

    def enqueue(control, slot, launches, num_launches, profile, first_launch, kernel, arguments):
        ticket = load_acquire(control + 8 * TAIL)
        placed = False
        while not placed and ticket - load_acquire(control + 8 * RETIRED) < RING_SIZE:
            seen = compare_and_swap(control + 8 * TAIL, ticket, ticket + 1)
            placed = seen == ticket
            ticket = seen
        if not placed:
            return -(ticket - RING_SIZE + RING_SIZE // 4)
        entry = control + 8 * (RING + (ticket & (RING_SIZE - 1)) * ENTRY_WORDS)
        store_i64(entry + 8 * SLOT, slot)
        store_i64(entry + 8 * LAUNCHES, launches)
        store_i64(entry + 8 * NUM_LAUNCHES, num_launches)
        store_i64(entry + 8 * PROFILE, profile)
        store_i64(entry + 8 * FIRST_LAUNCH, first_launch)
        store_i64(entry + 8 * KERNEL, kernel)
        store_i64(entry + 8 * ARGUMENTS, arguments)
        store_release(entry + 8 * PUBLISHED, ticket + 1)
        fence_full()
        if load_acquire(control + 8 * SLEEPERS) > 0:
            atomic_add(control + 8 * BELL, 1)
            futex_wake_all(control + 8 * BELL)
        return ticket + 1

    return enqueue


def wait_retired():
    """Sleep until command `sequence` has retired, a signal comes, or `nanoseconds` pass: one of the `WAIT_*` answers. May wake early."""

    def wait(control, sequence, nanoseconds):
        bell = load_acquire(control + 8 * EVENT_BELL)
        awaited = load_acquire(control + 8 * WAKE_AT)
        while awaited > sequence:
            seen = compare_and_swap(control + 8 * WAKE_AT, awaited, sequence)
            awaited = sequence if seen == awaited else seen
        fence_full()
        if load_acquire(control + 8 * RETIRED) < sequence:
            if load_acquire(control + 8 * STOPPED) > 0:
                return WAIT_STOPPED
            futex_wait(control + 8 * EVENT_BELL, bell, nanoseconds)
        return WAIT_DONE if load_acquire(control + 8 * RETIRED) >= sequence else WAIT_TIMED_OUT

    return wait


def abort():
    """Make every command submitted so far end with ERROR_ABORTED, unless it has retired. Later commands run."""

    def mark(control):
        tail = load_acquire(control + 8 * TAIL)
        mark = load_acquire(control + 8 * ABORTED_UP_TO)
        while mark < tail:
            seen = compare_and_swap(control + 8 * ABORTED_UP_TO, mark, tail)
            mark = tail if seen == mark else seen

    return mark
