"""Steps on a plain directory: commits, overwrites, moves, retention, and recovery from a death at each crash point."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from step_driver import FILES, MARKER, Driver, Program, content, marker, until

from tierfs.checksum import ChecksumStopped
from tierfs.crash_points import POINTS, CrashPoints
from tierfs.errors import CommitRefused, NotAStep, NotFound, PathRefused, SettingsError, StepBusy, TierfsError
from tierfs.settings import Settings
from tierfs.steps import commits, upkeep
from tierfs.steps import registry as registry_module
from tierfs.steps.manifest import load_manifest, manifest_path

STEP = "run/step_1"


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "ram")


@pytest.fixture
def trainer() -> Iterator[Program]:
    program = Program()
    yield program
    program.kill()


# --- commits


async def test_a_save_completes_with_the_rename_of_its_marker(driver: Driver) -> None:
    await driver.save(STEP, 1)
    assert driver.state(STEP) == "complete"
    assert driver.latest() == "step_1"
    assert driver.record(STEP).manifest.files.keys() == {*FILES, MARKER}
    assert load_manifest(manifest_path(driver.tier.meta, "run", "step_1")).state == "complete"


async def test_a_marker_that_names_too_much_is_refused_and_says_which(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "CLOSE_GRACE_S", 0.1)
    driver.mkdirs(STEP)
    await driver.write(f"{STEP}/__0_0.distcp", b"short")
    handle = await driver.open(f"{STEP}/__2_0.distcp")
    os.write(handle.fd, b"x" * 10)
    named = {"__0_0.distcp": 3000, "__1_0.distcp": 5000, "__2_0.distcp": 10}
    await driver.write(f"{STEP}/{MARKER}.tmp", marker(1, named))
    with trio.fail_after(20), pytest.raises(CommitRefused) as refused:
        await driver.rename(f"{STEP}/{MARKER}.tmp", f"{STEP}/{MARKER}")
    for sentence in (
        "commit of run/step_1 refused",
        "__1_0.distcp is missing",
        "__0_0.distcp has 5 bytes of at least 3000",
        "__2_0.distcp is still open for writing",
    ):
        assert sentence in refused.value.message
    assert refused.value.errno == 5
    assert driver.registry.problems[0]["path"] == STEP
    assert driver.state(STEP) == "writing"
    driver.close(handle)
    await driver.save(STEP, 1)
    assert driver.state(STEP) == "complete"
    assert driver.registry.problems == []


async def test_a_commit_waits_for_a_close_that_is_on_its_way(driver: Driver) -> None:
    driver.mkdirs(STEP)
    for name, size in FILES.items():
        await driver.write(f"{STEP}/{name}", content(1, name, size))
    handle = await driver.open(f"{STEP}/__0_0.distcp")
    await driver.write(f"{STEP}/{MARKER}.tmp", marker(1, FILES))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.rename, f"{STEP}/{MARKER}.tmp", f"{STEP}/{MARKER}")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert driver.state(STEP) == "writing"
        driver.close(handle)
    assert driver.state(STEP) == "complete"


async def test_an_overwrite_that_left_a_file_as_it_was_is_refused(driver: Driver) -> None:
    await driver.save(STEP, 1)
    await driver.write(f"{STEP}/__0_0.distcp", content(2, "__0_0.distcp", 3000))
    with pytest.raises(CommitRefused, match=r"__1_0.distcp was not written again and is the old generation's"):
        await driver.finish(STEP, 2)


async def test_a_file_that_was_only_opened_for_writing_is_not_written_again(driver: Driver) -> None:
    await driver.save(STEP, 1)
    driver.lookup(f"{STEP}/{MARKER}")
    await driver.write(f"{STEP}/__0_0.distcp", content(2, "__0_0.distcp", FILES["__0_0.distcp"]))
    driver.close(await driver.open(f"{STEP}/__1_0.distcp"))
    with pytest.raises(CommitRefused, match=r"__1_0.distcp was not written again and is the old generation's"):
        await driver.finish(STEP, 2)
    driver.restart()
    with pytest.raises(CommitRefused, match="was not written again"):
        await driver.finish(STEP, 2)


async def test_a_marker_moved_by_a_user_is_judged_and_not_refused(driver: Driver) -> None:
    driver.mkdirs(STEP)
    await driver.write(f"{STEP}/.{MARKER}.x7Gh2", marker(1, FILES))
    await driver.rename(f"{STEP}/.{MARKER}.x7Gh2", f"{STEP}/{MARKER}")
    await driver.settle()
    assert driver.state(STEP) == "writing"
    for name, size in FILES.items():
        await driver.settle()
        assert driver.state(STEP) == "writing"
        await driver.write(f"{STEP}/{name}", content(1, name, size))
    await driver.settle()
    assert driver.state(STEP) == "complete"


@pytest.mark.parametrize("order", list(itertools.permutations([*FILES, MARKER])), ids=" ".join)
async def test_a_copy_in_any_order_completes_with_its_last_file(driver: Driver, order: tuple[str, ...]) -> None:
    driver.mkdirs(STEP)
    for name in order:
        await driver.settle()
        assert driver.state(STEP) == "writing"
        handle = await driver.open(f"{STEP}/{name}", truncate=True)
        os.write(handle.fd, marker(1, FILES) if name == MARKER else content(1, name, FILES[name]))
        await driver.settle()
        assert driver.state(STEP) == "writing"
        driver.close(handle)
    await driver.settle()
    assert driver.state(STEP) == "complete"
    assert driver.loaded(STEP) == 1


async def test_a_copy_by_hard_links_completes(driver: Driver) -> None:
    await driver.save(STEP, 1)
    driver.mkdirs("run/step_2")
    for name in (MARKER, *FILES):
        driver.link(f"{STEP}/{name}", f"run/step_2/{name}")
    await driver.settle()
    assert driver.state("run/step_2") == "complete"


async def test_a_marker_for_each_rank_waits_for_all_ranks(driver: Driver) -> None:
    driver.mkdirs(STEP)
    for rank in (0, 1):
        await driver.write(f"{STEP}/__{rank}_0.distcp", content(1, f"__{rank}_0.distcp", 100))
    for rank in (0, 1):
        await driver.settle(seconds=5)
        assert driver.state(STEP) == "writing"
        await driver.write(f"{STEP}/__{rank}.metadata.tmp", marker(1, {f"__{rank}_0.distcp": 100}))
        await driver.rename(f"{STEP}/__{rank}.metadata.tmp", f"{STEP}/__{rank}.metadata")
    await driver.settle()
    assert driver.state(STEP) == "writing", "a rank may come late"
    await driver.settle(seconds=5)
    assert driver.state(STEP) == "complete"


async def test_a_checkpoint_of_hugging_face_waits_for_its_state_and_its_shards(driver: Driver) -> None:
    step = "run/checkpoint-5"
    driver.mkdirs(step)
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    for name, data in (
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"1"),
        ("trainer_state.json", b"{}"),
    ):
        await driver.write(f"{step}/{name}", data)
        await driver.settle()
        assert driver.state(step) == "writing"
    await driver.write(f"{step}/model-2.safetensors", b"2")
    await driver.settle()
    assert driver.state(step) == "complete"


async def test_lightnings_sharded_checkpoint_waits_for_meta_pt(driver: Driver) -> None:
    step = "run/epoch=0-step=7.ckpt"
    await driver.save(step, 1)
    await driver.settle()
    assert driver.state(step) == "writing"
    await driver.write(f"{step}/meta.pt", b"meta")
    await driver.settle()
    assert driver.state(step) == "complete"


async def test_a_directory_moved_into_place_is_complete_when_all_in_it_is_closed(driver: Driver) -> None:
    driver.mkdirs("run/9.orbax-checkpoint-tmp/default.tmp")
    await driver.write("run/9.orbax-checkpoint-tmp/default.tmp/d", b"data")
    late = await driver.open("run/9.orbax-checkpoint-tmp/default.tmp/late")
    await driver.rename("run/9.orbax-checkpoint-tmp/default.tmp", "run/9.orbax-checkpoint-tmp/default")
    await driver.rename("run/9.orbax-checkpoint-tmp", "run/9")
    await driver.settle()
    assert driver.state("run/9") == "writing"
    driver.close(late)
    await driver.settle()
    assert driver.state("run/9") == "complete"
    assert driver.latest() == "9"


# --- what may change in a complete step


async def test_adding_and_editing_small_files_starts_no_generation(driver: Driver) -> None:
    await driver.save(STEP, 1)
    await driver.write(f"{STEP}/config.json", b"{}")
    await driver.write(f"{STEP}/config.json", b'{"a": 1}')
    await driver.write(f"{STEP}/model.safetensors", b"head")
    again = await driver.open(f"{STEP}/model.safetensors")  # consolidation opens what it made once more
    os.pwrite(again.fd, b"tail", 4)
    driver.close(again)
    await driver.write(f"{STEP}/.config.new", b"{}")
    await driver.rename(f"{STEP}/.config.new", f"{STEP}/config.json")
    await driver.unlink(f"{STEP}/config.json")
    assert driver.state(STEP) == "complete"
    assert driver.record(STEP).manifest.generation == 1
    assert (driver.root / STEP / "model.safetensors").read_bytes() == b"headtail"
    driver.restart()
    assert driver.state(STEP) == "complete"
    handle = await driver.open(f"{STEP}/model.safetensors")
    assert driver.state(STEP) == "complete"
    driver.close(handle)


async def test_a_file_with_a_time_in_the_future_is_protected_too(driver: Driver) -> None:
    driver.mkdirs(STEP)
    for name, size in FILES.items():
        await driver.write(f"{STEP}/{name}", content(1, name, size))
        os.utime(driver.root / STEP / name, (4e9, 4e9))
    await driver.finish(STEP, 1)
    driver.restart()
    await driver.write(f"{STEP}/__0_0.distcp", b"new")
    assert driver.record(STEP).manifest.overwrite is not None


async def test_an_edited_config_costs_no_completeness_when_the_daemon_dies(driver: Driver) -> None:
    driver.mkdirs(STEP)
    await driver.write(f"{STEP}/model.bin", b"x" * 100)
    await driver.write(f"{STEP}/config.json", b"{}")
    await driver.operations.commit(STEP)
    driver.registry.save(driver.record(STEP))
    await driver.write(f"{STEP}/new", b"{}")
    await driver.rename(f"{STEP}/new", f"{STEP}/config.json")
    driver.restart()
    assert driver.state(STEP) == "complete"
    (driver.root / STEP / "model.bin").unlink()
    driver.restart()
    assert driver.state(STEP) == "writing"
    assert "model.bin changed while no daemon ran" in driver.record(STEP).manifest.note


# --- overwriting


async def test_an_overwrite_of_a_step_not_shown_as_a_whole_goes_on_with_the_next_daemon(
    driver: Driver,
) -> None:
    """Other nodes' files may not have their names here yet."""
    await driver.save(STEP, 1)
    driver.record(STEP).manifest.populated = False
    writing = await driver.open(f"{STEP}/__0_0.distcp", truncate=True)
    driver.restart()
    driver.close(writing)
    record = driver.record(STEP)
    assert not record.is_of_old_generation("__0_0.distcp") and record.is_of_old_generation("__1_0.distcp")
    assert record.manifest.files["__0_0.distcp"].ino == (driver.root / STEP / "__0_0.distcp").stat().st_ino
    assert MARKER not in record.manifest.files


async def test_an_overwrite_keeps_the_old_generation_until_the_new_one_is_whole(driver: Driver) -> None:
    await driver.save(STEP, 1, {**FILES, "__2_0.distcp": 700})
    old = (driver.root / STEP / "__0_0.distcp").open("rb")
    await driver.write(f"{STEP}/__0_0.distcp", content(2, "__0_0.distcp", 3000))
    assert driver.loaded(STEP) is None
    assert driver.state(STEP) == "writing"
    await driver.settle(seconds=20)
    assert driver.latest() is None
    (kept,) = driver.old_generations()
    assert (driver.tier.generations / kept / "__0_0.distcp").read_bytes() == old.read()
    assert driver.steps.xattrs(f"{STEP}/__0_0.distcp", os.stat(driver.root / STEP))["user.tierfs.generation"] == b"2"
    assert driver.steps.xattrs(f"{STEP}/__1_0.distcp", os.stat(driver.root / STEP))["user.tierfs.generation"] == b"1"
    await driver.write(f"{STEP}/__1_0.distcp", content(2, "__1_0.distcp", 5000))
    await driver.finish(STEP, 2)
    assert driver.loaded(STEP) == 2
    assert driver.latest() == "step_1"
    record = driver.record(STEP)
    assert record.manifest.generation == 2
    assert "__2_0.distcp" not in record.manifest.files, "left over from more ranks"
    assert driver.old_generations() == []
    old.seek(0)
    assert old.read() == content(1, "__0_0.distcp", 3000)
    old.close()


async def test_what_nobody_will_finish_is_put_back(driver: Driver, trainer: Program) -> None:
    driver.mkdirs("run/step_1/sub")
    (driver.root / STEP / "sub").chmod(0o751)
    await driver.save(STEP, 1)
    before = driver.tree(STEP)
    await driver.write(f"{STEP}/__0_0.distcp", b"new", pid=trainer.pid)
    await driver.write(f"{STEP}/added", b"new", pid=trainer.pid)
    driver.rmdir(f"{STEP}/sub")
    driver.mkdirs(f"{STEP}/new/deep", pid=trainer.pid)
    await driver.write(f"{STEP}/new/deep/x", b"new", pid=trainer.pid)
    await driver.unlink(f"{STEP}/__1_0.distcp", pid=trainer.pid)
    driver.mkdirs(f"{STEP}/__1_0.distcp", pid=trainer.pid)  # a directory in a file's place
    await driver.settle(seconds=20)
    assert driver.state(STEP) == "writing", "the trainer lives"
    trainer.kill()
    await driver.settle(seconds=20)
    assert driver.state(STEP) == "complete"
    assert driver.loaded(STEP) == 1
    assert driver.tree(STEP).keys() == before.keys()
    assert {name: ino for name, (ino, _) in driver.tree(STEP).items() if name not in ("sub", "")} == {
        name: ino for name, (ino, _) in before.items() if name not in ("sub", "")
    }
    assert (driver.root / STEP / "sub").stat().st_mode & 0o777 == 0o751
    assert "put back" in driver.record(STEP).manifest.note
    assert driver.old_generations() == []


async def test_a_lookup_of_the_marker_puts_back_at_once_what_nobody_will_finish(
    driver: Driver, trainer: Program
) -> None:
    await driver.save(STEP, 1)
    monitor = Program()
    assert driver.loaded(STEP, pid=monitor.pid) == 1
    await driver.write(f"{STEP}/__0_0.distcp", b"new", pid=trainer.pid)
    assert driver.loaded(STEP) is None
    trainer.kill()
    assert driver.loaded(STEP, pid=os.getpid()) == 1, "a monitor that lives has no part in it"
    monitor.kill()
    assert driver.latest() == "step_1"


async def test_a_parent_that_looked_keeps_what_its_children_wrote_but_may_load(driver: Driver) -> None:
    await driver.save(STEP, 1)
    driver.lookup(f"{STEP}/{MARKER}", pid=os.getpid())
    writer = Program()  # a child of this process, as Megatron's writers are of the trainer
    await driver.write(f"{STEP}/__0_0.distcp", b"new", pid=writer.pid)
    writer.kill()
    assert driver.loaded(STEP, pid=1) is None, "the trainer, which looked and lives, goes on"
    assert driver.loaded(STEP, pid=os.getpid()) == 1, "unless it is who asks"


async def test_a_thread_counts_as_its_process(driver: Driver) -> None:
    await driver.save(STEP, 1)

    def thread() -> int:
        import threading

        return threading.get_native_id()

    ended = await trio.to_thread.run_sync(thread)
    await driver.write(f"{STEP}/__0_0.distcp", b"new", pid=ended if _is_ours(ended) else os.getpid())
    participants = driver.record(STEP).manifest.overwrite
    assert participants is not None
    assert list(participants.participants) == [str(os.getpid())]


def _is_ours(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}").exists()


async def test_nothing_is_put_back_while_a_file_is_open(driver: Driver, trainer: Program) -> None:
    await driver.save(STEP, 1)
    handle = await driver.open(f"{STEP}/__0_0.distcp", pid=trainer.pid, truncate=True)
    trainer.kill()
    assert driver.loaded(STEP) is None
    await driver.settle(seconds=1000)
    assert driver.loaded(STEP) is None
    driver.close(handle)
    assert driver.loaded(STEP) == 1


async def test_an_open_without_a_change_is_put_back_and_leaves_no_trace(driver: Driver) -> None:
    await driver.save(STEP, 1)
    before = driver.tree(STEP)
    driver.close(await driver.open(f"{STEP}/__0_0.distcp"))
    assert driver.state(STEP) == "writing"
    await driver.settle(seconds=2)
    assert driver.state(STEP) == "complete"
    assert driver.tree(STEP) == before
    assert driver.record(STEP).manifest.generation == 1


async def test_a_file_changed_in_place_waits_for_the_rest(driver: Driver) -> None:
    await driver.save(STEP, 1)
    handle = await driver.open(f"{STEP}/__0_0.distcp")
    os.pwrite(handle.fd, b"!", 0)
    driver.close(handle)
    await driver.settle(seconds=2)
    assert driver.state(STEP) == "writing"
    assert (driver.root / STEP / "__0_0.distcp").read_bytes()[:1] == b"!"
    await driver.settle(seconds=400)
    assert driver.loaded(STEP) == 1


async def test_a_marker_is_opened_for_reading_and_writing(driver: Driver) -> None:
    await driver.save(STEP, 1)
    handle = await driver.open(f"{STEP}/{MARKER}")
    assert os.pread(handle.fd, 1 << 20, 0) == marker(1, FILES)
    driver.close(handle)
    await driver.settle(seconds=2)
    assert driver.loaded(STEP) == 1


async def test_removing_files_for_good_is_accepted(driver: Driver, trainer: Program) -> None:
    await driver.save(STEP, 1)
    await driver.unlink(f"{STEP}/__0_0.distcp", pid=trainer.pid)
    assert driver.lookup(f"{STEP}/{MARKER}")
    trainer.kill()
    await driver.settle(seconds=20)
    assert driver.state(STEP) == "writing"
    assert not (driver.root / STEP / "__0_0.distcp").exists()
    assert "removed by a program" in driver.record(STEP).manifest.note
    assert driver.old_generations() == []
    await driver.write(f"{STEP}/__0_0.distcp", content(2, "__0_0.distcp", 3000))
    assert driver.loaded(STEP) is None, "the marker that is left does not vouch for what comes next"
    await driver.save(STEP, 3)
    assert driver.loaded(STEP) == 3


async def test_a_removed_file_that_is_made_anew_hides_the_marker(driver: Driver) -> None:
    await driver.save(STEP, 1)
    assert not driver.steps.is_out_of_sight(f"{STEP}/{MARKER}")
    await driver.unlink(f"{STEP}/__0_0.distcp")
    await driver.write(f"{STEP}/__0_0.distcp", content(2, "__0_0.distcp", 3000))
    assert driver.loaded(STEP) is None
    seen = [name for name in ("__0_0.distcp", "no-such", MARKER) if driver.steps.is_out_of_sight(f"{STEP}/{name}")]
    assert seen == [MARKER], "who still saw it may remove it"
    await driver.settle(seconds=400)
    assert driver.loaded(STEP) == 1


async def test_removing_a_step_whole_leaves_nothing(driver: Driver) -> None:
    await driver.save("run/step_0", 1)
    await driver.save(STEP, 1)
    await driver.rmtree(STEP)
    assert driver.latest() == "step_0"
    assert driver.old_generations() == []
    assert not manifest_path(driver.tier.meta, "run", "step_1").exists()
    await driver.rmtree("run")
    assert os.listdir(driver.root) == []
    assert driver.registry.records == {}


async def test_a_name_that_is_removed_during_a_copy_stays_removed(driver: Driver) -> None:
    await driver.save(STEP, 1, {"__0_0.distcp": 64 << 20})
    async with trio.open_nursery() as nursery:
        opened: list[bool] = []

        async def open_it() -> None:
            opened.append(await driver.steps.before_write_open(f"{STEP}/__0_0.distcp", 1, truncate=False))

        nursery.start_soon(open_it)
        await until(lambda: driver.record(STEP).lock.locked() or opened, "the copy begins")
        if not opened:
            await driver.unlink(f"{STEP}/__0_0.distcp")
    assert opened == [True]
    assert not (driver.root / STEP / "__0_0.distcp").exists()
    assert len(driver.old_generations()) == 1, "no scratch file is left"


async def test_two_that_open_the_same_file_get_one_new_inode(driver: Driver) -> None:
    await driver.save(STEP, 1)
    handles = []

    async def open_it() -> None:
        handles.append(await driver.open(f"{STEP}/__0_0.distcp"))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(open_it)
    assert len({handle.ino for handle in handles}) == 1
    for handle in handles:
        driver.close(handle)


@pytest.mark.parametrize("failing", ["manifest", "copy", "links"])
async def test_no_room_for_an_overwrite_leaves_the_step_as_it_was(
    driver: Driver, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.save(STEP, 1)
    before = driver.tree(STEP)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if failing == "manifest":
            patch.setattr(registry_module, "save_manifest", full)
        else:
            patch.setattr(os, "sendfile" if failing == "copy" else "link", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                await driver.open(f"{STEP}/__0_0.distcp")
    await driver.settle(seconds=2)
    assert driver.state(STEP) == "complete"
    assert driver.tree(STEP) == before
    assert driver.old_generations() == []
    await driver.save(STEP, 2)
    assert driver.loaded(STEP) == 2


async def test_no_room_to_put_back_fails_no_lookup_and_is_tried_again(
    driver: Driver, trainer: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.save(STEP, 1)
    await driver.write(f"{STEP}/__0_0.distcp", b"new", pid=trainer.pid)
    trainer.kill()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        assert driver.loaded(STEP) is None
        await driver.settle(seconds=20)
        assert driver.state(STEP) == "writing"
    assert driver.loaded(STEP) == 1


async def test_no_room_to_note_a_commit_costs_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    await driver.save(STEP, 1)
    for name, size in FILES.items():
        await driver.write(f"{STEP}/{name}", content(2, name, size))
    await driver.write(f"{STEP}/{MARKER}.tmp", marker(2, FILES))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(registry_module, "save_manifest", full)
        await driver.rename(f"{STEP}/{MARKER}.tmp", f"{STEP}/{MARKER}")
    driver.restart()
    await driver.settle()
    assert driver.state(STEP) == "complete"
    assert driver.loaded(STEP) == 2


async def test_a_judgement_that_failed_is_made_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    driver.mkdirs(STEP)
    for name, size in FILES.items():
        await driver.write(f"{STEP}/{name}", content(1, name, size))
    await driver.write(f"{STEP}/{MARKER}", marker(1, FILES))
    with monkeypatch.context() as patch:
        patch.setattr("tierfs.steps.upkeep.judge", fail)
        await driver.settle()
    await driver.settle()
    assert driver.state(STEP) == "writing"
    await driver.settle(seconds=20)
    assert driver.state(STEP) == "complete"


# --- moving


async def test_a_step_and_a_namespace_take_everything_along(driver: Driver, trainer: Program) -> None:
    await driver.save(STEP, 1)
    await driver.operations.pin(STEP, pinned=True)
    await driver.rename(STEP, "run/step_5")
    assert driver.record("run/step_5").manifest.pinned
    assert driver.latest() == "step_5"
    await driver.write("run/step_5/__0_0.distcp", b"new", pid=trainer.pid)
    await driver.rename("run/step_5", "run/step_7")
    await driver.save("run/step_5", 3)
    await driver.write("run/step_5/__0_0.distcp", b"new", pid=trainer.pid)
    assert len(driver.old_generations()) == 2
    await driver.rename("run", "other")
    trainer.kill()
    assert driver.loaded("other/step_7") == 1
    assert driver.loaded("other/step_5") == 3
    assert driver.latest("other") == "step_7"
    driver.restart()
    assert sorted(record.rel for record in driver.registry.records.values()) == ["other/step_5", "other/step_7"]
    assert driver.record("other/step_7").manifest.pinned


async def test_a_step_moved_before_it_was_judged_completes_under_its_new_name(driver: Driver) -> None:
    driver.mkdirs(STEP)
    for name, size in FILES.items():
        await driver.write(f"{STEP}/{name}", content(1, name, size))
    await driver.write(f"{STEP}/{MARKER}", marker(1, FILES))
    await driver.rename(STEP, "run/step_9")
    await driver.settle()
    assert driver.state("run/step_9") == "complete"
    assert driver.latest() == "step_9"


async def test_a_step_moved_away_while_it_is_overwritten_is_moved_whole(driver: Driver) -> None:
    await driver.save(STEP, 1)
    await driver.write(f"{STEP}/__0_0.distcp", b"new")
    await driver.rename(STEP, "run/kept")
    assert driver.loaded("run/kept") == 1
    assert driver.old_generations() == []
    assert driver.registry.records == {}
    await driver.settle(seconds=20)
    assert driver.latest() is None


async def test_a_rename_that_nobody_noted_is_recognised(driver: Driver, trainer: Program) -> None:
    await driver.save(STEP, 1)
    await driver.operations.pin(STEP, pinned=True)
    await driver.write(f"{STEP}/__0_0.distcp", b"new", pid=trainer.pid)
    (driver.root / STEP).rename(driver.root / "run/step_9")
    trainer.kill()
    driver.restart()
    assert driver.loaded("run/step_9") == 1
    assert driver.record("run/step_9").manifest.pinned
    assert len(driver.registry.records) == 1


async def test_exchanged_steps_and_files(driver: Driver) -> None:
    await driver.save(STEP, 1)
    await driver.save("run/step_2", 2)
    await driver.operations.pin(STEP, pinned=True)
    await driver.rename(STEP, "run/step_2", exchange=True)
    assert (driver.loaded(STEP), driver.loaded("run/step_2")) == (2, 1)
    assert driver.record("run/step_2").manifest.pinned
    assert not driver.record(STEP).manifest.pinned
    await driver.rename(f"{STEP}/__0_0.distcp", f"{STEP}/__1_0.distcp", exchange=True)
    assert driver.loaded(STEP) is None
    await driver.settle(seconds=400)
    assert driver.loaded(STEP) == 2


async def test_a_file_that_is_open_while_it_is_moved_is_sealed_when_it_is_closed(driver: Driver) -> None:
    driver.mkdirs("run/step_1/sub")
    driver.mkdirs("run/step_2")
    handle = await driver.open("run/step_1/sub/a")
    await driver.rename("run/step_1/sub", "run/step_1/sub2")
    assert driver.record(STEP).open_names() == {"sub2/a"}
    await driver.rename("run/step_1/sub2/a", "run/step_2/a")
    assert driver.record(STEP).open_names() == set()
    assert driver.record("run/step_2").open_names() == {"a"}
    os.write(handle.fd, b"12345")
    driver.close(handle)
    entry = driver.record("run/step_2").manifest.files["a"]
    assert (entry.size_bytes, entry.sealed) == (5, True)


async def test_a_file_open_across_a_takeover_is_waited_for_and_sealed(driver: Driver) -> None:
    driver.mkdirs(STEP)
    await driver.write(f"{STEP}/__1_0.distcp", content(1, "__1_0.distcp", 5000))
    await driver.write(f"{STEP}/{MARKER}", marker(1, FILES))
    handle = await driver.open(f"{STEP}/__0_0.distcp")
    os.write(handle.fd, content(1, "__0_0.distcp", 3000))
    driver.restart()
    await driver.settle()
    assert driver.state(STEP) == "writing"
    os.write(handle.fd, b"more")
    driver.close(handle)
    await driver.settle()
    assert driver.state(STEP) == "complete"
    assert driver.record(STEP).manifest.files["__0_0.distcp"].size_bytes == 3004


# --- latest


async def test_latest_names_the_highest_number_and_changes_no_times(driver: Driver) -> None:
    await driver.save("run/step_10", 1)
    os.utime(driver.root / "run", (1e9, 1e9))
    await driver.save("run/step_10", 1)
    await driver.write("run/step_10/__0_0.distcp", b"new")
    await driver.settle(seconds=400)
    assert driver.latest() == "step_10"
    assert (driver.root / "run").stat().st_mtime == 1e9
    await driver.save("run/step_9", 1)
    assert driver.latest() == "step_10"


async def test_a_latest_of_a_program_is_its_own(driver: Driver) -> None:
    driver.mkdirs("run")
    driver.symlink("somewhere", "run/latest")
    await driver.save(STEP, 1)
    assert driver.latest() == "somewhere"
    driver.restart()
    assert driver.latest() == "somewhere"
    await driver.rename("run", "moved")
    await driver.save("run/step_3", 1)
    assert driver.latest("run") == "step_3", "the next namespace of that name is none of its business"
    await driver.save("moved/step_4", 1)
    assert driver.latest("moved") == "somewhere"
    await driver.unlink("moved/latest")
    await driver.save("moved/step_5", 1)
    assert driver.latest("moved") == "step_5"
    await driver.save("deep/global_step7", 1)
    assert driver.latest("deep") is None, "DeepSpeed writes a file of that name"


@pytest.mark.parametrize("mode", ["shown", "hidden", "off"])
async def test_latest_is_shown_or_not_and_never_in_the_way_of_rmdir(tmp_path: Path, mode: str) -> None:
    settings = Settings()
    settings.steps.latest = mode
    driver = Driver(tmp_path / "ram", settings)
    await driver.save(STEP, 1)
    assert driver.latest() == (None if mode == "off" else "step_1")
    assert driver.steps.hidden("run", "latest") == (mode == "hidden")
    await driver.rmtree("run")
    assert os.listdir(driver.root) == []


async def test_an_evicted_or_unfinished_step_is_not_latest(driver: Driver) -> None:
    await driver.save(STEP, 1)
    await driver.save("run/step_2", 1)
    driver.mkdirs("run/step_3")
    assert driver.latest() == "step_2"
    await driver.operations.evict("run/step_2", force=True)
    assert driver.latest() == "step_1"
    assert ("run", "latest") in driver.told


async def test_a_marker_that_somebody_still_writes_commits_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two programs that save one step at once, one writes the marker that the other renames."""
    monkeypatch.setattr(commits, "CLOSE_GRACE_S", 0.1)
    await driver.save("run/step_1", 1)
    for name, size in FILES.items():
        await driver.write(f"run/step_1/{name}", content(2, name, size))
    await driver.write(f"run/step_1/{MARKER}.tmp", marker(2, FILES))
    other = await driver.open(f"run/step_1/{MARKER}.tmp")
    with pytest.raises(CommitRefused, match=r"\.metadata\.tmp is still open for writing"):
        await driver.rename(f"run/step_1/{MARKER}.tmp", f"run/step_1/{MARKER}")
    driver.close(other)
    await driver.rename(f"run/step_1/{MARKER}.tmp", f"run/step_1/{MARKER}")
    assert driver.registry.records["run", "step_1"].manifest.generation == 2


# --- retention


async def test_a_maximum_is_held_and_spares_pinned_and_open_steps(tmp_path: Path) -> None:
    settings = Settings()
    settings.retention.ram_max_steps = 2
    driver = Driver(tmp_path / "ram", settings)
    await driver.save("run/step_1", 1)
    await driver.operations.pin("run/step_1", pinned=True)
    await driver.save("run/step_2", 1)
    reader = (driver.root / "run/step_2/__0_0.distcp").open("rb")
    inode = os.fstat(reader.fileno()).st_ino
    counted = driver.registry.open_handles
    driver.registry.open_handles = lambda nodeid: counted(nodeid) + (nodeid == inode)
    for number in (3, 4, 5):
        await driver.save(f"run/step_{number}", 1)
    assert sorted(step for _, step in driver.registry.records) == ["step_1", "step_2", "step_4", "step_5"]
    reader.close()
    driver.registry.open_handles = counted
    await driver.operations.pin("run/step_1", pinned=False)
    assert sorted(step for _, step in driver.registry.records) == ["step_4", "step_5"]


async def test_a_namespace_s_own_maximum_is_held_where_the_settings_have_none(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "ram")
    for namespace in ("asked", "other"):
        driver.mkdirs(f"{namespace}/step_1")
    driver.steps.wished("asked", "ram_max_steps", "2")
    for wrong in ("0", "-1", "x", "2,3", "9" * 20):
        with pytest.raises(PathRefused):
            driver.steps.wished("asked", "ram_max_steps", wrong)
    for no_namespace in ("asked/step_1", "nowhere"):
        with pytest.raises((PathRefused, NotAStep)):
            driver.steps.wished(no_namespace, "ram_max_steps", "1")
    for number in range(1, 5):
        await driver.save(f"asked/step_{number}", 1)
        await driver.save(f"other/step_{number}", 1)
    assert sorted(step for where, step in driver.registry.records if where == "asked") == ["step_3", "step_4"]
    assert len(driver.registry.records) == 6
    driver.registry.settings.retention.ram_max_steps = 3  # an operator's word is the last
    await driver.save("asked/step_5", 1)
    await driver.save("other/step_5", 1)
    assert [len(driver.registry.of_namespace(name)) for name in ("asked", "other")] == [3, 3]
    driver.steps.wished("asked", "ram_max_steps", "")
    driver.registry.settings.retention.ram_max_steps = 0
    for number in range(6, 10):
        await driver.save(f"asked/step_{number}", 1)
    assert len(driver.registry.of_namespace("asked")) == 7, "taken back"


async def test_room_for_the_next_step_is_made_when_its_directory_is(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 6):
        await driver.save(f"run/step_{number}", 1)
    usage = driver.tier.usage()
    monkeypatch.setattr(type(usage), "free_bytes", 100, raising=False)
    monkeypatch.setattr(driver.tier, "usage", lambda: type("Usage", (), {"free_bytes": 100}))
    driver.mkdirs("run/step_6")
    steps = {step for _, step in driver.registry.records}
    assert steps == {"step_2", "step_3", "step_4", "step_5", "step_6"}
    driver.mkdirs("run/step_7")
    assert "step_2" in {step for _, step in driver.registry.records}, "the room is on its way"
    monkeypatch.undo()
    async with driver.running():
        await until(lambda: not os.listdir(driver.tier.trash), "the trash is empty")
    assert driver.registry.make_room(1)
    assert "step_2" not in {step for _, step in driver.registry.records}


async def test_the_newest_steps_are_never_evicted(driver: Driver) -> None:
    for number in (100, 50, 60):
        await driver.save(f"run/step_{number}", 1)
    assert driver.registry.make_room(1 << 40)
    assert {step for _, step in driver.registry.records} == {"step_50", "step_60"}
    assert driver.latest() == "step_60"


# --- beside the requests


async def test_only_abandoned_saves_of_dcp_are_swept(driver: Driver) -> None:
    for step in ("run/step_1", "run/step_2", "other/step_1"):
        driver.mkdirs(step)
    await driver.write("run/step_1/__0_0.distcp", b"half")
    await driver.write("run/step_2/model.pt", b"no marker will come")
    await driver.write("other/step_1/__0_0.distcp", b"nothing newer")
    await driver.settle(seconds=5000)
    assert len(driver.registry.records) == 3
    await driver.save("run/step_3", 1)
    await driver.settle(seconds=5000)
    assert sorted(record.rel for record in driver.registry.records.values()) == [
        "other/step_1",
        "run/step_2",
        "run/step_3",
    ]
    assert not (driver.root / "run/step_1").exists()


async def test_a_step_without_a_marker_completes_when_idle_if_asked_for(tmp_path: Path) -> None:
    settings = Settings()
    settings.steps.complete_when_idle_s = 30
    driver = Driver(tmp_path / "ram", settings)
    driver.mkdirs(STEP)
    driver.mkdirs("run/step_2")
    await driver.write(f"{STEP}/model.pt", b"x")
    await driver.write("run/step_2/__0_0.distcp", b"x")
    handle = await driver.open(f"{STEP}/open.pt")
    await driver.settle(seconds=40)
    assert driver.state(STEP) == "writing"
    driver.close(handle)
    await driver.settle(seconds=40)
    assert driver.state(STEP) == "complete"
    assert driver.state("run/step_2") == "writing", "DCP's marker is missing"


async def test_checksums_come_by_themselves_and_a_flipped_byte_is_found(driver: Driver) -> None:
    async with driver.running():
        await driver.save(STEP, 1)
        files = driver.record(STEP).manifest.files
        await until(lambda: all(entry.checksum for entry in files.values()), "all have checksums")
        path = driver.root / STEP / "__0_0.distcp"
        told: list[object] = []

        async def progress(said: object) -> None:
            told.append(said)

        assert await driver.operations.verify("run", progress) == {
            "files": 3,
            "bytes": sum(entry.size_bytes for entry in files.values()),
            "bad": [],
            "unsealed": 0,
            "stubs": 0,
        }
        assert driver.steps.xattrs(f"{STEP}/__0_0.distcp", path.stat())["user.tierfs.checksum"].startswith(
            b"crc64nvme:"
        )
        with path.open("r+b") as file:
            file.seek(7)
            file.write(b"\0")
        assert "user.tierfs.checksum" not in driver.steps.xattrs(f"{STEP}/__0_0.distcp", path.stat())
        found = await driver.operations.verify(STEP, progress)
        assert [bad["path"] for bad in found["bad"]] == [f"{STEP}/__0_0.distcp"]
        assert re.search("has the checksum .*, .* was sealed", found["bad"][0]["reason"])
        assert driver.registry.problems[0]["severity"] == "error"
    driver.restart()
    entry = driver.record(STEP).manifest.files["__0_0.distcp"]
    assert entry.checksum is None, "what changed is not what was summed"


async def test_checksums_come_also_after_a_time_in_which_nothing_happened(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TICK_S", 0.05)
    monkeypatch.setattr(upkeep, "REST_S", 0.05)
    async with driver.running():
        await rounds_of_upkeep(driver, monkeypatch)
        await driver.save(STEP, 1)
        files = driver.record(STEP).manifest.files
        await until(lambda: all(entry.checksum for entry in files.values()), "all have checksums")


async def test_a_changed_file_gets_no_checksum_of_what_it_was(driver: Driver) -> None:
    driver.mkdirs(STEP)
    await driver.write(f"{STEP}/a", b"one")
    (driver.root / STEP / "a").write_bytes(b"another")
    async with driver.running():
        await until(lambda: not any(driver.registry.to_checksum.values()), "nothing is waiting")
        await trio.testing.wait_all_tasks_blocked(0.05)
    assert driver.record(STEP).manifest.files["a"].checksum is None


async def test_a_step_that_is_evicted_is_not_held_in_ram_by_its_checksum(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def sum_slowly(fd: int, *, should_stop: Callable[[], bool]) -> None:
        begun.set()
        while not should_stop():
            over.wait(0.01)
        over.set()
        raise ChecksumStopped

    monkeypatch.setattr(upkeep, "checksum_fd", sum_slowly)
    async with driver.running():
        await driver.save(STEP, 1)
        await until(begun.is_set, "a checksum is computed")
        driver.registry.evict(driver.record(STEP))
        await until(over.is_set, "it is given up")


async def rounds_of_upkeep(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """Waits until the upkeep has looked at all steps twice."""
    rounds, look = [], driver.upkeep._round

    async def counted() -> float:
        rounds.append(await look())
        return rounds[-1]

    patch.setattr(driver.upkeep, "_round", counted)
    await until(lambda: len(rounds) >= 2, "two rounds of the upkeep go by")


async def test_trash_and_old_generations_are_freed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "REST_S", 1.5)
    async with driver.running():
        for seed in (1, 2, 3):
            await driver.save(STEP, seed)
        await until(lambda: not os.listdir(driver.tier.trash), "the trash is empty")
        await rounds_of_upkeep(driver, monkeypatch)
        await driver.operations.remove(STEP, recursive=False)
        await until(lambda: not os.listdir(driver.tier.trash), "the trash is emptied at once", within_s=0.5)
    assert driver.old_generations() == []


# --- by hand


async def test_operations_say_what_is_wrong(driver: Driver) -> None:
    ask = driver.operations
    driver.mkdirs(STEP)
    driver.mkdirs("run/step_2")
    driver.mkdirs("run/plain")
    handle = await driver.open(f"{STEP}/__0_0.distcp")
    refusals: list[tuple[Callable[[], Awaitable[object]], type[TierfsError], str]] = [
        (lambda: ask.commit("run"), NotAStep, "run is not in a step"),
        (lambda: ask.commit("run/step_77"), NotFound, "there is no step run/step_77"),
        (lambda: ask.commit("../x"), PathRefused, r"\.\."),
        (lambda: ask.commit(STEP), StepBusy, "__0_0.distcp is open for writing"),
        (lambda: ask.commit("run/step_2"), CommitRefused, "holds no file"),
        (lambda: ask.remove(STEP, recursive=False), StepBusy, "stop the writer first"),
        (lambda: ask.remove("run", recursive=False), PathRefused, "--recursive"),
        (lambda: ask.remove("run", recursive=True), StepBusy, "run/step_1 is being written"),
        (lambda: ask.remove("run/step_2/x", recursive=True), PathRefused, "neither a step nor a namespace"),
    ]
    for call, kind, sentence in refusals:
        with pytest.raises(kind, match=sentence):
            await call()
    assert (driver.root / "run/step_2").exists(), "a namespace goes whole or not at all"
    driver.close(handle)
    with pytest.raises(CommitRefused, match="no marker yet"):
        await ask.commit(STEP)
    await driver.write("run/step_2/model.pt", b"x")
    assert (await ask.commit("run/step_2"))["state"] == "complete"
    with pytest.raises(TierfsError, match="--force"):
        await ask.evict("run/step_2", force=False)
    await ask.pin("run/step_2", pinned=True)
    with pytest.raises(StepBusy, match="unpin"):
        await ask.evict("run/step_2", force=True)
    assert (await ask.remove("run", recursive=True))["steps"] == 2
    assert driver.registry.records == {}
    assert os.listdir(driver.root) == []


async def test_names_that_are_no_text_are_steps_too(driver: Driver) -> None:
    namespace = os.fsdecode(b"caf\xe9 \xff")
    await driver.save(f"{namespace}/step_1", 1, {"__0_0.distcp": 10})
    await driver.write(f"{namespace}/step_1/" + os.fsdecode(b"\xfe.bin"), b"x")
    await driver.write(f"{namespace}/step_1/__0_0.distcp", b"new")
    driver.restart()
    await driver.settle(seconds=400)
    assert driver.loaded(f"{namespace}/step_1") == 1
    assert driver.latest(namespace) == "step_1"


def test_crash_points_are_named(tmp_path: Path) -> None:
    for wrong in ("nowhere", "commit:saved:x", "commit:saved:0"):
        with pytest.raises(SettingsError, match="known points"):
            CrashPoints(wrong, tmp_path)
    CrashPoints("", tmp_path)("commit:saved")


# --- a daemon that dies


async def _save_new(driver: Driver) -> None:
    await driver.save("run/step_2", 2)


async def _overwrite(driver: Driver) -> None:
    await driver.save(STEP, 2)


async def _change_in_place(driver: Driver) -> None:
    handle = await driver.open(f"{STEP}/__1_0.distcp")
    os.pwrite(handle.fd, b"?", 0)
    driver.close(handle)


async def _remove(driver: Driver) -> None:
    await driver.unlink(f"{STEP}/__1_0.distcp")


async def _put_back(driver: Driver) -> None:
    await _change_in_place(driver)
    await driver.settle(seconds=400)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("operation", [_save_new, _overwrite, _change_in_place, _remove, _put_back])
def test_a_death_at_any_point_leaves_all_old_or_all_new(
    tmp_path: Path, point: str, operation: Callable[[Driver], Awaitable[None]]
) -> None:
    settings = Settings()
    settings.steps.checksums = False
    trio.run(Driver(tmp_path / "ram", settings).save, STEP, 1)
    settings.debug_crash_at = point
    child = os.fork()
    if child == 0:
        try:
            trio.run(operation, Driver(tmp_path / "ram", settings))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    settings.debug_crash_at = ""
    survivor = Driver(tmp_path / "ram", settings)
    trio.run(_check_after_death, survivor, operation is _remove)


async def _check_after_death(driver: Driver, removed: bool) -> None:
    if not removed:
        assert driver.loaded(STEP) in (None, 1, 2)
    await driver.settle(seconds=400)
    if not (removed and driver.state(STEP) == "writing"):
        assert driver.state(STEP) == "complete"
        assert driver.loaded(STEP) in (1, 2)
    if (driver.root / "run/step_2").exists() and driver.loaded("run/step_2"):
        assert driver.state("run/step_2") == "complete"
        assert driver.latest() == "step_2"
    async with driver.running():
        await until(lambda: not os.listdir(driver.tier.trash), "the trash is empty")
    assert driver.old_generations() == []
    for seed, step in ((3, STEP), (4, "run/step_2")):
        await driver.save(step, seed)
        assert driver.loaded(step) == seed
