"""Events of a real mount, as a command and a webhook get them; nothing of the mount waits for either."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.instance import CommandFailed, tierfs, wait_until
from rig.plain_steps import write_step
from tests.watch.watched import Receiver, Watched, watched_instance
from tierfs.errors import TierfsError
from tierfs.settings_watch import EventsSettings
from tierfs.steps.news import Event, News
from tierfs.watch.telling import MOST_WAITING, Telling

MIB = 1 << 20
SIZES = [2 * MIB, MIB]
#: Far more than a save takes, and far less than the hook that must not delay it.
SOON_S = 10.0


def test_command_and_webhook_hear_of_each_level(watched: Watched, receiver: Receiver, run: str) -> None:
    write_step(watched.mountpoint / run / "step_7", 7, SIZES)
    complete = watched.wait_told(run, event="level", level="ram")
    stored = watched.wait_told(run, event="level", level="object")
    assert [event["level"] for event in watched.told(run)] == ["ram", "object"]
    assert complete["step"] == stored["step"] == "step_7"
    assert complete["files"] == 3 and complete["bytes"] > sum(SIZES)
    assert complete["mountpoint"] == str(watched.mountpoint)
    assert 0 <= stored["seconds"] < 60 and abs(stored["at"] - time.time()) < 60
    sent = wait_until(lambda: [body for _, body in receiver.requests if body["id"] == stored["id"]], "it was sent")
    assert sent == [stored]  # both hooks get the same
    assert receiver.requests[-1][0]["authorization"] == "Bearer sesame"
    assert f"events: level: {run}/step_7 is complete in RAM" in watched.instance.log(400)


def test_a_webhook_that_fails_for_a_while_gets_it_again(watched: Watched, receiver: Receiver, run: str) -> None:
    receiver.answers[:] = [503, 429]
    write_step(watched.mountpoint / run / "step_1", 1, SIZES)
    complete = watched.wait_told(run, event="level", level="ram")

    def times_sent() -> int:
        return sum(body["id"] == complete["id"] for _, body in receiver.requests)

    wait_until(lambda: times_sent() == 3, "it was sent a third time")
    wait_until(lambda: [body for _, body in receiver.requests if body.get("level") == "object"], "others follow")


def test_a_webhook_that_refuses_is_not_asked_again(watched: Watched, receiver: Receiver, run: str) -> None:
    failed = 'tierfs_event_hooks_total{hook="webhook",outcome="failed"}'
    before = watched.metrics()[failed]
    receiver.answers[:] = [400]
    write_step(watched.mountpoint / run / "step_1", 1, SIZES)
    wait_until(lambda: watched.metrics()[failed] == before + 1, "one failed")
    refused = watched.wait_told(run, event="level", level="ram")
    wait_until(lambda: receiver.requests[-1][1].get("level") == "object", "the next event was sent")
    assert sum(body["id"] == refused["id"] for _, body in receiver.requests) == 1
    assert "did not take it: HTTP 400" in watched.instance.log(400)


def test_removing_the_newest_step_is_a_walk_back(watched: Watched, run: str) -> None:
    for number in (1, 2):
        write_step(watched.mountpoint / run / f"step_{number}", number, SIZES)
        watched.wait_told(run, level="ram", step=f"step_{number}")
    shutil.rmtree(watched.mountpoint / run / "step_2")
    event = watched.wait_told(run, event="walk-back")
    assert (event["from"], event["to"], event["step"], event["reason"]) == ("step_2", "step_1", "step_1", "removed")


def test_writing_a_step_again_is_no_walk_back(watched: Watched, run: str) -> None:
    for number, generation in ((1, 1), (2, 1), (2, 2)):
        write_step(watched.mountpoint / run / f"step_{number}", number, SIZES)
        watched.wait_told(run, level="ram", step=f"step_{number}", generation=generation)
    assert not [event for event in watched.told(run) if event["event"] == "walk-back"]


@pytest.fixture
def stuck(scratch: Path) -> Iterator[tuple[Watched, Path]]:
    """An instance whose command starts another program and hangs with it; the file has that one's process id."""
    started = scratch / "started"
    command = scratch / "hang"
    command.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {started}\nwait\n")
    command.chmod(0o755)
    options = {"events.command": str(command), "events.timeout_s": "1", "events.only": "walk-back level"}
    with watched_instance(scratch / "stuck", **options) as watched:
        yield watched, started


def test_a_command_that_hangs_delays_nobody_and_is_killed_with_all_it_started(stuck: tuple[Watched, Path]) -> None:
    watched, started = stuck
    (watched.mountpoint / "run").mkdir()
    began = time.monotonic()
    for number in range(5):
        write_step(watched.mountpoint / "run" / f"step_{number}", number, SIZES)
    assert time.monotonic() - began < SOON_S
    wait_until(lambda: "was killed after 1 s" in watched.instance.log(400), "the command was killed")
    first = int(started.read_text().split()[0])
    wait_until(lambda: not _is_alive(first), "what it had started is gone")
    assert watched.metrics()['tierfs_event_hooks_waiting{hook="command"}'] > 0
    began = time.monotonic()
    tierfs("umount", watched.mountpoint)
    assert time.monotonic() - began < 2 * SOON_S


def test_an_unmounted_daemon_passes_on_what_it_had_to_tell(scratch: Path) -> None:
    with watched_instance(scratch / "leaving") as watched:
        (watched.mountpoint / "run").mkdir()
        write_step(watched.mountpoint / "run" / "step_1", 1, SIZES)
        watched.instance.umount()
        assert watched.wait_told("run", level="object")["step"] == "step_1"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("events.only=level-up", "'level-up' is none of level, under-replicated"),
        ("events.command=sh -c 'x", "not a command that can be split into words: No closing quotation"),
        ("events.webhook=hooks.example.com", "not an endpoint"),
    ],
)
def test_a_setting_that_can_not_be_stops_the_mount(scratch: Path, option: str, said: str) -> None:
    with pytest.raises(CommandFailed, match=said):
        tierfs("mount", scratch / "no", "-o", option)


class Gate:
    """A hook that lets nothing pass before it is opened."""

    name = "gate"

    def __init__(self) -> None:
        import trio

        self.open = trio.Event()
        self.passed: list[str] = []

    async def deliver(self, event: dict[str, Any]) -> None:
        await self.open.wait()
        self.passed.append(event["step"])
        if event["step"] == "bad":
            raise TierfsError("bad")


async def test_the_oldest_events_are_dropped_where_a_hook_is_too_slow(nursery: Any) -> None:
    news, gate = News(), Gate()
    told = Telling(news, EventsSettings(), {}, hooks=[gate])
    await nursery.start(told.run)
    steps = [f"step_{number}" for number in range(MOST_WAITING + 10)] + ["bad", "last"]
    for step in steps:
        news.tell(Event("lost", "it is lost", "run", step))
    assert told.hooks()["gate"]["dropped"] == 12
    gate.open.set()
    await told.finish(within_s=10)
    assert gate.passed == steps[12:]
    assert told.hooks()["gate"] == {"waiting": 0, "dropped": 12, "delivered": MOST_WAITING - 1, "failed": 1}


def test_a_listener_that_fails_holds_up_neither_the_commit_nor_the_others() -> None:
    news, heard = News(), []

    def fail(event: Event) -> None:
        raise RuntimeError("a mistake of ours")

    news.listen(fail)
    news.listen(heard.append)
    news.tell(Event("lost", "it is lost"))
    assert [event.kind for event in heard] == ["lost"]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
