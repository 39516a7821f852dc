"""A multi connector of children under the test's control, both halves, and its steps."""

import dataclasses

from kv_support import BLOCK_SIZE, LAYERS, Batch, Request, context, engine_config, kv_cache_config, kv_caches, scheduler_output
from multi_children import MADE

from interlock.core.config import KVTransferConfig
from interlock.core.forward_context import CUDAGraphMode
from interlock.core.step import LoadPromise
from interlock.kv_transfer.connector import KVConnectorRole, KVConnectorTransferResults
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.lifecycle import KVStepDriver
from interlock.kv_transfer.registry import create_connector

MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]


def child(name, **extra):
    return {"kv_connector": f"multi_children:{name}", "kv_connector_extra_config": extra}


def transfer_config(*children):
    return KVTransferConfig(kv_connector="MultiConnector", engine_id="engine", kv_connector_extra_config={"connectors": list(children)})


def make(role, *names):
    """`(multi, its children)`."""
    config = dataclasses.replace(engine_config(), kv_transfer_config=transfer_config(*map(child, names)))
    multi = create_connector(config, role, kv_cache_config())
    return multi, [made for made in MADE if made.role is role][-len(names) :]


class Pair:
    """Both halves, and steps through the real driver."""

    def __init__(self, *names, kv_load_wait="auto"):
        self.scheduler, self.asked = make(KVConnectorRole.SCHEDULER, *names)
        self.worker, self.working = make(KVConnectorRole.WORKER, *names)
        config = kv_cache_config()
        self.ledger = Ledger(config.num_layers, config.block_size)
        self.driver = KVStepDriver(
            self.worker,
            self.ledger,
            config,
            kv_caches(config),
            load_timeout=5.0,
            kv_load_wait=kv_load_wait,
            modes=MODES,
            synchronize=lambda: None,
        )
        self.number = 0

    def load(self, req_id, num_tokens=2 * BLOCK_SIZE, blocks=(0, 1, 2)):
        """A request whose load begins; returns it."""
        request = Request(req_id, list(range(12)), 12)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0)[0] == num_tokens
        self.scheduler.update_state_after_alloc(request, list(blocks), num_tokens)
        return request

    def step(self, promises=(), mode=CUDAGraphMode.NONE, finished=()):
        """One step with all its calls; returns the report, which the scheduler half has taken in."""
        self.number += 1
        output = scheduler_output(self.number, promises)
        output = dataclasses.replace(output, kv_connector_metadata=self.scheduler.build_connector_meta(output))
        with self.driver.begin(context(self.number, mode)) as step:
            step.pre_forward(output, Batch(), None)
            if mode is not CUDAGraphMode.FULL:
                for layer in range(len(LAYERS)):
                    step.before_layer(layer)
                    step.after_layer(layer)
            step.finish_forward()
            report = step.post_forward(frozenset(finished))
        self.scheduler.update_connector_output(report)
        return report


def recv(*req_ids, failed=()):
    return KVConnectorTransferResults(finished_recving=frozenset(req_ids) | frozenset(failed), failed_recving=frozenset(failed))


def sent(*req_ids):
    return KVConnectorTransferResults(finished_sending=frozenset(req_ids))


def promise(req_id, *blocks):
    return LoadPromise(req_id, 0, len(blocks) * BLOCK_SIZE, blocks)
