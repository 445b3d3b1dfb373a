"""Where other nodes reach this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from tierfs.settings import Settings
from tierfs.transport.addresses import is_loopback, join_address, split_address, split_setting

_CATALOG = "etcd://"
_EVERYWHERE = ("", "0.0.0.0", "::")


def advertised(settings: Settings, listening: Sequence[str]) -> tuple[str, ...]:
    """What other nodes are told to connect to. `listening` is where the server really listens.

    An address of all interfaces becomes the one by which this node reaches the catalogue. SettingsError.
    """
    told = settings.cluster.advertise
    wanted = (
        [join_address(host, port) for host, port in split_setting(told, "cluster.advertise")] if told else listening
    )
    found: list[str] = []
    for address in wanted:
        host, port = split_address(address)
        if host in _EVERYWHERE:
            host = address_towards(settings.catalog) or "127.0.0.1"
        if (each := join_address(host, port)) not in found:
            found.append(each)
    return tuple(sorted(found, key=lambda address: is_loopback(split_address(address)[0])))


def address_towards(catalog: str) -> str:
    """This machine's address on the way to the catalogue; "" where there is no way. Nothing is sent."""
    for endpoint in catalog.removeprefix(_CATALOG).split(","):
        with suppress(OSError, ValueError):
            host, port = split_address(endpoint)
            for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(target)  # of a datagram socket: only looks up the route
                    return str(probe.getsockname()[0])
    return ""
