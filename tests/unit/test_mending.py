"""What goes wrong beside the mount does not end the mount."""

from __future__ import annotations

import pytest
import trio

from mount.mending import run_again


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
