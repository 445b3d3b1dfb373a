"""Copies that no rule of replication brought, and what is told of them: reads, additions, losses, drains, fsync."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from tests.unit.replica_nodes import KEY, Cluster, Node, cluster, eventually, with_replication
from tierfs.catalog import keys
from tierfs.catalog.records import Holding, Level, StepState, from_bytes, to_bytes
from tierfs.cluster import draining
from tierfs.errors import LevelNotReached
from tierfs.steps.durability import wait_for_file
from tierfs.steps.registry import Key

MIB = 1 << 20
SECOND = ("run", "step_2")


async def of_four(all_nodes: Cluster) -> tuple[Node, Node, list[Node]]:
    """(author, its partner, the others) of one committed step of which the author wrote two files."""
    nodes = [await all_nodes.add(name, name) for name in "abcd"]
    await all_nodes.make()
    for at in (1, 2):
        nodes[0].write(f"a{at}.distcp", bytes([at]) * MIB)
    await all_nodes.commit()
    await eventually(lambda: sum("a" in parts for parts in all_nodes.held().values()) == 2)
    partner = next(node for node in nodes[1:] if "a" in all_nodes.held()[node.name])
    return nodes[0], partner, [node for node in nodes[1:] if node is not partner]


def versions_held(all_nodes: Cluster, node: Node) -> tuple[str, ...]:
    value = all_nodes.server.keys.get(keys.holding_key(*KEY, node.name))
    return from_bytes(Holding, value.value).versions if value is not None else ()


async def test_what_programs_read_is_a_copy_of_the_part_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication(after_s=60)) as all_nodes:
        author, _, (reader, _) = await of_four(all_nodes)
        first = reader.read_all(author, "a1.distcp")
        reader.holdings.copied(KEY, ["a"])
        await eventually(lambda: versions_held(all_nodes, reader) == (first,), "a single file is a copy too")
        reader.read_all(author, "a2.distcp")
        reader.holdings.copied(KEY, ["a"])
        await eventually(lambda: all_nodes.held()["a"] == all_nodes.held()[reader.name] == ("a",))
        assert versions_held(all_nodes, reader) == () and reader.shelf() == {}


async def test_copies_that_nobody_told_of_are_told_when_others_are_missing(tmp_path: Path) -> None:
    """Both nodes that could make the next copy have all of it, so neither has anything to fetch."""
    async with cluster(tmp_path, with_replication(after_s=0.1)) as all_nodes:
        author, partner, readers = await of_four(all_nodes)
        for reader in readers:
            for inner in ("a1.distcp", "a2.distcp"):
                reader.read_all(author, inner)
        await partner.lose()
        await eventually(lambda: all(all_nodes.held()[reader.name] == ("a",) for reader in readers))
        assert all(reader.shelf() == {} for reader in readers)


async def test_who_lets_go_of_copies_has_the_step_counted_again_also_after_it_lost_them_unseen(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication(after_s=60)) as all_nodes:
        _, partner, (other, _) = await of_four(all_nodes)
        less: list[Key] = []
        partner.holdings.on_less = other.holdings.on_less = less.append
        partner.replicator.forget(KEY)  # as when the step is evicted
        await eventually(lambda: less == [KEY] and all_nodes.held()[partner.name] == ())
        # It comes back with an empty RAM and the name that it had: the catalogue has what it held before.
        await all_nodes.store.put(keys.holding_key(*KEY, other.name), to_bytes(Holding(1, ("a",))))
        other.holdings._put.clear()
        other.holdings.changed(KEY)
        await eventually(lambda: less == [KEY, KEY] and all_nodes.held()[other.name] == ())


async def test_copies_of_an_evicted_step_come_back_by_themselves_only_of_the_newest(tmp_path: Path) -> None:
    """It is in the object tier: what a restart would load comes back to RAM, the rest when somebody reads it."""
    async with cluster(tmp_path, with_replication(after_s=0.1)) as all_nodes:
        author, partner, _ = await of_four(all_nodes)
        for node in all_nodes.running():
            node.replicator._missing.is_persisted = lambda key: True
        partner.replicator.forget(KEY)
        await put_level(all_nodes, KEY, "replicated")
        await put_level(all_nodes, KEY, "complete")  # as the steward says, who is told to count again
        await eventually(lambda: sum("a" in parts for parts in all_nodes.held().values()) == 2)
        await all_nodes.make(SECOND)
        author.write("a1.distcp", b"newer", SECOND)
        await all_nodes.commit(SECOND, generation=2)
        await eventually(lambda: sum("a" in parts for parts in all_nodes.held(SECOND).values()) == 2)
        for node in all_nodes.running():
            if node is not author:
                node.replicator.forget(KEY)
        await eventually(lambda: sum("a" in parts for parts in all_nodes.held().values()) == 1)
        sent = all_nodes.network.sent["a"]
        await put_level(all_nodes, KEY, "replicated")
        await put_level(all_nodes, KEY, "complete")
        await eventually(lambda: all(not node.replicator._missing.due() for node in all_nodes.running()))
        await eventually(lambda: all(node.replicator._missing.next_at() > 1e9 for node in all_nodes.running()))
        assert sum("a" in parts for parts in all_nodes.held().values()) == 1 and all_nodes.network.sent["a"] == sent


async def put_level(all_nodes: Cluster, key: Key, level: Level) -> None:
    name = keys.state_key(*key)
    state = from_bytes(StepState, all_nodes.server.keys[name].value)
    revision = await all_nodes.store.put(name, to_bytes(replace(state, level=level)))
    for node in all_nodes.running():
        await eventually(lambda node=node: node.view.revision >= revision)


async def commit_at_once_replicated(all_nodes: Cluster, key: Key) -> None:
    """As a steward that counts before others look: the copies on nodes that drain count, too."""
    await all_nodes.commit(key)
    await put_level(all_nodes, key, "replicated")


async def test_what_is_written_on_a_drained_node_leaves_it_too(tmp_path: Path) -> None:
    async with cluster(tmp_path, with_replication(after_s=60)) as all_nodes:
        author, _, _ = await of_four(all_nodes)
        async with trio.open_nursery() as nursery:
            drain = author.drain(nursery)
            assert (await drain.drain(within_s=15)).is_nothing
            await all_nodes.make(SECOND)
            author.write("a1.distcp", b"later" * MIB, SECOND)
            await commit_at_once_replicated(all_nodes, SECOND)
            assert (await drain.drain(within_s=15)).is_nothing
        held = all_nodes.held(SECOND)
        assert sum(held[name] == ("a",) for name in "bcd") == 2


async def test_a_drain_ends_when_nobody_can_take_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "HOPELESS_S", 0.3)
    async with cluster(tmp_path, with_replication(replicas=1)) as all_nodes:
        a, b = await all_nodes.add("a"), await all_nodes.add("b")
        await all_nodes.make()
        a.write("a.distcp", b"a" * MIB)
        await all_nodes.make(SECOND)  # the newest step is handed over, whatever has to go for it
        await all_nodes.commit()
        await all_nodes.commit(SECOND, generation=2)
        b.free_bytes = MIB - 1
        await b.join()
        await eventually(lambda: a.view.nodes["b"].record.free_bytes == MIB - 1)
        async with trio.open_nursery() as nursery:
            with trio.fail_after(10):
                left = await a.drain(nursery).drain(within_s=60)
            assert (left.files, left.bytes, left.paths) == (1, MIB, ("run/step_1",)) and "no other node" in left.note
            await b.lose()
            await eventually(lambda: "b" not in a.view.nodes)
            with trio.fail_after(10):
                assert not (await a.drain(nursery).drain(within_s=60)).is_nothing


async def test_what_grows_is_copied_to_its_end_though_a_node_that_joins_changes_who_holds_whose_copies(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, with_replication(after_s=60)) as all_nodes:
        nodes = {name: await all_nodes.add(name, name) for name in "abcd"}
        await all_nodes.make()
        (before,) = nodes["a"].replicator.groups.partners("a", 2)
        file = nodes["a"].begin("a.distcp")
        file.write(b"1" * MIB, 0)
        with trio.fail_after(10):
            await nodes["a"].replicator.waits.wait_growing(KEY[0], file.ino)
        sent = all_nodes.network.sent["a"]
        joined = await all_nodes.add("aa", "aa")
        assert before not in joined.replicator.groups.partners("a", 2)
        file.write(b"2" * MIB, MIB)
        version = file.seal()
        await eventually(lambda: nodes[before].shelf() == {version: b"1" * MIB + b"2" * MIB})
        after = [each for each in all_nodes.running() if each.name in joined.replicator.groups.partners("a", 2)]
        await eventually(lambda: all(version in each.shelf() for each in after))
        assert all_nodes.network.sent["a"] == sent + MIB + len(after) * 2 * MIB, "what was there was not sent again"
        await all_nodes.commit()
        await eventually(lambda: sum("a" in held for held in all_nodes.held().values()) == 2 + len(after))
        later = nodes["a"].write("b.distcp", b"later", SECOND)
        await eventually(lambda: all(later in each.shelf(SECOND) for each in after))
        assert nodes[before].shelf(SECOND) == {}


async def test_a_partner_that_stalls_holds_an_fsync_up_for_as_long_as_is_set(tmp_path: Path) -> None:
    settings = with_replication()
    settings.durability = replace(settings.durability, fsync="replica", strict=True, replica_timeout_s=0.5)
    async with cluster(tmp_path, settings) as all_nodes:
        a, _ = await all_nodes.add("a", "left"), await all_nodes.add("b", "right")
        await all_nodes.make()
        waits = a.replicator.waits

        async def wait_file_replicated(rel: str, ino: int) -> None:
            version = a.copies.version_of(ino)
            await (waits.wait_growing(KEY[0], ino) if version is None else waits.wait_file(KEY[0], version))

        registry = a.driver.registry
        registry.cluster = cast(Any, SimpleNamespace(has_peers=lambda: True, wait_file_replicated=wait_file_replicated))
        file = a.begin("a.distcp")
        file.write(b"1" * MIB, 0)
        all_nodes.network.stalled.add("b")
        with trio.fail_after(2):
            for _ in range(2):
                with pytest.raises(LevelNotReached):
                    await wait_for_file(registry, file.rel, file.ino)
        all_nodes.network.stalled.clear()
        with trio.fail_after(10):
            await waits.wait_growing(KEY[0], file.ino)
        file.seal()
        await wait_for_file(registry, file.rel, file.ino)
