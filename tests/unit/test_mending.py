"""What goes wrong beside the mount does not end the mount."""

from __future__ import annotations

import pytest
import trio

from mount.mending import run_again
from tierfs.errors import SettingsError


async def test_parts_that_fail_are_begun_again_and_told(caplog: pytest.LogCaptureFixture) -> None:
    began: list[str] = []
    told: list[str] = []
    works = trio.Event()

    async def first(task_status: trio.TaskStatus[None]) -> None:
        began.append("first")
        task_status.started()
        await trio.sleep_forever()

    async def second(task_status: trio.TaskStatus[None]) -> None:
        began.append("second")
        if len(began) == 2:
            raise TypeError("before it started")
        task_status.started()
        if len(began) == 4:
            raise TypeError("afterwards")
        await trio.sleep_forever()

    started: list[int] = []

    def note() -> None:
        started.append(len(began))
        if len(began) == 6:
            works.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: run_again([first, second], "the object tier", started=note, failed=told.append, pause_s=0.01)
        )
        with trio.fail_after(5):
            await works.wait()
        nursery.cancel_scope.cancel()
    assert began == ["first", "second"] * 3
    assert started[-1] == 6
    assert len(told) == 2 and "the object tier failed" in told[0]
    assert "TypeError: before it started" in caplog.text and "TypeError: afterwards" in caplog.text


async def test_what_can_be_told_is_told_in_its_own_words_and_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    async def part(task_status: trio.TaskStatus[None]) -> None:
        if len(told) < 3:
            raise SettingsError("another program has the port", key="cluster.listen")
        task_status.started()
        works.set()
        await trio.sleep_forever()

    works = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: run_again([part], "the cluster's part", started=lambda: None, failed=told.append, pause_s=0.01)
        )
        with trio.fail_after(5):
            await works.wait()
        nursery.cancel_scope.cancel()
    assert told[0].startswith("the cluster's part can't run: another program has the port.")
    assert caplog.text.count("another program has the port") == 1 and "Traceback" not in caplog.text
