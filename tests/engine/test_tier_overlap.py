"""A step computes its first layer while the tiers still bring the second one, for all of its requests at once."""

import pytest
from tier_engine import BLOCK_BYTES, GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone
from tier_puppets import Overlap

from checkpoints import make_tiny_llama

PROMPTS = [[3 + number, *range(40, 40 + length)] for number, length in enumerate((35, 19, 43))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("tier_overlap"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    return run_alone(model, PROMPTS, [GREEDY] * len(PROMPTS))


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("kv_load_wait", ["auto", "barrier"])
@pytest.mark.parametrize("tier", ["WatchedOffload", "WatchedStorage"])
def test_the_first_layer_is_computed_before_the_second_has_landed_unless_there_is_a_barrier(
    model, alone, tmp_path, tier, kv_load_wait, cudagraph_mode
):
    extra = {"cpu_bytes": 40 * BLOCK_BYTES} if tier == "WatchedOffload" else {"path": str(tmp_path)}
    extra |= {"async_load_bytes": 1 << 30}
    options = {"num_blocks": 40, "cudagraph_mode": cudagraph_mode, "kv_load_wait": kv_load_wait}
    if tier == "WatchedStorage":  # what an engine has saved is in its files when it has closed
        with open_engine(model, f"tier_puppets:{tier}", extra, **options) as llm:
            llm.generate(PROMPTS, GREEDY)
    with open_engine(model, f"tier_puppets:{tier}", extra, **options) as llm:
        if tier == "WatchedOffload":
            llm.generate(PROMPTS, GREEDY)
            forget_local(llm)
        overlaps = kv_load_wait == "auto"
        Overlap.watch(llm.core.runner.timelines.written, timeout=60 if overlaps else 0.2)
        assert [bits(output) for output in llm.generate(PROMPTS, GREEDY)] == alone
        assert llm.metrics()["num_external_tokens"] == sum((len(prompt) - 1) // 8 * 8 for prompt in PROMPTS)
        assert Overlap.seen is overlaps
        drain(llm)
