"""Interrupts at chosen places: a signal is raised at the n-th place of the engine's code, in this thread, where one could be handled."""

import dis
import functools
import inspect
import random
import signal
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import interlock

ROOT = str(Path(interlock.__file__).parent)
FLOORS = ("engine", "runner", "graphs", "core", "kv_transfer")


class Places:
    """While it is entered: SIGINT at each place whose number, counted from 1, is in `at`. `count`: how many places there were.

    The interpreter looks for signals when it enters a function, behind a call, and where it jumps back. A place is the entry of a function,
    and the begin of a line with a call or a jump back in it.
    """

    def __init__(self, at: Collection[int] = (), floors: Iterable[str] = FLOORS) -> None:
        self.count = 0
        self._at = frozenset(at)
        self._folders = tuple(f"{ROOT}/{floor}/" for floor in floors)

    def __enter__(self) -> "Places":
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._before)

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:  # an exception from here would end a generator without its `finally`
            self._pass()
        return self._line

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lineno in _lines(frame.f_code):
            self._pass()
        return self._line

    def _pass(self) -> None:
        self.count += 1
        if self.count in self._at:
            signal.raise_signal(signal.SIGINT)


@functools.cache
def _lines(code: CodeType) -> frozenset[int]:
    """The lines of `code` in which signals may be handled."""
    found, line = set(), code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line if instruction.starts_line is not None else line
        if instruction.opname.startswith(("CALL", "JUMP_BACKWARD")):
            found.add(line)
    return frozenset(found)


def count_places(call: Callable[[], object]) -> int:
    """How many places `call` passes."""
    with Places() as places:
        call()
    return places.count


def interrupted(call: Callable[[], object], at: Collection[int]) -> bool:
    """Whether KeyboardInterrupt came out of `call`, signals being raised at the places `at`; or none of them was reached, since a wait
    passes more or fewer places each time.

    An exception out of a trace function ends the tracing, so of several signals those behind the first that raises at once are lost.
    """
    places = Places(at)
    try:
        with places:
            call()
    except KeyboardInterrupt:
        return True
    return places.count < min(at)


def sample_places(count: int, number: int, seed: int = 0) -> list[int]:
    """`number` places of `count`, spread over all of them, the first and the last ones among them."""
    draw = random.Random(seed)
    edges = {*range(1, 5), *range(count - 7, count + 1)}
    return sorted(edges | {draw.randint(1 + count * k // number, count * (k + 1) // number) for k in range(number)})
