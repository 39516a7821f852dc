"""A step that fails, or is interrupted, while its loads are in flight keeps their blocks until nothing can write them any more."""

import held_connector
import pytest
import shelf_connector
from raising_connector import FAULTS, arm
from tier_engine import GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone

from checkpoints import make_tiny_llama
from interlock.engine.block_manager import BlockManager
from interlock.engine.load_reports import LoadReports
from interlock.runner.input_batch import InputBatch

PROMPT = [3, *range(40, 70)]
OTHER = [4, *range(80, 180)]
SMALL = [5, *range(80, 150)]  # it fits beside PROMPT
NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    return run_alone(model, [PROMPT, OTHER, SMALL], [GREEDY] * 3)


@pytest.fixture(autouse=True)
def far():
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    held_connector.FAR.append(held_connector.Far())
    yield held_connector.FAR[-1]
    held_connector.FAR.pop().land_all()
    shelf_connector.SHELF.pop()
    FAULTS.clear()


def open_held(model, mode="FULL", timeout=60.0):
    options = {"cudagraph_mode": mode, "kv_load_timeout": timeout, "enable_prefix_caching": False}
    return open_engine(model, "held_connector:HeldConnector", {}, NUM_BLOCKS, {"kv_load_failure_policy": "fail"}, **options)


def fail_in_a_kernel(llm, monkeypatch):
    """PROMPT's step faults in layer 0, while its load of the last layer is held. The replay skips the gate that it would wait at."""
    prepare = InputBatch.prepare

    def break_slots(self, output):
        batch = prepare(self, output)
        if output.load_promises:
            batch.slot.slot_mapping[0] = 10**9
        return batch

    monkeypatch.setattr(InputBatch, "prepare", break_slots)
    (output,) = llm.generate([PROMPT], GREEDY)
    monkeypatch.setattr(InputBatch, "prepare", prepare)
    assert output.outputs[0].finish_reason == "error"


def interrupt(llm, far):
    """Ctrl-C while PROMPT's step waits for the held layer."""
    far.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], GREEDY)


def meet_the_late_write(llm, far, prompt):
    """`prompt` needs nearly all blocks; the held layer of PROMPT lands while it is computed. Its bits."""
    stream = llm.stream([prompt], GREEDY)
    next(stream)
    far.land_all()
    return bits(list(stream)[-1].output)


@pytest.mark.parametrize("how", [(mode, "interrupt") for mode in MODES] + [("FULL", "fault")])
def test_blocks_of_loads_in_flight_outlive_the_step_that_failed(model, alone, far, monkeypatch, how):
    mode, way = how
    with open_held(model, mode) as llm:
        shelf_connector.SHELF[-1].entries = fill(llm)
        fail_in_a_kernel(llm, monkeypatch) if way == "fault" else interrupt(llm, far)
        assert far.reached.is_set()
        assert not far.may_land.is_set()
        audit = llm.audit()
        assert audit.clean
        assert audit.quarantined == len(PROMPT) // 8 + (len(PROMPT) % 8 > 1)
        assert meet_the_late_write(llm, far, SMALL) == alone[2]
        drain(llm)
        assert bits(llm.generate([OTHER], GREEDY)[0]) == alone[1]
        drain(llm)


@pytest.mark.parametrize("way", ["interrupt", "fault"])
def test_negative_control_blocks_that_are_given_back_at_once_are_overwritten(model, alone, far, monkeypatch, way):
    monkeypatch.setattr(LoadReports, "hold_pending", lambda self, output, pending_block_ids: None)
    with open_held(model) as llm:
        shelf_connector.SHELF[-1].entries = fill(llm)
        fail_in_a_kernel(llm, monkeypatch) if way == "fault" else interrupt(llm, far)
        assert meet_the_late_write(llm, far, SMALL) != alone[2]


def fill(llm):
    """The shelf's entries once PROMPT is on it."""
    llm.generate([PROMPT], GREEDY)
    forget_local(llm)
    return {tokens: kv for tokens, kv in shelf_connector.SHELF[-1].entries.items() if tokens[: len(PROMPT)] == tuple(PROMPT)}


def order_a_load_that_comes_a_step_late(model):
    """The metadata of the step that PROMPT's load belongs to cannot be built; the connector orders the load with the next step, when
    PROMPT has ended, and OTHER takes its blocks for its second chunk. Both outputs."""
    transfer = {"kv_load_failure_policy": "fail"}
    with open_engine(model, "raising_connector:RaisingShelf", {}, 40, transfer, cudagraph_mode="NONE") as llm:
        shelf_connector.SHELF[-1].entries = fill(llm)
        arm("build_connector_meta", "before")
        outputs = llm.generate([PROMPT, OTHER], GREEDY)
        drain(llm)
    return outputs


def test_blocks_of_a_load_that_may_still_be_ordered_are_not_given_to_others(model, alone):
    first, second = order_a_load_that_comes_a_step_late(model)
    assert "RaisingShelf.build_connector_meta raised ValueError: naive" in first.error
    assert bits(second) == alone[1]


def test_negative_control_without_the_doubt_a_load_that_comes_late_writes_into_another_request(model, alone, monkeypatch):
    monkeypatch.setattr(BlockManager, "hold_in_doubt", lambda self, step, block_ids: None)
    _, second = order_a_load_that_comes_a_step_late(model)
    assert bits(second) != alone[1]
