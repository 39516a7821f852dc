"""A prefill engine and a decode engine in two processes, and the way of a request through both.

A request goes to prefill for one token, with `do_remote_decode`; prefill keeps its KV and answers `kv_transfer_params`; the request
goes on to decode with them, which reads the KV across and generates. If prefill has died, `kv_load_failure_policy` decides: decode
computes the prompt itself, or the request fails.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from interlock.core.errors import InterlockError, KVLoadError
from interlock.pd.messages import Failed, Finished, Generate, Progress, Ready, ResetPrefixCache, Text
from interlock.pd.process import EngineProcess, EngineProcessError, wait_readable

OnProgress = Callable[[str, str, int, int], None]
OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PairRequest:
    """One prompt (text, or token ids) with its sampling parameters as plain JSON values; `chat` applies the chat template to text
    (None: if the model has one)."""

    request_id: str
    prompt: str | list[int]
    sampling: Mapping[str, Any]
    chat: bool | None


@dataclass(slots=True)
class HandOff:
    """What came of one request: decode's answer or an error; prefill's answer if it got that far; and the runs to compare with."""

    request: PairRequest
    prefill: Finished | None = None
    decode: Finished | None = None
    error: str | None = None
    recompute: Finished | None = None
    single: Finished | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as decode had it; empty if it got none."""
        return [] if self.decode is None else self.decode.prompt_token_ids

    @property
    def identical(self) -> bool:
        """Whether tokens and log-probabilities are those of a single process, which was run."""
        return bool(self.same_tokens and self.same_logprobs)

    @property
    def same_tokens(self) -> bool | None:
        """Whether the tokens are those of a single process; None if that was not run."""
        return None if self.decode is None or self.single is None else self.decode.token_ids == self.single.token_ids

    @property
    def same_logprobs(self) -> bool | None:
        """Whether the log-probabilities are those of a single process, bit for bit; None if that was not run."""
        return None if self.decode is None or self.single is None else bit_patterns(self.decode) == bit_patterns(self.single)


@dataclass(frozen=True, slots=True)
class WaitComparison:
    """Times to first token on decode, in seconds: with the engine's own way of waiting for loads, and behind a barrier."""

    as_configured: list[float] = field(default_factory=list)
    barrier: list[float] = field(default_factory=list)


def bit_patterns(finished: Finished) -> list[list[tuple[int, str]]]:
    """The log-probabilities as exact hexadecimal floats: -0.0 differs from 0.0, and NaN equals itself."""
    return [[(token, float.hex(value)) for token, value in position] for position in finished.logprobs]


class PrefillDecodePair:
    """The two processes. As a context manager it ends both, in order after success and at once after an error.

    engine: options of both, as plain values. connector: their `kv_transfer_config`; roles and engine ids are set here.
    """

    def __init__(self, engine: Mapping[str, Any], *, connector: Mapping[str, Any], on_progress: OnProgress) -> None:
        self._failure_policy = connector.get("kv_load_failure_policy", "fail")
        self._engine = dict(engine)
        self._connector = dict(connector)
        self._processes: list[EngineProcess] = []
        try:
            self.prefill = self._start("prefill", engine, {**connector, "kv_role": "kv_producer"}, on_progress)
            self.decode = self._start("decode", engine, {**connector, "kv_role": "kv_consumer"}, on_progress)
        except BaseException:
            self.close(orderly=False)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(orderly=kind is None)

    def close(self, *, orderly: bool = True) -> None:
        """End the processes, readers before the one that they read from."""
        for process in reversed(self._processes):
            process.stop() if orderly else process.kill()

    def run(self, request: PairRequest, on_text: OnText) -> HandOff:
        """Send one request through both processes; `on_text` gets decode's text as it comes. Raises EngineProcessError if decode dies."""
        result = HandOff(request)
        try:
            self._run_prefill(result)
            result.decode = self._run(self.decode, self._decode_message(result), on_text, result)
        except _RequestFailedError as error:
            result.error = str(error)
        return result

    def recompute(self, result: HandOff) -> None:
        """Run the prompt of `result` on decode without a hand-off and without cached prefixes, for one token."""
        assert result.decode is not None
        self.decode.send(ResetPrefixCache())
        message = Generate(f"{result.request.request_id}-recompute", result.decode.prompt_token_ids, {**result.request.sampling, "max_tokens": 1})
        result.recompute = self._run(self.decode, message, _ignore, result)

    def compare_waits(self, request: PairRequest, rounds: int, on_progress: OnProgress) -> "WaitComparison":
        """First tokens of one prompt on the decode process and, in turn, on one more that waits for all of a load before it launches.
        Neither has anything of the prompt in its cache. The first round of each is a warm-up and does not count."""
        behind_barrier = self._start(
            "decode-barrier", {**self._engine, "kv_load_wait": "barrier"}, {**self._connector, "kv_role": "kv_consumer"}, on_progress
        )
        found = WaitComparison()
        for number in range(rounds + 1):
            for process, seconds in ((self.decode, found.as_configured), (behind_barrier, found.barrier)):
                process.send(ResetPrefixCache())
                one_token = {**request.sampling, "max_tokens": 1, "min_tokens": 0}
                result = HandOff(PairRequest(f"{request.request_id}-{process.name}-{number}", request.prompt, one_token, request.chat))
                self._run_prefill(result)
                result.decode = self._run(process, self._decode_message(result), _ignore, result)
                if number:
                    seconds.append(result.decode.ttft_seconds)
        return found

    def _start(self, name: str, engine: Mapping[str, Any], connector: Mapping[str, Any], on_progress: OnProgress) -> EngineProcess:
        transfer = {**connector, "engine_id": f"{name}-{uuid.uuid4().hex}"}
        process = EngineProcess(name, {**engine, "kv_transfer_config": transfer})
        self._processes.append(process)
        wait_ready(process, on_progress)
        return process

    def _run_prefill(self, result: HandOff) -> None:
        """Fill `result.prefill`, or leave it None where decode is to compute the prompt itself."""
        request = result.request
        sampling = {**request.sampling, "max_tokens": 1, "min_tokens": 0, "n": 1}
        message = Generate(request.request_id, request.prompt, sampling, request.chat, {"do_remote_decode": True, "do_remote_prefill": False})
        try:
            if not self.prefill.alive:
                raise EngineProcessError("the prefill process has ended")
            result.prefill = self._run(self.prefill, message, _ignore, result)
        except EngineProcessError as error:
            if self._failure_policy == "fail":
                raise _RequestFailedError(f"{error}, and kv_load_failure_policy is fail") from None
            result.warnings.append(f"{error}; decode computes the prompt itself")

    def _decode_message(self, result: HandOff) -> Generate:
        request = result.request
        if result.prefill is None:
            return Generate(request.request_id, request.prompt, dict(request.sampling), request.chat)
        return Generate(
            request.request_id, result.prefill.prompt_token_ids, dict(request.sampling), kv_transfer_params=result.prefill.kv_transfer_params
        )

    def _run(self, process: EngineProcess, message: Generate, on_text: OnText, result: HandOff) -> Finished:
        """Run one request on `process`, watching the other one too. Raises _RequestFailedError, or EngineProcessError if `process` dies."""
        process.send(message)
        while True:
            for ready in wait_readable([other for other in self._processes if other.alive]):
                if ready is not process:
                    self._take_notice(ready, result)
                    continue
                answer = process.receive()
                if isinstance(answer, Text):
                    on_text(answer.text)
                elif isinstance(answer, Finished):
                    return answer
                elif isinstance(answer, Failed):
                    raise _RequestFailedError(answer.error)

    def _take_notice(self, process: EngineProcess, result: HandOff) -> None:
        """A process that is not being waited for has spoken: it can only have died. Decode is needed, prefill may not be any more."""
        try:
            process.receive()
        except EngineProcessError as error:
            if process is self.decode:
                raise
            result.warnings.append(str(error))


def run_single(engine: Mapping[str, Any], results: list[HandOff], on_progress: OnProgress) -> None:
    """Run the prompts of `results` in one process without any connector, for comparison."""
    process = EngineProcess("single", engine)
    try:
        wait_ready(process, on_progress)
        for result in results:
            if result.decode is not None:
                process.send(Generate(result.request.request_id, result.decode.prompt_token_ids, dict(result.request.sampling)))
                while not isinstance(answer := process.receive(), Finished):
                    if isinstance(answer, Failed):
                        raise InterlockError(f"the single process could not serve {result.request.request_id}: {answer.error}")
                result.single = answer
        process.stop()
    finally:
        process.kill()


def wait_ready(process: EngineProcess, on_progress: OnProgress) -> Ready:
    """Wait until the engine of `process` takes requests."""
    while not isinstance(answer := process.receive(), Ready):
        if isinstance(answer, Progress):
            on_progress(process.name, answer.stage, answer.done, answer.total)
    on_progress(process.name, "ready", 1, 1)
    return answer


class _RequestFailedError(KVLoadError):
    """One request failed; its processes go on."""


def _ignore(text: str) -> None:
    pass
