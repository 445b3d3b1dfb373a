"""The control socket: what a client of it may rely on, also when things go wrong on either side."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from mount.cli.client import request
from mount.control import MOST_LINE_BYTES, ControlServer, Operation, Progress
from mount.handover import take_over_connection
from mount.runtime import Instance, MountRecord, make_instance, write_process, write_record
from tierfs.errors import InstanceError, StepBusy, TierfsError


async def echo(arguments: dict[str, Any], progress: Progress) -> Any:
    return arguments


async def count(arguments: dict[str, Any], progress: Progress) -> Any:
    for done in range(3):
        await progress({"done": done})
    return "counted"


async def busy(arguments: dict[str, Any], progress: Progress) -> Any:
    raise StepBusy("step_5 has an open writer; close it first")


async def broken(arguments: dict[str, Any], progress: Progress) -> Any:
    raise ZeroDivisionError("a slip")


OPERATIONS: dict[str, Operation] = {"echo": echo, "count": count, "busy": busy, "broken": broken}


@asynccontextmanager
async def served(
    directory: Path, operations: dict[str, Operation] = OPERATIONS, fuse_fd: int | None = None
) -> AsyncIterator[Instance]:
    instance = make_instance(directory.parent, directory.name)
    write_record(instance, MountRecord("/nowhere", True))
    write_process(instance.daemon_pid, os.getpid())
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(instance.control_socket, operations, fuse_fd=fuse_fd).run)
        with trio.fail_after(20):
            yield instance
        nursery.cancel_scope.cancel()


async def ask(instance: Instance, op: str, **arguments: Any) -> Any:
    return await trio.to_thread.run_sync(partial(request, instance, op, **arguments))


async def test_an_answer_comes_back_and_the_socket_is_private(tmp_path: Path) -> None:
    async with served(tmp_path / "one") as instance:
        assert await ask(instance, "echo", path="a/ü\n") == {"path": "a/ü\n"}
        assert stat.S_IMODE(instance.control_socket.stat().st_mode) == 0o600
    assert not instance.control_socket.exists()


async def test_progress_comes_before_the_answer(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    async with served(tmp_path / "one") as instance:
        assert await ask(instance, "count", on_progress=seen.append) == "counted"
    assert seen == [{"done": 0}, {"done": 1}, {"done": 2}]


async def test_an_error_of_the_daemon_is_the_same_error_at_the_client(tmp_path: Path) -> None:
    async with served(tmp_path / "one") as instance:
        with pytest.raises(StepBusy, match="step_5 has an open writer"):
            await ask(instance, "busy")


async def test_a_bug_in_an_operation_is_told_logged_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path / "one") as instance:
        with pytest.raises(TierfsError, match="ZeroDivisionError: a slip"):
            await ask(instance, "broken")
        assert await ask(instance, "echo") == {}
    assert "Traceback" in caplog.text


async def test_nonsense_gets_an_error_and_the_connection_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path / "one") as instance:
        stream = await trio.open_unix_socket(instance.control_socket)
        async with stream:
            for nonsense in (b"not json\n", b"[1]\n", b"[" * 100_000 + b"\n", b'{"op": 5}\n', b'{"op": "nothing"}\n'):
                await stream.send_all(nonsense)
                reply = json.loads(await stream.receive_some())
                assert reply["ok"] is False and reply["error"]["kind"] == "InstanceError"
            await stream.send_all(b'{"op": "echo", "a": 1}\n')
            assert json.loads(await stream.receive_some()) == {"ok": True, "result": {"a": 1}}


async def test_an_endless_line_ends_the_connection_only(tmp_path: Path) -> None:
    async with served(tmp_path / "one") as instance:
        stream = await trio.open_unix_socket(instance.control_socket)
        async with stream:
            await stream.send_all(b"x" * (MOST_LINE_BYTES + 1))
            assert b"at most" in await stream.receive_some()
            assert await stream.receive_some() == b""
        assert await ask(instance, "echo") == {}


async def test_a_client_that_goes_away_cancels_its_request(tmp_path: Path) -> None:
    started, cancelled = trio.Event(), trio.Event()

    async def wait(arguments: dict[str, Any], progress: Progress) -> Any:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with served(tmp_path / "one", {"wait": wait}) as instance:
        stream = await trio.open_unix_socket(instance.control_socket)
        await stream.send_all(b'{"op": "wait"}\n')
        await started.wait()
        await stream.aclose()
        await cancelled.wait()


async def test_many_clients_are_answered_while_one_waits(tmp_path: Path) -> None:
    release = trio.Event()

    async def wait(arguments: dict[str, Any], progress: Progress) -> Any:
        await release.wait()
        return "waited"

    async with served(tmp_path / "one", {**OPERATIONS, "wait": wait}) as instance, trio.open_nursery() as nursery:

        async def waiting_client() -> None:
            assert await ask(instance, "wait") == "waited"

        nursery.start_soon(waiting_client)
        for number in range(20):
            assert await ask(instance, "echo", number=number) == {"number": number}
        release.set()


async def test_a_silent_instance_is_given_up_in_time(tmp_path: Path) -> None:
    async def wait(arguments: dict[str, Any], progress: Progress) -> Any:
        await trio.sleep_forever()

    async with served(tmp_path / "one", {"wait": wait}) as instance:
        with pytest.raises(InstanceError, match="did not answer"):
            await ask(instance, "wait", timeout_s=0.2)


async def test_a_socket_whose_path_is_longer_than_the_kernel_takes_works(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 60) / ("e" * 60)
    directory.parent.mkdir()
    async with served(directory) as instance:
        assert await ask(instance, "echo", a=1) == {"a": 1}


async def test_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    async with served(tmp_path / "one") as instance:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:  # only system calls here: threads of the parent may hold locks
                try:
                    fd = os.open(instance.directory, os.O_PATH)
                    client_path = f"/proc/self/fd/{fd}/control.sock"
                    instance.control_socket.chmod(0o666)
                    os.setresuid(65534, 65534, 65534)
                    try:
                        client.connect(client_path)
                        client.sendall(b'{"op": "echo"}\n')
                        os.write(writing, client.recv(65536))
                    except OSError as error:
                        os.write(writing, str(error).encode())
                finally:
                    os._exit(0)
            os.close(writing)
            said = await trio.to_thread.run_sync(os.read, reading, 65536)
            os.close(reading)
            await trio.to_thread.run_sync(os.waitpid, pid, 0)
        assert b"only the user" in said or b"Permission" in said, said


async def test_the_connection_is_handed_over_to_a_new_keeper(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    async with served(tmp_path / "one", fuse_fd=writing) as instance:
        process = write_process(instance.daemon_pid, os.getpid())
        assert process is not None
        fd = await trio.to_thread.run_sync(take_over_connection, instance, process)
        os.write(fd, struct.pack("<I", 42))
        assert struct.unpack("<I", os.read(reading, 4)) == (42,)
        assert not os.get_inheritable(fd)
    for each in (reading, writing, fd):
        os.close(each)
