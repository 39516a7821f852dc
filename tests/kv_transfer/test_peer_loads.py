"""The consumer's loads by reading and by pushes: to whom they are given, when they are given up, and how their ends are told."""

from types import SimpleNamespace

import pytest

from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors import peer_worker
from interlock.kv_transfer.connectors.peer_messages import PeerLoad, PeerMetadata
from interlock.kv_transfer.connectors.peer_worker import ABORT_SECONDS, ConsumerWorker
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.transports.copy_worker import PoolShape

LAYERS = range(2)
TIMEOUT = 5.0
PULL, PUSH = SimpleNamespace(push=False), SimpleNamespace(push=True)


class Worker:
    """Stands in for what reads, or for what takes in pushes. targets: by request, of what it was given."""

    bytes_per_second = None

    def __init__(self, name):
        self.name, self.jobs, self.given_up, self.aborted, self.targets = name, [], [], [], {}

    def submit(self, job, *push):
        if push:
            promise, _, target = push
            self.jobs.append((job, [promise.req_id]))
            self.targets[promise.req_id] = target
        else:
            self.jobs.append((job.key, [read.promise.req_id for read in job.reads]))
            self.targets.update((read.promise.req_id, read.target) for read in job.reads)

    def give_up(self, key):
        self.given_up.append(key)

    def abort(self, key, timeout, on_late):
        self.aborted.append((key, timeout))
        self.on_late = on_late

    def close(self): ...

    def end(self, req_id, error=None):
        for layer in LAYERS:
            self.targets[req_id].end_layer(layer, error)


class Consumer:
    def __init__(self, monkeypatch):
        made = []
        monkeypatch.setattr(peer_worker, "CopyWorker", lambda pools, clock, shape, name: made.append(Worker(name)) or made[-1])
        self.clock, self.ledger, self.told = VirtualClock(), Ledger(len(LAYERS), 4), []
        self.pushes = Worker("pushes")
        pools = SimpleNamespace(keep=lambda reference: self.note("keep", reference), done=lambda reference: self.note("done", reference))
        self.worker = ConsumerWorker(pools, self.pushes, self.clock, PoolShape([0, 64], 4, 1, 1), TIMEOUT)
        self.reads, self.parked_reads = made

    def note(self, *what):
        self.told.append(what)

    def start(self, *loads, step=1):
        self.ledger.open_step(step, [load.promise for load in loads if not load.parked], 10.0)
        self.worker.start(step, loads, self.ledger)

    def bind(self, **metadata):
        self.worker.bind(PeerMetadata(**metadata))

    def ends(self):
        results = self.worker.take_results()
        return set(results.finished_recving), dict(results.recving_errors)


@pytest.fixture
def consumer(monkeypatch):
    return Consumer(monkeypatch)


def load(req_id, reference=PULL, **options):
    return PeerLoad(LoadPromise(req_id, 0, 4, (len(req_id),)), reference, **options)


def test_each_load_is_given_to_who_makes_it(consumer):
    pulled = [load("a"), load("bb"), load("parked-a", parked=True), load("parked-b", parked=True)]
    consumer.start(*pulled, load("push", PUSH), load("parked-push", PUSH, parked=True))
    assert consumer.reads.jobs == [(1, ["a", "bb"])]
    assert consumer.parked_reads.jobs == [("parked-a", ["parked-a"]), ("parked-b", ["parked-b"])]
    assert consumer.pushes.jobs == [(1, ["push"]), ("parked-push", ["parked-push"])]


@pytest.mark.parametrize("reference", [PULL, PUSH], ids=["pull", "push"])
def test_a_load_that_must_not_be_made_fails_at_once_with_its_cause(consumer, reference):
    consumer.start(load("a", reference, void="it was used before"), load("parked", reference, void="it was used before", parked=True))
    assert consumer.reads.jobs == consumer.parked_reads.jobs == consumer.pushes.jobs == []
    assert consumer.ledger.close_step(1).load_errors == {"a": "layer 0, position 0: it was used before"}
    assert consumer.ends() == ({"parked"}, {"parked": "it was used before"})


def test_references_are_kept_and_given_back(consumer):
    consumer.bind(kept=(PULL,), released=(PUSH,))
    assert consumer.told == [("keep", PULL), ("done", PUSH)]


def test_a_load_that_nobody_waits_for_any_more_is_given_up(consumer):
    consumer.start(load("parked", parked=True), load("push", PUSH, parked=True))
    consumer.bind(cancelled=("parked", "push"))
    for worker in (consumer.parked_reads, consumer.pushes):
        assert set(worker.given_up) == {"parked", "push"}, "whoever makes it"
    assert consumer.ends() == (set(), {}), "it ends when nothing is written any more"


def test_a_load_that_a_request_waits_for_is_given_up_at_its_deadline(consumer):
    consumer.start(load("parked", parked=True), load("push", PUSH, parked=True), load("early", parked=True))
    consumer.parked_reads.end("early")
    assert consumer.ends() == ({"early"}, {})
    consumer.clock.advance(TIMEOUT - 0.1)
    consumer.bind()
    assert consumer.parked_reads.given_up == consumer.pushes.given_up == []
    consumer.clock.advance(0.1)
    consumer.bind()
    for worker in (consumer.parked_reads, consumer.pushes):
        assert worker.given_up == ["parked", "push"]


def test_the_end_of_a_load_is_told_once_with_its_cause(consumer):
    consumer.start(load("a", parked=True), load("bb", PUSH, parked=True))
    consumer.parked_reads.targets["a"].end_layer(0)
    assert consumer.ends() == (set(), {})
    consumer.parked_reads.targets["a"].end_layer(1)
    consumer.pushes.end("bb", "it was lost")
    assert consumer.ends() == ({"a", "bb"}, {"bb": "it was lost"})
    assert consumer.ends() == (set(), {})


def test_loads_of_a_step_are_given_up_together_and_those_that_do_not_stop_are_named_later(consumer):
    consumer.start(load("a"), load("push", PUSH), load("parked", parked=True))
    consumer.worker.abort(1)
    for worker in (consumer.reads, consumer.pushes):
        assert worker.aborted == [(1, ABORT_SECONDS)]
    assert consumer.parked_reads.aborted == []
    assert consumer.ends() == (set(), {})
    consumer.reads.on_late(["a"])
    consumer.pushes.on_late(["push"])
    assert consumer.ends() == ({"a", "push"}, {})
    assert consumer.ends() == (set(), {})


def test_a_reference_is_free_when_the_step_that_loads_it_has_ended_or_its_end_was_told(consumer):
    consumer.start(load("a"), load("parked", parked=True))
    assert consumer.worker.take_ended() == {"a"}
    consumer.parked_reads.end("parked")
    assert consumer.worker.take_ended() == set()
    consumer.ends()
    assert consumer.worker.take_ended() == {"parked"}
    assert consumer.worker.take_ended() == set()
