"""A small network on one machine: hosts that are network namespaces, joined by a switch in a namespace of its own.

Needs root, and nothing of it is seen outside: no link, address or rule of the machine is touched. A host's faults are
methods: its cable pulled, packets of some addresses or ports dropped, a slow link.

    with Network() as network:
        one, two = network.join("one"), network.join("two")
        two.run("ping", "-c1", one.address)
        one.unplug()
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
TAG = "tfs-"
_GONE_WITHIN_S = 10.0
#: include/uapi/linux/sched.h
_CLONE_NEWNET = 0x40000000

# Both ways, so that a rule on one side is enough; the sets are empty until a fault fills them.
_RULES = """
table inet faults {
    set hosts { type ipv4_addr; }
    set ports { type inet_service; }
    chain incoming { type filter hook input priority 0;
        ip saddr @hosts drop
        tcp dport @ports drop
        tcp sport @ports drop
    }
    chain outgoing { type filter hook output priority 0;
        ip daddr @hosts drop
        tcp dport @ports drop
        tcp sport @ports drop
    }
}
"""


def run(*command: str | Path, text: str | None = None, timeout_s: float = 30) -> str:
    """What the command printed; AssertionError when it fails."""
    done = subprocess.run(
        [str(word) for word in command], input=text, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stderr}"
    return done.stdout


def enter(namespace: Path) -> None:
    """From now on the calling thread, and what it starts, has the network of that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{namespace} can't be entered")
    finally:
        os.close(fd)


class Host:
    """One namespace with one interface. Programs run in it keep the machine's mounts: only their network is another."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = f"10.77.{number >> 8}.{number & 255}"
        self.namespace = NAMESPACES / f"{network.tag}-{name}"
        self._switch = f"{network.tag}-switch"
        self._port = f"p{number}"
        run("ip", "netns", "add", self.namespace.name)
        run(
            *("ip", "-n", self._switch, "link", "add", self._port, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", self.namespace.name),
        )
        run("ip", "-n", self._switch, "link", "set", self._port, "master", "br0", "up")
        setup = f"link set lo up\naddr add {self.address}/16 dev {INTERFACE}\nlink set {INTERFACE} up\n"
        run("ip", "-n", self.namespace.name, "-batch", "-", text=setup)
        self.run("nft", "-f", "-", text=_RULES)

    def command(self, *command: str | Path) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", f"--net={self.namespace}", *map(str, command)]

    def run(self, *command: str | Path, text: str | None = None, timeout_s: float = 30) -> str:
        return run(*self.command(*command), text=text, timeout_s=timeout_s)

    def socket(self) -> socket.socket:
        """A TCP socket of this host, for the calling program: it keeps the network that it was made in."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(enter, self.namespace).result()
            return thread.submit(socket.socket).result()

    # --- faults, until `heal`

    def unplug(self) -> None:
        """Its cable is pulled."""
        run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def drop(self, *others: Host) -> None:
        """Packets from and to these hosts vanish."""
        self.run("nft", "add", "element", "inet", "faults", "hosts", _elements(other.address for other in others))

    def drop_ports(self, *ports: int) -> None:
        """TCP packets from and to these ports vanish, also of connections that are open."""
        self.run("nft", "add", "element", "inet", "faults", "ports", _elements(map(str, ports)))

    def slow(self, bytes_s: int) -> None:
        """Both directions carry so much at most."""
        shape = ["root", "tbf", "rate", f"{bytes_s * 8}bit", "burst", "256kb", "latency", "200ms"]
        run("tc", "-n", self.namespace.name, "qdisc", "replace", "dev", INTERFACE, *shape)
        run("tc", "-n", self._switch, "qdisc", "replace", "dev", self._port, *shape)

    def heal(self) -> None:
        """Every fault is over. Returns at once: what was lost meanwhile is for the programs to notice."""
        run("ip", "-n", self._switch, "link", "set", self._port, "up")
        for name in ("hosts", "ports"):
            self.run("nft", "flush", "set", "inet", "faults", name)
        for namespace, device in ((self.namespace.name, INTERFACE), (self._switch, self._port)):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)

    # --- processes

    def pids(self) -> list[int]:
        """Every process whose network is this host's."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.namespace.name).split()]

    def signal(self, number: signal.Signals, *, named: str = "") -> None:
        """To each of its processes, or those whose command line has `named`."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if named.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILLs all that runs on it; returns when it is gone."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"{pids} on {self.name} do not end"
            time.sleep(0.01)


class Network:
    """`tag` is in every name that the network, or who uses it, makes outside of its namespaces, so that what a test
    run that was itself killed left behind is known by it, and swept by the next one."""

    def __init__(self) -> None:
        self.tag = f"{TAG}{os.getpid():x}-{uuid.uuid4().hex[:4]}"
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        switch = f"{self.tag}-switch"
        try:
            run("ip", "netns", "add", switch)
            run("ip", "-n", switch, "-batch", "-", text="link set lo up\nlink add br0 type bridge\nlink set br0 up\n")
        except BaseException:
            remove_namespaces(self.tag)
            raise
        return self

    def join(self, name: str) -> Host:
        host = Host(self, name, len(self.hosts) + 1)
        self.hosts.append(host)
        return host

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        remove_namespaces(self.tag)


def _elements(values: Iterable[str]) -> str:
    return "{ " + ", ".join(values) + " }"


def namespaces(tag: str) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{tag}-*"))


def remove_namespaces(tag: str) -> None:
    """With every process and link in them."""
    for name in namespaces(tag):
        for _ in range(100):
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def dead_tags() -> set[str]:
    """Tags of test runs that are gone without having cleaned up."""
    found = set()
    for path in NAMESPACES.glob(f"{TAG}*-*-*"):
        owner, mark = path.name.removeprefix(TAG).split("-")[:2]
        with contextlib.suppress(ValueError):
            if not Path(f"/proc/{int(owner, 16)}").exists():
                found.add(f"{TAG}{owner}-{mark}")
    return found
