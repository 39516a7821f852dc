"""A start that fails, wherever it fails, leaves no descriptor and no thread behind; and bad options fail before there is a pool."""

import gc
import logging
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_tiny_llama
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import ConfigError, InterlockError
from interlock.engine import core
from interlock.engine.core import EngineCore
from interlock.kv_transfer.connectors.host_tier import HostTierWorker
from interlock.kv_transfer.connectors.peer import PeerConnector
from interlock.kv_transfer.transports import shared_memory
from interlock.runner import kv_step, model_runner, rank
from interlock.runner.graph_manager import GraphManager
from interlock.runner.kv_cache import KVCache

PEER = {"kv_connector": "PeerConnector"}
OFFLOAD = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes": 1 << 20}}
STARTS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def config_of(model: str, transfer: dict[str, Any], **options: Any) -> EngineConfig:
    sizes = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 1 << 20, "threads": 2}
    return EngineConfig(model=model, kv_transfer_config=KVTransferConfig(**transfer), **sizes, **options)


def held() -> tuple[int, set[str]]:
    """What the process holds: descriptors, and the names of threads that it has started in Python."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}


def fail_to_start(config: EngineConfig, expected: type[BaseException]) -> None:
    with pytest.raises(expected):
        EngineCore(config)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("refused")

    return fail


def after(function: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
    """`function`, and then the error, as if Ctrl-C came right behind it."""

    def run(*arguments: Any, **options: Any) -> Any:
        function(*arguments, **options)
        raise error("refused")

    return run


PLACES = {
    "the pool": lambda patch, error: patch.setattr(shared_memory, "_prefault", raising(error)),
    "the team": lambda patch, error: patch.setattr(rank, "ThreadTeam", raising(error)),
    "the fingerprint": lambda patch, error: patch.setattr(rank, "kernel_fingerprint", raising(error)),
    "the worker half": lambda patch, error: patch.setattr(kv_step, "create_connector", raising(error)),
    "the connector's threads": lambda patch, error: patch.setattr(
        PeerConnector, "register_kv_caches", after(PeerConnector.register_kv_caches, error)
    ),
    "the driver": lambda patch, error: patch.setattr(kv_step, "KVStepDriver", raising(error)),
    "the input batch": lambda patch, error: patch.setattr(model_runner, "InputBatch", raising(error)),
    "the capture": lambda patch, error: patch.setattr(GraphManager, "capture", after(GraphManager.capture, error)),
    "the scheduler half": lambda patch, error: patch.setattr(core, "create_connector", raising(error)),
    "the scheduler": lambda patch, error: patch.setattr(core, "Scheduler", raising(error)),
}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_start_that_fails_at_any_place_leaks_nothing(model, monkeypatch, place, error):
    EngineCore(config_of(model, PEER)).shutdown()  # what is loaded once per process
    before = held()
    place(monkeypatch, error)
    for _ in range(STARTS):
        fail_to_start(config_of(model, PEER), error)
    assert held() == before


BAD_OPTIONS = {
    "engine_id": PEER | {"engine_id": "a/b"},
    "unknown option": PEER | {"kv_connector_extra_config": {"mod": "read"}},
    "transport": PEER | {"kv_connector_extra_config": {"transport": "pigeons"}},
    "lease": PEER | {"kv_connector_extra_config": {"lease_seconds": 1.0}},
    "unknown connector": {"kv_connector": "NoSuchConnector"},
    "no memory": OFFLOAD | {"kv_connector_extra_config": {"cpu_bytes": 1}},
    "no directory": {"kv_connector": "StorageConnector"},
    "a child": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OFFLOAD, PEER | {"engine_id": "a/b"}]}},
}


@pytest.mark.parametrize("transfer", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options_that_a_connector_refuses_are_refused_before_a_pool_is_allocated(model, monkeypatch, transfer):
    def allocate(*_: Any, **__: Any) -> Any:
        raise AssertionError("the pool was allocated first")

    monkeypatch.setattr(KVCache, "allocate", allocate)
    fail_to_start(config_of(model, transfer), ConfigError)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_an_engine_id_that_another_engine_has_leaks_nothing_and_harms_nobody(model):
    transfer = PEER | {"engine_id": f"test-{uuid.uuid4().hex}"}
    first = EngineCore(config_of(model, transfer))
    before = held()
    for _ in range(STARTS):
        fail_to_start(config_of(model, transfer), InterlockError)
    assert held() == before
    first.shutdown()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_the_children_of_a_composed_connector_that_could_not_be_made_are_shut_down(model, monkeypatch):
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OFFLOAD, PEER]}}
    EngineCore(config_of(model, transfer)).shutdown()
    before, closed = held(), []
    close = HostTierWorker.close
    monkeypatch.setattr(HostTierWorker, "close", lambda worker: (closed.append(worker), close(worker)))
    monkeypatch.setattr(PeerConnector, "__init__", raising(RuntimeError))
    for _ in range(STARTS):
        fail_to_start(config_of(model, transfer), RuntimeError)
    assert len(closed) == STARTS
    assert held() == before


@pytest.mark.parametrize(
    "place", ["interlock.models.llama._load_layer", "interlock.runner.model_runner.InputBatch", "interlock.engine.core.Scheduler"]
)
def test_all_threads_have_ended_when_the_error_is_raised(model, monkeypatch, place):
    """Whoever catches the error keeps its frames alive, and with them everything that was merely left to the garbage collector."""
    monkeypatch.setattr(place, raising(RuntimeError))
    with pytest.raises(RuntimeError, match="refused") as caught:
        EngineCore(config_of(model, PEER))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("interlock")] == []
    del caught


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_a_half_that_fails_to_shut_down_does_not_keep_the_rest_alive(model, monkeypatch, caplog):
    EngineCore(config_of(model, PEER)).shutdown()
    before = held()
    monkeypatch.setattr(PeerConnector, "shutdown", after(PeerConnector.shutdown, RuntimeError))
    engine = EngineCore(config_of(model, PEER))
    caplog.set_level(logging.CRITICAL)  # pytest keeps what is logged, and a traceback keeps its frames
    engine.shutdown()
    del engine
    assert held() == before
