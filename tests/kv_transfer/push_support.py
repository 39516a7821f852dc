"""Both legs of a WRITE hand-off, played by the test step by step."""

import threading

import numpy as np
from kv_support import LAYERS, Request
from peer_support import PeerEngine

from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.connectors.peer import PeerConnector

TOKENS = list(range(100, 113))
BLOCKS, OURS = [5, 2, 7, 4], [1, 6, 3, 8]
GATED = float("inf")  # as max_sync_load_seconds: pushes are consumed by the step, at its gates


class Prefill:
    """A request that the producer computes, step by step, with its KV written layer by layer by the test."""

    def __init__(self, engine: PeerEngine, transfer_id: str = "tx", tokens=TOKENS, blocks=BLOCKS, request_id: str | None = None):
        if not engine.steps:
            engine.step()
        self.engine, self.transfer_id = engine, transfer_id
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        self.request = Request(request_id or f"p-{transfer_id}", list(tokens), len(tokens), 0, params, None, list(blocks))
        engine.scheduler.on_new_request(self.request)
        self.kv = None

    def begin(self, count):
        """A step that computes `count` tokens is launched; nothing of it is written yet."""
        self.kv = self.engine.begin_step(CUDAGraphMode.NONE, scheduled={self.request.request_id: (self.request.num_computed_tokens, count)})
        self.count = count

    def write(self, layer):
        """The running step has written a layer."""
        self.engine.written.advance(layer, self.engine.steps)

    def end(self):
        output = self.engine.end_step(self.kv)
        self.engine.scheduler.update_connector_output(output)
        self.request.num_computed_tokens += self.count
        return output

    def chunk(self, count):
        self.begin(count)
        for layer in range(len(LAYERS)):
            self.write(layer)
        return self.end()

    def finish(self, reason="length"):
        self.request.finish_reason = reason
        keep, params = self.engine.scheduler.request_finished(self.request, self.request.block_ids)
        self.engine.step()
        return keep, params

    def wait_end(self):
        """The consumer has said that it needs the blocks no longer."""
        ended = frozenset()
        while self.request.request_id not in ended:
            ended = self.engine.step().finished_sending


def decode_params(producer, transfer_id="tx"):
    host, port = producer.worker._worker_half._transport.host, producer.worker._worker_half._transport.port
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": producer.worker.kv_transfer_config.engine_id,
        "remote_host": host,
        "remote_port": port,
    }


def wait_received(consumer, request_id="d"):
    """Steps, as an engine makes them while a request waits for its KV; the results."""
    while True:
        output = consumer.step()
        if request_id in output.finished_recving:
            return output


def park(consumer, params, tokens=TOKENS, num_computed=0, blocks=OURS, request_id="d"):
    request = Request(request_id, list(tokens), len(tokens), num_computed, params, None, list(blocks))
    consumer.scheduler.on_new_request(request)
    matched, is_async = consumer.scheduler.get_num_new_matched_tokens(request, num_computed)
    assert is_async
    consumer.scheduler.update_state_after_alloc(request, blocks, matched)
    return request


def assert_handed_over(producer, consumer, start=0, stop=12):
    assert np.array_equal(consumer.positions(OURS, start, stop), producer.positions(BLOCKS, start, stop))


def wait_for(condition):
    done = threading.Event()
    while not condition():
        done.wait(0.001)


class OnVirtualTime(PeerConnector):
    """A connector whose clock the test moves."""
