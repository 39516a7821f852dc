"""Data parallel for offline use: one engine per rank, each in a spawned process of its own, behind one `generate`."""

import dataclasses
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
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
    Several threads may use it: their calls run one after another. A forked child has no ranks: it can do nothing with this object.
    To place the ranks yourself, make an `LLM` with `data_parallel_size`, `data_parallel_rank`, `data_parallel_master_ip` and
    `data_parallel_master_port` in each process instead.
    """

    def __init__(self, model: str | os.PathLike[str], *, data_parallel_size: int = 2, **options: Any) -> None:
        options.setdefault("data_parallel_master_port", _free_port())
        config = EngineConfig.from_mapping({"model": model, "data_parallel_size": data_parallel_size, **options})
        context = multiprocessing.get_context("spawn")
        self._turns = Turns()
        self._num_calls = 0
        self._closed = False
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
            for _, answer in self._answers():
                _raise_first([answer], InterlockError)
        except BaseException:
            for process in self._processes:
                process.terminate()  # it may wait for one that will never come
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
        if self._turns.inside:
            raise RequestError("the DataParallelLLM is in the middle of a call of this thread; a signal's handler cannot generate with it there")
        with interrupts.deferred(), self._turns:
            self._check_open()
            size = len(self._connections)
            self._num_calls += 1
            messages = [_pack((self._num_calls, listed[rank::size], params[rank::size])) for rank in range(size)]
            try:
                for rank in range(size):
                    self._send(rank, messages[rank])
                answers = dict(self._answers())  # of all ranks, before any error of one
                _raise_first(answers.values(), DataParallelError)
            except DataParallelError:
                self.close()
                raise
        _raise_first(answers.values(), InterlockError)
        return [answers[index % size][index // size] for index in range(len(listed))]

    def close(self) -> None:
        """End all ranks, and what another thread generates. May be called twice. Does nothing in a forked child: the ranks are its parent's."""
        if self._turns.forked:
            return
        self._closed = True
        with interrupts.deferred(), self._turns:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            for process in self._processes:
                with interrupts.served():
                    process.join(_STOP_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()
            self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the DataParallelLLM is closed, expected an open one; make a new one")

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._connections[rank].send_bytes(message)
        except OSError:
            raise self._gone(rank) from None

    def _answers(self) -> Iterator[tuple[int, Any]]:
        """Each rank with its answer to the last call, as they come; those to earlier ones, which were interrupted, are dropped. A rank that
        ends is noticed at once, whatever the others wait for."""
        awaited = {connection: rank for rank, connection in enumerate(self._connections)}
        while awaited:
            interrupts.deliver()
            self._check_open()
            for connection in wait(list(awaited), interrupts.SLICE_SECONDS):
                assert isinstance(connection, Connection)
                try:
                    call, answer = connection.recv()
                except (EOFError, OSError):
                    raise self._gone(awaited[connection]) from None
                if call == self._num_calls:
                    yield awaited.pop(connection), answer

    @staticmethod
    def _gone(rank: int) -> DataParallelError:
        return DataParallelError(f"data-parallel rank {rank} has ended, so the others were ended too; its output says why; make a new one")


def _raise_first(answers: Iterable[Any], kind: type[InterlockError]) -> None:
    for answer in answers:
        if isinstance(answer, kind):
            raise answer


def _pack(message: Any) -> bytes:
    """As `Connection.send` does it; done for all ranks before the first of them is told anything."""
    try:
        return pickle.dumps(message)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RequestError(f"the prompts and sampling_params cannot be sent to the ranks ({error}), expected what can be pickled") from None


def _serve(config: EngineConfig, connection: Connection) -> None:
    """A rank: answers each list of prompts with its results, until its parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        llm = LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    except InterlockError as error:
        connection.send((0, error))
        return
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with llm, suppress(BrokenPipeError, ConnectionResetError):
        connection.send((0, None))
        threading.Thread(target=_read, args=(connection, llm, calls), daemon=True).start()
        while (message := calls.get()) is not None:
            call, prompts, params = pickle.loads(message)
            try:
                answer: Any = llm.generate(prompts, params)
            except DataParallelError as error:
                connection.send((call, error))
                raise
            except InterlockError as error:
                answer = error
            connection.send((call, answer))


def _read(connection: Connection, llm: LLM, calls: "queue.SimpleQueue[bytes | None]") -> None:
    """Pass messages on as they come, so that the parent never waits to send one; when its end closes, end what the rank generates."""
    with suppress(EOFError, OSError):
        while True:
            calls.put(connection.recv_bytes())
    calls.put(None)
    llm.close()


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
