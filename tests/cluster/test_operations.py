"""What a person does with a cluster by `tierfs` commands: bring, compare, mend, hand over, wait, look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.checkpoints import MIB
from rig.cluster import BOUND_S, Cluster, Node
from rig.cluster_steps import check_everywhere, latest, soon, wait_latest, wait_replicated
from rig.instance import TIERFS, tierfs
from rig.plain_steps import MARKER, content, shard_names, write_marker, write_step

pytestmark = pytest.mark.alone
OPTIONS = {
    "durability_fsync": "replica",
    "durability_replica_timeout_s": "15",
    "cluster_drain_on_stop": "on",
    "transfer_read_retry_for_s": "2",
}
SIZES = [5 * MIB, 3 * MIB, 300_000, 2 * MIB]


def asked(node: Node, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """The answer of a command with `--json`, which ends with that exit code."""
    command = [TIERFS, *arguments, "--json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}\n{node.log(30)}"
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return answer


def nodes_of(node: Node) -> list[dict[str, Any]]:
    """Also where one of them is lost."""
    told: list[dict[str, Any]] = json.loads(tierfs("nodes", node.mountpoint, "--json", may_be_degraded=True))["nodes"]
    return told


def states(node: Node) -> dict[str, str]:
    return {each["node"]: each["state"] for each in nodes_of(node)}


def partner_of(nodes: Cluster, node: Node) -> Node:
    """Who holds copies of what the node writes, as it says itself."""
    (name,) = next(each["partners"] for each in nodes_of(node) if each["this"])
    return next(other for other in nodes if other.node_id == name)


def copies_on(node: Node, step: str, size: int) -> Iterator[Path]:
    """Files of the node's RAM tier with the step in their path, and of that size."""
    for top in (node.ram_path / "shelf", node.ram_path / "root"):
        for path in top.rglob(f"{step.partition('/')[2]}/*"):
            if path.is_file() and path.stat().st_size == size and path.stat().st_blocks:
                yield path


def damage(path: Path) -> None:
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(info.st_size // 2)
        file.write(b"damage")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_prefetch_brings_the_files_that_a_rank_will_load(nodes: Cluster, run: str) -> None:
    step = f"{run}/step_1"
    write_step(nodes[0].mountpoint / step, 1, SIZES)
    assert asked(nodes[0], "wait", nodes[0].mountpoint / step, "--level", "ram")["reached"]
    assert asked(nodes[0], "wait", nodes[0].mountpoint / step, "--level", "replica", "--timeout", "20")["reached"]
    wait_latest(nodes.nodes, "step_1", run)
    reader, _ = nodes.others(nodes[0], partner_of(nodes, nodes[0]))
    top = {each["name"] for each in asked(reader, "ls", reader.mountpoint)["entries"]}
    assert run.partition("/")[0] in top, "`ls` of the mount itself looks at what others have, too"
    here, names = reader.mountpoint / step, shard_names(4)
    told = reader.step("step_1", run)
    assert (told["level"], told["files"], told["bytes"]) == ("replica", 5, sum(SIZES) + (here / MARKER).stat().st_size)
    answer = asked(reader, "prefetch", here, "--files", "*-0000[03].*", "--files", names[1], "--files", MARKER)
    assert (answer["files"], answer["bytes"], answer["already"]) == (3, SIZES[0] + SIZES[1] + SIZES[3], 1)
    levels = [asked(reader, "stat", here / name)["level"] for name in names]
    assert levels == ["ram", "ram", "replica", "ram"]
    asked(reader, "prefetch", here, "--files", "no such*", code=1)
    answer = asked(reader, "prefetch", reader.mountpoint / run / "latest")
    assert (answer["files"], answer["bytes"], answer["already"]) == (1, SIZES[2], 4)
    nodes[0].partition()
    check_everywhere([reader], step, 1, SIZES)


@pytest.mark.slow
def test_what_a_command_removes_is_removed_everywhere(nodes: Cluster, run: str) -> None:
    for number in (1, 2):
        write_step(nodes[0].mountpoint / run / f"step_{number}", number, [300_000])
    (nodes[0].mountpoint / run / "notes").mkdir()
    (nodes[0].mountpoint / run / "notes" / "text").write_text("plain")
    wait_latest(nodes.nodes, "step_2", run)
    assert asked(nodes[1], "rm", nodes[1].mountpoint / run / "step_2")["steps"] == 1
    wait_latest(nodes.nodes, "step_1", run)
    assert asked(nodes[2], "rm", "-r", nodes[2].mountpoint / run)["steps"] == 1
    for node in nodes:
        soon(lambda node=node: not (node.mountpoint / run).exists(), f"{run} is gone on {node.node_id}")  # type: ignore[misc]


def test_damaged_copies_are_found_from_anywhere_and_each_node_mends_its_own(nodes: Cluster, run: str) -> None:
    for seed in (1, 2):
        write_step(nodes[0].mountpoint / run / f"step_{seed}", seed, SIZES)
    first, second = f"{run}/step_1", f"{run}/step_2"
    wait_replicated(nodes.nodes, first, second)
    author, partner = nodes[0], partner_of(nodes, nodes[0])
    other, _ = nodes.others(author, partner)
    assert asked(other, "verify", "--tier", "replica", other.mountpoint / first)["files"] == 2 * 5

    (shelved,) = copies_on(partner, first, SIZES[0])
    damage(shelved)
    damage(author.backing(author.mountpoint / first / shard_names(4)[1]))
    found = asked(other, "verify", "--tier", "replica", other.mountpoint / first, code=1)
    assert [each["path"].rpartition("/")[2] for each in found["bad"]] == shard_names(4)[:2], found
    assert partner.node_id in found["bad"][0]["reason"] and author.node_id in found["bad"][1]["reason"]
    assert not asked(other, "repair", other.mountpoint / run)["actions"]
    for node, name in ((partner, shard_names(4)[0]), (author, shard_names(4)[1])):
        for arguments, code in ((["--dry-run"], 1), ([], 0)):
            answer = asked(node, "repair", node.mountpoint / first, *arguments, code=code)
            assert [(each["path"], each["action"]) for each in answer["actions"]] == [
                (f"{first}/{name}", "fetched again")
            ], answer
    assert not asked(other, "verify", "--tier", "all", other.mountpoint / first)["bad"]
    check_everywhere(nodes.nodes, first, 1, SIZES)
    wait_replicated(nodes.nodes, first)

    # What is whole nowhere is a checkpoint no more.
    for node in (author, partner):
        for copy in copies_on(node, second, SIZES[3]):
            damage(copy)
    for node in (author, partner):
        answer = asked(node, "repair", node.mountpoint / second, code=1)
        assert [each["action"] for each in answer["actions"]] == ["lost"], answer
    wait_latest(nodes.nodes, "step_1", run, within_s=BOUND_S)
    with pytest.raises(OSError):
        (other.mountpoint / second / shard_names(4)[3]).read_bytes()


def test_a_node_that_is_stopped_hands_over_what_only_it_holds(nodes: Cluster, run: str) -> None:
    """Though its partner could not be reached before. And a drain can be taken back."""
    going = nodes[1]
    assert not asked(going, "drain", going.mountpoint, "--stop")["stopped"]
    assert asked(going, "drain", going.mountpoint, "--timeout", "30")["left"] == []
    assert going.status()["cluster"]["draining"]
    soon(lambda: states(nodes[0])[going.node_id] == "draining", "others see that it goes")
    assert asked(going, "drain", going.mountpoint, "--stop")["stopped"]
    soon(lambda: states(nodes[0])[going.node_id] == "serving", "others see that it stays")

    going.drop_from(*nodes.others(going))
    step = going.mountpoint / run / "step_1"
    step.mkdir()
    for number, name in enumerate(shard_names(4)):
        (step / name).write_bytes(content(1, number, SIZES[number]))
    write_marker(step, 4)
    soon(lambda: latest(nodes[0], run) == "step_1", "it is complete", within_s=BOUND_S)
    with subprocess.Popen([TIERFS, "drain", going.mountpoint], stderr=subprocess.PIPE, text=True) as draining:
        soon(lambda: going.status()["cluster"]["draining"], "it drains, and has nobody to give anything to")
        assert asked(going, "drain", going.mountpoint, "--stop")["stopped"]
        assert draining.wait(20) == 1
        assert draining.stderr is not None and "the node stays after all" in draining.stderr.read()
    going.heal()
    os.kill(going.daemon_pid(), signal.SIGTERM)
    # Its end may take longer: another mount namespace of the test's network may have a copy of the mount.
    soon(lambda: not going.mountpoint.is_mount(), "it is unmounted", within_s=BOUND_S)
    going.kill(wipe=True)
    check_everywhere(nodes.others(going), f"{run}/step_1", 1, SIZES)


def test_a_notice_has_the_node_drain_and_what_is_written_then_survives_its_unmount(
    nodes: Cluster, run: str, tmp_path: Path
) -> None:
    going, notice = nodes[3], tmp_path / "notice"
    going.kill(wipe=True)
    noticed = {"cluster.notice_file": str(notice), "cluster.notice_every_s": "0.2"}
    going.options.update(noticed)
    try:
        going.start(node_id="n4-spot")
        notice.touch()
        soon(lambda: states(nodes[0]).get("n4-spot") == "draining", "others see that it goes", within_s=BOUND_S)
        write_step(going.mountpoint / run / "step_1", 1, SIZES)
        tierfs("umount", going.mountpoint, timeout_s=100)
        going.kill(wipe=True)
    finally:
        for key in noticed:
            del going.options[key]
    check_everywhere(nodes.others(going), f"{run}/step_1", 1, SIZES)


def test_fsync_returns_once_the_partner_has_the_bytes(nodes: Cluster, run: str) -> None:
    """DCP syncs before it closes: the file is open, and not sealed yet."""
    step = nodes[0].mountpoint / run / "step_1"
    step.mkdir()
    shelf = partner_of(nodes, nodes[0]).ram_path / "shelf"
    data = content(1, 0, 24 * MIB)
    with (step / shard_names(1)[0]).open("wb") as file:
        for end in (8 * MIB, 16 * MIB, 24 * MIB):
            file.write(data[end - 8 * MIB : end])
            file.flush()
            os.fsync(file.fileno())
            (copy,) = shelf.rglob("step_1/*.pull")
            assert copy.read_bytes() == data[:end]
    write_marker(step, 1)
    wait_replicated(nodes.nodes, f"{run}/step_1")
    check_everywhere(nodes.nodes, f"{run}/step_1", 1, [24 * MIB])


def test_nodes_and_doctor_tell_of_a_lost_node(nodes: Cluster, run: str) -> None:
    lost = nodes[2]
    told = [each for each in nodes_of(nodes[0]) if each["node"] in {node.node_id for node in nodes}]
    assert [each["state"] for each in told] == 4 * ["serving"] and all(each["partners"] for each in told)
    lost.kill(wipe=True)
    soon(lambda: states(nodes[0])[lost.node_id] == "lost", "the node is lost", within_s=BOUND_S)
    told = asked(nodes[0], "nodes", nodes[0].mountpoint, code=3)
    gone = next(each for each in told["nodes"] if each["node"] == lost.node_id)
    assert told["connected"] and gone["state"] == "lost" and gone["lost_s"] < BOUND_S
    command = nodes[0].host.command(TIERFS, "doctor", nodes[0].mountpoint, "--json")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    for check in ("cluster secret", "cluster listen", "catalogue", "nodes"):
        assert findings[check]["verdict"] == "ok", findings[check]
    nodes.etcd.freeze()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}["catalogue"]
    assert found["verdict"] == "warn" and found["advice"]
