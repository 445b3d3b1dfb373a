"""Complete steps in real stores: committed, found again without the RAM tier, deleted; nothing else is left there."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from objects.targets import Target
from objects.transfers import get, keys_of
from tierfs.objects.opening import StoreSettings
from tierfs.objects.pool import WorkerPool
from tierfs.objects.store import MIB
from tierfs.persist.object_manifest import read_manifest
from tierfs.settings import RetentionSettings, Settings, TransferSettings
from unit.persist_driver import Node, settings
from unit.step_driver import FILES, content

MANIFEST = ".tierfs/manifest.json"


def on(target: Target, store: StoreSettings, **values: object) -> Settings:
    found = settings(**values)  # type: ignore[arg-type]
    found.object, found.s3 = store.url, store.s3
    found.transfer = TransferSettings(retry_for_s=20.0)
    return found


@asynccontextmanager
async def node_on(target: Target, path: Path, name: str = "n1", **values: object) -> AsyncIterator[Node]:
    config = on(target, target.settings, **values)
    pool = WorkerPool(config)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        yield Node(path / name, pool, name, config)
        nursery.cancel_scope.cancel()


def committed(target: Target) -> list[str]:
    return sorted(key.removesuffix("/" + MANIFEST) for key in keys_of(target.store) if key.endswith("/" + MANIFEST))


def check_whole(target: Target, step: str, seed: int, files: dict[str, int] = FILES) -> None:
    namespace, _, name = step.rpartition("/")
    manifest = read_manifest(get(target.store, f"{step}/{MANIFEST}"), namespace, name)
    assert set(manifest.files) == {*files, ".metadata"}
    for inner, size in files.items():
        is_same = target.store.get(f"{step}/{inner}", 256 * MIB)[0] == content(seed, inner, size)
        assert is_same, f"{step}/{inner} has other bytes"
        assert manifest.files[inner].size_bytes == size


async def test_steps_go_there_are_found_again_and_go(target: Target, tmp_path: Path) -> None:
    async with node_on(target, tmp_path, policy="every", every_steps=2) as node:
        for number in range(1, 6):
            await node.driver.save(f"my run/step_{number}", number)
        await node.drain(60)
        assert committed(target) == ["my run/step_2", "my run/step_4"]
        check_whole(target, "my run/step_4", 4)
        await node.driver.save("my run/step_2", 9, {"__0_0.distcp": 700, "é +.bin": 0})
        await node.drain(60)
        check_whole(target, "my run/step_2", 9, {"__0_0.distcp": 700, "é +.bin": 0})
    async with node_on(target, tmp_path, "after the RAM tier was lost") as node:
        await node.index.refresh()
        assert node.driver.latest("my run") == "step_4"
        assert node.record("my run/step_2").manifest.generation == 2
        manifest = await node.index.manifest("my run", "step_4")
        assert manifest.size_bytes == node.record("my run/step_4").manifest.bytes
        for step in ("my run/step_2", "my run/step_4"):
            await node.driver.rmtree(step)
        await node.drain(60)
        assert [key for key in keys_of(target.store) if not key.startswith(".tierfs/")] == []


async def test_two_nodes_that_persist_the_same_step_make_one_commit(target: Target, tmp_path: Path) -> None:
    async with node_on(target, tmp_path, "n1") as one, node_on(target, tmp_path, "n2") as other:
        for node in (one, other):
            await node.driver.save("run/step_1", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.drain, 60)
            nursery.start_soon(other.drain, 60)
        assert one.record("run/step_1").is_persisted and other.record("run/step_1").is_persisted
        check_whole(target, "run/step_1", 1)
        assert sum(key.startswith("run/step_1/") and ".tierfs" not in key for key in keys_of(target.store)) == 3


async def test_a_daemon_that_dies_in_an_upload_in_parts_sends_the_rest_only(target: Target, tmp_path: Path) -> None:
    files = {"__0_0.distcp": 70 * MIB if target.kind == "file" else 34 * MIB}
    async with node_on(target, tmp_path) as node:
        await node.driver.save("run/step_1", 1, files)
        with trio.move_on_after(60) as scope:
            async with node.running():
                while not journal_lines(node):  # noqa: ASYNC110 - what is waited for is on the disk
                    await trio.sleep(0.005)
                scope.cancel()
    async with node_on(target, tmp_path) as node:
        assert committed(target) == []
        await node.drain(100)
        check_whole(target, "run/step_1", 1, files)
        assert target.store.list_uploads("") == []
        assert list(node.registry.tier.meta.rglob("*.jsonl")) == []


def journal_lines(node: Node) -> int:
    return sum(b'"part"' in path.read_bytes() for path in node.registry.tier.meta.rglob("*.jsonl"))


async def test_retention_in_a_real_store(target: Target, tmp_path: Path) -> None:
    async with node_on(target, tmp_path) as node:
        node.registry.settings.retention = RetentionSettings(object_steps=1)
        for number in range(1, 4):
            await node.driver.save(f"run/step_{number}", number)
            await node.drain(60)
        assert committed(target) == ["run/step_3"]
        assert all(key.startswith(("run/step_3/", ".tierfs/")) for key in keys_of(target.store))


async def test_thousands_of_small_files_in_a_directory(
    on_files: Target, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    files = {f"__{rank}_0.distcp": 1024 for rank in range(2000)}
    async with node_on(on_files, tmp_path) as node:
        await node.driver.save("run/step_1", 1, files)
        began = time.monotonic()
        await node.drain(120)
        took_s = time.monotonic() - began
        record_property("seconds", took_s)
        print(f"2000 files of 1 KiB: {took_s:.1f} s")
        assert node.record("run/step_1").is_persisted
        assert took_s < 60
