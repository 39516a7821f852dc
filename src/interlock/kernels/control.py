"""The control block of a thread team: 64-bit words that its native loops and its callers share. Words that are spun on have their own cache line.

A command is one entry of the ring. Its sequence number, from 1 upwards, is its place in the ring's endless order; a command has
retired when its launches have ended in every thread. Commands retire in order.
"""

from typing import Final

_LINE = 8  # words

TAIL: Final = 0 * _LINE  # number of commands submitted so far
BELL: Final = 1 * _LINE  # futex of threads that wait for a command
SLEEPERS: Final = 2 * _LINE  # threads that sleep on BELL, or are about to
BARRIER_COUNT: Final = 3 * _LINE  # threads that have arrived
BARRIER_GENERATION: Final = 4 * _LINE  # futex of threads that wait for the others
BARRIER_DECISION: Final = 4 * _LINE + 1  # 1: the command ends here; set by the last thread to arrive
BARRIER_SLEEPERS: Final = 5 * _LINE
RETIRED: Final = 6 * _LINE  # sequence number of the last command that has retired
WAKE_AT: Final = 7 * _LINE  # the least sequence number that somebody sleeps for
EVENT_BELL: Final = 7 * _LINE + 1  # futex of those who wait for a command to retire
ABORTED_UP_TO: Final = 8 * _LINE  # commands up to this sequence number end with ERROR_ABORTED
STOPPED: Final = 8 * _LINE + 1  # threads that have left their loop
RING: Final = 9 * _LINE

RING_SIZE: Final = 1024  # entries; a power of two
ENTRY_WORDS: Final = 8
THREAD_CPUS: Final = RING + RING_SIZE * ENTRY_WORDS  # of each thread, the CPU on which it last arrived at a barrier
NEVER: Final = 2**62  # a sequence number that no command reaches


def num_control_words(num_threads: int) -> int:
    """Words of the control block of a team of `num_threads`."""
    return THREAD_CPUS + num_threads


# Words of an entry.
PUBLISHED: Final = 0  # the command's sequence number, once the other words are set
SLOT: Final = 1  # address of the step slot
LAUNCHES: Final = 2  # address of pairs (kernel, arguments); 0: the one pair in this entry
NUM_LAUNCHES: Final = 3  # STOP: the threads leave their loops
PROFILE: Final = 4  # address of int64 [launches of the program, threads] that takes nanoseconds, or 0
FIRST_LAUNCH: Final = 5  # index in its program of the command's first launch
KERNEL: Final = 6
ARGUMENTS: Final = 7

STOP: Final = -1

# Bit 0 of an argument address: the next launch may begin before every thread has ended this one.
NO_BARRIER: Final = 1

# Answers of `wait_retired`.
WAIT_TIMED_OUT: Final = 0
WAIT_DONE: Final = 1
WAIT_STOPPED: Final = -1

# A timeline: one cache line.
TIMELINE_WORDS: Final = _LINE
TIMELINE_SLEEPERS: Final = 1  # word: threads that sleep on it, or are about to
TIMELINE_ERROR: Final = 2**62  # bit of the timeline's word: this stamp was reached by a failure
