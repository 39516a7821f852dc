"""Calls into a connector: what it raises, and what it answers that is no answer, costs what the call was about and nothing else.

Only the calls themselves are guarded, here and nowhere else. What Interlock raises between them is a fault of its own and surfaces;
KeyboardInterrupt and SystemExit pass, and so does whatever a signal handler raises.
"""

import logging
import reprlib
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from interlock.core import interrupts
from interlock.kv_transfer.connector import KVConnector
from interlock.kv_transfer.transports.repeats import FirstWarnings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotAnAnswerError(Exception):
    """What a method returned cannot be used; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a call has given. fault: what went wrong, naming class and method; `value` is then what stands for the answer."""

    value: T
    fault: str | None = None


class ConnectorGuard:
    """Makes the calls into one half of a connector, by the names of its methods.

    The first fault of each kind is logged with its traceback, the next ones in a line, the same one again and again for debugging only.
    """

    def __init__(self, connector: KVConnector) -> None:
        self.connector = connector
        self.name = type(connector).__name__
        self._num_faults = 0
        self._kinds: set[tuple[str, str]] = set()
        self._first = FirstWarnings(logger)

    def ask(
        self,
        method: str,
        *arguments: Any,
        read: Callable[[Any], T],
        otherwise: T,
        cost: str,
        about: str = "",
        passes: tuple[type[Exception], ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Answer[T]:
        """Call `method`; `read` checks what it returns (NotAnAnswerError). After a fault the value is `otherwise`.

        cost: what the fault costs, for the log; about: the request, or nothing. passes: exceptions that are part of the method's contract.
        """
        try:
            answer = getattr(self.connector, method)(*arguments, **(keywords or {}))
            try:
                return Answer(read(answer))
            except NotAnAnswerError as error:
                fault = f"{self.name}.{method} returned {reprlib.repr(answer)}, expected {error}"
                self._note(method, fault, about, cost, None)
        except passes:
            raise
        except Exception as error:
            if interrupts.caused(error):
                raise
            fault = f"{self.name}.{method} raised {type(error).__name__}: {error}"
            self._note(method, fault, about, cost, error)
        return Answer(otherwise, fault)

    def tell(self, method: str, *arguments: Any, cost: str, about: str = "", keywords: Mapping[str, Any] | None = None) -> str | None:
        """Call `method`, whose answer does not count. Returns the fault."""
        return self.ask(method, *arguments, read=lambda _: None, otherwise=None, cost=cost, about=about, keywords=keywords).fault

    def warn(self, message: str) -> None:
        """Log what the connector has said that is dropped."""
        self._first.warn(message)

    def take_num_faults(self) -> int:
        """How many calls have had a fault since the last call of this."""
        count, self._num_faults = self._num_faults, 0
        return count

    def _note(self, method: str, fault: str, about: str, cost: str, error: Exception | None) -> None:
        self._num_faults += 1
        message, kind = f"{fault}{' for ' + about if about else ''}; {cost}", (method, type(error).__name__)
        if kind not in self._kinds:
            self._kinds.add(kind)
            logger.error("%s", message, exc_info=error)
        else:
            self._first.warn(message)


def expect(what: str) -> NoReturn:
    """Raises NotAnAnswerError."""
    raise NotAnAnswerError(what)


def read_bool(answer: Any) -> bool:
    """A truth value, NumPy's too."""
    return bool(answer) if isinstance(answer, (bool, np.bool_)) else expect("True or False")


def read_matched(answer: Any, most: int) -> tuple[int | None, bool]:
    """`(n, is_async)` of a lookup; n is None or between 0 and `most`, the positions that are left of the request."""
    expected = f"(a number of positions from 0 to {most} or None, is_async)"
    if not (isinstance(answer, tuple) and len(answer) == 2):
        expect(expected)
    found, is_async = answer
    if found is not None and (isinstance(found, bool) or not isinstance(found, Integral) or not 0 <= int(found) <= most):
        expect(expected)
    return None if found is None else int(found), read_bool(is_async)


def read_block_ids(answer: Any) -> frozenset[int]:
    """A set of block ids. Some that are none spoil the whole answer: what they stand for has not landed."""
    if not isinstance(answer, Set) or any(isinstance(block_id, bool) or not isinstance(block_id, Integral) for block_id in answer):
        expect("a set of block ids")
    return frozenset(int(block_id) for block_id in answer)


def read_stats(answer: Any) -> dict[str, float]:
    """Numbers by name."""
    if not isinstance(answer, Mapping) or not all(isinstance(key, str) and isinstance(value, Real) for key, value in answer.items()):
        expect("numbers by name")
    return dict(answer)


def split_ids(answer: Any) -> tuple[frozenset[str], list[Any]]:
    """The request ids of a report, and what in it is none. None is no ids."""
    if answer is None:
        return frozenset(), []
    if not isinstance(answer, Set):
        return frozenset(), [answer]
    ids: Collection[str] = [name for name in answer if isinstance(name, str)]
    return frozenset(ids), [name for name in answer if not isinstance(name, str)]
