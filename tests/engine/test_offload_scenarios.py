"""What goes wrong with host tiers in the field, each with a negative control where it is about ordering."""

import itertools

import pytest
import shelf_connector
from tier_engine import BLOCK_BYTES, GREEDY, MODES, bits, drain, forget_local, open_engine, run_alone, step_until, step_until_saved
from tier_puppets import TardyShelf

from checkpoints import make_tiny_llama
from interlock import SamplingParams
from interlock.core.errors import KernelError

BLOCK = 8
A = [(7 * position) % 240 + 3 for position in range(4 * BLOCK + 3)]
OTHERS = [[(11 * position + 50 * number) % 240 + 5 for position in range(3 * BLOCK + 2)] for number in range(1, 4)]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("offload_scenarios"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    prompts = [A, *OTHERS]
    return dict(zip(map(tuple, prompts), run_alone(model, prompts, [GREEDY] * len(prompts)), strict=True))


def open_tier(model, connector, cpu_blocks, async_load_bytes=0, **options):
    extra = {"cpu_bytes": cpu_blocks * BLOCK_BYTES, "async_load_bytes": async_load_bytes}
    return open_engine(model, f"tier_puppets:{connector}", extra, **options)


def halves(llm, child=None):
    """`(scheduler half's index, worker half)` of the tier."""
    scheduler, worker = llm.core._connector, llm.core.runner._kv.connector
    if child is not None:
        scheduler, worker = scheduler.children[child], worker.children[child]
    return scheduler.scheduler_half.index, worker.worker_half


def start(llm, prompt, params=GREEDY):
    """Put a prompt in."""
    request = llm.core.make_request(f"r{next(NUMBERS)}", {"prompt_token_ids": prompt}, params)
    llm.core.add_request(request)
    return request


def tokens_alone(alone, prompt):
    return alone[tuple(prompt)][0][0]


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_blocks_are_pinned_from_lookup_to_landing(model, alone, cudagraph_mode):
    with open_tier(model, "HeldOffload", 6, num_blocks=30, cudagraph_mode=cudagraph_mode) as llm:
        assert evict_under_a_queued_load(llm) == tokens_alone(alone, A)
        index, _ = halves(llm)
        assert index.num_pins == 0
        assert llm.metrics()["num_external_tokens"] == 4 * BLOCK
        assert llm.metrics()["num_failed_loads"] == 0


def test_without_the_pins_the_load_brings_somebody_elses_blocks(model, alone):
    with open_tier(model, "PinlessOffload", 6, num_blocks=30) as llm:
        assert evict_under_a_queued_load(llm) != tokens_alone(alone, A)


def evict_under_a_queued_load(llm):
    """A's load is looked up and queued; six other blocks are stored; then it lands. Returns A's tokens."""
    llm.generate([A], GREEDY)
    forget_local(llm)
    _, worker = halves(llm)
    worker.hold_loads = True
    request = start(llm, A)
    step_until(llm, lambda: worker.held_loads)
    others = [start(llm, prompt) for prompt in OTHERS[:2]]
    step_until(llm, lambda: all(other.finished for other in others))
    step_until(llm, lambda: not llm.core._connector.scheduler_half._reading)
    assert not request.finished
    worker.release()
    step_until(llm, lambda: request.finished)
    drain(llm)
    return request.output_token_ids


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_block_that_has_gone_is_recomputed_with_all_behind_it(model, alone, cudagraph_mode, async_load_bytes, gone):
    with open_tier(model, "HeldOffload", 12, async_load_bytes, cudagraph_mode=cudagraph_mode) as llm:
        request = start(llm, A)
        step_until(llm, lambda: request.finished)
        forget_local(llm)
        index, _ = halves(llm)
        type(index).gone = request.block_hashes[gone]
        computed = llm.metrics()["num_computed_tokens"]
        (output,) = llm.generate([A], GREEDY)
        assert bits(output) == alone[tuple(A)]
        assert type(index).gone is None
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)
        assert index.num_pins == 0
        assert llm.metrics()["num_computed_tokens"] - computed >= len(A) - gone * BLOCK
        forget_local(llm)
        (output,) = llm.generate([A], GREEDY)
        assert bits(output) == alone[tuple(A)]
        assert llm.metrics()["num_failed_loads"] == 1, "what was recomputed is in the tier again"
        drain(llm)


@pytest.mark.parametrize("connector", ["HeldOffload", "CarelessOffload"])
def test_a_block_with_a_save_in_flight_is_not_reassigned(model, alone, connector):
    with open_tier(model, connector, 12, num_blocks=8) as llm:
        _, worker = halves(llm)
        worker.hold_saves = True
        llm.generate([A], GREEDY)
        step_until(llm, lambda: len(worker.held_saves) == 4)
        holds = connector == "HeldOffload"
        assert llm.audit().quarantined == (4 if holds else 0)
        other = start(llm, OTHERS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))  # wants all eight blocks
        for _ in range(60):
            llm.core.step()
        assert other.finished != holds, "it waits for the blocks that are being saved"
        worker.release()
        step_until(llm, lambda: other.finished)
        forget_local(llm)
        (output,) = llm.generate([A], GREEDY)
        assert (bits(output) == alone[tuple(A)]) == holds
        assert llm.metrics()["num_external_tokens"] == 4 * BLOCK
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("connector", ["HeldOffload", "HastyOffload"])
def test_nothing_is_saved_before_it_has_landed(model, alone, connector, cudagraph_mode):
    shelf_connector.SHELF.append(shelf_connector.Shelf(is_async=True))
    remote = {"kv_connector": "tier_puppets:PuppetRemote"}
    tier = {"kv_connector": f"tier_puppets:{connector}", "kv_connector_extra_config": {"cpu_bytes": 40 * BLOCK_BYTES}}
    with open_engine(model, "MultiConnector", {"connectors": [remote, tier]}, num_blocks=40, cudagraph_mode=cudagraph_mode) as llm:
        fill_the_shelf(llm)
        index, worker = halves(llm, child=1)
        puppet = llm.core.runner._kv.connector.children[0]
        request = start(llm, A)
        others = [start(llm, prompt) for prompt in OTHERS]
        step_until(llm, lambda: all(other.finished for other in others))
        honest = connector == "HeldOffload"
        saved_early = [key for key in request.block_hashes if not index.wants(key)]
        assert request.request_id in puppet.held
        assert (saved_early == []) == honest
        assert all(not index.wants(key) for other in others for key in other.block_hashes[:3]), "requests that nobody matched are saved"
        step_until(llm, lambda: not llm.core._connector.children[1].scheduler_half._reading)  # what is saved early is saved before it lands
        puppet.lands = True
        step_until(llm, lambda: request.finished)
        assert request.output_token_ids == tokens_alone(alone, A)
        drain(llm)
        keys = request.block_hashes[:4]
        shelf = shelf_connector.SHELF[-1]
        landed = next(entry for tokens, entry in shelf.entries.items() if tokens[: len(A)] == tuple(A))
        memory = worker.memory.numpy().reshape(worker.memory.shape[0], 2, -1)
        for number, place in enumerate(index.places(keys)):
            for layer in range(2):
                positions = landed[layer][number * BLOCK : (number + 1) * BLOCK]
                stored = memory[place, layer].view("uint16").reshape(2, 2, BLOCK, 16)
                assert (stored.transpose(2, 0, 1, 3) == positions).all() == honest
        shelf.entries.clear()
        forget_local(llm)
        (output,) = llm.generate([A], GREEDY)
        assert (bits(output) == alone[tuple(A)]) == honest
        drain(llm)


def fill_the_shelf(llm):
    """A's KV is on the remote side, and nowhere else."""
    llm.generate([A], GREEDY)
    forget_local(llm)
    index, _ = halves(llm, child=1)
    for key in list(index._stored):
        index.distrust(key)


def test_a_block_whose_last_position_was_never_computed_is_not_saved(model):
    with open_tier(model, "HeldOffload", 12) as llm:
        llm.generate([A[:12]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        drain(llm)
        index, _ = halves(llm)
        assert len(index._stored) == 1, "of 16 tokens 15 have KV"


@pytest.mark.parametrize(
    ("first", "second", "hits"), [(None, None, True), ("a", "a", True), ("a", "b", False), ("a", None, False), (None, "a", False)]
)
def test_only_the_same_salt_hits(model, alone, first, second, hits):
    with open_tier(model, "HeldOffload", 20) as llm:
        for salt in (first, second):
            prompt = {"prompt_token_ids": A, **({} if salt is None else {"cache_salt": salt})}
            (output,) = llm.generate([prompt], GREEDY)
            assert bits(output) == alone[tuple(A)]
            forget_local(llm)
        assert llm.metrics()["num_external_tokens"] == (4 * BLOCK if hits else 0)
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_a_preempted_request_loads_again_and_changes_no_bit(model, alone, cudagraph_mode):
    long = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    prompts = [A, *OTHERS]
    expected = run_alone(model, prompts, [long] * len(prompts))
    with open_tier(model, "HeldOffload", 60, num_blocks=14, cudagraph_mode=cudagraph_mode) as llm:
        outputs = llm.generate(prompts, long)
        assert [bits(output) for output in outputs] == expected
        metrics = llm.metrics()
        assert metrics["num_preemptions"] > 0
        assert metrics["num_external_tokens"] == 0, "what is counted is what a prompt found when it came"
        assert halves(llm)[1].loads, "who was preempted asked again"
        drain(llm)


def test_an_abort_in_mid_load_leaves_the_blocks_to_the_load(model, alone):
    with open_tier(model, "HeldOffload", 12, num_blocks=8) as llm:
        llm.generate([A], GREEDY)
        forget_local(llm)
        index, worker = halves(llm)
        worker.hold_loads = True
        request = start(llm, A)
        step_until(llm, lambda: worker.held_loads)
        llm.core.abort_request(request.request_id)
        other = start(llm, OTHERS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))  # wants all eight blocks
        for _ in range(60):
            llm.core.step()
        assert llm.audit().quarantined >= 4, "the blocks that are being loaded, whatever has become of their request"
        assert not other.finished
        worker.release()
        step_until(llm, lambda: other.finished)
        assert other.output_token_ids[:4] == tokens_alone(alone, OTHERS[0])
        assert index.num_pins == 0
        drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
def test_a_step_that_fails_on_the_device_loses_no_save_no_load_and_no_block(model, alone, cudagraph_mode, async_load_bytes, monkeypatch):
    with open_tier(model, "HeldOffload", 30, async_load_bytes, num_blocks=30, cudagraph_mode=cudagraph_mode) as llm:
        llm.generate([A], GREEDY)
        forget_local(llm)
        index, _ = halves(llm)
        other = start(llm, OTHERS[0])
        llm.core.step()  # what it computed is ordered to be saved with the next step
        request = start(llm, A)

        def fail(descriptor):
            raise KernelError("a kernel has failed")

        with monkeypatch.context() as broken:
            broken.setattr(llm.core.runner._graphs, "launch", fail)
            step_until(llm, lambda: other.finished)
        step_until(llm, lambda: request.finished)
        assert other.finish_reason == "error"
        assert request.finish_reason == ("length" if async_load_bytes == 0 else "error")
        drain(llm)
        assert index.num_pins == 0
        assert all(not index.wants(key) for key in other.block_hashes[:3]), "what had been computed before is saved"
        for prompt in (A, OTHERS[0]):
            (output,) = llm.generate([prompt], GREEDY)
            assert bits(output) == alone[tuple(prompt)]
        drain(llm)


@pytest.mark.parametrize(("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)])
def test_a_producer_saves_and_a_consumer_loads(model, alone, role, saves, loads, tmp_path):
    path = {"path": str(tmp_path)}
    with open_engine(model, "StorageConnector", path, transfer={"kv_role": role}) as llm:
        llm.generate([A], GREEDY)
        drain(llm)
    assert len(list(tmp_path.rglob("*.kv"))) == (4 if saves else 0)
    with open_engine(model, "StorageConnector", path) as llm:
        llm.generate([A], GREEDY)
        drain(llm)
    with open_engine(model, "StorageConnector", path, transfer={"kv_role": role}) as llm:
        (output,) = llm.generate([A], GREEDY)
        assert bits(output) == alone[tuple(A)]
        assert llm.metrics()["num_external_tokens"] == (4 * BLOCK if loads else 0)
        drain(llm)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_of_a_prompt_in_chunks_only_what_was_computed_is_found(model, tmp_path, num_steps):
    path, prompt = {"path": str(tmp_path)}, A + A + A[:10]
    with open_engine(model, "StorageConnector", path, max_num_batched_tokens=3 * BLOCK) as llm:
        start(llm, prompt)
        step_until(llm, lambda: llm.metrics()["num_computed_tokens"] == num_steps * 3 * BLOCK)
    with open_engine(model, "StorageConnector", path) as llm:
        (output,) = llm.generate([prompt], GREEDY)
        assert [bits(output)] == run_alone(model, [prompt], [GREEDY])
        assert llm.metrics()["num_external_tokens"] == (num_steps - 1) * 3 * BLOCK, "each chunk is saved after its step has retired"
        drain(llm)


class Deaf:
    """The negative control: does not hear that blocks are invalid."""

    def invalidate(self, block_ids):
        pass


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("tier", ["OffloadConnector", "StorageConnector"])
def test_what_turns_out_wrong_after_it_was_saved_does_not_stay_in_the_tier(model, tmp_path, tier, hears):
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    expected = run_alone(model, [A], [long])[0]
    shelf_connector.SHELF.append(shelf_connector.Shelf())
    extra = {"cpu_bytes": 40 * BLOCK_BYTES} if tier == "OffloadConnector" else {"path": str(tmp_path)}
    children = [{"kv_connector": "tier_puppets:TardyShelf"}, {"kv_connector": tier, "kv_connector_extra_config": extra}]
    with open_engine(model, "MultiConnector", {"connectors": children}, transfer={"kv_load_failure_policy": "recompute"}) as llm:
        scheduler_half = llm.core._connector.children[1].scheduler_half
        worker_half = llm.core.runner._kv.connector.children[1].worker_half
        llm.generate([A], long)
        drain(llm)
        forget_everything(llm, scheduler_half, tmp_path)
        request = start(llm, A, long)
        step_until(llm, lambda: request.num_output_tokens == 6)
        assert all(not scheduler_half.index.wants(key) for key in request.block_hashes[:4]), "the garbage is saved"
        step_until_saved(llm, scheduler_half, worker_half)
        assert not request.finished
        if not hears:
            scheduler_half.invalidate = Deaf().invalidate
        TardyShelf.notices = True
        step_until(llm, lambda: request.finished)
        assert llm.metrics()["num_failed_loads"] == 1
        forget_local(llm)
        step_until(llm, lambda: not scheduler_half._saves)  # what is garbage would have been found from here on
        shelf_connector.SHELF[-1].entries.clear()
        (output,) = llm.generate([A], long)
        assert (bits(output) == expected) == hears
        drain(llm)


def forget_everything(llm, scheduler_half, directory):
    """Only the shelf has something."""
    llm.core.reset_prefix_cache()
    for key in [*getattr(scheduler_half.index, "_stored", ()), *getattr(scheduler_half.index, "_saved", ())]:
        scheduler_half.index.distrust(key)
    for path in directory.rglob("*.kv"):
        path.unlink()
