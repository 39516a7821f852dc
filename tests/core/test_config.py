"""Engine options: what is refused, and with which words."""

import math
from pathlib import Path
from typing import Any

import pytest

from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import ConfigError
from interlock.core.forward_context import CUDAGraphMode

PEER = {"kv_connector": "PeerConnector"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_prefix_caching", "no"),
        ("enable_prefix_caching", 1),
        ("enforce_eager", "false"),
        ("data_parallel_lockstep", None),
        ("data_parallel_master_ip", 5),
        ("data_parallel_master_port", 65536),
        ("kv_load_timeout", True),
        ("kv_load_timeout", math.inf),
        ("kv_load_timeout", math.nan),
        ("kv_load_timeout", "10"),
        ("kv_async_load_timeout", 0),
        ("kv_async_load_timeout", "120"),
        ("max_sync_load_seconds", "x"),
        ("max_sync_load_seconds", math.nan),
        ("max_sync_load_seconds", -1),
        ("max_sync_load_seconds", True),
        ("max_num_batched_tokens", 10**9),
        ("max_num_batched_tokens", 64.0),
        ("max_num_batched_tokens", math.nan),
        ("max_num_seqs", True),
        ("threads", 10**6),
        ("seed", 2**64),
        ("block_size", 512),
        ("cudagraph_capture_sizes", 5),
        ("cudagraph_capture_sizes", []),
        ("cudagraph_capture_sizes", [1.5]),
        ("cudagraph_capture_sizes", "12"),
        ("cudagraph_capture_sizes", [100000]),
        ("cudagraph_mode", 5),
        ("kv_transfer_config", 5),
        ("kv_transfer_config", []),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_mapping({"model": "m", name: value})
    shown = value[0] if isinstance(value, list) and value else value
    assert name in str(error.value)
    assert repr(tuple(shown) if isinstance(shown, list) and name != "kv_transfer_config" else shown) in str(error.value)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"), [("kv_connector", 5), ("engine_id", 5), ("engine_id", ""), ("kv_connector_module_path", 5), ("kv_connector_extra_config", 5)]
)
def test_a_value_of_the_transfer_configuration_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, expected"):
        KVTransferConfig.from_mapping({**PEER, name: value})


def test_keys_that_are_no_text_are_unknown_keys() -> None:
    with pytest.raises(ConfigError, match="unknown keys"):
        KVTransferConfig.from_mapping({**PEER, 5: 1, "x": 2})  # type: ignore[dict-item]


def test_a_load_may_be_awaited_in_a_step_for_ever() -> None:
    assert EngineConfig.from_mapping({"model": "m", "max_sync_load_seconds": math.inf}).max_sync_load_seconds == math.inf


def test_a_small_token_budget_lowers_the_number_of_requests_that_was_not_given() -> None:
    assert EngineConfig.from_mapping({"model": "m", "max_num_batched_tokens": 32}).max_num_seqs == 32
    assert EngineConfig.from_mapping({"model": "m", "max_num_batched_tokens": 100}).max_num_seqs == 64
    with pytest.raises(ConfigError, match=r"max_num_seqs is 40, .* 32: .*; lower max_num_seqs or raise max_num_batched_tokens"):
        EngineConfig.from_mapping({"model": "m", "max_num_batched_tokens": 32, "max_num_seqs": 40})


GATES = {"FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}


@pytest.mark.parametrize("mode", [mode.name for mode in CUDAGraphMode])
def test_gates_can_be_forced_only_where_decode_steps_are_full_replays(mode: str) -> None:
    options = {"model": "m", "cudagraph_mode": mode, "kv_load_wait": "gate"}
    if mode in GATES:
        assert EngineConfig.from_mapping(options).kv_load_wait == "gate"
        with pytest.raises(ConfigError, match=f"kv_load_wait is 'gate', but under cudagraph_mode {mode} with enforce_eager no step is a FULL replay"):
            EngineConfig.from_mapping({**options, "enforce_eager": True})
    else:
        with pytest.raises(ConfigError, match=f"kv_load_wait is 'gate', but under cudagraph_mode {mode} no step is a FULL replay"):
            EngineConfig.from_mapping(options)


def test_the_model_may_be_a_path_object() -> None:
    assert EngineConfig.from_mapping({"model": Path("some") / "model"}).model == "some/model"
    with pytest.raises(ConfigError, match="model is 5"):
        EngineConfig.from_mapping({"model": 5})
