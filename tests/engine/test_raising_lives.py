"""Long random lives of an engine whose connector raises now and then, before or after it has done its work, with two steps in flight."""

import dataclasses
import random

import pytest
from engine_fakes import FakeConnector, Harness
from test_scheduler_properties import act_out, random_actions

METHODS = [
    "build_connector_meta",
    "get_num_new_matched_tokens",
    "has_pending_push_work",
    "on_new_request",
    "request_finished",
    "request_preempted",
    "update_connector_output",
    "update_state_after_alloc",
]


class RaisingFake(FakeConnector):
    """Raises in its scheduler half at `rate`; `refused` are the loads that it has never heard of."""

    def start_raising(self, rate, seed):
        self.rate, self.rng, self.refused = rate, random.Random(seed), set()

    def load_promises(self, runner, output):
        for promise in output.load_promises:
            if promise.void or output.connector_fault:
                self._invalid.update(promise.block_ids)
            else:
                self._load(runner, promise, self.offers[promise.req_id])

    def report(self, runner, output):
        report = super().report(runner, output)
        return dataclasses.replace(report, fault=output.connector_fault, num_connector_faults=int(output.connector_fault is not None))


def raising(name):
    method = getattr(FakeConnector, name)

    def call(self, *arguments):
        chance = self.rng.random()
        if chance < self.rate / 2:
            if name == "update_state_after_alloc":
                self.refused.add(arguments[0].request_id)
            raise ValueError("before")
        answer = method(self, *arguments)
        if chance < self.rate and name != "request_finished":  # who keeps blocks and does not say so has let them go
            raise ValueError("after")
        return answer

    return call


for name in METHODS:
    setattr(RaisingFake, name, raising(name))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_raised_nobody_starves_no_output_changes_and_only_loads_that_nobody_names_keep_blocks(seed):
    rng = random.Random(seed)
    actions, size, policy, depth = list(random_actions(rng)), rng.choice([1, 2, 4]), rng.choice(["recompute", "fail"]), rng.randint(1, 2)
    connector = RaisingFake(keep={})
    connector.start_raising(rng.choice([0.02, 0.1, 0.4]), seed)
    h = Harness(
        num_blocks=rng.randint(4, 12) * 4 // size,
        connector=connector,
        policy=policy,
        max_model_len=30,
        eos=0,
        max_num_batched_tokens=rng.randint(3, 12),
        max_num_seqs=rng.randint(1, 3),
        enable_prefix_caching=rng.random() < 0.7,
        block_size=size,
        kv_load_timeout=5.0,
        kv_async_load_timeout=20.0,
    )
    expected = act_out(h, actions, depth, 200, lambda tokens: (len(tokens) + 60) * 4)
    connector.rate = 0
    for _ in range(2):  # what is in doubt ends with a step in which all goes well
        h.step()
    assert set(h.done) == set(expected)
    for req_id, request in h.done.items():
        assert h.output_of(req_id) == expected[req_id][: request.num_output_tokens]
        if request.finish_reason == "error":
            assert policy == "fail" or "on_new_request raised" in request.error or "needs" in request.error
        elif request.finish_reason != "abort":
            assert h.output_of(req_id) == expected[req_id]
    audit = h.pool.audit()
    assert audit.clean
    assert audit.free + audit.quarantined == audit.num_blocks
    holders = {owner for block_id in range(audit.num_blocks) for owner in h.pool.owners(block_id)}
    assert holders <= {f"load {req_id}" for req_id in connector.refused}
