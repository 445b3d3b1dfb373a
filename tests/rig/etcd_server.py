"""A real etcd of one or three members, on the loopback or inside network namespaces, that a test may kill and freeze.

Data lies in memory (`/dev/shm`): etcd waits for its disk after each change, and what is tested is not the disk. All of
it is killed and removed when the context ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tierfs.settings import Settings

_START_S = 30.0
#: Below Linux's ephemeral ports (32768), above those of the S3 servers.
_PORTS = range(20_000, 30_000)
#: In a namespace of its own each member has etcd's own ports.
_CLIENT_PORT, _PEER_PORT = 2379, 2380
USER, PASSWORD = "tierfs", "pass-$word:é"
_ROOT_PASSWORD = "root's password"


class EtcdDidNotStart(AssertionError):
    """The message holds the end of the member's log."""


@dataclass(frozen=True)
class Certificates:
    ca: Path
    cert: Path
    key: Path


@dataclass
class Member:
    """`namespace` is the network namespace it runs in, where `host` is its address; empty is this one."""

    name: str
    host: str
    client_port: int
    peer_port: int
    directory: Path
    namespace: str = ""
    arguments: Sequence[str] = ()
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.client_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"etcd {self.name} does not run"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Returns at once: of three, two are needed before any answers."""
        assert not self.is_running
        inside = _inside(self.namespace)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*inside, "etcd", *self.arguments],
                env={"PATH": os.environ["PATH"], "ETCD_UNSUPPORTED_ARCH": _unsupported()},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL; `launch` brings it back with what it had."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)

    def freeze(self) -> None:
        """It answers nothing, and its connections stay."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return (self.directory / "log").read_text(errors="replace")[-4000:]
        return ""

    def _signal(self, number: int) -> None:
        # `nsenter` becomes the program it runs, so the group has one process either way.
        if self.is_running:
            assert self._process is not None
            os.killpg(self._process.pid, number)


@dataclass
class Etcd:
    members: list[Member]
    directory: Path
    tls: Certificates | None = None
    has_users: bool = False
    _control: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """For the setting `catalog`."""
        return "etcd://" + ",".join(member.endpoint for member in self.members)

    def settings(self, name: str, *, timeout_s: float = 5.0, password: str = PASSWORD) -> Settings:
        """Of a node of the cluster `name`."""
        settings = Settings(catalog=self.url)
        settings.cluster.name = name
        settings.etcd.timeout_s = timeout_s
        if self.tls is not None:
            settings.etcd.ca, settings.etcd.cert, settings.etcd.key = self.tls.ca, self.tls.cert, self.tls.key
        if self.has_users:
            settings.etcd.user = USER
            settings.etcd.password_file = self.directory / f"password-{len(password)}-{abs(hash(password))}"
            settings.etcd.password_file.write_text(f"{password}\n")
        return settings

    def start(self) -> None:
        """Launches those that don't run. Returns when all answer; EtcdDidNotStart."""
        for member in self.members:
            if not member.is_running:
                member.launch()
        deadline = time.monotonic() + _START_S
        waiting = list(self.members)
        while waiting:
            if self._is_healthy(waiting[0]):
                waiting.pop(0)
            elif time.monotonic() > deadline or not waiting[0].is_running:
                raise EtcdDidNotStart(f"etcd {waiting[0].name} did not start:\n{waiting[0].log()}")
            else:
                time.sleep(0.02)

    def kill(self) -> None:
        for member in self.members:
            member.thaw()
            member.kill()

    def restart(self) -> None:
        """As after a power loss of all; what was answered for is still there."""
        self.kill()
        self.start()

    def leader(self) -> Member:
        for told in json.loads(self.control("endpoint", "status", "-w", "json")):
            status = told["Status"]
            if status["header"]["member_id"] == status.get("leader"):
                return next(member for member in self.members if member.endpoint == told["Endpoint"])
        raise AssertionError("etcd has no leader")

    def control(self, *arguments: str, member: Member | None = None, given: str = "") -> str:
        """What `etcdctl` prints, asked as root and given this at its standard input."""
        asked = member or self.members[0]
        inside = _inside(asked.namespace)
        endpoints = ",".join(each.endpoint for each in ([member] if member else self.members))
        done = subprocess.run(
            [*inside, "etcdctl", f"--endpoints={endpoints}", *self._control, *arguments],
            env={"PATH": os.environ["PATH"], "ETCDCTL_API": "3"},
            input=given,
            capture_output=True,
            text=True,
            timeout=20,
        )
        if done.returncode:
            raise AssertionError(f"etcdctl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    def compact(self) -> None:
        """Forget all history."""
        revision = json.loads(self.control("get", "x", "-w", "json"))["header"]["revision"]
        self.control("compact", str(revision))

    def add_users(self) -> None:
        """From now on only users may do anything, and USER only below `tierfs/`."""
        for command in (
            ["user", "add", f"root:{_ROOT_PASSWORD}"],
            ["user", "grant-role", "root", "root"],
            ["user", "add", f"{USER}:{PASSWORD}"],
            ["role", "add", USER],
            ["role", "grant-permission", USER, "--prefix=true", "readwrite", "tierfs/"],
            ["user", "grant-role", USER, USER],
            ["auth", "enable"],
        ):
            self.control(*command)
        self.has_users = True
        self._control += ["--user", "root", "--password", _ROOT_PASSWORD]

    def _is_healthy(self, member: Member) -> bool:
        try:
            self.control("endpoint", "health", "--dial-timeout=1s", "--command-timeout=2s", member=member)
        except AssertionError:
            return False
        return True


@contextlib.contextmanager
def running_etcd(
    *, members: int = 1, tls: bool = False, users: bool = False, places: Sequence[tuple[str, str]] = ()
) -> Iterator[Etcd]:
    """`places`: (network namespace, address in it) of each member, instead of the loopback here."""
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        pytest.fail("etcd is not installed: run scripts/system-packages.sh")
    root = Path(tempfile.mkdtemp(prefix="tierfs-etcd-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        certificates = make_certificates(root, [host for _, host in places] or ["127.0.0.1"]) if tls else None
        etcd = Etcd(_members(root, members, places), root, certificates)
        _add_arguments(etcd)
        try:
            etcd.start()
            if users:
                etcd.add_users()
            yield etcd
        finally:
            etcd.kill()
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[Etcd]:
    """One member, shared by tests: each uses a cluster's name of its own."""
    with running_etcd() as etcd:
        yield etcd


def make_certificates(directory: Path, hosts: Sequence[str]) -> Certificates:
    """An authority, and one certificate by it for servers and clients at these addresses."""
    ca, ca_key, cert, key = (directory / name for name in ("ca.pem", "ca.key", "node.pem", "node.key"))
    request, extensions = directory / "node.csr", directory / "node.ext"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    extensions.write_text(f"subjectAltName={','.join(f'IP:{host}' for host in hosts)}\n")
    for command in (
        ["req", "-x509", *curve, "-days", "2", "-subj", "/CN=tierfs tests", "-keyout", str(ca_key), "-out", str(ca)],
        ["req", *curve, "-subj", "/CN=node", "-keyout", str(key), "-out", str(request)],
        ["x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca_key), "-CAcreateserial", "-days", "2",
         "-extfile", str(extensions), "-out", str(cert)],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=30)
    return Certificates(ca, cert, key)


def _members(root: Path, count: int, places: Sequence[tuple[str, str]]) -> list[Member]:
    members = []
    for index in range(len(places) or count):
        directory = root / f"m{index}"
        directory.mkdir()
        if places:
            namespace, host = places[index]
            members.append(Member(f"m{index}", host, _CLIENT_PORT, _PEER_PORT, directory, namespace))
        else:
            client, peer = _free_ports(2)
            members.append(Member(f"m{index}", "127.0.0.1", client, peer, directory))
    return members


def _add_arguments(etcd: Etcd) -> None:
    scheme, tls, control = "http", list[str](), list[str]()
    if etcd.tls is not None:
        scheme = "https"
        ca, cert, key = str(etcd.tls.ca), str(etcd.tls.cert), str(etcd.tls.key)
        tls = ["--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", cert, "--key-file", key]
        control = ["--cacert", ca, "--cert", cert, "--key", key]
    peers = ",".join(f"{each.name}=http://{each.host}:{each.peer_port}" for each in etcd.members)
    for member in etcd.members:
        client, peer = f"{scheme}://{member.endpoint}", f"http://{member.host}:{member.peer_port}"
        member.arguments = [
            "--name", member.name, "--data-dir", str(member.directory / "data"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", peers, "--initial-cluster-token", etcd.directory.name,
            *tls,
        ]  # fmt: skip
    etcd._control = control


def _free_ports(count: int) -> list[int]:
    """Below the ephemeral range, so that nobody is given one of them before etcd listens."""
    found: list[int] = []
    start = _PORTS.start + (os.getpid() * 37 + int(time.monotonic() * 1000)) % len(_PORTS)
    for offset in range(len(_PORTS)):
        port = _PORTS.start + (start - _PORTS.start + offset) % len(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


_given: set[int] = set()


def _inside(namespace: str) -> list[str]:
    """What goes before a command that is to run there. `ip netns exec` would make a copy of all mounts for it as well,
    and hold every FUSE mount of the machine for as long as it runs."""
    return ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []


def _unsupported() -> str:
    # etcd 3.4 starts on other architectures than amd64 only when it is told to.
    return {"aarch64": "arm64", "armv7l": "arm"}.get(platform.machine(), "")
