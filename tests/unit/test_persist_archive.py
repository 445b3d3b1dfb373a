"""Persisted steps that a rule picks are copied to the archive, all or nothing; what is owed to it is not deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from persist_driver import WITHIN_S, Node, check_listed, listed, quickly, settings
from step_driver import FILES, MARKER, until
from test_persist_machine import OneDeath, Trouble, check_markers, has_died

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.crash_points import ARCHIVE_POINTS
from tierfs.errors import ObjectUnavailable, SettingsError
from tierfs.persist.archive_rule import Counted, Persisted, pick
from tierfs.settings import RetentionSettings, Settings
from tierfs.settings_archive import ArchiveSettings, check_archive

WIDE = {f"__{rank}_0.distcp": 400 + rank for rank in range(6)}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


@pytest.fixture
def stores() -> tuple[MemoryStore, MemoryStore]:
    """The object tier's and the archive's. At each moment both hold whole steps only."""
    tier, archive = MemoryStore(), MemoryStore()
    for store in (tier, archive):
        store.watch = lambda store=store: (check_listed(store), check_markers(store))[0]  # type: ignore[misc]
    return tier, archive


@pytest.fixture
def make(tmp_path: Path, stores: tuple[MemoryStore, MemoryStore]) -> Callable[..., Node]:
    def make(name: str = "n1", *, retention: RetentionSettings | None = None, **rule: Any) -> Node:
        config: Settings = settings()
        config.archive = ArchiveSettings(**rule)
        config.retention = retention or config.retention
        archive = MemoryClient(stores[1], copies_from=stores[0])
        return Node(tmp_path / name, MemoryClient(stores[0]), name, config, archive)

    return make


def archiving(node: Node) -> MemoryClient:
    assert isinstance(node.archive, MemoryClient)
    return node.archive


async def archive_all(node: Node) -> None:
    """Until nothing is owed to either."""
    assert node.archiver is not None
    archiver = node.archiver
    with trio.fail_after(WITHIN_S):
        async with node.running():
            await node.persister.drain()
            await until(lambda: not any(map(archiver.holds, node.registry.records.values())), "all is archived")


def listed_keys(store: MemoryStore) -> list[str]:
    return store.keys()


def state(node: Node, step: str) -> str:
    assert node.archiver is not None
    namespace, _, name = step.rpartition("/")
    return str(node.archiver.describe((namespace, name))["state"])


async def test_every_second_persisted_step_is_copied_by_the_store(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    node = make(every_steps=2)
    for number in range(1, 4):
        await node.driver.save(f"run/step_{number}", number)
    await archive_all(node)
    node.restart()  # the count goes on
    for number in range(4, 6):
        await node.driver.save(f"run/step_{number}", number)
    await archive_all(node)
    tier, archive = stores
    assert listed(archive) == ["run/step_2", "run/step_4"]
    for key in listed_keys(archive):
        assert archive.objects[key].data == tier.objects[key].data, "the same layout, and the very same manifest"
    assert not any("/nodes/" in key for key in listed_keys(archive))
    client = archiving(node)
    assert client.requests["upload"] == 0 and max(client.sent.values()) == 1
    assert [state(node, f"run/step_{number}") for number in range(1, 6)] == ["none", "done", "none", "done", "none"]
    node.restart()
    assert state(node, "run/step_4") == "done"


async def test_a_mount_that_lost_its_memory_goes_on_after_the_newest_archived_step(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    node = make(every_steps=2)
    for number in range(1, 6):
        await node.driver.save(f"run/step_{number}", number)
    await archive_all(node)
    assert listed(stores[1]) == ["run/step_2", "run/step_4"]
    other = make("n2", every_steps=2)
    await other.index.refresh()
    await other.driver.save("run/step_6", 6)
    await archive_all(other)
    assert listed(stores[1]) == ["run/step_2", "run/step_4", "run/step_6"]
    assert state(other, "run/step_4") == "done", "it is there, whoever copied it"


async def test_an_old_tier_that_gets_an_archive_is_not_copied_from_its_beginning(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    before = make()
    for number in range(1, 6):
        await before.driver.save(f"run/step_{number}", number)
    await before.drain()
    node = make("n2", every_s=3600.0)
    await node.index.refresh()
    await archive_all(node)
    assert listed(stores[1]) == ["run/step_5"]


async def test_retention_waits_for_the_archive_and_for_nothing_else(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    tier, archive = stores
    node = make(every_steps=2, retention=RetentionSettings(object_steps=1, ram_steps=1))
    refused: list[str] = []

    def away(when: str, what: str, key: str) -> None:
        if what == "copy":
            refused.append(key)
            raise ObjectUnavailable("the archive is away")

    archiving(node).fault = away
    assert node.archiver is not None
    archiver = node.archiver
    with trio.fail_after(WITHIN_S):
        async with node.running():
            for number in range(1, 6):
                await node.driver.save(f"run/step_{number}", number)
                await node.persister.drain()
            assert listed(tier) == ["run/step_2", "run/step_4", "run/step_5"]
            await until(lambda: len(refused) > 3, "it is tried again")
            await until(lambda: state(node, "run/step_2") == "waiting", "and says why")
            assert "the archive is away" in archiver.problems()[0]["message"]
            archiving(node).fault = lambda when, what, key: None
            await until(lambda: not archiver.owed(), "all is archived")
            await until(lambda: listed(tier) == ["run/step_5"], "retention had waited for that only")
            await node.driver.save("run/step_6", 6)
            await node.persister.drain()
            await until(lambda: not archiver.owed(), "all is archived")
            await node.driver.save("run/step_7", 7)
            await node.persister.drain()
    assert listed(archive) == ["run/step_2", "run/step_4", "run/step_6"]
    assert listed(tier) == ["run/step_7"]


async def test_what_is_unknown_of_the_archive_holds_retention(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    node = make(every_steps=1, retention=RetentionSettings(object_steps=1, ram_steps=1))

    def away(when: str, what: str, key: str) -> None:
        raise ObjectUnavailable("the archive is away")

    archiving(node).fault = away
    async with node.running():
        for number in range(1, 4):
            await node.driver.save(f"run/step_{number}", number)
            await node.persister.drain()
    assert listed(stores[0]) == ["run/step_1", "run/step_2", "run/step_3"]
    archiving(node).fault = lambda when, what, key: None
    await archive_all(node)
    assert listed(stores[1]) == ["run/step_1", "run/step_2", "run/step_3"]


async def test_a_step_that_is_removed_before_it_was_copied_is_not_archived(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    tier, archive = stores
    node = make(every_steps=1)
    await node.driver.save("run/step_0", 0)
    await archive_all(node)

    def remove(when: str, what: str, key: str) -> None:
        if (when, what) == ("after", "copy") and "step_1" in key:
            raise ObjectUnavailable("half way")

    archiving(node).fault = remove
    assert node.archiver is not None
    archiver = node.archiver
    async with node.running():
        await node.driver.save("run/step_1", 1)
        await node.persister.drain()
        await until(lambda: state(node, "run/step_1") == "waiting", "some of it is copied")
        await node.driver.rmtree("run/step_1")
        await node.persister.drain()
        await until(lambda: not archiver.owed(), "nobody owes it any more")
    assert listed(tier) == listed(archive) == ["run/step_0"]
    await node.driver.rmtree("run/step_0")
    await archive_all(node)
    assert listed(tier) == [] and listed(archive) == ["run/step_0"], "an archive keeps what it has"


async def test_a_save_under_an_archived_name_takes_its_place_once_it_is_whole(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    tier, archive = stores
    node = make(every_steps=1)
    await node.driver.save("run/step_1", 1, {**FILES, "__2_0.distcp": 77})
    await archive_all(node)
    await node.driver.save("run/step_1", 2, FILES)
    await archive_all(node)
    same = {key: archive.objects[key].data == tier.objects[key].data for key in listed_keys(archive)}
    assert all(same.values()) and f"run/step_1/{MARKER}" in same
    await node.driver.write("run/step_1/meta.pt", b"added to the step later")
    await archive_all(node)
    assert archive.objects["run/step_1/meta.pt"].data == b"added to the step later"


async def test_a_newer_save_takes_the_place_of_one_with_a_higher_generation(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    """As after a `tierfs rm`, or retention: the name was free in the object tier, and not in the archive."""
    tier, archive = stores
    node = make(every_steps=1)
    for seed in (1, 2):
        await node.driver.save("run/step_1", seed)
        await archive_all(node)
    await node.driver.rmtree("run/step_1")
    await archive_all(node)
    await node.driver.save("run/step_1", 3)
    await archive_all(node)
    assert node.record("run/step_1").manifest.generation == 1
    assert all(archive.objects[key].data == tier.objects[key].data for key in listed_keys(archive))


async def test_a_step_that_is_removed_while_its_copying_fails_is_no_problem_for_ever(
    make: Callable[..., Node],
) -> None:
    node = make(every_steps=1)
    await node.driver.save("run/step_0", 0)
    await archive_all(node)
    assert node.archiver is not None
    archiver = node.archiver

    def fail(when: str, what: str, key: str) -> None:
        if what == "copy":
            archiver.removed(("run", "step_1"))
            raise ObjectUnavailable("the archive is away")

    archiving(node).fault = fail
    await node.driver.save("run/step_1", 1)
    await archive_all(node)
    assert archiver.problems() == []


async def test_the_object_tier_by_another_name_is_no_archive(tmp_path: Path) -> None:
    """Each step would look archived there, and retention would delete it."""
    tier = MemoryStore()
    config = settings()
    config.archive = ArchiveSettings(every_steps=1)
    config.retention = RetentionSettings(object_steps=1)
    node = Node(tmp_path / "n1", MemoryClient(tier), "n1", config, MemoryClient(tier, copies_from=tier))
    assert node.archiver is not None
    archiver = node.archiver
    async with node.running():
        for number in (1, 2):
            await node.driver.save(f"run/step_{number}", number)
            await node.persister.drain()
        await until(lambda: "is the object tier itself" in str(archiver.problems()), "status says so")
        assert "is the object tier itself" in archiver.status()["problem"]
    assert listed(tier) == ["run/step_1", "run/step_2"]


@pytest.mark.parametrize(
    ("tier", "archive"),
    [("s3://b/p", "s3://b//p/"), ("s3://b", "s3://b/archive"), ("file:///t/tier", "file:///t/./tier//old")],
)
def test_however_it_is_spelt_an_archive_does_not_lie_in_the_object_tier(tier: str, archive: str) -> None:
    with pytest.raises(SettingsError, match="lie in each other"):
        check_archive(Settings(object=tier, archive=ArchiveSettings(object=archive, every_steps=1)))
    check_archive(Settings(object=tier, archive=ArchiveSettings(object=f"{tier}-archive", every_steps=1)))


async def test_a_damaged_manifest_in_the_archive_holds_up_nothing(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    node = make(every_steps=1)
    for number in (1, 2):
        await node.driver.save(f"run/step_{number}", number)
    await archive_all(node)
    stores[1].objects["run/step_2/.tierfs/manifest.json"].data = b"{"
    other = make("n2", every_steps=1)
    await other.index.refresh()
    await archive_all(other)
    assert listed(stores[1]) == ["run/step_1", "run/step_2"]


async def test_a_step_that_is_renamed_is_archived_under_its_new_name(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    node = make(every_steps=1)
    await node.driver.save("run/step_1", 1)
    assert node.archiver is not None
    archiver = node.archiver

    def away(when: str, what: str, key: str) -> None:
        if what == "copy" and "step_1" in key:
            raise ObjectUnavailable("the archive is away")

    archiving(node).fault = away
    async with node.running():
        await node.persister.drain()
        await until(lambda: len(archiver.owed()) == 1, "it is owed")
        await node.driver.rename("run/step_1", "run/step_9")
        await node.persister.drain()
        await until(lambda: not archiver.owed(), "all is archived")
    assert listed(stores[1]) == ["run/step_9"]


async def test_whatever_request_a_daemon_dies_at_the_step_is_archived_and_nothing_copied_again_and_again(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore]
) -> None:
    deaths = 0
    for at in range(1, 200):
        for store in stores:
            store.objects.clear()
        node = make(f"n{at}", every_steps=1)
        client, trouble = archiving(node), Trouble()
        client.fault = trouble
        await node.driver.save("run/step_1", 1, WIDE)
        trouble.die_in = at
        try:
            await archive_all(node)
            died = False
        except BaseException as error:
            if not has_died(error):
                raise
            died = True
            node.restart()
            await archive_all(node)
        deaths += died
        assert listed(stores[1]) == ["run/step_1"]
        assert max(client.sent.values()) <= 2
        if not died:
            break
    else:
        raise AssertionError("the requests have no end")
    assert deaths > 10


@pytest.mark.parametrize("point", ARCHIVE_POINTS)
async def test_a_daemon_that_dies_at_a_named_point_is_gone_on_with(
    make: Callable[..., Node], stores: tuple[MemoryStore, MemoryStore], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(every_steps=1)
    monkeypatch.setattr(node.registry, "crash", OneDeath(point, 1))
    await node.driver.save("run/step_1", 1, WIDE)
    with pytest.raises(BaseException) as died:
        await archive_all(node)
    assert has_died(died.value)
    node.restart()
    await archive_all(node)
    assert listed(stores[1]) == ["run/step_1"]


SAVES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 3)), max_size=30)


@given(saves=SAVES, every_steps=st.integers(0, 4), every_s=st.sampled_from([0.0, 3.0, 10.0]), cuts=st.integers(0, 5))
def test_picks_do_not_depend_on_how_often_somebody_looks(
    saves: list[tuple[int, int]], every_steps: int, every_s: float, cuts: int
) -> None:
    rule = ArchiveSettings(every_steps=every_steps, every_s=every_s)
    there = [Persisted(f"step_{number}", generation, float(at)) for at, (number, generation) in enumerate(saves, 1)]
    _, at_once = pick(Counted(), rule, there)
    counted, one_by_one = Counted(), []
    for end in range(1, len(there) + 1):
        counted, more = pick(counted, rule, there[max(0, end - 1 - cuts) : end])
        one_by_one += more
    assert one_by_one == at_once
    if every_steps == 1:
        assert len(at_once) == len(there)
    if not (every_steps or every_s):
        assert at_once == []
