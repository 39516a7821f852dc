"""Warnings that would come again and again: the first of each kind is a warning, the others are for debugging."""

import logging
import threading
from collections import OrderedDict

_REMEMBERED = 1024


class FirstWarnings:
    """Logs a message as a warning when its kind is new among the last 1024 different ones. May be called from any thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def warn(self, message: str, kind: str | None = None) -> None:
        """Log a whole message; kind: what else is like it, None for only the same message."""
        kind = kind or message
        with self._lock:
            is_new = kind not in self._seen
            self._seen[kind] = None
            self._seen.move_to_end(kind)
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        self._logger.log(logging.WARNING if is_new else logging.DEBUG, "%s", message)
