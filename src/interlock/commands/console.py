"""Where the commands write: results on standard output, everything else on standard error."""

import errno
import json
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]


def json_line(value: Any) -> str:
    """`value` as one line of JSON, without a line break. JSON has no infinity: the log-probability of what cannot be is -9999.0, as in vLLM's
    server. Raises ValueError for any other number that is not finite."""
    return json.dumps(_without_infinity(value), allow_nan=False)


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(item) for item in value]
    return -9999.0 if isinstance(value, float) and value == -math.inf else value


class OutputConsole(Console):
    """A console whose reader may go away: that is an error like any other, and `cli` decides what becomes of it."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the BrokenPipeError. Raises it again."""
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has gone away")


class StartDisplay:
    """What a long start does, on standard error: one line for each of several starts at once. On a terminal it moves and then goes
    away; elsewhere each new stage is one plain line."""

    def __init__(self) -> None:
        self._console = OutputConsole(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._kinds: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def reporter(self, name: str) -> Report:
        """A function `(stage, done, total)` that shows where the start of `name` is; total 0 means unknown."""

        def report(stage: str, done: int, total: int) -> None:
            self.update(name, stage, done, total)

        return report

    def update(self, name: str, stage: str, done: int = 0, total: int = 0) -> None:
        """Show that `name` is at `stage`, `done` of `total`."""
        if self._progress.disable:
            kind = stage.split(" ", 1)[0]  # 'compiling' is one line, however many kernels there are
            if self._kinds.get(name) != kind:
                self._console.print(f"{name}: {stage}" + (f" ({done} of {total})" if total > 1 else ""), markup=False, highlight=False)
            self._kinds[name] = kind
        else:
            fields: dict[str, Any] = {"description": f"{name}: {stage}", "completed": done, "total": total or None}
            count = f"{done}/{total}" if total else ""
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(fields.pop("description"), **{"total": fields["total"], "count": count})
            self._progress.update(self._tasks[name], count=count, **fields)
