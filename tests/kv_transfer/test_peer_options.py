"""The peer connector's options, and what follows from them for UCX and for the rung."""

import os
import socket
from pathlib import Path

import pytest
from peer_support import LOOPBACK_6

from interlock.core.errors import ConfigError
from interlock.core.forward_context import CUDAGraphMode
from interlock.kv_transfer.connectors.peer_options import PeerOptions
from interlock.kv_transfer.rungs import Rung, choose_rung
from interlock.kv_transfer.transports.interfaces import interface_of
from interlock.kv_transfer.transports.local import SharedMemoryTransport
from interlock.kv_transfer.transports.nixl import NixlTransport, net_devices


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_an_address_that_no_peer_could_call_is_refused_by_name(host):
    with pytest.raises(ConfigError, match=rf"'host'\] is '{host}', expected an address at which peers reach this host"):
        PeerOptions.parse({"transport": "nixl", "host": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "192.0.2.1", "nobody.invalid"])
def test_other_addresses_are_taken(host):
    assert PeerOptions.parse({"transport": "nixl", "host": host}).host == host


@pytest.mark.parametrize("transport", [SharedMemoryTransport, NixlTransport])
def test_a_transport_that_does_not_progress_by_itself_gets_the_barrier(engines, transport, monkeypatch):
    kind = transport.kind
    assert choose_rung(CUDAGraphMode.FULL, engines(transport=kind).worker, "auto") is Rung.GATE
    monkeypatch.setattr(transport, "progresses_by_itself", False)
    connector = engines(transport=kind).worker
    assert choose_rung(CUDAGraphMode.FULL, connector, "auto") is Rung.BARRIER
    with pytest.raises(ConfigError, match="progresses_by_itself"):
        choose_rung(CUDAGraphMode.FULL, connector, "gate")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_over_tcp_alone_ucx_is_kept_to_the_interface_of_the_host(host):
    assert interface_of(host) == "lo"
    assert net_devices("tcp,self", host) == "lo"
    assert net_devices("tcp,posix,self", host) == "lo"


@pytest.mark.parametrize(
    ("tls", "host"), [("rc,tcp,self", "127.0.0.1"), ("posix,sysv,cma,self", "127.0.0.1"), ("", "127.0.0.1"), ("tcp", "192.0.2.99")]
)
def test_what_cannot_be_said_of_all_its_devices_is_left_to_ucx(tls, host):
    assert net_devices(tls, host) is None


def listening():
    """The addresses at which this process listens, as /proc has them."""
    held = set()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path):
            held.add(os.readlink(path))
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return [entry[1].split(":")[0] for entry in lines if entry[3] == "0A" and f"socket:[{entry[9]}]" in held]


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_nothing_of_an_engine_listens_beyond_loopback(engines):
    consumer, producer = engines("kv_consumer"), engines("kv_producer")
    _, promises = consumer.admit("d", list(range(12)), producer.prefill("p", list(range(12)), [1, 2, 3]), [1, 2, 3])
    assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
    addresses = listening()
    assert len(addresses) >= 4  # of each engine the side channel, and UCX
    assert {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_what_the_environment_says_of_ucx_stands(engines, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert engines().worker._worker_half._transport._factory._devices is None
    assert os.environ["UCX_NET_DEVICES"] == "lo"


@pytest.mark.parametrize("transport", ["nixl", "tcp"], indirect=True)
def test_ipv6_reaches_from_engine_to_engine(engines):
    consumer, producer = engines("kv_consumer", host=LOOPBACK_6), engines("kv_producer", host=LOOPBACK_6)
    _, promises = consumer.admit("d", list(range(12)), producer.prefill("p", list(range(12)), [1, 2, 3]), [1, 2, 3])
    assert not consumer.step(CUDAGraphMode.FULL, promises).load_errors
