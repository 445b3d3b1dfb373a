"""The one etcd of a cluster under test, on a host of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
from base64 import b64decode
from collections.abc import Iterator

from rig.etcd_server import Etcd, running_etcd
from rig.network import Host


class ClusterEtcd:
    """`host` has its faults of the network."""

    def __init__(self, host: Host, etcd: Etcd) -> None:
        self.host = host
        self._etcd = etcd
        self.url = etcd.url
        (self._member,) = etcd.members

    def start(self) -> None:
        """Returns when it answers."""
        self._etcd.start()

    def answers(self) -> bool:
        try:
            self._etcd.control("endpoint", "health", "--dial-timeout=1s", "--command-timeout=1s")
        except AssertionError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; what it answered for is on its disk."""
        self._etcd.kill()

    def restart(self, *, lose_data: bool = False) -> None:
        self.kill()
        if lose_data:
            shutil.rmtree(self._member.directory / "data")
        self.start()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self._member.freeze()

    def thaw(self) -> None:
        self._member.thaw()

    def keys(self, part: str = "") -> list[str]:
        """Every key of the catalogue that has `part` in it."""
        printed = self._etcd.control("get", "", "--from-key", "--keys-only", "--write-out=json")
        found = [b64decode(entry["key"]).decode() for entry in json.loads(printed).get("kvs", ())]
        return [key for key in found if part in key]


@contextlib.contextmanager
def etcd_on(host: Host) -> Iterator[ClusterEtcd]:
    with running_etcd(places=[(host.namespace.name, host.address)]) as etcd:
        yield ClusterEtcd(host, etcd)
