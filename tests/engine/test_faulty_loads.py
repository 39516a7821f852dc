"""Whatever goes wrong with a load, an answer is that of an undisturbed run or an error, the others of the batch notice nothing, and every
block comes back."""

import fault_connector
import pytest
import shelf_connector
from fault_connector import LOSING, LOSSLESS
from tier_engine import GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone

from checkpoints import make_tiny_llama

PROMPTS = [[3 + number, *range(40, 40 + length)] for number, length in enumerate((30, 17, 41))]
COMPANION = list(range(100, 120))
PATIENT, IMPATIENT = 60.0, 0.3  # seconds until a load is given up


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    return run_alone(model, [*PROMPTS, COMPANION], [GREEDY] * 4)


@pytest.fixture(autouse=True)
def far_side():
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    yield shelf_connector.SHELF[-1]
    shelf_connector.SHELF.pop()
    fault_connector.FAULTS.clear()


def faulty_engine(model, mode, policy, timeout, kv_load_wait="auto"):
    connector = "fault_connector:FaultyConnector"
    options = {"cudagraph_mode": mode, "kv_load_timeout": timeout, "kv_load_wait": kv_load_wait, "num_blocks": 64}
    return open_engine(model, connector, {}, transfer={"kv_load_failure_policy": policy}, **options)


def fill_the_shelf(llm):
    llm.generate(PROMPTS, GREEDY)
    forget_local(llm)


@pytest.mark.parametrize("kv_load_wait", ["auto", "barrier"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", LOSSLESS)
def test_a_load_that_arrives_late_out_of_order_or_twice_is_a_load(model, alone, far_side, fault, mode, kv_load_wait):
    with faulty_engine(model, mode, "fail", PATIENT, kv_load_wait) as llm:
        fill_the_shelf(llm)
        fault_connector.FAULTS.extend([fault] * len(PROMPTS))
        outputs = llm.generate([*PROMPTS, COMPANION], GREEDY)
        assert [bits(output) for output in outputs] == alone
        assert far_side.num_loads == len(PROMPTS)
        assert llm.metrics()["num_failed_loads"] == 0
        drain(llm)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", LOSING)
def test_a_load_that_is_lost_is_computed_here(model, alone, fault, mode):
    with faulty_engine(model, mode, "recompute", IMPATIENT) as llm:
        fill_the_shelf(llm)
        fault_connector.FAULTS.extend(["none", fault, "none"])
        outputs = llm.generate([*PROMPTS, COMPANION], GREEDY)
        assert [bits(output) for output in outputs] == alone
        assert llm.metrics()["num_failed_loads"] >= 1
        forget_local(llm)
        assert [bits(output) for output in llm.generate([*PROMPTS, COMPANION], GREEDY)] == alone
        drain(llm)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", LOSING)
def test_a_load_that_is_lost_fails_its_request_alone_where_the_policy_says_so(model, alone, fault, mode):
    with faulty_engine(model, mode, "fail", IMPATIENT) as llm:
        fill_the_shelf(llm)
        fault_connector.FAULTS.append(fault)
        outputs = llm.generate([PROMPTS[1], COMPANION], GREEDY)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert not outputs[0].outputs[0].token_ids
        assert bits(outputs[1]) == alone[3]
        assert bits(llm.generate([PROMPTS[0]], GREEDY)[0]) == alone[0]
        drain(llm)


def test_negative_control_ends_that_are_believed_without_reading_give_another_answer(model, alone, monkeypatch):
    """The reads are skipped and reported as landed: the tests above would see it."""
    with faulty_engine(model, "FULL", "fail", PATIENT) as llm:
        fill_the_shelf(llm)
        entries = shelf_connector.SHELF[-1].entries
        for tokens in entries:
            entries[tokens] = [layer * 0 + 0x3C00 for layer in entries[tokens]]
        assert bits(llm.generate([PROMPTS[0]], GREEDY)[0]) != alone[0]
        drain(llm)
