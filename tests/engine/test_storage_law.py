"""A tier of files behind the pool changes no bit, whatever is in the directory, in every mode, with loads of both kinds."""

import pytest
from tier_engine import MODES, bits, drain, forget_local, open_engine


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30], ids=["asynchronous", "synchronous"])
def test_blocks_that_come_back_from_files_change_no_bit(model, prompts, params, alone, cudagraph_mode, async_load_bytes, tmp_path):
    extra = {"path": str(tmp_path), "async_load_bytes": async_load_bytes}
    options = {"cudagraph_mode": cudagraph_mode}
    for life in range(2):
        with open_engine(model, "StorageConnector", extra, **options) as llm:
            outputs = llm.generate(prompts, params)
            assert [bits(output) for output in outputs] == alone
            metrics = llm.metrics()
            if life == 1:
                found = metrics["num_external_tokens"] + metrics["num_cached_tokens"]
                assert found == sum((len(prompt) - 1) // 8 * 8 for prompt in prompts), "all that the first life computed is found by the second"
                assert metrics["num_external_tokens"] > 0
            assert metrics["num_failed_loads"] == 0
            forget_local(llm)
            drain(llm)
