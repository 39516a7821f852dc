"""The network interface behind an address of this host."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_of(host: str) -> str | None:
    """The name of the interface that has an address of `host`; None if there is none, or none can be told (IPv6 link addresses, other
    systems than Linux)."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, ValueError):  # ValueError: no host name at all
        for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(str(entry[4][0]).partition("%")[0])
            for _, name in socket.if_nameindex():
                if address in _addresses(name) or (address.is_loopback and name == "lo"):
                    return name
    return None


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        found.append(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        found += [ipaddress.IPv6Address(int(line.split()[0], 16)) for line in table if line.split()[-1] == name]
    return found
