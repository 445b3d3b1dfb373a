"""The RDMA self-test over ports without a device: it passes where all is well, names what is not, leaves nothing."""

from __future__ import annotations

import ctypes
import errno
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conftest import repository
from tests.unit.verbs_double import DoublePort, Fabric, Read
from tierfs.errors import PeerError, PeerRefused, PeerUnavailable
from tierfs.settings import Settings
from tierfs.transport.frames import Kind as FrameKind
from tierfs.transport.verbs_port import Kind
from tierfs.transport.verbs_selftest import Check, SelfTest, usual_size
from tierfs.transport.verbs_selftest_holder import Holder, Holding
from tierfs.transport.verbs_selftest_peer import RemoteHolder, SelfTestServer, remote_holder

MIB = 1 << 20
SIZE = 3 * MIB
BOUND_S = 60
both_kinds = pytest.mark.parametrize("kind", ["rc", "srd"])


class Lenient(Fabric):
    """Carries out what it should refuse, if only the memory is there."""

    def _error(self, read: Read) -> str:
        error = super()._error(read)
        return "" if error == "remote access error" and self._is_within(read) else error

    def _is_within(self, read: Read) -> bool:
        return any(
            region.remote and region.address <= read.remote_address <= region.address + region.length - read.length
            for region in self.regions.values()
        )


class Damaging(Fabric):
    """One bit of each READ of a MiB is another one."""

    def _move(self, read: Read) -> None:
        super()._move(read)
        if read not in read.link.port.posted and read.length == MIB and read.into.is_open:
            byte = ctypes.c_ubyte.from_address(read.into.address + read.at + MIB - 1)
            byte.value ^= 4


class Rig:
    def __init__(self, fabric: Fabric, kinds: Sequence[Kind]) -> None:
        self.fabric = fabric
        self.here = [fabric.port(f"here{index}", kind) for index, kind in enumerate(kinds)]
        self.there = [fabric.port(f"there{index}", kind) for index, kind in enumerate(kinds)]
        self.threads = trio.CapacityLimiter(2)

    async def test(self, holder: Holder, *, stall_s: float = 20.0, told: Any = lambda _: None) -> list[Check]:
        test = SelfTest(self.here, holder, size_bytes=SIZE, stall_s=stall_s, threads=self.threads, told=told)
        return await test.run()

    def check_nothing_left(self) -> None:
        assert (self.fabric.registered, self.fabric.open_links, self.fabric.misuse) == (0, 0, [])


@asynccontextmanager
async def rig(fabric: Fabric, *kinds: Kind) -> AsyncIterator[Rig]:
    made = Rig(fabric, kinds)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(fabric.run)
            yield made
            nursery.cancel_scope.cancel()
    for port in [*made.here, *made.there]:
        port.close()


def failed(checks: Sequence[Check]) -> dict[str, str]:
    return {check.check: check.found for check in checks if check.verdict == "fail"}


def found(checks: Sequence[Check], name: str, device: str = "here0") -> Check:
    [check] = [each for each in checks if (each.device, each.check) == (device, name)]
    return check


@both_kinds
async def test_devices_that_do_as_they_should_pass(kind: Kind) -> None:
    told: list[dict[str, Any]] = []
    async with rig(Fabric(1), kind, kind) as made:
        holding = Holding(made.there, made.threads)
        checks = await made.test(holding, told=told.append)
        holding.close()
        made.check_nothing_left()
    assert failed(checks) == {} and not [check for check in checks if check.verdict == "warn"]
    for device in ("here0", "here1"):
        assert [check.check for check in checks if check.device == device] == [
            "link", "READ of 4 KiB", "READ of 1 MiB", "wrong key", "link after an error", "beyond the memory",
            "deregistered memory", "after errors", "READ of 3 MiB",
        ]  # fmt: skip
        assert found(checks, "READ of 3 MiB", device).bytes_s > 0
    assert found(checks, "all devices together", "").bytes_s > 0
    after = found(checks, "link after an error").found
    assert ("carries nothing any more" in after) if kind == "rc" else (after == "it goes on")
    assert told[-1] == {"bytes": SIZE, "bytes_total": SIZE, "path": "here0 here1"}


@both_kinds
async def test_memory_that_should_not_be_read_is_named(kind: Kind) -> None:
    async with rig(Lenient(2), kind) as made:
        holding = Holding(made.there, made.threads)
        checks = await made.test(holding)
        holding.close()
        made.check_nothing_left()
    assert set(failed(checks)) == {"wrong key", "link after an error", "deregistered memory"}
    assert "can be read by whoever should not" in failed(checks)["deregistered memory"]


async def test_wrong_bytes_are_named() -> None:
    async with rig(Damaging(3), "srd", "srd") as made:
        holding = Holding(made.there, made.threads)
        checks = await made.test(holding)
        holding.close()
        made.check_nothing_left()
    assert set(failed(checks)) == {"READ of 1 MiB", "READ of 3 MiB", "all devices together"}
    assert found(checks, "READ of 1 MiB").found == "the 1 MiB that came are not those that are there"


async def test_a_link_of_srd_that_ends_with_an_error_is_a_warning() -> None:
    class Ending(Fabric):
        def _move(self, read: Read) -> None:
            is_refused = bool(self._error(read))
            super()._move(read)
            if is_refused:
                read.link.break_down()

    async with rig(Ending(4), "srd") as made:
        holding = Holding(made.there, made.threads)
        checks = await made.test(holding)
        holding.close()
        made.check_nothing_left()
    assert failed(checks) == {}
    assert found(checks, "link after an error").verdict == "warn"
    assert "not expected of srd" in found(checks, "link after an error").found


@both_kinds
async def test_a_device_that_completes_nothing_is_given_up(kind: Kind) -> None:
    async with rig(Fabric(5), kind) as made:
        link = DoublePort.link

        def stalled(port: DoublePort) -> Any:
            made_link = link(port)
            made_link.stall()
            return made_link

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DoublePort, "link", stalled)
            holding = Holding(made.there, made.threads)
            checks = await made.test(holding, stall_s=0.2)
        holding.close()
        made.check_nothing_left()
    assert found(checks, "link").verdict == "ok"
    assert failed(checks)["READ of 4 KiB"] == "no completion within 0.2 s"
    assert "no READ completed for 0.2 s" in failed(checks)["READ of 3 MiB"]


async def test_a_device_that_goes_meanwhile_fails_and_the_other_is_tested() -> None:
    async with rig(Fabric(6), "rc", "rc") as made:
        holding = Holding(made.there, made.threads)
        reads = 0

        def told(progress: Any) -> None:
            nonlocal reads
            reads += 1
            if progress["path"] == "here0" and reads > 1:
                made.here[0].remove()

        checks = await made.test(holding, told=told)
        holding.close()
        made.check_nothing_left()
    assert {check.device for check in checks if check.verdict == "fail"} <= {"", "here0"}
    assert found(checks, "READ of 3 MiB", "here1").verdict == "ok"
    assert "here0" in failed(checks)["all devices together"]


async def test_memory_that_can_not_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register = DoublePort.register

    def refuse(port: DoublePort, address: int, length: int, *, remote: bool) -> Any:
        if port.gid in ("here0", "there1"):
            raise OSError(errno.ENOMEM, f"{length} bytes can't be registered")
        return register(port, address, length, remote=remote)

    async with rig(Fabric(11), "srd", "srd", "srd") as made:
        monkeypatch.setattr(DoublePort, "register", refuse)
        holding = Holding(made.there, made.threads)
        checks = await made.test(holding)
        holding.close()
        made.check_nothing_left()
    of_first = [check for check in checks if check.device == "here0" and check.verdict == "fail"]
    assert [check.check for check in of_first] == ["memory", "READ of 3 MiB"]
    assert all("can't be registered" in check.found for check in of_first)
    assert "can't be registered" in found(checks, "READ of 4 KiB", "here1").found
    assert found(checks, "READ of 3 MiB", "here2").verdict == "ok"
    assert "can't be registered" in found(checks, "all devices together", "").found


async def test_no_device_of_the_same_kind_there() -> None:
    async with rig(Fabric(7), "srd") as made:
        other = [made.fabric.port("ib", "rc")]
        holding = Holding(other, made.threads)
        checks = await made.test(holding)
        holding.close()
        made.check_nothing_left()
        other[0].close()
    assert [(check.check, check.verdict) for check in checks] == [("link", "fail")]
    assert checks[0].found == "the devices there are of another kind than this one: rc"


# --- over a connection


def settings_with(secret: Path | None) -> Settings:
    settings = Settings()
    settings.cluster.listen = "127.0.0.1:0"
    settings.cluster.secret_file = secret
    return settings


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of the cluster's nodes")
    path.chmod(0o600)
    return path


@asynccontextmanager
async def serving(made: Rig, settings: Settings, told: list[str] | None = None) -> AsyncIterator[SelfTestServer]:
    said: list[str] = [] if told is None else told
    about = {"machine": {"kernel": "7"}}
    server = SelfTestServer(settings, made.there, about=about, most_bytes=SIZE, threads=made.threads, told=said.append)
    async with trio.open_nursery() as nursery:
        await server.listen()
        nursery.start_soon(server.run)
        yield server
        nursery.cancel_scope.cancel()


@both_kinds
async def test_another_machine_is_tested_with(kind: Kind, secret: Path) -> None:
    settings = settings_with(secret)
    async with rig(Fabric(8), kind, kind) as made, serving(made, settings) as server:
        async with remote_holder(settings, f"verbs-selftest@{server.addresses[0]}") as holder:
            assert holder.about == {"machine": {"kernel": "7"}} and holder.most_bytes == SIZE
            checks = await made.test(holder)
        while not server.served:
            await server.changed.wait()
        made.check_nothing_left()
    assert failed(checks) == {}
    assert len(checks) == 2 * 9 + 1


async def test_it_lets_in_whom_the_cluster_lets_in(secret: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("a secret of another cluster")
    other.chmod(0o600)
    said: list[str] = []
    async with rig(Fabric(9), "rc") as made, serving(made, settings_with(secret), said) as server:
        address = server.addresses[0]
        for wrong in (settings_with(other), settings_with(None)):
            with pytest.raises(PeerError):
                async with remote_holder(wrong, address):
                    pytest.fail("it was let in")
        async with remote_holder(settings_with(secret), address):
            with pytest.raises(PeerUnavailable, match="another node is being tested with"):
                async with remote_holder(settings_with(secret), address):
                    pytest.fail("both test at once")
    assert len(said) == 4 and not any("a secret of the cluster" in line for line in said)


async def test_without_credentials_only_this_machine_is_asked() -> None:
    with pytest.raises(PeerRefused, match=r"cluster\.secret_file"):
        async with remote_holder(settings_with(None), "192.0.2.1:7127"):
            pytest.fail("it was asked")


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "hold", "size_bytes": SIZE + MIB},
        {"op": "hold", "size_bytes": MIB + 4096},
        {"op": "hold", "size_bytes": -1},
        {"op": "link", "first": 0, "links": [["rc", "::1", 1, 2]]},
        {"op": "export", "version": "a/b"},
        {"op": "about", "more": 1},
    ],
)
async def test_what_can_not_be_asked_is_refused(asked: dict[str, Any]) -> None:
    settings = settings_with(None)
    async with rig(Fabric(10), "rc") as made, serving(made, settings) as server:
        async with remote_holder(settings, server.addresses[0]) as holder:
            with pytest.raises(PeerRefused):
                await holder._ask(asked)
        while not server.served:
            await server.changed.wait()
        made.check_nothing_left()


@pytest.mark.parametrize(
    "answer",
    [
        {"remotes": [[4096, MIB, 1]], "sums": {}},
        {"remotes": [], "sums": {str(MIB): 1}},
        {"remotes": [[4096, 2 * MIB, 1]], "sums": {str(MIB): 1}},
        {"remotes": [[(1 << 64) - 1, MIB, 1]], "sums": {str(MIB): 1}},
        {"remotes": [[4096, MIB, 1]], "sums": {str(MIB): "1"}},
        {"remotes": [[4096, MIB, 1]], "sums": {"many": 1}},
    ],
)
async def test_an_answer_about_memory_that_can_not_be(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from tierfs.transport.frames import Frame

    none: Any = None
    holder = RemoteHolder(none)
    holder._links = 1

    async def ask(_: Any) -> Frame:
        return Frame(FrameKind.answer, answer)

    monkeypatch.setattr(holder, "_ask", ask)
    with pytest.raises(PeerRefused):
        await holder.hold(MIB)


# --- the command and the package


def selftest(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mount.cli.main", "verbs-selftest", *map(str, arguments)],
        cwd=repository(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_command_without_a_device_says_why_and_what_to_send(secret: Path) -> None:
    options = ("-o", f"peer.verbs_devices=none0,cluster.secret_file={secret}")
    done = selftest("--json", *options)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert not answer["passed"] and answer["reason"] and answer["checks"] == []
    assert answer["machine"]["tierfs"] == "0.1.0" and answer["machine"]["kernel"]
    people = selftest(*options)
    assert people.returncode == 1
    assert f"RDMA can't be used here: {answer['reason']}" in people.stdout
    assert "please send this" in people.stdout and f"reason: {answer['reason']}" in people.stdout
    assert secret.read_text() not in done.stdout + people.stdout
    served = selftest("--serve", *options)
    assert (served.returncode, served.stdout) == (1, "") and answer["reason"] in served.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "much"], "not a size"),
        (["--size", "4KiB"], "not some whole MiB"),
        (["--once"], "goes with --serve"),
        (["node7:7127", "--serve"], "leave one of them out"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    done = selftest(*arguments)
    assert done.returncode == 2 and said in done.stderr


def test_the_large_read_is_smaller_where_memory_is_short() -> None:
    assert [usual_size(available) for available in (1 << 40, 100 * MIB + 5, 0)] == [1 << 30, 25 * MIB, 2 * MIB]


def test_nothing_needs_pyverbs_to_be_imported() -> None:
    names = [
        str(path.relative_to(repository()).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for package in ("tierfs", "mount")
        for path in sorted((repository() / package).rglob("*.py"))
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules['pyverbs'] = None  # an import of it fails\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repository(), check=True, timeout=120)
