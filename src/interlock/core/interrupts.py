"""Interrupts at safe points: while something is half done, what a signal handler would raise is held off until nothing is.

A Python signal handler (Ctrl-C's raises KeyboardInterrupt) runs between any two bytecodes of the main thread. Inside `deferred()` a signal
is only noted. Its handler is called at the next safe point (`deliver`: the slices of every wait), or at the end.
"""

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, Final

SLICE_SECONDS: Final = 0.05  # the longest wait between two safe points
PATIENCE_SECONDS: Final = 5.0  # a signal that comes again after this time is not held off: whatever should have served the first one is stuck

Handler = Callable[[int, FrameType | None], object]

# `signal.getsignal` makes an enum member of each answer, which costs more than a step can spend.
_signal: Final[Any] = importlib.import_module("_signal")
_NUMBERS: Final = tuple(sorted(int(number) for number in signal.valid_signals()))


class _MainThread:
    """What is held off in the main thread, which alone runs signal handlers, and alone changes this."""

    inside = False  # inside a region that has taken the handlers over
    thread = 0  # which thread that is: in a forked child another one may be the main thread
    holding = False  # inside `deferred`, and not inside `served` within it
    cleaning_up = False  # a handler has raised: until its region ends, nothing more is raised at a safe point
    raised: BaseException | None = None  # what a handler raised last, in this region
    notes: "list[_Note]" = []  # noqa: RUF012 (there is one main thread)
    pending: "dict[int, tuple[Handler, FrameType | None, float]]" = {}  # noqa: RUF012


class _Note:
    """Stands in for a signal's handler. It notes the signal while signals are held off; otherwise it is as good as the handler."""

    def __init__(self, number: int, handler: Handler) -> None:
        self.number = number
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        noted = _MainThread.pending.get(number)
        if not _MainThread.holding or (noted is not None and time.monotonic() - noted[2] > PATIENCE_SECONDS):
            _MainThread.pending.pop(number, None)
            _call(self.handler, number, frame)
        elif noted is None:
            _MainThread.pending[number] = (self.handler, frame, time.monotonic())


class _Region:
    """A stretch of code in which signals are held off, or are not although they are around it.

    A signal is handled between two bytecodes, so the order of the statements counts: what opens a region ends with the statement that
    does it, and what closes it does so whatever is raised meanwhile.
    """

    def __init__(self, holding: bool) -> None:
        self._holding = holding

    def __enter__(self) -> None:
        self._active = _in_main_thread() and (self._holding or _MainThread.holding)
        if not self._active:
            return
        self._before = _MainThread.inside, _MainThread.holding, _MainThread.cleaning_up
        self._outermost = not _MainThread.inside
        if self._outermost:
            try:
                _take_over()
            except BaseException:
                _give_back()
                raise
            _MainThread.thread = threading.get_ident()
            _MainThread.inside = _MainThread.holding = True
        elif self._holding:
            _MainThread.holding, _MainThread.cleaning_up = True, False
        else:
            deliver()
            _MainThread.holding = _MainThread.cleaning_up

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._active:
            return
        try:
            if self._outermost:
                _give_back()
            elif not self._holding:
                _take_over()  # also what was installed inside
        finally:
            _MainThread.inside, _MainThread.holding, _MainThread.cleaning_up = self._before
            if self._outermost:
                _MainThread.raised = None
            if not _MainThread.holding:
                try:
                    _deliver()
                finally:  # something may have come before it had begun; nothing is left for the next region
                    _deliver()


def deferred() -> AbstractContextManager[None]:
    """Inside, signals are noted, and their handlers called at safe points alone; at its end those of what is still noted. In the main
    thread; elsewhere it does nothing, as signals do. May be nested: the end of an inner one is no safe point, but safe points inside it are
    some, also where it is part of a clean-up.

    Only handlers written in Python are held off, whichever they are and whichever signal they are for; they are given back at the end,
    but for those that somebody replaced meanwhile. Costs a few microseconds, and a fraction of one inside another.
    """
    return _Region(holding=True)


def served() -> AbstractContextManager[None]:
    """Inside `deferred`: for calls into code of others that may wait, and that knows nothing of safe points. Handlers run as they would
    outside. Does nothing while an exception that a handler raised is being cleaned up after."""
    return _Region(holding=False)


def deliver() -> None:
    """A safe point: call the handlers of what was noted. Raises what they raise; once, until the innermost `deferred` has ended, so that
    what cleans up is not disturbed. Costs next to nothing where nothing was noted. Outside the main thread it does nothing."""
    if _MainThread.pending and _in_main_thread() and not _MainThread.cleaning_up:
        _MainThread.cleaning_up = _MainThread.holding
        _deliver()
        _MainThread.cleaning_up = False


def caused(error: BaseException) -> bool:
    """Whether a handler raised `error`: then it is not the error of whatever was running."""
    return error is _MainThread.raised


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _call(handler: Handler, number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    except BaseException as error:
        if _MainThread.inside:
            _MainThread.raised, _MainThread.holding, _MainThread.cleaning_up = error, True, True
        raise


def _deliver() -> None:
    """Call the handlers of all that was noted, each although another raises."""
    pending = _MainThread.pending
    try:
        while pending:
            number = next(iter(pending))
            handler, frame, _ = pending.pop(number)
            _call(handler, number, frame)
    finally:
        if pending:
            _deliver()


def _take_over() -> None:
    for number in [number for number in _NUMBERS if callable(_signal.getsignal(number))]:
        handler = _signal.getsignal(number)
        if type(handler) is not _Note:
            note = _Note(number, handler)
            _MainThread.notes.append(note)
            _signal.signal(number, note)


def _give_back() -> None:
    """Restore the handlers, also if one that was restored already raises meanwhile."""
    notes = _MainThread.notes
    try:
        while notes:
            note = notes[-1]
            if _signal.getsignal(note.number) is note:
                _signal.signal(note.number, note.handler)
            notes.pop()
    finally:
        if notes:
            _give_back()


def _leave_in_child() -> None:
    """A child that another thread has forked is not inside what the main thread was inside of, and would never reach its end."""
    if _MainThread.inside and _MainThread.thread != threading.get_ident():
        _give_back()
        _MainThread.inside = _MainThread.holding = _MainThread.cleaning_up = False
        _MainThread.raised = None
        _MainThread.pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
