"""The rig does to the network what its words say, and leaves nothing over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cluster import Cluster, cluster, leftovers
from rig.instance import wait_until
from rig.network import Host

pytestmark = pytest.mark.alone
PORT = 7117


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Nodes that are not mounted, each with a program that takes connections."""
    with cluster(nodes=3, start=False) as made:
        listening = [node.host.socket() for node in made]
        for node, each in zip(made, listening, strict=True):
            each.bind((node.host.address, PORT))
            each.listen(64)
        yield made
        for each in listening:
            each.close()


def reaches(one: Host, other: Host, port: int = PORT) -> bool:
    with one.socket() as connection:
        connection.settimeout(0.3)
        try:
            connection.connect((other.address, port))
        except OSError:
            return False
    return True


def reached(made: Cluster) -> set[str]:
    """Which pairs of the nodes 1 to 3 reach each other, and who reaches etcd."""
    found = {
        f"{one.number}-{other.number}"
        for one, other in itertools.permutations(made, 2)
        if reaches(one.host, other.host)
    }
    return found | {f"{node.number}-etcd" for node in made if reaches(node.host, made.etcd.host, 2379)}


ALL = {"1-2", "2-1", "1-3", "3-1", "2-3", "3-2", "1-etcd", "2-etcd", "3-etcd"}


def test_faults_cut_what_they_name_and_nothing_else(hosts: Cluster) -> None:
    one, two, _ = hosts
    assert reached(hosts) == ALL
    for fault, lost in (
        (one.partition, {"1-2", "2-1", "1-3", "3-1", "1-etcd"}),
        (lambda: one.drop_from(two), {"1-2", "2-1"}),
        (one.lose_etcd, {"1-etcd"}),
        (one.stall, {"1-2", "2-1", "1-3", "3-1"}),
        (hosts.etcd.host.unplug, {"1-etcd", "2-etcd", "3-etcd"}),
    ):
        fault()
        assert reached(hosts) == ALL - lost
        one.heal()
        hosts.etcd.host.heal()
        wait_until(lambda: reached(hosts) == ALL, "everything reaches everything again", 10)


def test_a_slow_link_is_slow_and_a_frozen_etcd_answers_nothing(hosts: Cluster) -> None:
    one, two, _ = hosts
    one.host.slow(1 << 20)
    with one.host.socket() as connection, two.host.socket() as listening:
        listening.bind((two.host.address, PORT + 1))
        listening.listen()
        connection.connect((two.host.address, PORT + 1))
        there, _ = listening.accept()
        sender = threading.Thread(target=lambda: (connection.sendall(bytes(2 << 20)), connection.close()))
        begin = time.monotonic()
        sender.start()
        while there.recv(1 << 20):
            pass
        there.close()
        sender.join(10)
        assert time.monotonic() - begin > 1
    one.heal()
    hosts.etcd.freeze()
    assert not hosts.etcd.answers()
    hosts.etcd.thaw()
    assert hosts.etcd.answers()
    hosts.etcd.restart()
    assert hosts.etcd.answers()


def test_what_a_failing_test_leaves_is_removed() -> None:
    tag = ""
    with pytest.raises(ZeroDivisionError), cluster(nodes=1, start=False) as made:
        tag = made.network.tag
        made[0].host.run("sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
        assert made[0].host.pids()
        assert leftovers(tag)
        raise ZeroDivisionError
    assert not leftovers(tag)


def test_who_waits_for_a_mount_that_hangs_is_released() -> None:
    with pytest.raises(AssertionError, match="not done within"), cluster(nodes=1, start=False) as made:
        ended = made[0].directory / "ended"
        made[0].host.run("sh", "-c", f"(sleep 1000; touch {ended}) >/dev/null 2>&1 &")
        with made.at_most(0.1):
            while made[0].host.pids():
                time.sleep(0.01)
        assert not Path(ended).exists()
