"""The stream: kernels are launched on it asynchronously and run in order; it captures programs and replays them."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interlock.core.buffer import Buffer
from interlock.core.errors import KernelError, StreamError
from interlock.graphs.program import Hook, Piece, Program
from interlock.graphs.threads import SLICE_NANOSECONDS, ThreadTeam
from interlock.kernels import native
from interlock.kernels.native import Arguments, Kernel
from interlock.kernels.slot import ERROR_NONE, ERROR_TEXT, STATUS_CODE, STATUS_KERNEL, STATUS_LAUNCH, STATUS_ROW


@dataclass(frozen=True, slots=True)
class Event:
    """A point in a stream: done when all that was launched before it has ended, with or without an error. See `raise_for_status`."""

    team: ThreadTeam
    sequence: int

    @property
    def done(self) -> bool:
        """Whether the stream has passed this point."""
        return self.team.retired >= self.sequence

    def wait(self, timeout: float | None = None) -> bool:
        """Wait without the GIL, in slices between which signals are served (a safe point). False if `timeout` seconds passed first.

        Raises StreamError if the team was shut down before.
        """
        if self.done:
            return True
        deadline = None if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        while True:
            remaining = SLICE_NANOSECONDS if deadline is None else deadline - time.monotonic_ns()
            if self.team.wait_slice(self.sequence, max(0, min(remaining, SLICE_NANOSECONDS))):
                return True
            if remaining <= 0:
                return False


class Stream:
    """Launches kernels on a thread team, in order and asynchronously. One Python thread at a time may launch, capture or replay. Whatever a
    signal handler raises in the middle of that: what was submitted keeps what it points to, and is covered by the next event.

    Every launch reads the step slot that was bound when it was submitted; a slot must stay alive until that launch has retired.
    """

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self._slot = 0
        self._status: Buffer | None = None
        self._capturing: Program | None = None
        self._breaks = False

    @property
    def capturing(self) -> bool:
        """Whether launches are captured instead of run."""
        return self._capturing is not None

    def bind_slot(self, address: int, status: Buffer) -> None:
        """Use the step slot at `address`, whose status block is `status`, for all that is submitted from now on."""
        self._slot = address
        self._status = status

    def launch(self, kernel: Kernel, args: Arguments, *, barrier: bool = True) -> None:
        """Launch a kernel; returns at once. While capturing, append it to the program.

        Without `barrier` the next launch of the program may begin before every thread has ended this one.
        """
        if self._capturing is not None:
            self._capturing.append(kernel, args, barrier=barrier)
            return
        self.team.submit(self._slot or self._require_slot(), 0, 1, keep=args, kernel=kernel.address, arguments=args.address)

    def call(self, hook: Hook) -> None:
        """Call `hook` on this thread, between what was submitted before (which may still run) and what follows.

        While capturing with breaks the call becomes part of the program; while capturing without, it is dropped.
        """
        if self._capturing is None:
            hook()
        elif self._breaks:
            self._capturing.append_call(hook)

    @contextmanager
    def capture(self, program: Program, *, breaks: bool) -> Iterator[Program]:
        """While inside, launches go into `program` and nothing runs. `breaks`: cut it at each `call` (PIECEWISE), else FULL."""
        if self._capturing is not None:
            raise StreamError("this stream is capturing already; end that capture first")
        program.begin()
        self._capturing, self._breaks = program, breaks
        try:
            yield program
        finally:
            self._capturing = None
        program.finish()

    def replay(self, program: Program, profile: Buffer | None = None) -> None:
        """Run a captured program for the bound slot; returns when all of it is submitted. Its Python calls run on this thread.

        profile: int64 [num_launches, num_threads] (`program.profile_buffer`) that takes each launch's nanoseconds in each thread.
        """
        self._check_not_capturing("replay")
        slot = self._require_slot()
        if profile is not None and profile.shape != (expected := (max(1, program.num_launches), self.team.num_threads)):
            raise StreamError(f"profile has shape {profile.shape}, expected {expected}: launches of the program, threads of the team")
        address = 0 if profile is None else profile.address
        for piece in program.pieces:
            if isinstance(piece, Piece):
                self.team.submit(slot, piece.launches.address, piece.num_launches, keep=(program, profile), profile=address, first_launch=piece.first)
            else:
                piece()

    def record(self) -> Event:
        """An event for all that was submitted to this stream's team so far."""
        self._check_not_capturing("record")
        self.team.release_retired()
        return Event(self.team, self.team.submitted)

    def synchronize(self) -> None:
        """Wait until all that was submitted to this stream has ended; signals are served."""
        self.record().wait()
        self.team.release_retired()

    def abort(self) -> None:
        """Make all that is submitted so far end soon, with ERROR_ABORTED in its slots; what is submitted later runs. Any thread may call it."""
        self.team.abort()

    def _require_slot(self) -> int:
        if self._slot == 0:
            raise StreamError("no step slot is bound to this stream; call bind_slot before launching or replaying")
        return self._slot

    def _check_not_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise StreamError(f"{what} was called while the stream is capturing; end the capture first")


def raise_for_status(status: Buffer) -> None:
    """Raise KernelError if a kernel of the step reported an error into its status block (int64 [4]). Call it after the step's event."""
    if ctypes.c_int64.from_address(status.address + 8 * STATUS_CODE).value == ERROR_NONE:
        return
    words = status.numpy().tolist()
    code, launch, row = words[STATUS_CODE], words[STATUS_LAUNCH], words[STATUS_ROW]
    name = native.function_name(words[STATUS_KERNEL]) or "(none)"
    where = f" at row {row}" if row >= 0 else ""
    text = ERROR_TEXT.get(code, f"error code {code}")
    raise KernelError(f"kernel {name}, launch {launch} of its program, failed{where}: {text}", code=code, launch=launch, row=row)
