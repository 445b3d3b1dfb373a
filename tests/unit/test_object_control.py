"""The control operations of the object tier, over a real control socket and with work that does as a test says."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from mount import object_operations
from mount.cli.client import OutOfTime, request
from mount.control import ControlServer
from mount.leaving import Leaving
from mount.object_operations import ObjectControl
from mount.runtime import Instance, MountRecord, make_instance, write_process, write_record
from tierfs.errors import NotFound, PathRefused, SettingsError

Tell = Callable[[dict[str, Any]], Awaitable[None]]


class Work:
    """Does nothing until `done` is set; `asked` are its calls."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.asked: list[tuple[Any, ...]] = []

    async def flush(self, paths: Sequence[str], *, wait: bool, progress: Tell) -> dict[str, Any]:
        self.asked.append(("flush", list(paths), wait))
        await progress({"bytes": 1, "bytes_total": 2})
        if wait:
            await self.done.wait()
        return {"steps": 1, "bytes": 2, "already": 0, "failed": []}

    async def wait(self, path: str, *, level: str, timeout_s: float | None, progress: Tell) -> dict[str, Any]:
        self.asked.append(("wait", path, level, timeout_s))
        raise NotFound(f"there is no {path}")

    async def prefetch(self, paths: Sequence[str], *, globs: Sequence[str], progress: Tell) -> dict[str, Any]:
        raise ZeroDivisionError("a slip")

    async def verify(self, path: str, progress: Tell) -> dict[str, Any]:
        return {}

    async def repair(self, path: str, *, dry_run: bool, progress: Tell) -> dict[str, Any]:
        self.asked.append(("repair", path, dry_run))
        return {"checked": 0, "actions": []}

    async def adopt(self, path: str, progress: Tell, *, force: bool = False) -> dict[str, Any]:
        self.asked.append(("adopt", path, force))
        return {"path": path, "files": 0, "bytes": 0}

    async def drain(self, progress: Tell, *, timeout_s: float | None = None) -> dict[str, Any]:
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            await self.done.wait()
        return {"steps": 0, "bytes": 0, "left": [] if self.done.is_set() else ["run1/step_5"]}

    async def status(self) -> dict[str, Any]:
        sending = {"path": "run1/step_5", "state": "waiting", "error": "access denied"}
        return {"bytes_owed": 7, "problem": "", "sending": [sending]}


@asynccontextmanager
async def served(directory: Path, work: Work | None, leaving: Leaving | None = None) -> AsyncIterator[Instance]:
    instance = make_instance(directory.parent, directory.name)
    write_record(instance, MountRecord("/nowhere", True))
    write_process(instance.daemon_pid, os.getpid())
    operations = ObjectControl(work, leaving or Leaving()).table()
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(instance.control_socket, operations).run)
        with trio.fail_after(20):
            yield instance
        nursery.cancel_scope.cancel()


async def ask(instance: Instance, op: str, **arguments: Any) -> Any:
    return await trio.to_thread.run_sync(partial(request, instance, op, **arguments))


async def test_arguments_reach_the_work_and_paths_are_checked(tmp_path: Path) -> None:
    work = Work()
    async with served(tmp_path / "one", work) as instance:
        await ask(instance, "flush", paths=["run1/step_5"])
        await ask(instance, "flush", paths=["run1/step_5", ""])
        await ask(instance, "repair", path="", dry_run=True)
        await ask(instance, "import", path="run1/step_5", force=True)
        with pytest.raises(NotFound, match="there is no run1/step_6"):
            await ask(instance, "wait", path="run1/step_6", level="ram", seconds=2)
        for wrong in ("../etc", "/run1", "run1//a"):
            with pytest.raises(PathRefused):
                await ask(instance, "flush", paths=[wrong])
        with pytest.raises(PathRefused):
            await ask(instance, "wait", path="run1/step_6", seconds="soon")
        with pytest.raises(PathRefused, match="there are ram and object"):
            await ask(instance, "wait", path="run1/step_6", level="tape")
    assert work.asked == [
        ("flush", ["run1/step_5"], False),
        ("flush", [], False),
        ("repair", "", True),
        ("adopt", "run1/step_5", True),
        ("wait", "run1/step_6", "ram", 2.0),
    ]


async def test_a_long_operation_repeats_its_last_word_and_a_client_may_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_operations, "HEARTBEAT_S", 0.02)
    work, heard = Work(), []
    async with served(tmp_path / "one", work) as instance:

        def hear(values: dict[str, Any]) -> None:
            heard.append(values)
            if len(heard) == 5:
                trio.from_thread.run_sync(work.done.set)

        await ask(instance, "flush", paths=[], wait=True, on_progress=hear)
        assert heard[:5] == [{"bytes": 1, "bytes_total": 2}] * 5
        work.done = trio.Event()
        with pytest.raises(OutOfTime, match="not done within"):
            await ask(instance, "flush", paths=[], wait=True, within_s=0.1)
        with pytest.raises(Exception, match="a slip"):
            await ask(instance, "prefetch", paths=[])


async def test_draining_says_what_is_left_and_why(tmp_path: Path) -> None:
    work = Work()
    async with served(tmp_path / "one", work) as instance:
        answer = await ask(instance, "drain", seconds=0)
        assert answer == {
            "steps": 0, "bytes": 0, "left": ["run1/step_5"], "bytes_left": 7, "problem": "access denied",
        }  # fmt: skip
        work.done.set()
        assert (await ask(instance, "drain", seconds=20))["left"] == []


async def test_without_an_object_tier_all_refuse_but_draining_has_nothing_to_do(tmp_path: Path) -> None:
    async with served(tmp_path / "one", None) as instance:
        for op in ("flush", "wait", "prefetch", "repair", "import"):
            with pytest.raises(SettingsError, match="no object tier: mount with -o object=") as refused:
                await ask(instance, op, path="run1/step_5")
            assert refused.value.exit_code == 2
        assert (await ask(instance, "drain"))["left"] == []


async def test_a_daemon_that_still_sends_can_be_stopped_and_one_that_serves_can_not(tmp_path: Path) -> None:
    leaving, work = Leaving(), Work()
    async with served(tmp_path / "one", work, leaving) as instance:
        assert await ask(instance, "stop-draining") == {"stopped": False}
        assert not leaving.is_sending
        ended: list[bool] = []

        async def send() -> None:
            ended.append(await leaving.send(work.done.wait, within_s=20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            assert leaving.is_sending
            assert await ask(instance, "stop-draining") == {"stopped": True}
        assert ended == [False]
    assert await Leaving().send(trio.lowlevel.checkpoint, within_s=20)
    assert not await Leaving().send(trio.sleep_forever, within_s=0.01)
