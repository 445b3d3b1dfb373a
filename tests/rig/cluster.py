"""Several nodes on one machine: a network namespace, a mount and a RAM tier each, and a real etcd on a host of its own.

    with cluster(nodes=4) as nodes:
        (nodes[0].mountpoint / "run").mkdir()
        nodes[1].kill(wipe=True)
        nodes[1].start(node_id="replacement")

Nothing is left over afterwards, whatever happened; what is left all the same fails the test. A run that was itself
killed is cleaned up after by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mount.cli.client import request
from mount.runtime import Instance as Runtime
from rig.cluster_etcd import ClusterEtcd, etcd_on
from rig.instance import COMMAND_TIMEOUT_S, MOUNT_S, TIERFS, CommandFailed, Instance, wait_until
from rig.network import Host, Network, dead_tags, namespaces, remove_namespaces, run
from tierfs.errors import TierfsError

PEER_PORT = 7117
MIB = 1 << 20
INSTANCE_LINKS = Path("/run/tierfs/.instances")

#: Faults are noticed soon, so that tests need not wait long.
QUICK = {
    "cluster.lease_s": "3",
    "cluster.wait_s": "6",
    "etcd.timeout_s": "2",
    "peer.stall_s": "2",
    "replication.after_s": "2",
    "transfer.read_retry_for_s": "5",
    "ram.ballast": "off",
    "log.level": "debug",
}
LEASE_S = 3.0
#: No step of a test may wait longer for something that a fault delays: leases, stalls and repeats, one after the other.
BOUND_S = 30.0


class Node(Instance):
    """A node: an instance whose daemon lives on a host of the test's network."""

    def __init__(
        self, host: Host, directory: Path, size: str, options: dict[str, str], etcd: ClusterEtcd, number: int
    ) -> None:
        super().__init__(directory / f"n{number}" / "ckpt", f"{directory.name}-n{number}", size=size, options=options)
        self.host = host
        self.number = number
        self.etcd = etcd
        self.directory = directory
        self.is_started = False

    @property
    def node_id(self) -> str:
        return self.options["node"]

    @property
    def ram_path(self) -> Path:
        return self.runtime_path / "ram"

    @property
    def runtime_path(self) -> Path:
        return Path(self.options["runtime_dir"]) / self.name

    def mount(self) -> None:
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        command = self.host.command(TIERFS, "mount", self.mountpoint, "-o", options, "--timeout", str(MOUNT_S))
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
        # 3: mounted, with problems of its own, such as an etcd that can't be reached
        if done.returncode not in (0, 3):
            raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}\n{self.log()}")
        if self not in self.live:
            self.live.append(self)
        self.is_started = True

    def status(self) -> dict[str, Any]:
        """What `tierfs status --json` prints, asked for without starting a program: tests poll it."""
        try:
            answer: dict[str, Any] = request(Runtime(self.runtime_path), "status")
        except TierfsError as error:
            raise CommandFailed(f"{self.node_id} says no status: {error}") from None
        return answer

    def start(self, *, node_id: str | None = None) -> None:
        """Mounted again after `kill`; with `node_id` it is another machine in the old one's place."""
        if node_id is not None:
            self.options["node"] = node_id
        self.mount()

    def kill(self, *, wipe: bool) -> None:
        """The machine dies: its daemon, keeper and every program on it, and with `wipe` what was in its RAM."""
        self.host.kill()
        self.is_started = False
        _detach(self.mountpoint)
        if wipe:
            _detach(self.ram_path)
            shutil.rmtree(self.runtime_path, ignore_errors=True)

    def kill_daemon(self) -> None:
        """SIGKILL for the daemon alone; its keeper starts another. Returns when that one answers."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        self.wait_for_new_daemon(pid)

    # --- faults of the network, until `heal`

    def partition(self) -> None:
        """No packet leaves it or reaches it."""
        self.host.unplug()

    def drop_from(self, *others: Node) -> None:
        """Packets between it and these nodes vanish."""
        self.host.drop(*(other.host for other in others))

    def lose_etcd(self) -> None:
        self.host.drop(self.etcd.host)

    def stall(self) -> None:
        """It sends nothing more to other nodes and reads nothing of theirs, but is a member with a living lease."""
        self.host.drop_ports(PEER_PORT)

    def heal(self) -> None:
        self.host.heal()

    # --- looking

    def step(self, name: str, namespace: str = "run") -> dict[str, Any]:
        """What this node says of a step; {} where it knows of none."""
        return self.steps(namespace).get(name, {})

    def backing(self, path: Path) -> Path:
        """The file in the RAM tier that is shown as `path` of this mount."""
        return self.ram_path / "root" / path.relative_to(self.mountpoint)

    def log(self, lines: int = 60) -> str:
        parts = []
        for path in sorted((self.directory / "log" / f"n{self.number}").rglob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path}", *tail]))
        return "\n".join(parts)

    def discard(self) -> None:
        if self in self.live:
            self.live.remove(self)
        self.kill(wipe=True)
        for link in INSTANCE_LINKS.glob(f"{self.name}-*"):
            link.unlink(missing_ok=True)


class Cluster(Sequence[Node]):
    """The nodes by their number from 0, and the etcd that they share."""

    def __init__(
        self, network: Network, etcd: ClusterEtcd, directory: Path, size: str, options: dict[str, str]
    ) -> None:
        self.network = network
        self.directory = directory
        self.etcd = etcd
        self.nodes: list[Node] = []
        self._size, self._options = size, options
        self._replacements = itertools.count(1)
        self.was_stopped = False

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: Any) -> Any:
        return self.nodes[index]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def add(self, *, domain: str = "") -> Node:
        """Another node, not yet started."""
        number = len(self.nodes) + 1
        host = self.network.join(f"n{number}")
        options = {
            **QUICK,
            "runtime_dir": str(self.directory / "run"),
            "log.directory": str(self.directory / "log" / f"n{number}"),
            "catalog": self.etcd.url,
            "node": f"n{number}",
            "cluster.listen": f"{host.address}:{PEER_PORT}",
            "cluster.secret_file": str(self.directory / "secret"),
            "cluster.domain": domain or f"rack-{number}",
            **self._options,
        }
        node = Node(host, self.directory, self._size, options, self.etcd, number)
        self.nodes.append(node)
        return node

    def start(self, *nodes: Node) -> None:
        """Side by side, as they would in a cluster; all of them where none is named."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Node.start, nodes or self.nodes))

    def others(self, *nodes: Node) -> list[Node]:
        return [node for node in self.nodes if node not in nodes]

    def members(self) -> set[str]:
        """The ids of the nodes that hold a lease."""
        return {key.rpartition("/")[2] for key in self.etcd.keys("/nodes/")}

    def wait_members(self, *, within_s: float = BOUND_S) -> None:
        """Until the nodes that are started, and no others, are members."""
        expected = {node.node_id for node in self.nodes if node.is_started}
        wait_until(lambda: self.members() == expected, f"the members are {expected}", within_s, every_s=0.1)

    def heal(self) -> None:
        """Every link is whole, and nobody is frozen."""
        self.etcd.thaw()
        for host in self.network.hosts:
            host.heal()
            host.signal(signal.SIGCONT)

    def restore(self) -> None:
        """After a fault: etcd answers, every link is whole, and in a lost node's place is another with a new id."""
        self.heal()
        if not self.etcd.answers():
            self.etcd.restart()
        if lost := [node for node in self.nodes if not node.is_started]:
            for node in lost:
                node.kill(wipe=True)
                node.options["node"] = f"n{node.number}-{next(self._replacements)}"
            self.start(*lost)
        self.wait_members()

    def stop_all(self) -> None:
        """Kills every process, so that whoever waits for a mount gets an error."""
        self.was_stopped = True
        for host in self.network.hosts:
            host.kill()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """What is done meanwhile may take so long; then all nodes are killed, and the test fails instead of hanging."""
        timer = threading.Timer(seconds, self.stop_all)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            assert not self.was_stopped, f"not done within {seconds:g} s; all nodes were killed"

    def discard(self) -> None:
        with contextlib.suppress(AssertionError):
            self.stop_all()
        for node in self.nodes:
            node.discard()


@contextlib.contextmanager
def cluster(nodes: int = 4, *, size: str = "384M", start: bool = True, **options: str) -> Iterator[Cluster]:
    """A running cluster. `options` are settings, with `_` for the first `.`: `replication_replicas="3"`."""
    sweep()
    given = {key.replace("_", ".", 1): value for key, value in options.items()}
    with Network() as network, etcd_on(network.join("etcd")) as etcd:
        directory = Path("/tmp") / network.tag
        directory.mkdir(mode=0o700)
        try:
            (directory / "secret").touch(mode=0o600)
            (directory / "secret").write_text("a secret that all nodes of this test share\n")
            (directory / "run").mkdir(mode=0o700)
            made = Cluster(network, etcd, directory, size, given)
            try:
                for _ in range(nodes):
                    made.add()
                if start:
                    made.start()
                    made.wait_members()
                yield made
            finally:
                made.discard()
        finally:
            remove_leftovers(network.tag)
    assert not (left := leftovers(network.tag)), f"the cluster left something over: {left}"


def leftovers(tag: str) -> list[str]:
    """Namespaces, mounts and directories that bear the tag."""
    found = namespaces(tag)
    found += [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"/{tag}" in line]
    for place in (Path("/tmp"), INSTANCE_LINKS):
        found += [str(path) for path in place.glob(f"{tag}*")]
    return found


def remove_leftovers(tag: str) -> None:
    remove_namespaces(tag)
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        if f"/{tag}" in line:
            subprocess.run(["umount", "-l", line.split()[4]], capture_output=True)
    for path in Path("/tmp").glob(f"{tag}*"):
        shutil.rmtree(path, ignore_errors=True)
    for link in INSTANCE_LINKS.glob(f"{tag}*"):
        link.unlink(missing_ok=True)


def sweep() -> None:
    """Removes what runs that were killed left behind."""
    for tag in dead_tags():
        remove_leftovers(tag)


def _detach(path: Path) -> None:
    while any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        run("umount", "-l", path)
