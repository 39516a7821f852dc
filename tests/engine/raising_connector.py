"""Connectors that work, until a test makes one of their methods raise, or answer with something that is no answer."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fault_connector import FaultyConnector
from shelf_connector import ShelfConnector

from interlock.core.forward_context import ForwardContext
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


class _Unhurried(ShelfConnector):
    """Loads while it is waited for. What nobody waits for comes late, at the end of the next step, and into whatever the blocks are then."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun: list[Any] = []
        self.late: list[Any] = []

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        self.begun += [(*load, orders.saves[f"tokens {req_id}"][1]) for req_id, load in orders.loads.items()]

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._land(self.begun)

    def abort_loads(self, step: int) -> None:
        self.begun.clear()

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._land(self.late)
        self.late, self.begun = self.begun, []

    def _land(self, loads: list[Any]) -> None:
        for load in loads:
            self._load(*load)
        loads.clear()


RaisingShelf = _make("RaisingShelf", ShelfConnector)
RaisingReader = _make("RaisingReader", FaultyConnector)
RaisingLoader = _make("RaisingLoader", _Loader)
RaisingUnhurried = _make("RaisingUnhurried", _Unhurried)
