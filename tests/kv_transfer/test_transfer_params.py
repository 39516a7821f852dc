import pytest
from kv_support import engine_config, kv_cache_config
from peer_support import REMOTE_DECODE

from interlock.core.errors import RequestError
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors.multi import MultiConnector
from interlock.kv_transfer.connectors.peer import PeerConnector
from interlock.kv_transfer.transfer_params import check_hand_off, read_transfer_params

TOKENS = list(range(100, 108))


def read(params):
    return read_transfer_params({"kv_transfer_params": params})


@pytest.mark.parametrize("params", [5, "x", True, [], [1], 0, ""])
def test_what_is_no_object_is_refused(params):
    with pytest.raises(RequestError, match=r"kv_transfer_params is .*, expected an object"):
        read(params)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_prefill": "true"}, "do_remote_prefill"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        ({"do_remote_decode": 0}, "do_remote_decode"),
        ({"do_remote_decode": [True]}, "do_remote_decode"),
        ({"tp_size": 2}, "tp_size is 2, expected 1"),
        ({"tp_size": 0}, "tp_size is 0, expected 1"),
        ({"tp_size": True}, "tp_size"),
        ({"tp_size": "1"}, "tp_size"),
        ({"pp_size": 4}, "pp_size is 4, expected 1"),
        ({"dcp_size": 2}, "dcp_size is 2, expected 1"),
        ({"remote_tp_size": 2}, "remote_tp_size is 2, expected 1"),
        ({"transfer_mode": "pipe"}, "transfer_mode"),
        ({"transfer_mode": 1}, "transfer_mode"),
        ({"transfer_id": 5}, "transfer_id"),
        ({"transfer_id": ""}, "transfer_id"),
        ({5: 1}, "kv_transfer_params"),
    ],
)
def test_a_field_of_a_wrong_type_or_an_unsupported_layout_is_refused_by_name(params, named):
    with pytest.raises(RequestError, match=named):
        read(params)


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": False, "do_remote_decode": None}, {"tp_size": 1, "pp_size": 1}, {"transfer_mode": "pull"}, {"unknown": object}],
)
def test_what_asks_for_nothing_unusual_is_taken_as_it_is(params):
    assert read(params) == params
    assert read_transfer_params(None) is None
    assert read_transfer_params({}) is None


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_decode": True}])
def test_a_hand_off_to_an_engine_that_makes_none_is_refused(params):
    (field,) = params
    with pytest.raises(RequestError, match=field):
        check_hand_off(params, possible=False)
    check_hand_off(params, possible=True)
    check_hand_off({field: False}, possible=False)


@pytest.mark.parametrize(("mode", "sent", "ours"), [("read", "push", "pull"), ("write", "pull", "push")])
@pytest.mark.parametrize("field", ["do_remote_prefill", "do_remote_decode"])
def test_a_hand_off_of_the_other_mode_is_refused(engines, mode, sent, ours, field):
    engine = engines(mode=mode)
    with pytest.raises(RequestError, match=f"transfer_mode is '{sent}', expected '{ours}'"):
        engine.admit("d", TOKENS, {field: True, "transfer_mode": sent}, [1, 2])
    if field == "do_remote_decode":
        engine.admit("e", TOKENS, REMOTE_DECODE | {"transfer_mode": ours}, [1, 2])


def test_a_composed_connector_hands_over_if_a_child_does():
    tier = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes": 1 << 20}}
    for children, expected in (([tier], False), ([tier, {"kv_connector": "PeerConnector"}], True)):
        connector = MultiConnector(engine_config("e", connectors=children), KVConnectorRole.SCHEDULER, kv_cache_config())
        assert connector.hands_over is expected
        connector.shutdown()
    assert PeerConnector.hands_over
