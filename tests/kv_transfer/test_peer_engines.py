"""Prefill and decode engines in two processes: the same bits as one undisturbed engine, whatever moves the KV, and when."""

import pytest
from storm import TCP, Storm

AT_GATES = {"max_sync_load_seconds": float("inf")}
PARKED = {"max_sync_load_seconds": 1e-9}
EAGER = {"cudagraph_mode": "NONE"}

CASES = {
    "pull, parked": ("shared_memory", "read", {}, PARKED),
    "pull over nixl at gates, larger blocks here": ("nixl", "read", {}, {"block_size": 32}),
    "push at gates": ("shared_memory", "write", {}, AT_GATES),
    "push over nixl at gates, smaller blocks here": ("nixl", "write", {}, AT_GATES | {"block_size": 8}),
    "push over nixl from an eager prefill at hooks": ("nixl", "write", EAGER, AT_GATES | EAGER),
    "push over nixl while prefill is short of blocks": (
        "nixl",
        "write",
        {"kv_cache_memory_bytes": 448 * 1024, "enable_prefix_caching": False},
        {},
    ),
    "pull over tcp at gates, longer sequences in prefill": (TCP, "read", {"max_model_len": 512}, {}),
    "push over tcp at gates": (TCP, "write", {}, AT_GATES),
    "push while prefill is short of blocks": (
        "shared_memory",
        "write",
        {"kv_cache_memory_bytes": 448 * 1024, "enable_prefix_caching": False},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_one_engine(model, prompts, expected, case):
    transport, mode, prefill, decode = CASES[case]
    storm = Storm(model, transport, mode, expected, prompts, seed=11, prefill=prefill, decode=decode)
    try:
        if "short" in case:
            storm.accompany(4, max_tokens=90)
        outcome = storm.calm(12)
    finally:
        storm.close()
    assert outcome.requests >= 24
    assert outcome.failed_loads == 0
