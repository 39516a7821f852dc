"""Calls to several connectors: each is made although another has raised."""

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from interlock.kv_transfer.connector import KVConnector

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def call_all(children: Iterable[KVConnector], call: Callable[[KVConnector], None]) -> None:
    """Call all, and raise in the end what the first that raised has raised; the others' errors are logged."""
    first: Exception | None = None
    for child in children:
        try:
            call(child)
        except Exception as error:
            if first is not None:
                logger.exception("%s raised too", type(child).__name__)
            first = first or error
    if first is not None:
        raise first


def ask(child: KVConnector, question: Callable[[], Answer], otherwise: Answer) -> Answer:
    """The child's answer; `otherwise`, if it raises, so that what the others say is not lost with it."""
    try:
        return question()
    except Exception:
        logger.exception("%s, a child of MultiConnector, raised where it was to answer; it counts as having nothing to say", type(child).__name__)
        return otherwise


def describe(child: KVConnector, method: str, error: Exception) -> str:
    """What `child` has raised, for errors and the log."""
    return f"{type(child).__name__}.{method} raised {type(error).__name__}: {error}"
