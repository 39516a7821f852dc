"""Connectors that work, until a test makes one of their methods raise, or answer with something that is no answer."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fault_connector import FaultyConnector
from shelf_connector import ShelfConnector

from interlock.kv_transfer.connector import KVConnector

METHODS = sorted(name for name, value in vars(KVConnector).items() if inspect.isfunction(value) and not name.startswith("_"))
CLASS_METHODS = sorted(name for name, value in vars(KVConnector).items() if isinstance(value, classmethod) and not name.startswith("_"))


@dataclass
class Fault:
    """What the next `times` calls of `method` do: raise before or after they have done their work, or return `answer` instead of their own."""

    method: str
    how: str
    answer: Any = None
    error: type[BaseException] = ValueError
    times: float = 1


FAULTS: dict[str, Fault] = {}  # by method


def arm(method: str, how: str, answer: Any = None, error: type[BaseException] = ValueError, times: float = 1) -> None:
    """Let the next calls of `method` fail."""
    FAULTS[method] = Fault(method, how, answer, error, times)


def _failing(base: type[KVConnector], name: str) -> Any:
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        fault = FAULTS.get(name)
        if fault is not None:
            fault.times -= 1
            if fault.times == 0:
                del FAULTS[name]
        if fault is not None and fault.how == "before":
            raise fault.error("naive")
        answer = getattr(super(type(self), self), name)(*arguments, **keywords)
        if fault is None:
            return answer
        if fault.how == "after":
            raise fault.error("naive")
        return fault.answer

    return call


def _make(name: str, base: type[KVConnector]) -> type[KVConnector]:
    return type(name, (base,), {"saves_layers": True, **{method: _failing(base, method) for method in METHODS}})


class _Loader(ShelfConnector):
    """Keeps the blocks of the first request only, until they are on the shelf."""

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        return (False, None) if self.shelf.entries else super().request_finished(request, block_ids)


RaisingShelf = _make("RaisingShelf", ShelfConnector)
RaisingReader = _make("RaisingReader", FaultyConnector)
RaisingLoader = _make("RaisingLoader", _Loader)
