"""A tier in host memory behind the pool changes no bit, whatever it holds, in every mode, with loads of both kinds."""

import pytest
from tier_engine import BLOCK_BYTES, MODES, bits, drain, forget_local, open_engine


@pytest.mark.parametrize("cudagraph_mode", MODES)
@pytest.mark.parametrize("async_load_bytes", [0, 1 << 30, 3 * BLOCK_BYTES], ids=["asynchronous", "synchronous", "by size"])
@pytest.mark.parametrize("cpu_blocks", [100, 12])
def test_blocks_that_come_back_from_host_memory_change_no_bit(model, prompts, params, alone, cudagraph_mode, async_load_bytes, cpu_blocks):
    extra = {"cpu_bytes": cpu_blocks * BLOCK_BYTES, "async_load_bytes": async_load_bytes}
    with open_engine(model, "OffloadConnector", extra, cudagraph_mode=cudagraph_mode) as llm:
        found = []
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [bits(output) for output in outputs] == alone
            metrics = llm.metrics()
            found.append(metrics["num_external_tokens"] + metrics["num_cached_tokens"])
            forget_local(llm)
        if cpu_blocks == 100:
            assert found[1] - found[0] == sum((len(prompt) - 1) // 8 * 8 for prompt in prompts)
            assert metrics["num_preemptions"] > 0
        for _ in range(2):  # of several at once a small tier may have forgotten all when they come back
            (output,) = llm.generate(prompts[2:3], params[2:3])
            assert bits(output) == alone[2]
            forget_local(llm)
        assert llm.metrics()["num_external_tokens"] >= metrics["num_external_tokens"] + (len(prompts[2]) - 1) // 8 * 8
        assert llm.metrics()["num_failed_loads"] == 0
        drain(llm)
