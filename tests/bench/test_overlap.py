"""The overlap benchmark on a tiny model: it waits for what it says it waits for, and every way gives the same bits."""

import numpy as np
import pytest

from checkpoints import make_tiny_llama
from interlock.bench import overlap
from interlock.bench.measure import compare
from interlock.bench.overlap import BATCH, GATES, RATIOS, WAYS, Point, figures, measure
from interlock.bench.overlap_plot import write_plot
from interlock.bench.overlap_step import LOADING, Batch, RepeatedStep, Way
from interlock.bench.paced_connector import Pacer
from interlock.core.errors import ConfigError, InterlockError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.ledger import Ledger
from interlock.runner.input_batch import PreparedBatch

NUM_LAYERS = 3
SMALL = Batch(loaded=37, computed=4, others=(5, 9))
LOAD_SECONDS = 0.003


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=NUM_LAYERS)


def open_step(model: str, way: Way) -> RepeatedStep:
    return RepeatedStep(model, 2, way, SMALL, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def steps(model):
    opened = [open_step(model, way) for way in WAYS]
    yield opened
    for step in opened:
        step.close()


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_a_step_gives_the_same_bits_again_and_again_in_every_way_with_a_load_and_without(steps, number):
    reference = steps[0].run()
    answers = [steps[number].run(seconds) for seconds in (None, LOAD_SECONDS, LOAD_SECONDS, None, 0.0)]
    assert all(answer.same_bits(reference) for answer in answers)
    assert set(reference.tokens) == {LOADING, "other-0", "other-1"}
    assert reference.logits.shape[0] == 3
    assert answers[1].seconds >= LOAD_SECONDS


def test_negative_control_a_step_that_does_not_wait_is_found_out(model, monkeypatch):
    step = open_step(model, GATES)
    try:
        monkeypatch.setattr(PreparedBatch, "arm_gates", lambda batch: None)
        with pytest.raises(InterlockError, match=r"FULL, gates: .*(did not wait|load failed)"):
            step.run(0.5)
    finally:
        step.close()


def test_a_way_that_gives_other_bits_ends_the_measurement(steps, monkeypatch):
    run = RepeatedStep.run

    def flip_a_bit(step, load_seconds=None):
        answer = run(step, load_seconds)
        if step.way is WAYS[2] and load_seconds:
            answer.logits[1, 7] ^= 1
        return answer

    monkeypatch.setattr(RepeatedStep, "run", flip_a_bit)
    with pytest.raises(InterlockError, match="eager, hooks: a step gave other tokens or other logits"):
        measure(steps, 1, ratios=(1.0,))


def test_the_measurement_has_every_way_at_every_ratio(steps, monkeypatch):
    monkeypatch.setattr(overlap, "_TURNS", 1)
    points = measure(steps, 2, ratios=(0.5, 2.0))
    assert [point.load_to_compute for point in points] == [0.5, 2.0]
    for point in points:
        assert point.num_layers == NUM_LAYERS
        assert list(point.steps) == [way.name for way in WAYS]
        assert {len(samples) for samples in point.steps.values()} == {2}
        assert set(point.stalls) == set(point.steps)
        assert min(min(samples) for samples in point.steps.values()) >= point.load


def point(ratio: float) -> Point:
    load = 10.0 * ratio
    steps = {way.name: (load + number, load + number + 5.0, load + number + 1.0) for number, way in enumerate(WAYS, start=1)}
    return Point(ratio, 5, load, (9.0, 10.0, 11.0), steps, {way.name: 20.0 + load for way in WAYS})


@pytest.mark.parametrize(("load", "bound"), [(2.5, 10.5), (10.0, 12.0), (20.0, 22.0)])
def test_the_bound_is_that_of_a_pipeline_over_layers(load, bound):
    assert Point(load / 10, 5, load, (10.0,), {}, {}).bound == bound


def test_the_promises_are_of_the_gates():
    found = figures(point(1.0))
    gates, *_, pair = found
    assert (gates.name, gates.value, gates.peer_value, gates.bound) == ("T/C = 1: FULL, gates", 12.0, 12.0, 1.1)
    assert gates.met is True
    assert [figure.bound for figure in found] == [1.1, None, None, None, 1.02]
    assert (pair.value, pair.peer, pair.peer_value, pair.met) == (12.0, "PIECEWISE, hooks", 13.0, True)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_shows_every_way(tmp_path, suffix):
    path = tmp_path / "deep" / f"plot{suffix}"
    write_plot(path, [figure for ratio in RATIOS for figure in figures(point(ratio))])
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        assert all(way.name in written.decode() for way in WAYS)


def test_a_plot_that_cannot_be_made_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"plot.jpg.*\.png or \.svg"):
        write_plot(tmp_path / "plot.jpg", [])
    with pytest.raises(ConfigError, match="'overlap', which was not run"):
        write_plot(tmp_path / "plot.png", [compare("x", "s", {"ours": (1.0,)})])


def test_layers_are_reported_in_order_each_at_its_share_of_the_load_time():
    due: list[int] = []
    landed: list[int] = []
    ledger = Ledger(4, 8, on_layer_landed=lambda layer, step, error: landed.append(layer))
    ledger.open_step(1, [LoadPromise("r", 0, 8, (0,))], 60.0)
    pacer = Pacer(due.append)
    try:
        pacer.submit(1, 0.4, ledger, [[ledger.begin_transfer(1, "r", layer, 0, 8)] for layer in range(4)])
        assert ledger.wait_step(1)
    finally:
        pacer.close()
    assert landed == [0, 1, 2, 3]
    np.testing.assert_array_equal(np.diff(due), [100_000_000] * 3)
    assert ledger.close_step(1).failures == ()


def test_an_aborted_load_reports_nothing_more():
    ledger = Ledger(2, 8)
    ledger.open_step(1, [LoadPromise("r", 0, 8, (0,))], 60.0)
    pacer = Pacer(lambda deadline: pacer.abort(1))
    try:
        pacer.submit(1, 0.0, ledger, [[ledger.begin_transfer(1, "r", layer, 0, 8)] for layer in range(2)])
    finally:
        pacer.close()
    assert ledger.unfinished_block_ids(1) == {0}


def test_the_step_is_a_mixed_batch_of_eight_rows():
    rows = BATCH.rows(49152)
    assert [row.count for row in rows.values()] == [BATCH.computed, 1, 1, 1, 1, 1, 1, 1]
    assert rows[LOADING].behind == BATCH.loaded


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_decode_batch_can_be_repeated_too(model, way):
    step = RepeatedStep(model, 1, way, Batch(loaded=20, others=(5,)), kv_cache_memory_bytes=1 << 20)
    try:
        assert step.run(LOAD_SECONDS).same_bits(step.run())
    finally:
        step.close()


def test_a_pool_that_is_too_small_is_an_error_that_says_so(model):
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        RepeatedStep(model, 1, GATES, SMALL, kv_cache_memory_bytes=24_576, max_num_batched_tokens=16, max_model_len=41)
