"""The requests of `interlock pd` on their way through pairs of processes; what is finished stays, whatever fails after it."""

import sys
from collections.abc import Mapping
from typing import Any

from interlock.commands.console import OutputConsole, StartDisplay
from interlock.commands.pd_report import TransportRun
from interlock.commands.prompts import shortened
from interlock.core.errors import InterlockError
from interlock.pd.pair import HandOff, PairRequest, PrefillDecodePair, run_single
from interlock.pd.process import EngineProcessError

COMPARED_ROUNDS = 7


class PairSession:
    """Runs `requests` over one transport after another. Text goes to standard output as it comes, unless `quiet`; warnings and errors go
    to standard error.

    options: of all engines, as plain values. stall_timeout: how long a process at work may say nothing, in seconds. runs: what came of it.
    failed: whether something could not be done. compare_barrier: whether to measure what the way of waiting saves, too.
    """

    def __init__(self, options: Mapping[str, Any], requests: list[PairRequest], *, stall_timeout: float, compare_barrier: bool, quiet: bool) -> None:
        self._options = options
        self._requests = requests
        self._stall_timeout = stall_timeout
        self._compare_barrier = compare_barrier
        self._quiet = quiet
        self.runs: list[TransportRun] = []
        self.failed = False

    @property
    def results(self) -> list[HandOff]:
        """All that was begun, over all transports."""
        return [result for run in self.runs for result in run.results]

    def run(self, transport: str, connector: Mapping[str, Any]) -> bool:
        """All requests through one pair. False if its processes could not go on; what was finished is kept. Raises InterlockError if nothing
        has come of anything yet and the user can mend it."""
        run = TransportRun(transport, len(self._requests))
        self.runs.append(run)
        try:
            with StartDisplay() as display:
                pair = PrefillDecodePair(self._options, connector=connector, on_progress=display.update, stall_timeout=self._stall_timeout)
            with pair:
                for number, request in enumerate(self._requests, 1):
                    self._serve(pair, run, number, request)
                self._measure(pair, run)
        except InterlockError as error:
            if not isinstance(error, EngineProcessError) and not self.results:
                raise
            self._complain(str(error))
            return False
        return True

    def verify(self) -> None:
        """Compare all results with those of a single process."""
        told = {id(result): len(result.warnings) for result in self.results}
        try:
            with StartDisplay() as display:
                run_single(self._options, self.results, display.update, stall_timeout=self._stall_timeout)
        except InterlockError as error:
            self._complain(f"not all results could be compared with a single process: {error}")
        for result in self.results:
            _warn(result, told[id(result)])

    def _serve(self, pair: PrefillDecodePair, run: TransportRun, number: int, request: PairRequest) -> None:
        if not self._quiet:
            head = f"[{number}/{len(self._requests)}] {shortened(request.prompt)}"
            OutputConsole(highlight=False, soft_wrap=True).print(head, style="bold", markup=False)
        try:
            result = pair.run(request, _discard if self._quiet else _write)
        except EngineProcessError as error:
            run.results.append(HandOff(request, error=str(error)))
            if not self._quiet:
                _write("\n\n")
            raise
        run.results.append(result)
        if not self._quiet:
            _write("\n\n")
        _warn(result, 0)
        if result.error is not None:
            self._complain(f"{request.request_id}: {result.error}")

    def _measure(self, pair: PrefillDecodePair, run: TransportRun) -> None:
        """What the hand-offs saved: against computing each prompt on decode, and against a barrier."""
        served = [result for result in run.results if result.decode is not None]
        for result in served:
            told = len(result.warnings)
            pair.recompute(result)
            _warn(result, told)
        if self._compare_barrier and served:
            longest = max(served, key=lambda result: len(result.prompt_token_ids))
            try:
                with StartDisplay() as display:
                    run.waits = pair.compare_waits(longest.request, COMPARED_ROUNDS, display.update)
            except InterlockError as error:
                self._complain(f"the ways of waiting could not be compared: {error}")

    def _complain(self, message: str) -> None:
        self.failed = True
        print(f"error: {message}", file=sys.stderr)


def _warn(result: HandOff, told: int) -> None:
    for warning in result.warnings[told:]:
        print(f"warning: {result.request.request_id}: {warning}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(text: str) -> None:
    pass
