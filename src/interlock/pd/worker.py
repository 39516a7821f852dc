"""An engine process: builds the engine that its parent describes, serves requests, and never outlives the parent's end of the socket."""

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from interlock.core.errors import InterlockError
from interlock.core.logs import set_up_logging
from interlock.core.sampling_params import SamplingParams
from interlock.engine.inputs import as_user_message
from interlock.engine.llm import LLM
from interlock.engine.outputs import RequestDelta
from interlock.engine.pacing import pause_seconds
from interlock.engine.request import Request
from interlock.pd.heartbeat import Heart
from interlock.pd.messages import Channel, Failed, Fatal, Finished, Generate, Progress, Ready, ResetPrefixCache, Start, Stop, Text, ToEngine

Arrival = tuple[float, Any]
"""When a message arrived (seconds of `time.monotonic`), and the message."""


@dataclass(slots=True)
class _Running:
    request: Request
    arrival: float
    text: list[str] = field(default_factory=list)


class EngineServer:
    """Runs the requests that come through `inbox` and sends what they give."""

    def __init__(self, llm: LLM, channel: Channel, inbox: "queue.SimpleQueue[Arrival]") -> None:
        self._llm = llm
        self._core = llm.core
        self._channel = channel
        self._inbox = inbox
        self._running: dict[str, _Running] = {}
        self._heart = Heart(channel)

    def serve(self) -> None:
        """Serve until the parent says stop."""
        while True:
            for arrival, message in self._messages():
                if isinstance(message, Stop):
                    return
                if isinstance(message, ResetPrefixCache):
                    self._core.reset_prefix_cache()
                elif isinstance(message, Generate):
                    self._add(arrival, message)
            if self._core.has_work:
                for delta in self._core.step():
                    self._report(delta)
            self._heart.note(working=bool(self._running))

    def _messages(self) -> list[Arrival]:
        """What has arrived; waits for it as long as there is nothing better to do."""
        messages = []
        try:
            messages.append(self._inbox.get(timeout=self._patience()))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _patience(self) -> float | None:
        return pause_seconds(self._core) if self._core.has_work else None

    def _add(self, arrival: float, message: Generate) -> None:
        extra = None if message.kv_transfer_params is None else {"kv_transfer_params": message.kv_transfer_params}
        try:
            params = SamplingParams(**message.sampling, extra_args=extra)
            request = self._core.make_request(message.request_id, self._prompt(message), params)
            self._core.add_request(request)
        except InterlockError as error:
            self._channel.send(Failed(message.request_id, str(error)))
        else:
            self._running[message.request_id] = _Running(request, arrival)
            self._heart.note(working=True)

    def _prompt(self, message: Generate) -> Any:
        tokenizer = self._core.tokenizer
        has_template = tokenizer is not None and tokenizer.has_chat_template
        wanted = has_template if message.chat is None else message.chat
        return as_user_message(message.prompt, self._llm.chat_prompt) if wanted else message.prompt

    def _report(self, delta: RequestDelta) -> None:
        running = self._running[delta.request_id]
        if delta.text:
            running.text.append(delta.text)
            self._channel.send(Text(delta.request_id, delta.text))
        if delta.finished:
            del self._running[delta.request_id]
            if delta.finish_reason == "error":
                self._channel.send(Failed(delta.request_id, delta.error or "the engine gave no reason"))
            else:
                self._channel.send(_finished(running, delta))


def _finished(running: _Running, delta: RequestDelta) -> Finished:
    request, metrics = running.request, running.request.metrics
    first = metrics.first_token_time if metrics.first_token_time is not None else time.monotonic()
    return Finished(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=request.output_token_ids,
        text="".join(running.text),
        finish_reason=delta.finish_reason or "",
        logprobs=[list(zip(position.token_ids, position.logprobs, strict=True)) for position in request.logprobs],
        modes=dict(metrics.cudagraph_modes),
        ttft_seconds=first - running.arrival,
        kv_bytes_loaded=metrics.loaded_bytes,
        load_wait_seconds=metrics.load_wait_seconds,
        num_failed_loads=metrics.num_failed_loads,
        kv_transfer_params=delta.kv_transfer_params,
        load_parked=metrics.num_parked_loads > 0,
    )


def main() -> None:
    """Run one engine process: `worker NAME FD`, where FD is our end of the parent's socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    channel = Channel(socket.socket(fileno=int(sys.argv[2])), ToEngine)
    inbox: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), daemon=True, name="parent").start()
    try:
        start = inbox.get()[1]
        assert isinstance(start, Start)
        set_up_logging()
        with LLM(**start.engine, progress=lambda stage, done, total: channel.send(Progress(stage, done, total))) as llm:
            channel.send(Ready())
            EngineServer(llm, channel, inbox).serve()
    except (BrokenPipeError, ConnectionResetError):
        _end()
    except InterlockError as error:
        channel.send(Fatal(str(error), user_error=True))
    except Exception as error:
        traceback.print_exc()
        channel.send(Fatal(f"{type(error).__name__}: {error}", user_error=False))


def _read(channel: Channel, inbox: "queue.SimpleQueue[Arrival]") -> None:
    """Pass messages on; when the parent's end closes, whatever this process is doing, end it."""
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError, msgspec.MsgspecError):
            _end()
        inbox.put((time.monotonic(), message))


def _end() -> NoReturn:
    """End this process and what it has started, such as compilers."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
