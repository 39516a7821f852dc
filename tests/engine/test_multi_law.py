"""Several tiers as one connector change no bit, in every mode, with loads of both kinds side by side."""

import pytest
import shelf_connector
from tier_engine import BLOCK_BYTES, MODES, bits, drain, forget_local, open_engine


def offload(cpu_blocks, async_load_bytes=1 << 30):
    extra = {"cpu_bytes": cpu_blocks * BLOCK_BYTES, "async_load_bytes": async_load_bytes}
    return {"kv_connector": "OffloadConnector", "kv_connector_extra_config": extra}


def storage(path, async_load_bytes=0):
    return {"kv_connector": "StorageConnector", "kv_connector_extra_config": {"path": str(path), "async_load_bytes": async_load_bytes}}


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("cpu_blocks", [8, 100])
def test_memory_before_files_changes_no_bit(model, prompts, params, alone, cudagraph_mode, cpu_blocks, tmp_path):
    children = {"connectors": [offload(cpu_blocks), storage(tmp_path)]}
    for life in range(2):
        with open_engine(model, "MultiConnector", children, cudagraph_mode=cudagraph_mode) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                assert [bits(output) for output in outputs] == alone
                forget_local(llm)
            assert llm.metrics()["num_failed_loads"] == 0
            assert llm.metrics()["num_external_tokens"] > 0 or life == 0
            drain(llm)


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kv_load_wait", ["auto", "barrier"])
@pytest.mark.parametrize("fail_from", [[], [1, None, 0, None]], ids=["landing", "mixed"])
def test_a_foreign_connector_beside_a_tier_changes_no_bit(model, prompts, params, alone, cudagraph_mode, is_async, kv_load_wait, fail_from):
    """The one waits in Python and the other lands through timelines; who has the longer hit loads."""
    shelf_connector.SHELF.append(shelf_connector.Shelf(is_async=is_async))
    children = {"connectors": [{"kv_connector": "shelf_connector:ShelfConnector"}, offload(12, async_load_bytes=0 if is_async else 1 << 30)]}
    options = {"cudagraph_mode": cudagraph_mode, "kv_load_wait": kv_load_wait, "transfer": {"kv_load_failure_policy": "recompute"}}
    with open_engine(model, "MultiConnector", children, num_blocks=40, **options) as llm:
        for life in range(3):
            shelf_connector.SHELF[-1].fail_from += fail_from if life else []
            outputs = llm.generate(prompts, params)
            assert [bits(output) for output in outputs] == alone
            forget_local(llm)
        assert shelf_connector.SHELF[-1].num_loads > 0
        assert llm.metrics()["num_failed_loads"] == shelf_connector.SHELF[-1].num_failures
        assert (shelf_connector.SHELF[-1].num_failures > 0) == bool(fail_from)
        drain(llm)
