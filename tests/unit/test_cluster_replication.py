"""Copies on other nodes: fetched while a file grows, right or not at all, kept as long as the step needs them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.unit.replica_nodes import KEY, Cluster, Node, cluster, eventually, with_replication
from tierfs.catalog import keys
from tierfs.catalog.records import FileRecord, TreeRecord, from_bytes, to_bytes
from tierfs.checksum import CHUNK_BYTES
from tierfs.cluster import pulling, replication
from tierfs.cluster.draining import Left
from tierfs.cluster.notices import Notices
from tierfs.ram.tier import RamTier
from tierfs.settings_cluster import ClusterSettings

MIB = 1 << 20
DATA = random.Random(3).randbytes(2 * CHUNK_BYTES + 3 * MIB + 17)


async def two(all_nodes: Cluster) -> tuple[Node, Node]:
    one, other = await all_nodes.add("a", "left"), await all_nodes.add("b", "right")
    await all_nodes.make()
    return one, other


async def test_a_file_is_copied_while_it_grows_and_told_once_its_step_is_complete(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a, b = await two(all_nodes)
        file = a.begin("a.distcp")
        file.write(DATA[: CHUNK_BYTES + MIB], 0)
        await eventually(lambda: all_nodes.network.sent["a"] >= CHUNK_BYTES + MIB, "it is copied before it is sealed")
        file.write(b"synced", CHUNK_BYTES + MIB)
        with trio.fail_after(10):
            await a.replicator.waits.wait_growing(KEY[0], file.ino)
        assert all_nodes.network.sent["a"] == CHUNK_BYTES + MIB + 6 and b.shelf() == {}
        file.write(b"header", 5)  # the writer goes back, behind what was copied
        file.write(DATA[CHUNK_BYTES + MIB :], CHUNK_BYTES + MIB)
        version = file.seal()
        with trio.fail_after(10):
            await a.replicator.waits.wait_file(KEY[0], version)
        assert b.shelf() == {version: DATA[:5] + b"header" + DATA[11:]} and b.leftovers() == []

        small = b.write("b.distcp", b"small")
        empty = b.write("empty", b"")
        await all_nodes.commit()
        await eventually(lambda: all_nodes.held() == {"a": ("a", "b"), "b": ("a", "b")})
        assert a.shelf() == {small: b"small", empty: b""}


async def test_a_broken_connection_costs_what_was_under_way_and_no_more(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a, b = await two(all_nodes)
        file = a.begin("a.distcp")
        file.write(DATA[:CHUNK_BYTES], 0)
        await eventually(lambda: all_nodes.network.sent["a"] >= CHUNK_BYTES)
        all_nodes.network.down.add("a")
        all_nodes.network.break_connections()
        file.write(DATA[CHUNK_BYTES:], CHUNK_BYTES)
        version = file.seal()
        await all_nodes.network.nodes["b"].view.caught_up()
        all_nodes.network.down.discard("a")
        await eventually(lambda: b.shelf() == {version: DATA})
        assert all_nodes.network.sent["a"] == len(DATA)


async def test_wrong_bytes_are_never_a_copy_and_another_holder_has_the_right_ones(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication(replicas=3)) as all_nodes:
        a, b = await two(all_nodes)
        c = await all_nodes.add("c", "third")
        all_nodes.network.spoil = lambda node, data: bytes(len(data)) if node == "a" else data
        version = a.write("a.distcp", DATA[:MIB])
        await eventually(lambda: all_nodes.network.sent["a"] >= 6 * MIB, "both try")
        assert b.shelf() == c.shelf() == {}
        all_nodes.network.spoil = lambda node, data: bytes(len(data)) if node == "a" and b.shelf() else data
        await all_nodes.commit()
        await eventually(lambda: b.shelf() == c.shelf() == {version: DATA[:MIB]})
        await eventually(lambda: set(all_nodes.held()) == {"a", "b", "c"})


async def test_what_was_written_again_or_removed_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "ASK_AFTER_S", 0.05)
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a, b = await two(all_nodes)
        first = a.write("a.distcp", DATA[:MIB])
        kept = a.write("kept.distcp", b"kept")
        await eventually(lambda: set(b.shelf()) == {first, kept})
        second = a.write("a.distcp", b"another")
        await eventually(lambda: set(b.shelf()) == {second, kept})
        given_up = a.begin("b.distcp")
        given_up.write(DATA[: 2 * MIB], 0)
        await eventually(b.leftovers)
        given_up.path.unlink()
        a.copies.grows_no_more(given_up.ino)
        await all_nodes.commit()
        await eventually(lambda: all_nodes.held()["b"] == ("a",))

        # A new generation: the old one's copies stay until it is complete.
        record = a.driver.registry.records[KEY]
        record.manifest.state, record.manifest.generation = "writing", 2
        third = a.write("a.distcp", b"third")
        await eventually(lambda: set(b.shelf()) == {second, third, kept})
        await all_nodes.commit(generation=2)
        await eventually(lambda: set(b.shelf()) == {third, kept})
        await eventually(lambda: b.leftovers() == [])

        await all_nodes.remove()
        await eventually(lambda: b.shelf() == {} and b.copies.bytes_of(KEY) == 0)
        assert all_nodes.held() == {}


async def test_what_a_lost_node_held_is_copied_again_by_one_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication()) as all_nodes:
        nodes = [await all_nodes.add(name, name) for name in "abcd"]
        await all_nodes.make()
        versions = {node.name: node.write(f"{node.name}.distcp", node.name.encode() * MIB) for node in nodes}
        await all_nodes.commit()
        await eventually(lambda: sorted(map(len, all_nodes.held().values())) == [2, 2, 2, 2])
        partner = next(node for node in nodes[1:] if "a" in all_nodes.held()[node.name])
        await partner.lose()
        others = [node for node in nodes if node is not partner]

        def copies_of(author: str) -> list[str]:
            return [node.name for node in others if author in all_nodes.held()[node.name]]

        await eventually(lambda: all(len(copies_of(author)) == 2 for author in "abcd"))
        for node in others:
            for author in all_nodes.held()[node.name]:
                assert node.copies.has(versions[author])


async def test_a_node_that_joins_gets_what_has_too_few_copies_and_a_restart_finds_its_own(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a = await all_nodes.add("a", "left")
        await all_nodes.make()
        version = a.write("a.distcp", DATA[:MIB])
        await all_nodes.commit()
        await eventually(lambda: all_nodes.held() == {"a": ("a",)})
        b = await all_nodes.add("b", "right")
        await eventually(lambda: all_nodes.held() == {"a": ("a",), "b": ("a",)})
        added = a.write("tokens.json", b"added later")
        await eventually(lambda: added in b.shelf())
        b.scope.cancel()
        await all_nodes.store.delete(keys.holding_key(*KEY, "b"))
        sent = all_nodes.network.sent["a"]
        again = await all_nodes.add("b", "right")
        await eventually(lambda: all_nodes.held()["b"] == ("a",))
        assert version in again.shelf() and all_nodes.network.sent["a"] == sent


async def test_without_room_nothing_is_fetched_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "NO_ROOM_PAUSE_S", 0.05)
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a, b = await two(all_nodes)
        tier: RamTier = b.driver.tier
        free = CHUNK_BYTES
        real = tier.usage

        def usage() -> Any:
            state = real()
            return type(state)(
                **{**vars(state), "size_bytes": 16 * free, "free_bytes": free + b.replicator.room.promised_bytes}
            )

        monkeypatch.setattr(tier, "usage", usage)
        version = a.write("a.distcp", DATA)
        await eventually(lambda: b.driver.registry.problems, "it is told")
        assert "not copied here" in b.driver.registry.problems[0]["message"]
        await all_nodes.commit()
        assert b.shelf() == {} and all_nodes.network.sent["a"] == 0 and b.leftovers() == []
        free = 8 * CHUNK_BYTES
        await eventually(lambda: b.shelf() == {version: DATA})
        await eventually(lambda: all_nodes.held()["b"] == ("a",))
        assert b.driver.registry.problems == [] and b.replicator.room.promised_bytes == 0
        assert b.replicator.room_needed_for_replicas(KEY[0]) == len(DATA)


async def test_a_file_that_grows_without_news_is_asked_for_and_dropped_once_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "ASK_AFTER_S", 0.05)
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a, b = await two(all_nodes)
        file = a.begin("a.distcp")
        file.write(DATA[: 2 * MIB], 0)
        await eventually(lambda: all_nodes.network.sent["a"] >= 2 * MIB + 3, "it is asked for, and is there")
        assert b.leftovers()
        a.copies.grows_no_more(file.ino)
        await eventually(lambda: not b.leftovers() and b.replicator.state().pulling == 0)


async def test_a_drained_node_leaves_nothing_that_only_it_holds(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication(after_s=60)) as all_nodes:
        nodes = [await all_nodes.add(name, name) for name in "abc"]
        a = nodes[0]
        await all_nodes.make()
        for node in nodes:
            node.write(f"{node.name}.distcp", node.name.encode() * MIB)
        await all_nodes.commit()
        await eventually(lambda: sum(map(len, all_nodes.held().values())) >= 6)
        await all_nodes.make(("run", "step_2"))
        a.write("a.distcp", b"half a step", ("run", "step_2"))
        plain = a.driver.root / "tables/words"
        plain.parent.mkdir()
        plain.write_bytes(DATA[:MIB])
        version = a.copies.seal(plain, plain.stat().st_ino)
        file = FileRecord(MIB, 0, 0o644, 0, 0, version)
        await all_nodes.store.put(keys.tree_key("tables/words"), to_bytes(TreeRecord("file", "a", file=file)))
        told: list[Left] = []
        async with trio.open_nursery() as nursery:
            left = await a.drain(nursery).drain(within_s=15, told=told.append)
        assert left.is_nothing and told[-1] == left and told[0].note
        held = all_nodes.held()
        for author in "abc":
            assert sum(author in held[node] for node in "bc") == 2
        taken = from_bytes(TreeRecord, all_nodes.server.keys[keys.tree_key("tables/words")].value).file
        assert taken is not None and taken.node in ("b", "c") and replace(taken, version=version) == file
        lies_at = all_nodes.network.nodes[taken.node].copies.path(taken.version)
        assert lies_at is not None and lies_at.read_bytes() == DATA[:MIB]
        assert any(b"half a step" in node.shelf(("run", "step_2")).values() for node in nodes[1:])


async def test_a_notice_is_told_once_whether_it_is_a_file_or_a_command(tmp_path: Path) -> None:
    told: list[str] = []

    async def on_notice(reason: str) -> None:
        told.append(reason)

    flag = tmp_path / "it is over"
    command = ClusterSettings(notice_command=f'test -e "{flag}"', notice_every_s=0.01)
    file = ClusterSettings(notice_file=flag, notice_every_s=0.01)
    broken = ClusterSettings(notice_command="/no/such 'program", notice_every_s=0.01)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for settings in (command, file, broken):
                nursery.start_soon(Notices(settings, on_notice).run)
            await trio.sleep(0.05)
            assert told == []
            flag.touch()
    assert sorted(told) == sorted([f"{flag} is there", "test says so"])


async def test_a_file_that_gets_its_final_name_at_once_is_copied_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication()) as all_nodes:
        a, b = await two(all_nodes)
        arrived: list[tuple[str, str]] = []
        b.replicator.on_arrived = lambda key, inner, version: arrived.append((inner, version))
        file = a.begin("a.distcp.tmp")
        file.write(DATA, 0)
        version = file.seal()
        final = file.path.with_name("a.distcp")
        file.path.rename(final)
        files = file.record.manifest.files
        files["a.distcp"] = files.pop("a.distcp.tmp")
        a.copies.moved(file.path, final)
        assert a.copies.sealed("run/step_1/a.distcp", file.ino) == version
        await all_nodes.commit()
        await eventually(lambda: all_nodes.held()["b"] == ("a",))
        assert b.shelf() == {version: DATA} and all_nodes.network.sent["a"] == len(DATA)
        assert arrived == [("a.distcp", version)] and b.leftovers() == []
