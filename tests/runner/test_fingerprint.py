from typing import Any

import pytest
from outside_connector import REMOTE, Remote

from checkpoints import make_tiny_llama
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"))


@pytest.fixture(autouse=True)
def remote():
    REMOTE.append(Remote(2))
    yield
    REMOTE.pop()


def fingerprint(model: str, **options: Any) -> str:
    transfer = KVTransferConfig(kv_connector="outside_connector:OutsideConnector")
    sizes: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20, "threads": 2, "kv_transfer_config": transfer}
    runner = ModelRunner(EngineConfig(model=model, **{**sizes, **options}))
    try:
        assert not any(layer.numpy().any() for layer in runner.kv_cache.layers), "the probe left something in the pool"
        return runner.kv_cache_config.kernel_fingerprint
    finally:
        runner.shutdown()


def test_the_fingerprint_does_not_depend_on_how_an_engine_is_set_up(model):
    expected = fingerprint(model)
    assert len(expected) == 32
    for options in ({"block_size": 4}, {"block_size": 64}, {"max_num_batched_tokens": 7}, {"threads": 1}, {"enforce_eager": True}):
        assert fingerprint(model, **options) == expected, options


def test_the_fingerprint_differs_where_bits_differ(model, tmp_path):
    assert len({fingerprint(model), fingerprint(model, kv_cache_dtype="float32"), fingerprint(make_tiny_llama(tmp_path, seed=1))}) == 3
