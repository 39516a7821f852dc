"""A stand-in for an engine around the peer connector: both halves, a shared pool, and steps; also as a separate producer process."""

import dataclasses
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from kv_support import LAYERS, Batch, Request, context, engine_config, kv_cache_config, random_bytes, scheduler_output

from children import end_with_parent
from interlock.core.buffer import Buffer
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import CachedRequestData, LoadPromise
from interlock.graphs import NATIVE_FUNCTIONS
from interlock.graphs.timeline import Timelines
from interlock.kernels import native
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors.peer import PeerConnector
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.lifecycle import KVStepDriver
from interlock.kv_transfer.references import from_params, sign
from interlock.kv_transfer.transports.shared_memory import allocate_pool

MINE, THEIRS = list(range(100, 112)), list(range(200, 212))
MY_BLOCKS, THEIR_BLOCKS = [1, 2, 3], [4, 5, 6]
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


LOOPBACK_6 = "::1" if has_ipv6() else "127.0.0.1"


class PeerEngine:
    """Blocks are chosen by the test; `steps` counts the stamps."""

    def __init__(
        self,
        engine_id: str,
        role: str = "kv_both",
        *,
        connector: type[PeerConnector] = PeerConnector,
        timeout: float = 10.0,
        max_sync_load_seconds: float | None = None,
        **options: Any,
    ) -> None:
        shape = {key: options.pop(key) for key in ("num_blocks", "block_size", "identity", "dtype") if key in options}
        self.kv = kv_cache_config(**shape)
        config = dataclasses.replace(engine_config(engine_id, role, **options), max_sync_load_seconds=max_sync_load_seconds)
        native.load(NATIVE_FUNCTIONS)
        self.written = Timelines(len(LAYERS))
        self.scheduler = connector(config, KVConnectorRole.SCHEDULER, self.kv)
        self.worker = connector(config, KVConnectorRole.WORKER, self.kv)
        self.pool = allocate_pool(self.kv.layer_bytes * self.kv.num_layers)
        layer_shape = (self.kv.num_blocks, 2, self.kv.num_kv_heads, self.kv.block_size, self.kv.head_dim)
        base = self.pool.buffer
        self.caches = {
            name: Buffer(base.address + i * self.kv.layer_bytes, layer_shape, self.kv.dtype, base.owner) for i, name in enumerate(self.kv.layer_names)
        }
        self.worker.register_pool(self.pool)
        self.worker.register_timelines(self.written)
        try:
            self.worker.register_kv_caches(self.caches)
        except BaseException:
            self.worker.shutdown()
            self.pool.close()
            raise
        self.ledger = Ledger(self.kv.num_layers, self.kv.block_size, connector.clock)
        self.driver = KVStepDriver(
            self.worker,
            self.ledger,
            self.kv,
            self.caches,
            load_timeout=timeout,
            kv_load_wait="auto",
            modes=(CUDAGraphMode.NONE, CUDAGraphMode.FULL),
            synchronize=lambda: None,
        )
        self.steps = 0

    def step(self, mode: CUDAGraphMode = CUDAGraphMode.NONE, promises: tuple[LoadPromise, ...] = ()) -> Any:
        """One whole step; the scheduler half hears of its result."""
        output = self.end_step(self.begin_step(mode, promises))
        self.scheduler.update_connector_output(output)
        return output

    def begin_step(self, mode: CUDAGraphMode, promises: tuple[LoadPromise, ...] = (), scheduled: dict[str, tuple[int, int]] | None = None) -> Any:
        """scheduled: per request, the position where its KV ends before this step, and how many tokens the step computes."""
        self.steps += 1
        planned = scheduler_output(self.steps, promises)
        entries = [CachedRequestData(req_id, [], computed, computed) for req_id, (computed, _) in (scheduled or {}).items()]
        counts = {req_id: count for req_id, (_, count) in (scheduled or {}).items()}
        planned = dataclasses.replace(planned, scheduled_cached_reqs=entries, num_scheduled_tokens=counts)
        planned = dataclasses.replace(planned, kv_connector_metadata=self.scheduler.build_connector_meta(planned))
        # These steps have no replay that could wait at gates.
        self.driver.kv_load_wait = "barrier" if mode is CUDAGraphMode.FULL else "auto"
        kv = self.driver.begin(context(self.steps, mode))
        kv.pre_forward(planned, Batch(), None)
        return kv

    def end_step(self, kv: Any) -> Any:
        if kv.context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
            for layer in range(len(LAYERS)):
                self.driver.before_layer(layer)
                self.driver.after_layer(layer)
        kv.finish_forward()
        return kv.post_forward(frozenset())

    def prefill(self, request_id: str, tokens: list[int], block_ids: list[int], **extra: Any) -> dict[str, Any]:
        """A request whose KV is in `block_ids` ends; its hand-off parameters."""
        if not self.steps:
            self.step()
        request = Request(request_id, [*tokens, 99], len(tokens), len(tokens), REMOTE_DECODE | extra, "length", list(block_ids))
        self.scheduler.on_new_request(request)
        keep, params = self.scheduler.request_finished(request, block_ids)
        assert keep
        assert params is not None
        return params

    def admit(
        self, request_id: str, tokens: list[int], params: Any, block_ids: list[int], num_computed: int = 0
    ) -> tuple[Request, tuple[LoadPromise, ...]]:
        """A request arrives, is matched, and gets its blocks: as the scheduler does it."""
        request = Request(request_id, list(tokens), len(tokens), num_computed, params)
        self.scheduler.on_new_request(request)
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert matched is not None
        assert not is_async
        self.scheduler.update_state_after_alloc(request, block_ids, matched)
        if not matched:
            return request, ()
        size = self.kv.block_size
        stop = num_computed + matched
        blocks = tuple(block_ids[num_computed // size : -(-stop // size)])
        return request, (LoadPromise(request_id, num_computed, stop, blocks),)

    def positions(self, block_ids: list[int], start: int, stop: int) -> np.ndarray:
        """KV at positions [start, stop): `[layers, 2, heads, stop - start, head_dim]`."""
        at = np.arange(start, stop)
        blocks = np.asarray(block_ids)[at // self.kv.block_size]
        return np.stack([np.moveaxis(self.caches[name].numpy()[blocks, :, :, at % self.kv.block_size], 0, 2) for name in LAYERS])

    def fill(self, seed: int) -> None:
        random_bytes(self.pool.buffer, seed)

    def snapshot(self) -> np.ndarray:
        return self.pool.buffer.numpy().copy()

    def close(self) -> None:
        self.driver.shutdown()
        self.scheduler.shutdown()
        self.pool.close()


def two_hand_offs(engines: Any, consumers: int = 1) -> tuple[PeerEngine, list[PeerEngine], dict[str, Any], dict[str, Any]]:
    """A producer that keeps two prompts for two users, and engines that read."""
    producer = engines("kv_producer")
    producer.fill(1)
    mine, theirs = producer.prefill("mine", MINE, MY_BLOCKS), producer.prefill("theirs", THEIRS, THEIR_BLOCKS)
    producer.step()
    return producer, [engines("kv_consumer") for _ in range(consumers)], mine, theirs


def load(consumer: PeerEngine, params: Any, tokens: list[int], blocks: Sequence[int] = (1, 2, 3), request_id: str = "d") -> str | None:
    """A request brings parameters; the cause why its load failed, or None."""
    request, promises = consumer.admit(request_id, tokens, params, list(blocks))
    output = consumer.step(CUDAGraphMode.FULL, promises)
    request.finish_reason = "length"
    consumer.scheduler.request_finished(request, list(blocks))
    return output.load_errors.get(request_id)


def resigned(producer: PeerEngine, params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Parameters that the producer itself might have given, but has not."""
    changed = params | changes
    return changed | {"remote_signature": sign(producer.worker._worker_half.key, from_params(changed))}


def producer_process(pipe: Any, engine_id: str, transport: str, seed: int) -> None:
    """A prefill engine in its own process, driven over a pipe: ('prefill', id, tokens, blocks) → params, ('step',), ('stop',)."""
    end_with_parent()
    engine = PeerEngine(engine_id, "kv_producer", transport=transport)
    engine.fill(seed)
    pipe.send("ready")
    while True:
        command, *arguments = pipe.recv()
        if command == "stop":
            break
        if command == "prefill":
            pipe.send(engine.prefill(*arguments))
        elif command == "resign":
            pipe.send(resigned(engine, arguments[0], **arguments[1]))
        elif command == "step":
            pipe.send(engine.step().finished_sending)
        elif command == "expected":
            pipe.send(engine.positions(*arguments))
    engine.close()


class ProducerProcess:
    def __init__(self, engine_id: str, transport: str, seed: int = 7) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, child = spawn.Pipe()
        self.process = spawn.Process(target=producer_process, args=(child, engine_id, transport, seed))
        self.process.start()
        child.close()
        assert self.pipe.recv() == "ready"

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)
            self.pipe.send(("stop",))
        self.process.join()
        self.pipe.close()
