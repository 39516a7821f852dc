import itertools
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_support import run_in_thread

from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.ledger import Ledger

LAYERS, BLOCK = 2, 4


@dataclass
class Piece:
    """A range of one promise and layer that is read as one transfer, and what becomes of it."""

    req_id: str
    layer: int
    start: int
    stop: int
    fate: str


@dataclass
class Plan:
    promises: list[LoadPromise] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


@st.composite
def plans(draw):
    """Promises cut into transfers, each of which lands, fails, never ends, or is never issued."""
    plan = Plan()
    next_block = 0
    for index in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 9))
        stop = start + draw(st.integers(1, 9))
        count = (stop - 1) // BLOCK - start // BLOCK + 1
        plan.promises.append(LoadPromise(f"r{index}", start, stop, tuple(range(next_block, next_block + count))))
        next_block += count
        for layer in range(LAYERS):
            cuts = sorted(draw(st.sets(st.integers(start + 1, stop - 1), max_size=2))) if stop - start > 1 else []
            bounds = [start, *cuts, stop]
            for a, b in itertools.pairwise(bounds):
                fate = draw(st.sampled_from(["lands", "lands", "lands", "fails", "never ends", "never issued"]))
                plan.pieces.append(Piece(f"r{index}", layer, a, b, fate))
    return plan


def first_invalid(plan, promise):
    """By the model: the first promised position that not every layer has landed."""
    bad = [piece.start for piece in plan.pieces if piece.req_id == promise.req_id and piece.fate != "lands"]
    return min(bad, default=None)


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_the_verdict_is_what_landed_whatever_the_order_and_the_noise(plan, random):
    clock = VirtualClock()
    told = []
    ledger = Ledger(LAYERS, BLOCK, clock, on_layer_landed=lambda layer, step, error: told.append((layer, step, error)))
    ledger.open_step(5, plan.promises, timeout=1.0)
    reports = []
    issued = [piece for piece in plan.pieces if piece.fate != "never issued"]
    random.shuffle(issued)
    for piece in issued:
        transfer = ledger.begin_transfer(5, piece.req_id, piece.layer, piece.start, piece.stop)
        if piece.fate != "never ends":
            error = "broken" if piece.fate == "fails" else None
            reports += [(transfer, error)] * random.choice([1, 1, 2])
    noise = [(10**6, None), (0, None), (-3, "x")]
    events = reports + noise
    random.shuffle(events)
    accepted = sum(ledger.end_transfer(*event) for event in events)
    ended = len({transfer for transfer, _ in reports})
    assert accepted == ended
    assert ledger.counters.unknown == len(noise)
    assert ledger.counters.duplicate == len(reports) - ended

    ends = {layer: all(p.fate in ("lands", "fails") for p in plan.pieces if p.layer == layer) for layer in range(LAYERS)}
    assert {layer for layer, _, _ in told} == {layer for layer, ended in ends.items() if ended}
    clock.advance(1.0)
    landed = {layer: all(p.fate == "lands" for p in plan.pieces if p.layer == layer) for layer in range(LAYERS)}
    for layer in range(LAYERS):
        assert ledger.wait_layer(5, layer) == landed[layer]
    assert sorted(told) == [(layer, 5, not landed[layer]) for layer in range(LAYERS)]

    verdict = ledger.close_step(5)
    failures = {failure.req_id: failure for failure in verdict.failures}
    for promise in plan.promises:
        expected = first_invalid(plan, promise)
        failure = failures.get(promise.req_id)
        if expected is None:
            assert failure is None
        else:
            assert failure is not None
            assert failure.first_invalid_position == expected
            assert failure.block_ids == promise.block_ids[expected // BLOCK - promise.start // BLOCK :]
            assert failure.cause
    late = [transfer for transfer, _ in reports]
    assert not any(ledger.end_transfer(transfer) for transfer in late)


@given(st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_timelines_advance_in_the_order_of_the_steps(random):
    told = []
    ledger = Ledger(1, BLOCK, VirtualClock(), on_layer_landed=lambda layer, step, error: told.append(step))
    transfers = []
    for step in range(1, 5):
        ledger.open_step(step, [LoadPromise("r", 0, 4, (step,))], timeout=1.0)
        transfers.append(ledger.begin_transfer(step, "r", 0, 0, 4))
    random.shuffle(transfers)
    for count, transfer in enumerate(transfers, 1):
        ledger.end_transfer(transfer)
        ended = set(transfers[:count])
        assert told == [step for step in range(1, 5) if all(t in ended for t in sorted(transfers)[:step])]
    assert told == [1, 2, 3, 4]


def test_reports_from_many_threads_are_each_counted_once():
    ledger = Ledger(1, BLOCK)
    ledger.open_step(1, [LoadPromise("r", 0, 400, tuple(range(100)))], timeout=60.0)
    transfers = [ledger.begin_transfer(1, "r", 0, i, i + 1) for i in range(400)]
    start = threading.Barrier(4)

    def report():
        start.wait()
        return sum(ledger.end_transfer(transfer) for transfer in transfers)

    threads = [run_in_thread(report) for _ in range(4)]
    assert ledger.wait_step(1)
    for thread, _ in threads:
        thread.join()
    assert sum(results[0] for _, results in threads) == 400
    assert not ledger.close_step(1).failures


def test_nothing_landed_before_the_deadline_becomes_permission_after_it():
    clock = VirtualClock()
    ledger = Ledger(1, BLOCK, clock)
    ledger.open_step(1, [LoadPromise("r", 0, 4, (0,))], timeout=3.0)
    transfer = ledger.begin_transfer(1, "r", 0, 0, 4)
    thread, result = run_in_thread(lambda: ledger.wait_step(1))
    clock.wait_for_waiters(1)
    clock.advance(3.0)
    thread.join()
    assert result == [False]
    assert not ledger.end_transfer(transfer)
    assert not ledger.wait_step(1)
    failure = ledger.close_step(1).failures[0]
    assert failure.block_ids == (0,)
    assert "3 s" in failure.cause


def test_a_promise_that_is_given_up_ends_at_once():
    ledger = Ledger(LAYERS, BLOCK, VirtualClock())
    ledger.open_step(1, [LoadPromise("a", 0, 4, (0,)), LoadPromise("b", 0, 4, (1,))], timeout=1.0)
    for layer in range(LAYERS):
        ledger.end_transfer(ledger.begin_transfer(1, "b", layer, 0, 4))
    ledger.fail_promise(1, "a", "the peer refused")
    assert not ledger.wait_step(1)
    verdict = ledger.close_step(1)
    assert verdict.invalid_block_ids == {0}
    assert "the peer refused" in verdict.load_errors["a"]
    assert verdict.landed_positions == 4 * LAYERS


def test_at_its_deadline_and_not_before_a_step_gives_up_on_what_is_outstanding():
    clock = VirtualClock()
    ledger = Ledger(LAYERS, BLOCK, clock)
    for step in (1, 2):
        ledger.open_step(step, [LoadPromise("a", 0, 4, (step,))], timeout=3.0)
        ledger.end_transfer(ledger.begin_transfer(step, "a", 0, 0, 4))
    ledger.end_transfer(ledger.begin_transfer(2, "a", 1, 0, 4))
    clock.advance(2.9)
    assert not ledger.expire_if_due(1)
    clock.advance(0.1)
    assert ledger.expire_if_due(1)
    assert ledger.expire_if_due(1)
    assert not ledger.expire_if_due(2)
    assert ledger.close_step(1).invalid_block_ids == {1}
    assert not ledger.close_step(2).invalid_block_ids


def test_what_a_step_may_still_write_is_what_its_own_reads_may():
    ledger = Ledger(1, BLOCK, VirtualClock())
    transfers = {}
    for step in (1, 2):
        ledger.open_step(step, [LoadPromise("a", 0, 4, (step,))], timeout=1.0)
        transfers[step] = ledger.begin_transfer(step, "a", 0, 0, 4)
    assert [ledger.unfinished_block_ids(step) for step in (1, 2)] == [{1}, {2}]
    ledger.end_transfer(transfers[1])
    assert [ledger.unfinished_block_ids(step) for step in (1, 2)] == [set(), {2}]


def test_a_layer_that_nobody_waited_for_counts_as_not_landed_although_it_was_reported():
    ledger = Ledger(LAYERS, BLOCK, VirtualClock())
    ledger.open_step(1, [LoadPromise("a", 0, 8, (0, 1))], timeout=1.0)
    for layer in range(LAYERS):
        ledger.end_transfer(ledger.begin_transfer(1, "a", layer, 0, 8))
    ledger.fail_layer(1, 1, "it ran without waiting")
    verdict = ledger.close_step(1)
    assert verdict.load_errors == {"a": "layer 1, position 0: it ran without waiting"}
    assert verdict.invalid_block_ids == {0, 1}
    assert verdict.landed_positions == 8


def test_of_several_blocks_that_are_named_the_first_counts():
    ledger = Ledger(LAYERS, BLOCK, VirtualClock())
    ledger.open_step(1, [LoadPromise("a", 2, 14, (0, 1, 2, 3))], timeout=1.0)
    for layer in range(LAYERS):
        ledger.end_transfer(ledger.begin_transfer(1, "a", layer, 2, 14))
    ledger.retract_blocks(1, {1, 3}, "it could not be loaded")
    verdict = ledger.close_step(1)
    assert verdict.load_errors == {"a": "layer 0, position 4: it could not be loaded"}
    assert verdict.invalid_block_ids == {1, 2, 3}
    assert verdict.landed_positions == 2 * LAYERS


def test_the_first_cause_is_the_one_that_is_told():
    ledger = Ledger(1, BLOCK, VirtualClock())
    ledger.open_step(1, [LoadPromise("a", 0, 8, (0, 1))], timeout=1.0)
    for start, cause in ((0, "the connection was lost"), (4, "it was stopped")):
        ledger.end_transfer(ledger.begin_transfer(1, "a", 0, start, start + 4), cause)
    ledger.fail_promise(1, "a", "the peer refused")
    ledger.retract_blocks(1, {0}, "it could not be loaded")
    assert ledger.close_step(1).load_errors == {"a": "layer 0, position 0: the connection was lost"}


def test_a_zero_length_promise_needs_nothing():
    ledger = Ledger(1, BLOCK, VirtualClock())
    ledger.open_step(1, [LoadPromise("a", 4, 4, ())], timeout=1.0)
    assert ledger.wait_step(1)
    assert not ledger.close_step(1).failures


class TestMisuse:
    def test_stamps_only_grow(self):
        ledger = Ledger(1, BLOCK)
        ledger.open_step(3, [], 1.0)
        ledger.close_step(3)
        with pytest.raises(KVTransferError, match="only grow"):
            ledger.open_step(3, [], 1.0)

    def test_promises_that_make_no_sense_are_refused(self):
        ledger = Ledger(1, BLOCK)
        for promise, named in (
            (LoadPromise("a", 5, 4, ()), "start <= stop"),
            (LoadPromise("a", 0, 9, (0, 1)), "3 blocks"),
        ):
            with pytest.raises(KVTransferError, match=named):
                ledger.open_step(1, [promise], 1.0)
        with pytest.raises(KVTransferError, match="two load promises"):
            ledger.open_step(1, [LoadPromise("a", 0, 4, (0,)), LoadPromise("a", 4, 8, (1,))], 1.0)

    def test_reads_that_were_not_promised_are_refused(self):
        ledger = Ledger(1, BLOCK)
        with pytest.raises(KVTransferError, match="not open"):
            ledger.begin_transfer(1, "a", 0, 0, 4)
        ledger.open_step(1, [LoadPromise("a", 2, 8, (0, 1))], 1.0)
        for arguments in (("b", 0, 2, 8), ("a", 1, 2, 8), ("a", 0, 0, 8), ("a", 0, 2, 9), ("a", 0, 4, 4)):
            with pytest.raises(KVTransferError):
                ledger.begin_transfer(1, *arguments)
        ledger.begin_transfer(1, "a", 0, 2, 5)
        with pytest.raises(KVTransferError, match="twice"):
            ledger.begin_transfer(1, "a", 0, 4, 8)
