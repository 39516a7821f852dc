"""Data parallel for offline use: one engine per rank, each in a spawned process of its own, behind one `generate`."""

import dataclasses
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from interlock.core import interrupts
from interlock.core.config import EngineConfig
from interlock.core.errors import DataParallelError, InterlockError, RequestError
from interlock.core.sampling_params import SamplingParams
from interlock.engine.inputs import Prompt, list_params, list_prompts
from interlock.engine.llm import LLM
from interlock.engine.outputs import RequestOutput
from interlock.engine.turns import Turns

_STOP_SECONDS = 10.0


class DataParallelLLM:
    """`data_parallel_size` engines with the same model, each with a KV pool of its own; options are those of `EngineConfig`.

    The ranks are spawned, so a script makes it under `if __name__ == "__main__"`. The CPUs are divided among them unless `threads` is given,
    and a KV connector's `engine_id` gets the suffix `_dp<rank>`. With `data_parallel_lockstep` they make their steps together.
    Several threads may use it: their calls run one after another.
    To place the ranks yourself, make an `LLM` with `data_parallel_size`, `data_parallel_rank`, `data_parallel_master_ip` and
    `data_parallel_master_port` in each process instead.
    """

    def __init__(self, model: str | os.PathLike[str], *, data_parallel_size: int = 2, **options: Any) -> None:
        options.setdefault("data_parallel_master_port", _free_port())
        config = EngineConfig.from_mapping({"model": model, "data_parallel_size": data_parallel_size, **options})
        context = multiprocessing.get_context("spawn")
        self._turns = Turns()
        self._num_calls = 0
        self._connections: list[Connection] = []
        self._processes = []
        try:
            for rank in range(data_parallel_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(_rank_config(config, rank), theirs), name=f"interlock-dp{rank}", daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
            for rank in range(data_parallel_size):
                self._receive(rank)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them, dealt out to the ranks in turn; results are in their order. sampling_params: one for all, or one
        for each.

        Raises RequestError if one cannot be served, DataParallelError if a rank is gone. An interrupt leaves the ranks at work on what they
        were given; they are ready for the next call when that is done.
        """
        listed = list_prompts(prompts)
        params = list_params(listed, sampling_params)
        with interrupts.deferred(), self._turns:
            size = len(self._connections)
            if not size:
                raise RequestError("the DataParallelLLM is closed, expected an open one; make a new one")
            self._num_calls += 1
            for rank in range(size):
                self._send(rank, (self._num_calls, listed[rank::size], params[rank::size]))
            answers = [self._answer(rank) for rank in range(size)]  # of all ranks, before any error of one
            if any(isinstance(answer, DataParallelError) for answer in answers):
                self.close()
        for answer in answers:
            if isinstance(answer, InterlockError):
                raise answer
        return [answers[index % size][index // size] for index in range(len(listed))]

    def close(self) -> None:
        """End all ranks. May be called twice."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        for process in self._processes:
            process.join(_STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self, rank: int, message: Any) -> None:
        try:
            self._connections[rank].send(message)
        except OSError:
            raise self._gone(rank) from None

    def _answer(self, rank: int) -> Any:
        """The rank's answer to the last call; those to earlier ones, which were interrupted, are dropped."""
        connection, call, answer = self._connections[rank], -1, None
        try:
            while call != self._num_calls:
                interrupts.deliver()
                if connection.poll(interrupts.SLICE_SECONDS):
                    call, answer = connection.recv()
            return answer
        except (EOFError, OSError):
            raise self._gone(rank) from None

    def _receive(self, rank: int) -> None:
        answer = self._answer(rank)
        if isinstance(answer, InterlockError):
            raise answer

    def _gone(self, rank: int) -> DataParallelError:
        self.close()
        return DataParallelError(f"data-parallel rank {rank} has ended, so the others were ended too; its output says why; make a new one")


def _serve(config: EngineConfig, connection: Connection) -> None:
    """A rank: answers each list of prompts with its results, until its parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        llm = LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    except InterlockError as error:
        connection.send((0, error))
        return
    with llm:
        connection.send((0, None))
        while True:
            try:
                call, prompts, params = connection.recv()
            except EOFError:
                return
            try:
                answer: Any = llm.generate(prompts, params)
            except DataParallelError as error:
                connection.send((call, error))
                raise
            except InterlockError as error:
                answer = error
            connection.send((call, answer))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    threads = config.threads or max(1, config.num_threads // config.data_parallel_size)
    transfer = config.kv_transfer_config
    if transfer is not None:
        transfer = dataclasses.replace(transfer, engine_id=f"{transfer.engine_id}_dp{rank}")
    return dataclasses.replace(config, data_parallel_rank=rank, threads=threads, kv_transfer_config=transfer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
