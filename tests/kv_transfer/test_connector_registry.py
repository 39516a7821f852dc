import dataclasses

import kv_support
import pytest
from kv_support import RecordingConnector, engine_config, kv_cache_config

from interlock.core.config import EngineConfig, KVTransferConfig
from interlock.core.errors import ConfigError, LifecycleError
from interlock.kv_transfer.connector import KVConnectorRole
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
