"""The offline interface: `LLM(model=...).generate(prompts, params)`, in vLLM's shapes."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any, Self, cast

from interlock.core import interrupts
from interlock.core.config import EngineConfig
from interlock.core.errors import ConfigError, RequestError, StreamError
from interlock.core.memory import available_memory
from interlock.core.sampling_params import SamplingParams
from interlock.engine.block_pool import PoolAudit
from interlock.engine.core import EngineCore, Progress, Runner
from interlock.engine.inputs import Messages, Prompt, TokenizedPrompt, list_chats, list_params, list_prompts
from interlock.engine.outputs import CompletionOutput, Logprob, RequestDelta, RequestOutput
from interlock.engine.pacing import pause_seconds
from interlock.engine.samples import PromptSamples
from interlock.engine.turns import Turns

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "StreamDelta"]


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What a step added to sample `index` of prompt number `prompt_index`. `output` is the whole result, with the prompt's last delta."""

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    output: RequestOutput | None = None


class LLM:
    """An engine in this process. Options are those of `EngineConfig`; `cudagraph_mode` may be a name, `kv_transfer_config` an object or
    its JSON text. `progress(what, done, total)` is called during the start. Use it as a context manager, or call `close`.
    Several threads may use it at once: what they ask for runs together. A forked child has no engine: it can do nothing with this object.

    With `data_parallel_size` > 1 it is one rank of several (see `engine.data_parallel`). In lockstep each call of `generate`, `stream` or
    `chat` is made on every rank, with an own, maybe empty, list of prompts, and ends when no rank has requests.

    Raises ConfigError for an unknown or unusable option and for memory that cannot be had, CheckpointError for a model that cannot be loaded.
    """

    def __init__(self, model: str | PathLike[str], *, runner: Runner | None = None, progress: Progress | None = None, **options: Any) -> None:
        transfer = options.get("kv_transfer_config")
        if isinstance(transfer, str):
            options["kv_transfer_config"] = _parse_object("kv_transfer_config", transfer)
        self.config = EngineConfig.from_mapping({"model": model, **options})
        self._num_prompts = 0
        self._closed = False
        self._live: set[str] = set()
        self._kept: list[RequestDelta] = []
        self._turns = Turns()
        self._stepping: int | None = None  # the thread that is in a step
        self._dropped: deque[list[PromptSamples]] = deque()  # of streams that were collected as garbage in the midst of a turn
        with ExitStack() as unwanted:
            with interrupts.deferred():
                self.core = _make_core(self.config, runner, progress)
                unwanted.callback(self.core.shutdown)
            unwanted.pop_all()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts, together; results are in their order.

        prompts: one or a list; each a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, with an optional
        `"cache_salt"`. sampling_params: one for all, or one for each. progress(done, total): called when a prompt is done.
        Raises RequestError, before anything runs, if any of them cannot be served.
        """
        results: dict[int, RequestOutput] = {}
        with interrupts.deferred():  # whatever is raised in a step, nothing more is until its requests have left the engine
            started = self._start(prompts, sampling_params)
            for delta in self._run(started):
                if delta is not None and delta.output is not None:
                    results[delta.prompt_index] = delta.output
                    if progress is not None:
                        with interrupts.served():
                            progress(len(results), len(started))
        return [results[index] for index in range(len(started))]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamDelta]:
        """As `generate`, but gives what each step added as it comes. Closing the iterator, or dropping it, aborts what is left of its
        prompts; closing the LLM ends it with a RequestError."""
        with ExitStack() as unwanted:
            with interrupts.deferred():
                deltas = self._run(self._start(prompts, sampling_params))
                next(deltas)  # into its `try`: only a generator that has begun aborts its prompts when it is closed
                unwanted.callback(deltas.close)
            unwanted.pop_all()
        return cast("Iterator[StreamDelta]", deltas)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer one chat, or a list of chats: `[{"role": ..., "content": ...}, ...]` through the model's chat template.
        Raises RequestError for messages that are none."""
        prompts = [self.chat_prompt(chat, add_generation_prompt=add_generation_prompt, **variables) for chat in list_chats(messages)]
        return self.generate(prompts, sampling_params)

    def chat_prompt(self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any) -> dict[str, Any]:
        """The prompt of a chat, for `generate` or `stream`. Raises RequestError if the model has no chat template, or it refuses the messages."""
        tokenizer = self.core.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise RequestError("the model has no chat template; use generate with a plain prompt")
        text = tokenizer.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, or None if its files have none."""
        return self.core.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        with interrupts.deferred(), self._turns:
            self.core.reset_prefix_cache()

    def audit(self) -> PoolAudit:
        """Count every KV block and check every rule of the pool."""
        with interrupts.deferred(), self._turns:
            return self.core.audit()

    def metrics(self) -> dict[str, int]:
        """Counters and gauges by name."""
        with interrupts.deferred(), self._turns:
            return self.core.metrics()

    def close(self) -> None:
        """Stop the engine and give its memory back. May be called twice. Does nothing in a forked child: what it shares is its parent's."""
        if self._turns.forked:
            return
        with interrupts.deferred(), self._turns:
            if not self._closed:
                self._closed = True
                self.core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> list[PromptSamples]:
        """Check all prompts, then put all into the engine; on an error none stays there."""
        self._check_open()
        if self.core.lockstep is not None:
            self.core.lockstep.join_next()
        try:
            return self._admit(prompts, sampling_params)
        except RequestError:
            self._keep_pace()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the LLM is closed, expected an open one; make a new one")
        if self._in_step:
            raise RequestError(
                "the LLM is in the middle of a step of this thread, expected it between two; what runs within a step, a signal's handler for one, "
                "cannot generate with it"
            )

    @property
    def _in_step(self) -> bool:
        """Whether what this thread runs was called from within a step."""
        return self._stepping == threading.get_ident()

    def _admit(self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> list[PromptSamples]:
        listed = list_prompts(prompts)
        params = list_params(listed, sampling_params)
        tokenized = [self._tokenize(number, prompt, len(listed)) for number, prompt in enumerate(listed)]
        interrupts.deliver()
        with self._turns:
            self._check_open()
            return self._put_in(tokenized, params)

    def _put_in(self, tokenized: Sequence[TokenizedPrompt], params: Sequence[SamplingParams]) -> list[PromptSamples]:
        samples = []
        for prompt, wanted in zip(tokenized, params, strict=True):
            samples.append(PromptSamples(self.core, str(self._num_prompts), prompt, wanted))
            self._num_prompts += 1
        started: list[PromptSamples] = []
        try:
            for prompt_samples in samples:
                prompt_samples.start()
                started.append(prompt_samples)
                self._live.update(request.request_id for request in prompt_samples.requests)
        except BaseException:
            self._end(started)
            raise
        return started

    def _tokenize(self, number: int, prompt: Prompt, count: int) -> TokenizedPrompt:
        interrupts.deliver()  # many and long prompts take their time
        try:
            return self.core.inputs.process(prompt)
        except RequestError as error:
            if count == 1:
                raise
            raise RequestError(f"prompts[{number}] of {count}: {error}") from None

    def _run(self, started: list[PromptSamples]) -> Generator[StreamDelta | None, None, None]:
        """None when it begins, then the deltas of prompts that have started. However it ends, none of them stays in the engine."""
        owners = {request.request_id: number for number, samples in enumerate(started) for request in samples.requests}
        try:
            yield None
            while not all(samples.finished for samples in started):
                with interrupts.deferred(), self._turns:
                    deltas = [self._take(started, owners[delta.request_id], delta) for delta in self._next_deltas(owners)]
                    interrupts.deliver()  # `generate` defers it further
                yield from deltas
            self._tell_ends()
        except GeneratorExit:
            self._abort(started)
            if self.core.lockstep is None and not self._turns.forked and not self._turns.inside:
                with suppress(StreamError):  # at the interpreter's end the engine's threads go first
                    self._tell_ends()
            raise
        finally:
            try:
                self._abort(started)
            finally:
                self._abort(started)  # an interrupt may have come just before the first call held it off
                self._keep_pace()

    def _tell_ends(self) -> None:
        """Make the step that tells the connector, and through it the peers, what has ended: no other one may come for long."""
        with interrupts.deferred(), self._turns:
            if self.core.has_work and not self._closed and not self._in_step:
                self._step()

    @staticmethod
    def _take(started: list[PromptSamples], number: int, delta: RequestDelta) -> StreamDelta:
        samples = started[number]
        index = samples.take(delta)
        output = samples.output() if samples.finished else None
        return StreamDelta(number, index, delta.text, delta.token_ids, delta.finish_reason, output)

    def _keep_pace(self) -> None:
        """Step while other ranks count on it."""
        if self._turns.forked:
            return
        while self.core.lockstep is not None and not self._turns.inside and self.core.lockstep.must_step and not self._closed:
            with interrupts.deferred(), self._turns:
                self._step()

    def _next_deltas(self, owners: Collection[str]) -> list[RequestDelta]:
        """What comes next for `owners`. A step serves all iterators; what it gives to others is kept for them."""
        self._check_open()
        if not any(delta.request_id in owners for delta in self._kept):
            self._step()
        mine = [delta for delta in self._kept if delta.request_id in owners]
        self._kept = [delta for delta in self._kept if delta.request_id not in owners]
        return mine

    def _step(self) -> None:
        with interrupts.deferred():  # what is for others than the caller stays
            try:
                self._stepping = threading.get_ident()
                self._kept += [delta for delta in self.core.step() if delta.request_id in self._live]
            finally:
                self._stepping = None
                while self._dropped:
                    self._end(self._dropped.popleft())
        others_busy = self.core.lockstep is not None and self.core.lockstep.others_busy
        pause = pause_seconds(self.core) if self.core.has_unfinished_requests and not self._kept and not others_busy else 0.0
        if pause:
            time.sleep(pause)

    def _abort(self, started: list[PromptSamples]) -> None:
        """End what is left of these prompts, and forget them: now, or where this comes in the midst of a step, when it has ended. May be called
        twice."""
        if self._turns.forked:
            return
        if self._turns.inside:
            self._dropped.append(started)
            return
        with interrupts.deferred(), self._turns:
            self._end(started)

    def _end(self, started: list[PromptSamples]) -> None:
        for samples in started:
            samples.abort()
            self._live.difference_update(request.request_id for request in samples.requests)
        self._kept = [delta for delta in self._kept if delta.request_id in self._live]


def _make_core(config: EngineConfig, runner: Runner | None, progress: Progress | None) -> EngineCore:
    available = available_memory() if runner is None else None
    if available is not None and config.kv_cache_memory_bytes > available:
        raise ConfigError(
            f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, but this machine has {available} bytes of memory available; "
            "lower it, and leave room for the model's weights"
        )
    try:
        return EngineCore(config, runner, progress=progress)
    except MemoryError as error:
        sizes = ("kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "threads")
        given = ", ".join(f"{name} = {getattr(config, name)}" for name in sizes)
        raise ConfigError(
            f"the engine's memory could not be had ({str(error) or 'out of memory'}); of {given}, lower what is large"
            + ("" if available is None else f": this machine has {available} bytes available")
        ) from error


def _parse_object(name: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, which is not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {text!r}, expected a JSON object")
    return value
