"""What is wrong with a node's settings for its cluster, as far as it can be told before it is mounted.

Neither the catalogue nor other nodes are asked: that they can't be reached now is no reason not to mount.
"""

from __future__ import annotations

import errno
import os
import socket

from tierfs.errors import MountError, SettingsError
from tierfs.settings import Settings


def check_cluster(settings: Settings) -> str:
    """SettingsError for a secret, a certificate or a password that can't be used, or a package that is missing.

    Returns what to warn of, "" where there is nothing.
    """
    if not settings.catalog:
        return ""
    from tierfs.catalog.opening import open_store
    from tierfs.transport.addresses import is_loopback, split_setting
    from tierfs.transport.credentials import Credentials
    from tierfs.transport.server import where_to_listen

    open_store(settings)
    for name in ("password_file", "ca", "cert", "key"):
        if (path := getattr(settings.etcd, name)) is not None:
            try:
                with path.open("rb"):
                    pass
            except OSError as error:
                raise SettingsError(f"etcd.{name} {path} can't be read: {error.strerror}", key=f"etcd.{name}") from None
    split_setting(settings.cluster.advertise, "cluster.advertise")
    credentials = Credentials(settings.cluster)
    where_to_listen(settings, credentials)
    asked_for = split_setting(settings.cluster.listen, "cluster.listen")
    if credentials.none and not all(is_loopback(host) for host, _ in asked_for):
        return (
            "warning: there is neither a secret nor a certificate, so no node of another machine is let in, nor lets "
            "this one in: set cluster.secret_file to a file of mode 600 that is the same on all nodes"
        )
    return ""


def check_listening(settings: Settings) -> None:
    """MountError where another program listens at an address of `cluster.listen`, or it is none of this machine's."""
    if not settings.catalog:
        return
    from tierfs.transport.addresses import join_address, split_setting

    for host, port in split_setting(settings.cluster.listen, "cluster.listen"):
        problem = cannot_listen(host, port)
        at = f"{join_address(host, port)} (cluster.listen)"
        if problem == errno.EADDRINUSE:
            raise MountError(
                f"another program listens at {at}: several nodes on one machine need different ports, such as "
                f"-o cluster.listen=:{port + 1}"
            )
        if problem:
            raise MountError(f"this node can't listen at {at}: {os.strerror(problem)}")


def cannot_listen(host: str, port: int) -> int:
    """errno of what keeps this machine from listening there; 0 where nothing does. `host` "" is all addresses."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        return errno.EADDRNOTAVAIL
    try:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0
