"""A prefill engine and a decode engine in two processes, and the way of a request through both.

A request goes to prefill for one token, with `do_remote_decode`; prefill keeps its KV and answers `kv_transfer_params`; the request
goes on to decode with them, which reads the KV across and generates. If prefill has died, `kv_load_failure_policy` decides: decode
computes the prompt itself, or the request fails.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from interlock.core.errors import InterlockError, KVLoadError
from interlock.pd.messages import Failed, Finished, Generate, Progress, Ready, ResetPrefixCache, Text
from interlock.pd.process import STALL_SECONDS, EngineProcess, EngineProcessError, wait_readable

START_SECONDS = 120.0  # from one piece of news of a starting process to the next
OnProgress = Callable[[str, str, int, int], None]
OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PairRequest:
    """One prompt, as `LLM.generate` takes it, with its sampling parameters as plain JSON values; `chat` applies the chat template to text
    (None: if the model has one)."""

    request_id: str
    prompt: str | list[int] | dict[str, Any]
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
    """Times to first token on decode, in seconds: with the engine's own way of waiting for loads, and behind a barrier. obstacle: why
    there are none, if no step waited for a load."""

    as_configured: list[float] = field(default_factory=list)
    barrier: list[float] = field(default_factory=list)
    obstacle: str | None = None


def bit_patterns(finished: Finished) -> list[list[tuple[int, str]]]:
    """The log-probabilities as exact hexadecimal floats: -0.0 differs from 0.0, and NaN equals itself."""
    return [[(token, float.hex(value)) for token, value in position] for position in finished.logprobs]


class PrefillDecodePair:
    """The two processes. As a context manager it ends both, in order after success and at once after an error.

    engine: options of both, as plain values. connector: their `kv_transfer_config`; roles and engine ids are set here.
    stall_timeout: how long a process at work may say nothing, in seconds, before it is taken for stalled and ended.
    """

    def __init__(
        self, engine: Mapping[str, Any], *, connector: Mapping[str, Any], on_progress: OnProgress, stall_timeout: float = STALL_SECONDS
    ) -> None:
        self._stall_timeout = stall_timeout
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
        """Send one request through both processes; `on_text` gets decode's text as it comes. Raises EngineProcessError if decode dies or stalls."""
        result = HandOff(request)
        try:
            self._run_prefill(result)
            result.decode = self._run(self.decode, self._decode_message(result), on_text, result)
        except _RequestFailedError as error:
            result.error = str(error)
        return result

    def recompute(self, result: HandOff) -> None:
        """Run the prompt of `result` on decode without a hand-off and without cached prefixes, for one token. If that fails, the result
        gets a warning. Raises EngineProcessError if decode dies or stalls."""
        assert result.decode is not None
        self.decode.send(ResetPrefixCache())
        request = result.request
        message = Generate(f"{request.request_id}-recompute", _tokenized(request, result.decode.prompt_token_ids), _one_token(request.sampling))
        try:
            result.recompute = self._run(self.decode, message, _ignore, result)
        except _RequestFailedError as error:
            result.warnings.append(f"the run without a hand-off failed: {error}")

    def compare_waits(self, request: PairRequest, rounds: int, on_progress: OnProgress) -> "WaitComparison":
        """First tokens of one prompt on the decode process and, in turn, on one more that waits for all of a load before it launches.
        Neither has anything of the prompt in its cache. The first round of each is a warm-up and does not count. It ends at once where the
        steps do not wait for the load. Raises InterlockError if any of them fails."""
        behind_barrier = self._start(
            "decode-barrier", {**self._engine, "kv_load_wait": "barrier"}, {**self._connector, "kv_role": "kv_consumer"}, on_progress
        )
        found = WaitComparison()
        for number in range(rounds + 1):
            for process, seconds in ((self.decode, found.as_configured), (behind_barrier, found.barrier)):
                process.send(ResetPrefixCache())
                request_id = f"{request.request_id}-{process.name}-{number}"
                result = HandOff(PairRequest(request_id, request.prompt, _one_token(request.sampling), request.chat))
                self._run_prefill(result)
                if result.prefill is None:
                    raise InterlockError(f"there is no hand-off to compare ways of waiting on: {'; '.join(result.warnings)}")
                result.decode = self._run(process, self._decode_message(result), _ignore, result)
                if result.decode.load_parked:
                    return WaitComparison(obstacle="KV that is pushed, or takes longer than max_sync_load_seconds, is waited for outside the steps")
                if not result.decode.kv_bytes_loaded:
                    return WaitComparison(obstacle="no KV was loaded")
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
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        message = Generate(request.request_id, request.prompt, _one_token(request.sampling), request.chat, wanted)
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
        prompt = _tokenized(request, result.prefill.prompt_token_ids)
        return Generate(request.request_id, prompt, dict(request.sampling), kv_transfer_params=result.prefill.kv_transfer_params)

    def _run(self, process: EngineProcess, message: Generate, on_text: OnText, result: HandOff) -> Finished:
        """Run one request on `process`, watching the other ones too. Raises _RequestFailedError, or EngineProcessError if `process` dies or
        stalls."""
        process.send(message, self._stall_timeout)
        heard = time.monotonic()
        while True:
            ready = wait_readable([other for other in self._processes if other.alive], heard + self._stall_timeout - time.monotonic())
            for other in ready:
                if other is not process:
                    self._take_notice(other, result)
            if process in ready:
                heard = time.monotonic()
                answer = _take_answer(process, on_text, self._stall_timeout)
                if answer is not None:
                    return answer
            elif time.monotonic() - heard > self._stall_timeout:
                raise process.stalled(self._stall_timeout)

    def _take_notice(self, process: EngineProcess, result: HandOff) -> None:
        """A process that is not being waited for has spoken: its last beat, or its end. Decode is needed, prefill may not be any more."""
        try:
            process.receive(self._stall_timeout)
        except EngineProcessError as error:
            if process is self.decode:
                raise
            result.warnings.append(str(error))


def run_single(engine: Mapping[str, Any], results: list[HandOff], on_progress: OnProgress, *, stall_timeout: float = STALL_SECONDS) -> None:
    """Run the prompts of `results` in one process without any connector, for comparison; of those that none came of, none, and without
    any left no process is started. A result that it cannot serve gets a warning. Raises InterlockError if the process cannot go on."""
    served = [result for result in results if result.decode is not None]
    if not served:
        return
    process = EngineProcess("single", engine)
    try:
        wait_ready(process, on_progress)
        for result in served:
            assert result.decode is not None
            request = result.request
            prompt = _tokenized(request, result.decode.prompt_token_ids)
            process.send(Generate(request.request_id, prompt, dict(request.sampling)), stall_timeout)
            try:
                while result.single is None:
                    result.single = _take_answer(process, _ignore, stall_timeout)
            except _RequestFailedError as error:
                result.warnings.append(f"the single process could not serve it: {error}")
        process.stop()
    finally:
        process.kill()


def wait_ready(process: EngineProcess, on_progress: OnProgress, timeout: float = START_SECONDS) -> Ready:
    """Wait until the engine of `process` takes requests. Raises EngineProcessError if it ends, or tells nothing new for `timeout` seconds."""
    while not isinstance(answer := process.receive(timeout), Ready):
        if isinstance(answer, Progress):
            on_progress(process.name, answer.stage, answer.done, answer.total)
    on_progress(process.name, "ready", 1, 1)
    return answer


class _RequestFailedError(KVLoadError):
    """One request failed; its processes go on."""


def _take_answer(process: EngineProcess, on_text: OnText, timeout: float) -> Finished | None:
    """Take in one message about the request that `process` works on; its end, if that is it. Raises _RequestFailedError."""
    message = process.receive(timeout)
    if isinstance(message, Text):
        on_text(message.text)
    elif isinstance(message, Failed):
        raise _RequestFailedError(message.error)
    return message if isinstance(message, Finished) else None


def _tokenized(request: PairRequest, token_ids: list[int]) -> list[int] | dict[str, Any]:
    """The request's prompt as the token ids that it turned out to be, with what separates its cached prefixes from those of others."""
    salt = request.prompt.get("cache_salt") if isinstance(request.prompt, dict) else None
    return token_ids if salt is None else {"prompt_token_ids": token_ids, "cache_salt": salt}


def _one_token(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """These parameters, for the first token alone."""
    return {**sampling, "max_tokens": 1, "min_tokens": 0, "n": 1}


def _ignore(text: str) -> None:
    pass
