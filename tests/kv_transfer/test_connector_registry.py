import dataclasses
import logging

import kv_support
import pytest
from kv_support import RecordingConnector, engine_config, kv_cache_config

from checkpoints import make_tiny_llama
from interlock import LLM
from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors import offload
from interlock.kv_transfer.connectors.peer import PeerConnector
from interlock.kv_transfer.registry import create_connector


def create(name, **options):
    config = EngineConfig(model="smollm2", kv_transfer_config=KVTransferConfig(kv_connector=name, **options))
    return create_connector(config, KVConnectorRole.WORKER, kv_cache_config())


def test_connectors_are_made_by_name_by_import_path_and_by_module_path():
    assert type(create("PeerConnector")) is PeerConnector
    assert type(create("kv_support:RecordingConnector")) is RecordingConnector
    assert type(create("RecordingConnector", kv_connector_module_path=kv_support.__name__)) is RecordingConnector


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("NoSuchConnector", {}, "PeerConnector"),
        ("no_such_package:Connector", {}, "no_such_package"),
        ("kv_support:Nothing", {}, "Nothing"),
        ("kv_support:LAYERS", {}, "subclass"),
        (":Class", {}, "cannot be imported"),
        (".relative:Class", {}, "'.relative:Class' is relative"),
        ("Class", {"kv_connector_module_path": ".relative"}, "'.relative:Class' is relative"),
        ("interlock.kv_transfer.connector:KVConnector", {}, "is abstract.*it lacks .*'get_num_new_matched_tokens'.*'wait_for_save'"),
        ("PeerConnector", {"kv_connector_module_path": "no_such_package"}, "no_such_package"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(name, options, said):
    with pytest.raises(ConfigError, match=said):
        create(name, **options)


SOURCES = {
    "syntax": "def x(:\n",
    "raises": "raise RuntimeError('first line\\nsecond line')\n",
    "exits": "import sys\nsys.exit(3)\n",
    "silent": "raise AssertionError\n",
    "interrupted": "raise KeyboardInterrupt\n",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that anybody could have written, and an engine's start with a connector from one of them."""
    for name, source in SOURCES.items():
        (tmp_path / f"outside_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("syntax", r"'outside_syntax:X' cannot be imported: SyntaxError: .*line 1"),
        ("raises", r"'outside_raises:X' cannot be imported: RuntimeError: first line second line"),
        ("exits", r"'outside_exits:X' cannot be imported: SystemExit: 3"),
        ("silent", r"'outside_silent:X' cannot be imported: AssertionError"),
    ],
)
def test_whatever_an_outside_module_raises_at_its_import_is_one_line_with_the_traceback_in_the_log(caplog, name, said):
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError, match=said) as error:
        create(f"outside_{name}:X")
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None
    (record,) = (record for record in caplog.records if record.name == "interlock.kv_transfer.registry")
    assert record.levelno == logging.DEBUG
    assert f"outside_{name}.py" in caplog.text


@pytest.mark.usefixtures("modules")
def test_an_interrupt_while_a_module_is_imported_passes():
    with pytest.raises(KeyboardInterrupt):
        create("outside_interrupted:X")


class TakesNothing(RecordingConnector):
    def __init__(self):
        pass


class KnowsNothing(RecordingConnector):
    def __init__(self, *arguments):
        pass


class ChecksBadly(RecordingConnector):
    @classmethod
    def check_options(cls, config, kv_cache_config):
        raise KeyError("cpu_bytes")


class AsksBadly(RecordingConnector):
    @classmethod
    def requires_piecewise_for_cudagraph(cls):
        return True


class RegistersBadly(RecordingConnector):
    closed = 0

    def register_kv_caches(self, kv_caches):
        raise KeyError("layer.0")

    def shutdown(self):
        type(self).closed += 1
        raise RuntimeError("and then this")


class BindsBadly(RecordingConnector):
    def bind_block_pool(self, block_pool):
        raise ZeroDivisionError("pool")


class Interrupted(RecordingConnector):
    def register_kv_caches(self, kv_caches):
        raise KeyboardInterrupt


FAULTS = {
    "TakesNothing": r"cannot be made as WORKER: TypeError: .*positional argument",
    "KnowsNothing": r"has no kv_transfer_config, expected that its __init__ calls super\(\).__init__",
    "ChecksBadly": r"cannot check its options: KeyError: 'cpu_bytes'",
    "AsksBadly": r"cannot say whether it requires_piecewise_for_cudagraph: TypeError: ",
    "RegistersBadly": r"cannot register the KV cache: KeyError: 'layer.0'",
    "BindsBadly": r"cannot bind the block pool: ZeroDivisionError: pool",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def start(model, transfer):
    LLM(model, threads=1, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20, kv_transfer_config=transfer)


@pytest.mark.parametrize("composed", [False, True], ids=["alone", "a child"])
@pytest.mark.parametrize("name", FAULTS)
def test_whatever_an_outside_connector_raises_at_the_start_is_a_config_error_that_names_it(model, name, composed):
    transfer = {"kv_connector": f"{__name__}:{name}"}
    if composed:
        transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer]}}
    RegistersBadly.closed = 0
    with pytest.raises(ConfigError, match=f"kv_connector '{__name__}:{name}' {FAULTS[name]}"):
        start(model, transfer)
    assert RegistersBadly.closed == (name == "RegistersBadly"), "what was made is shut down, and what that raises hides nothing"


def test_an_interrupt_while_a_connector_registers_passes(model):
    with pytest.raises(KeyboardInterrupt):
        start(model, {"kv_connector": f"{__name__}:Interrupted"})


@pytest.mark.parametrize("cpu_bytes", [1 << 45, 1 << 60, 10**25])
def test_host_memory_that_cannot_be_had_is_refused_by_its_own_name(model, cpu_bytes):
    with pytest.raises(ConfigError, match=f"cpu_bytes is {cpu_bytes}, "):
        start(model, {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes": cpu_bytes}})


def test_host_memory_that_cannot_be_had_is_refused_where_the_system_does_not_say_what_there_is(model, monkeypatch):
    monkeypatch.setattr(offload, "available_memory", lambda: None)
    with pytest.raises(ConfigError, match=f"cpu_bytes is {1 << 60}, which could not be had"):
        start(model, {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes": 1 << 60}})


def test_an_engine_without_configuration_has_no_connector():
    config = dataclasses.replace(engine_config(), kv_transfer_config=None)
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        create_connector(config, KVConnectorRole.WORKER, kv_cache_config())
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        RecordingConnector(config, KVConnectorRole.WORKER, kv_cache_config())


def test_metadata_is_bound_only_within_a_step():
    connector = RecordingConnector(engine_config(), KVConnectorRole.WORKER, kv_cache_config())
    with pytest.raises(LifecycleError, match="no connector metadata"):
        connector._get_connector_metadata()
    connector.bind_connector_metadata("m")
    assert connector._get_connector_metadata() == "m"
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()
