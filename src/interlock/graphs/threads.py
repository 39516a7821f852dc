"""The thread team: native loops that run commands without the GIL. The Python thread is never a member."""

import ctypes
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from interlock.core import interrupts
from interlock.core.buffer import Buffer
from interlock.core.errors import StreamError
from interlock.kernels import native
from interlock.kernels.control import NEVER, RETIRED, STOP, TAIL, THREAD_CPUS, WAIT_DONE, WAIT_STOPPED, WAKE_AT, num_control_words
from interlock.kernels.native import NativeFunction

_SOURCE: Final = "interlock.kernels.cpu.team"
TEAM_LOOP: Final = NativeFunction("team_loop", ("void", "i64", "i32", "i32"), f"{_SOURCE}:team_loop")
SUBMIT: Final = NativeFunction("team_submit", ("i64",) * 9, f"{_SOURCE}:submit")
WAIT_RETIRED: Final = NativeFunction("team_wait_retired", ("i64",) * 4, f"{_SOURCE}:wait_retired")
ABORT: Final = NativeFunction("team_abort", ("void", "i64"), f"{_SOURCE}:abort")
TEAM_FUNCTIONS: Final = (TEAM_LOOP, SUBMIT, WAIT_RETIRED, ABORT)

SLICE_NANOSECONDS: Final = int(interrupts.SLICE_SECONDS * 1e9)  # the longest native wait: signals are served between two

_MAX_RETAINED: Final = 2048  # things kept alive for launches, after which those of retired ones are dropped even if nobody records an event

_SYNCHRONOUS_SIGNALS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS"}

_teams: "weakref.WeakSet[ThreadTeam]" = weakref.WeakSet()


class ThreadTeam:
    """`num_threads` threads that run every command together. Commands run in the order of submission, and retire in it.
    One Python thread at a time submits; any may wait.

    Errors: StreamError after `shutdown`, and in a forked child, which has no team.
    """

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise StreamError(f"num_threads is {num_threads}, expected at least 1")
        native.load(TEAM_FUNCTIONS)
        self.num_threads = num_threads
        self._control = Buffer.zeros((num_control_words(num_threads),), "int64")
        self._words = self._control.numpy()
        self._words[WAKE_AT] = NEVER
        self._view = memoryview(cast("Any", self._words))  # reads a word faster
        self._unusable: str | None = None
        # Submitting never waits, and giving the GIL up may cost milliseconds until another thread returns it.
        self._submit: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)(SUBMIT.address)
        self._wait: Callable[[int, int, int], int] = WAIT_RETIRED.callable()
        self._abort: Callable[[int], None] = ABORT.callable()
        loop = TEAM_LOOP.callable()
        self._threads = [
            threading.Thread(target=_run_loop, args=(loop, self._control, i, num_threads), name=f"interlock-team-{i}", daemon=True)
            for i in range(num_threads)
        ]
        self._retained: deque[tuple[int, object]] = deque()
        self._retained_lock = threading.Lock()
        self._start()
        self._finalizer = weakref.finalize(self, _stop, self._control, self._submit, self._wait, self._abort, self._threads, self._retained)
        _teams.add(self)

    def _start(self) -> None:
        """Start the threads: all, or none."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            started = [thread for thread in self._threads if thread.is_alive()]
            _stop(self._control, self._submit, self._wait, self._abort, started, self._retained)
            if isinstance(error, RuntimeError):
                raise StreamError(f"{len(started)} of {self.num_threads} threads could be started ({error}); lower threads") from error
            raise

    @property
    def retired(self) -> int:
        """Sequence number of the last command that has retired; 0 before the first."""
        return self._view[RETIRED]

    @property
    def submitted(self) -> int:
        """Sequence number of the last command that was submitted; 0 before the first."""
        return self._view[TAIL]

    @property
    def cpus(self) -> list[int]:
        """The CPU on which each thread last arrived at a barrier; -1 where the system does not tell."""
        return [int(cpu) for cpu in self._words[THREAD_CPUS:]]

    def submit(
        self,
        slot: int,
        launches: int,
        num_launches: int,
        *,
        keep: object,
        profile: int = 0,
        first_launch: int = 0,
        kernel: int = 0,
        arguments: int = 0,
    ) -> int:
        """Queue a command (fields: `kernels/control.py`); returns its sequence number. Waits, with signals served, while the ring is full.

        keep: owns all that the command points to, but for the slot; stays alive until the command has retired, also if a signal handler
        raises when the command is already queued and its number is not yet known here.
        """
        if self._unusable is not None:
            raise StreamError(self._unusable)
        if len(self._retained) >= _MAX_RETAINED:
            self.release_retired()
        self._retained.append((self._view[TAIL] + 1, keep))
        while True:
            sequence = self._submit(self._control.address, slot, launches, num_launches, profile, first_launch, kernel, arguments)
            if sequence > 0:
                return sequence
            self.wait_slice(-sequence)

    def release_retired(self) -> None:
        """Drop what was kept alive for commands that have retired."""
        retained, retired = self._retained, self._view[RETIRED]
        with self._retained_lock:
            while retained and retained[0][0] <= retired:
                retained.popleft()

    def wait_slice(self, sequence: int, nanoseconds: int = SLICE_NANOSECONDS) -> bool:
        """Sleep without the GIL until command `sequence` has retired, at most `nanoseconds`; may wake early. Whether it has retired.

        A safe point: what was noted of signals is delivered first.
        """
        interrupts.deliver()
        if self._unusable is not None and self.retired < sequence:
            raise StreamError(self._unusable)
        answer = self._wait(self._control.address, sequence, nanoseconds)
        if answer == WAIT_STOPPED:
            raise StreamError(f"command {sequence} will never run: the thread team was shut down")
        return answer == WAIT_DONE

    def abort(self) -> None:
        """Make every command submitted so far end with ERROR_ABORTED, unless it has retired; those submitted later run. Returns at once."""
        self._abort(self._control.address)

    def shutdown(self) -> None:
        """Abort what is queued, stop the threads and join them. Further use is an error; a second call does nothing."""
        if self._unusable is None:
            self._unusable = "the thread team was shut down; create a new ThreadTeam and Stream"
        self._finalizer()

    def _mark_forked(self) -> None:
        self._unusable = (
            "this process was forked from one with a thread team, whose threads it does not have; spawn processes, or create a new ThreadTeam"
        )
        self._finalizer.detach()


def _run_loop(loop: Callable[[int, int, int], None], control: Buffer, thread_id: int, num_threads: int) -> None:
    if hasattr(signal, "pthread_sigmask"):
        # Signals belong to the Python thread: one that is handled here would not end its wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, {s for s in signal.valid_signals() if getattr(s, "name", "") not in _SYNCHRONOUS_SIGNALS})
    loop(control.address, thread_id, num_threads)


def _stop(
    control: Buffer,
    submit: Callable[..., int],
    wait: Callable[[int, int, int], int],
    abort: Callable[[int], None],
    threads: list[threading.Thread],
    retained: deque[tuple[int, object]],
) -> None:
    """End a team: abort, queue the stop command, join; only then drop what its launches point to. Must not refer to the team itself."""
    with interrupts.deferred():
        abort(control.address)
        while (sequence := submit(control.address, 0, 0, STOP, 0, 0, 0, 0)) < 0:
            wait(control.address, -sequence, SLICE_NANOSECONDS)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        retained.clear()


def _mark_all_forked() -> None:
    for team in list(_teams):
        team._mark_forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_all_forked)
