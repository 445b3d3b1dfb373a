"""Publishing and the commit: what one node did is what the others get, whatever is lost, late or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from tests.unit.cluster_nodes import names_in
from tests.unit.cluster_writers import WritingNode
from tests.unit.step_driver import MARKER, until
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer
from tierfs.catalog.records import StepState, to_bytes
from tierfs.errors import CatalogUnavailable, CommitRefused

STEP = "run/step_1"
KEY = ("run", "step_1")
A, B = "__0_0.distcp", "__1_0.distcp"
MINE, OTHERS = {A: 3000}, {B: 5000}
BOTH = MINE | OTHERS


class Cluster:
    def __init__(self, path: Path) -> None:
        self.server = MemoryServer()
        self.nodes: dict[str, WritingNode] = {}
        for name in "ab":
            self.nodes[name] = WritingNode(name, path / name, self.server, self.nodes)
        self.a, self.b = self.nodes["a"], self.nodes["b"]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        for node in self.nodes.values():
            await self._stack.enter_async_context(node.running())
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def settled(self) -> None:
        """Everything is published, and everybody has done what the others published."""
        for _ in range(3):
            for node in self.nodes.values():
                if node.view.connected:
                    await node.flushed()
            for node in self.nodes.values():
                if node.view.connected:
                    await node.caught_up()

    async def save(self, seed: int) -> None:
        await self.a.shards(STEP, seed, MINE)
        await self.b.shards(STEP, seed, OTHERS)
        await self.a.finish(STEP, seed, BOTH)

    async def away(self, node: WritingNode, *, away: bool = True) -> None:
        node.store.cut_off = away
        await until(lambda: node.view.connected != away, "the view notices")

    def files(self, generation: int = 1) -> dict[str, str]:
        """Versions by name, of what the catalogue has."""
        found = self.a.view.known_files(KEY, generation)
        assert found is not None
        return {inner: file.version for inner, file in found.files.items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(tmp_path)


async def test_a_step_written_by_two_nodes_is_complete_on_both_and_so_is_its_next_generation(cluster: Cluster) -> None:
    async with cluster:
        for generation in (1, 2):
            await cluster.save(generation)
            await cluster.settled()
            state = cluster.b.view.states[KEY].record
            assert (state.generation, state.node, state.files, set(state.parts)) == (generation, "a", 3, {"a", "b"})
            for node in cluster.nodes.values():
                record = node.driver.record(STEP)
                assert record.is_complete and record.manifest.generation == generation
                assert record.manifest.completed_at == state.completed_at
                await node.showing.show_listing(STEP)
                assert names_in(node.root / STEP) == {A, B, MARKER}
                assert node.publisher.pending == 0
        assert not [key for key in cluster.server.keys if key.startswith(keys.parts_prefix(*KEY, 1))]


async def test_a_commit_waits_for_a_file_that_is_being_written_again(cluster: Cluster) -> None:
    async with cluster:
        await cluster.a.shards(STEP, 1, MINE)
        await cluster.b.shards(STEP, 1, OTHERS)
        await cluster.settled()
        handle = await cluster.b.driver.open(f"{STEP}/{B}", truncate=True)
        with pytest.raises(CommitRefused, match=r"__1_0\.distcp is missing"):
            await cluster.a.finish(STEP, 1, BOTH)
        assert KEY not in cluster.a.view.states
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.a.finish, STEP, 1, BOTH)
            cluster.b.driver.close(handle)
            await cluster.b.shards(STEP, 1, OTHERS)
        await cluster.settled()
        assert cluster.a.view.states[KEY].record.generation == 1


@pytest.mark.parametrize("lost", range(1, 8))
async def test_a_lost_answer_costs_nothing(cluster: Cluster, lost: int) -> None:
    async with cluster:
        asked = 0

        async def hook(when: str, call: str) -> None:
            nonlocal asked
            if (when, call) == ("answer", "txn"):
                asked += 1
                if asked == lost:
                    raise CatalogUnavailable("the answer was lost")

        cluster.a.store.hook = hook
        cluster.a.registry.settings.cluster.wait_s = 5
        await cluster.save(1)
        await cluster.settled()
        assert asked >= lost or lost > 4
        for node in cluster.nodes.values():
            assert node.driver.record(STEP).is_complete
            assert node.view.states[KEY].record.completed_at == node.driver.record(STEP).manifest.completed_at


async def test_a_late_put_of_an_older_part_changes_nothing(cluster: Cluster) -> None:
    async with cluster:
        b = cluster.b
        await b.shards(STEP, 1, OTHERS)
        await cluster.settled()
        part = await b.publisher.parts.known(KEY, 1)
        record, files = b.driver.record(STEP), part.files()
        compares = [*b.publisher.compares(record, None), b.publisher.parts.compare(KEY, 1, part)]
        await b.shards(STEP, 2, OTHERS)
        await cluster.settled()
        result = await b.store.txn(compares, [b.publisher.parts.page(KEY, 1, 0, files)])
        assert not result.succeeded


async def test_a_commit_after_an_outage_waits_for_nodes_that_come_back_later(cluster: Cluster) -> None:
    """What they wrote meanwhile is in no part yet: it is not missing, and nothing is refused."""
    async with cluster:
        a, b = cluster.a, cluster.b
        a.agreement.settled_after_s = 2.0
        await a.mkdirs(STEP)
        await cluster.settled()
        for node in (a, b):
            await cluster.away(node)
        await b.shards(STEP, 1, OTHERS)
        await a.shards(STEP, 1, MINE)
        await cluster.away(a, away=False)
        await a.finish(STEP, 1, BOTH)
        assert a.driver.state(STEP) == "writing"
        await cluster.away(b, away=False)
        await cluster.settled()
        with trio.fail_after(10):
            while KEY not in a.view.states:
                await a.showing.show_listing(STEP)
                a.registry.judge_soon(a.driver.record(STEP))
                await a.driver.settle(seconds=5)
        await cluster.settled()
        assert all(node.driver.record(STEP).is_complete for node in cluster.nodes.values())
        await a.shards("run/step_2", 2, MINE)
        with pytest.raises(CommitRefused):  # with nobody away a file that is missing is missing
            await a.finish("run/step_2", 2, BOTH)


async def test_steps_completed_and_removed_without_the_catalogue_are_told_later(cluster: Cluster) -> None:
    async with cluster:
        a = cluster.a
        await a.shards("run/step_1", 1, BOTH)
        await a.finish("run/step_1", 1, BOTH)
        await cluster.settled()
        await cluster.away(a)
        await a.driver.rmtree("run/step_1")
        for number in (2, 3):
            await a.shards(f"run/step_{number}", number, BOTH)
            await a.finish(f"run/step_{number}", number, BOTH)
            assert a.driver.state(f"run/step_{number}") == "complete"
        assert a.publisher.pending and "run/step_1" in cluster.b.view.tree
        await cluster.away(a, away=False)
        await cluster.settled()
        states = cluster.b.view.states
        assert set(states) == {("run", "step_2"), ("run", "step_3")}
        assert states["run", "step_2"].mod_revision < states["run", "step_3"].mod_revision
        assert cluster.b.driver.latest() == "step_3"
        assert not (cluster.b.root / STEP).exists() and not a.publisher.pending


async def test_a_step_that_was_removed_while_a_node_was_away_does_not_come_back(cluster: Cluster) -> None:
    async with cluster:
        await cluster.save(1)
        await cluster.settled()
        await cluster.away(cluster.b)
        await cluster.a.driver.rmtree(STEP)
        await cluster.a.flushed()
        await cluster.b.driver.write(f"{STEP}/more.json", b"added without knowing")
        await cluster.away(cluster.b, away=False)
        await until(lambda: not (cluster.b.root / STEP).exists(), "the step goes")
        await cluster.settled()
        assert not [key for key in cluster.server.keys if "step_1" in key]


async def test_a_removal_does_not_take_what_another_node_wrote_since(cluster: Cluster) -> None:
    async with cluster:
        await cluster.save(1)
        await cluster.settled()
        await cluster.away(cluster.b)
        await cluster.b.driver.rmtree(STEP)
        await cluster.a.shards(STEP, 2, BOTH)
        await cluster.a.finish(STEP, 2, BOTH)
        await cluster.a.flushed()
        await cluster.away(cluster.b, away=False)
        await cluster.settled()
        assert cluster.a.view.states[KEY].record.generation == 2
        await until(lambda: cluster.b.driver.record(STEP).manifest.generation == 2, "the step is back")


async def test_two_nodes_that_make_one_name_at_once_agree_who_did(cluster: Cluster) -> None:
    won: list[str] = []

    async def make(node: WritingNode, what: str) -> None:
        try:
            if what == "run":
                await node.publisher.make_directory("run", 0o755, 0, 0)
            else:
                await node.publisher.claim("lock")
        except FileExistsError:
            return
        won.append(what)

    async with cluster:
        for what in ("run", "lock"):
            async with trio.open_nursery() as nursery:
                for node in cluster.nodes.values():
                    nursery.start_soon(make, node, what)
        assert won == ["run", "lock"]


async def test_of_two_nodes_files_of_one_name_the_later_counts(cluster: Cluster) -> None:
    async with cluster:
        for seed, node in enumerate((cluster.b, cluster.a, cluster.b, cluster.a), 1):
            await node.shards(STEP, seed, {"config.json": 100 + seed})
            await cluster.settled()
            files = (await cluster.a.view.files(KEY, 1)).files
            assert (files["config.json"].node, files["config.json"].size_bytes) == (node.name, 100 + seed)


async def test_files_of_a_complete_step_that_are_added_and_removed(cluster: Cluster) -> None:
    async with cluster:
        await cluster.save(1)
        await cluster.settled()
        await cluster.b.driver.write(f"{STEP}/meta.json", b"{}")
        await cluster.settled()
        added = await cluster.a.view.files(KEY, 1, fresh=True)
        assert set(added.files) == {A, B, MARKER, "meta.json"} and set(added.added["b"]) == {"meta.json"}
        assert cluster.a.view.states[KEY].record.generation == 1
        await cluster.a.showing.show_listing(STEP)
        assert "meta.json" in names_in(cluster.a.root / STEP)
        await cluster.b.driver.unlink(f"{STEP}/meta.json")
        await until(lambda: not cluster.b.removing.is_removed(KEY, "meta.json"), "the addition goes", within_s=6)
        assert set((await cluster.a.view.files(KEY, 1, fresh=True)).files) == {A, B, MARKER}
        await cluster.a.showing.show_listing(STEP)
        assert names_in(cluster.a.root / STEP) == {A, B, MARKER}
        await cluster.b.driver.unlink(f"{STEP}/{B}")
        await until(lambda: KEY not in cluster.a.view.states, "the commit is withdrawn")
        await until(lambda: not cluster.a.driver.record(STEP).is_complete, "it is not complete elsewhere either")


async def test_a_step_that_is_removed_while_its_commit_is_made_does_not_come_back(cluster: Cluster) -> None:
    """`rm -r` just after the save: its rmdir would find names again."""
    async with cluster:
        a = cluster.a
        await a.shards(STEP, 1, MINE)
        (a.root / STEP / MARKER).write_bytes(b"marker")
        marker = a.file(f"{STEP}/{MARKER}")
        await cluster.settled()
        await a.driver.unlink(f"{STEP}/{A}")
        await a.driver.unlink(f"{STEP}/{MARKER}")
        state = StepState(1, 1, 1.0, "a", MARKER, marker, {"a": 1}, 2, 3000, "complete")
        await a.store.put(keys.state_key(*KEY), to_bytes(state))
        await until(lambda: KEY in a.view.states, "the commit is seen")
        for _ in range(10):
            await a.showing.show_listing(STEP)
            assert names_in(a.root / STEP) == set()
        await until(lambda: KEY not in a.view.states, "the commit is withdrawn")


async def test_a_file_that_was_committed_by_the_name_it_had_while_it_was_copied(cluster: Cluster) -> None:
    async with cluster:
        await cluster.b.mkdirs(STEP)
        await cluster.b.driver.write(f"{STEP}/.notes.txt.Xy12", b"notes")
        await cluster.save(1)
        await cluster.settled()
        assert ".notes.txt.Xy12" in cluster.files()
        await cluster.b.driver.rename(f"{STEP}/.notes.txt.Xy12", f"{STEP}/notes.txt")
        for node in cluster.nodes.values():
            await node.showing.show_listing(STEP)
        assert not (cluster.b.root / STEP / ".notes.txt.Xy12").exists()
        await until(lambda: not cluster.b.removing.is_removed(KEY, ".notes.txt.Xy12"), "the old name goes", within_s=6)
        await cluster.settled()
        await cluster.a.showing.show_listing(STEP)
        for node in cluster.nodes.values():
            assert names_in(node.root / STEP) == {A, B, MARKER, "notes.txt"}


async def test_a_catalogue_that_was_lost_is_filled_again(cluster: Cluster) -> None:
    async with cluster:
        await cluster.save(1)
        await cluster.a.driver.write("run/notes.txt", b"plain")
        await cluster.settled()
        for node in cluster.nodes.values():
            await node.showing.show_listing(STEP)
        before, catalogue = cluster.files(), cluster.a.view.cluster_id
        cluster.server.wipe()
        for node in cluster.nodes.values():
            await until(
                lambda node=node: node.view.connected and node.view.cluster_id != catalogue, "it is another one"
            )
            await until(lambda node=node: KEY in node.view.states, "the step is published again")
            await node.become_member()
        await cluster.settled()
        assert (await cluster.a.view.files(KEY, 1, fresh=True)).files.keys() == before.keys()
        assert cluster.files() == before
        for node in cluster.nodes.values():
            assert node.driver.record(STEP).is_complete and "run/notes.txt" in node.view.tree


async def test_a_directory_that_is_renamed_takes_its_steps_along(cluster: Cluster) -> None:
    async with cluster:
        await cluster.save(1)
        await cluster.settled()
        await cluster.b.driver.rename("run", "old")
        await cluster.settled()
        await until(lambda: (cluster.a.root / "old/step_1").is_dir(), "a renames it too")
        await cluster.settled()
        for node in cluster.nodes.values():
            assert set(node.view.states) == {("old", "step_1")} and set(node.view.tree) == {"old", "old/step_1"}
            record = node.driver.record("old/step_1")
            assert record.is_complete and record.manifest.joined == node.view.tree["old/step_1"].create_revision
        files = await cluster.a.view.files(("old", "step_1"), 1)
        assert set(files.files) == {A, B, MARKER} and set(files.parts) == {"a", "b"}
