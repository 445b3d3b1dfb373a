"""What one node does with names, files and small steps, the others see: two nodes, no trainer."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.cluster import MIB, Cluster, Node
from rig.cluster_steps import latest, on_each, soon, sums, wait_latest, write_shards
from rig.plain_steps import MARKER, check_step, content, shard_names, write_marker, write_step

pytestmark = pytest.mark.alone
NODES = 2
SIZES = [3 * MIB, 100_000, 700]


def one_winner(nodes: Cluster, make: Callable[[Path], object], names: list[str]) -> None:
    """Of all nodes that make the same name at the same time one succeeds, the others get EEXIST."""

    def race(node: Node) -> list[str]:
        won = []
        for name in names:
            try:
                make(node.mountpoint / name)
            except FileExistsError:
                path = node.mountpoint / name
                soon(path.exists, f"{name} exists, so {node.node_id} sees it")
            else:
                won.append(name)
        return won

    winners = on_each(nodes.nodes, race)
    assert sorted(name for won in winners for name in won) == names, winners


def make_exclusively(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def test_of_several_nodes_that_make_one_name_one_wins(nodes: Cluster, run: str) -> None:
    one_winner(nodes, os.mkdir, [f"{run}/dir-{number:02}" for number in range(20)])
    one_winner(nodes, os.mkdir, [f"{run}/step_{number:02}" for number in range(10)])
    one_winner(nodes, make_exclusively, [f"{run}/lock-{number:02}" for number in range(20)])


def test_a_directory_is_there_for_all_as_soon_as_it_is_made(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run for node in nodes)
    for number in range(10):
        (one / f"a/{number}/b").mkdir(parents=True)
        assert (two / f"a/{number}/b").is_dir()
        assert str(number) in os.listdir(two / "a")
        (two / f"a/{number}/b").mkdir(parents=True, exist_ok=True)
        with pytest.raises(FileExistsError):
            (two / f"a/{number}/b").mkdir()
        (two / f"a/{number}/c").mkdir()
        assert sorted(os.listdir(one / f"a/{number}")) == ["b", "c"]


def test_a_small_file_is_there_for_all_once_it_is_closed(nodes: Cluster, run: str) -> None:
    name = "latest_checkpointed_iteration.txt"
    mounts = [node.mountpoint / run for node in nodes]
    (mounts[0] / "1000").write_text("no step, whatever its name looks like")
    assert (mounts[1] / "1000").read_text().startswith("no step")
    for number in range(10):
        here, there = mounts[number % 2], mounts[1 - number % 2]
        if number % 3:
            (here / name).write_text(str(number))
        else:
            (here / "temporary").write_text(str(number))
            (here / "temporary").replace(here / name)
        assert (here / name).stat().st_size == 1
        if number:
            soon(lambda there=there, n=number: (there / name).read_text() == str(n), "the new text", within_s=1)
        else:
            assert (there / name).read_text() == "0"


def test_what_a_shell_writes_is_there_for_all(nodes: Cluster, run: str) -> None:
    here, there = (node.mountpoint / run for node in nodes)
    for size in (1000, 3_000_000):
        # The shell closes a copy of the descriptor of `>` before its program writes.
        subprocess.run(["sh", "-c", f"head -c {size} /dev/urandom > {here}/file{size}"], check=True, timeout=20)
        soon((there / f"file{size}").exists, "the name")
        soon(
            lambda size=size: (there / f"file{size}").read_bytes() == (here / f"file{size}").read_bytes(),
            f"{size} bytes",
        )


def test_many_files_of_all_sizes_are_the_same_everywhere(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run for node in nodes)
    for number in range(60):
        directory = one / "logs" / str(number % 3)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number}.txt").write_bytes(os.urandom(number**2 * 40))
    with (one / "large").open("wb") as file:
        os.fchmod(file.fileno(), 0o640)
        file.write(os.urandom(5 * MIB))
    (one / "link").symlink_to("logs/1")
    expected = sums(one)
    soon(lambda: sums(two) == expected, "the files are the same")
    assert os.readlink(two / "link") == "logs/1"
    assert (two / "large").stat().st_mode & 0o777 == 0o640
    assert (two / "large").stat().st_mtime_ns == (one / "large").stat().st_mtime_ns


def test_what_is_removed_or_renamed_is_so_for_all(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run for node in nodes)
    (one / "dir").mkdir()
    (one / "dir/file").write_text("one")
    soon(lambda: (two / "dir/file").read_text() == "one", "the file is there")
    with (one / "dir/file").open("rb") as opened:
        (two / "dir/file").unlink()
        soon(lambda: not os.path.lexists(one / "dir/file"), "the file is gone")
        assert opened.read() == b"one"
    soon(lambda: os.listdir(one / "dir") == [], "the directory is empty")
    (one / "dir/file").write_text("again")
    soon(lambda: (two / "dir/file").read_text() == "again", "the name is used again")
    (two / "dir").rename(two / "other")
    soon(lambda: (one / "other/file").read_text() == "again", "the directory has its new name")
    assert not os.path.lexists(one / "dir")
    with pytest.raises(OSError) as refused:
        (one / "other").rmdir()
    assert refused.value.errno == errno.ENOTEMPTY
    shutil.rmtree(one / "other")
    soon(lambda: os.listdir(two) == [], "all is gone")
    (two / "other").mkdir()
    assert (one / "other").is_dir()


def test_a_complete_step_is_read_and_found_latest_everywhere(nodes: Cluster, run: str) -> None:
    one, two = nodes
    for number in (1, 2):
        write_step(one.mountpoint / run / f"step_{number}", number, SIZES)
    wait_latest(nodes.nodes, "step_2", run)
    step = two.mountpoint / run / "step_2"
    sizes = {path.name: path.stat().st_size for path in step.iterdir()}
    assert {name: sizes.pop(name) for name in shard_names(3)} == dict(zip(shard_names(3), SIZES, strict=True))
    assert list(sizes) == [MARKER]
    check_step(step, 2, SIZES)
    check_step(two.mountpoint / run / "latest", 2, SIZES)
    soon(lambda: sums(one.mountpoint / run) == sums(two.mountpoint / run), "step_1 is complete there too")


def test_a_step_whose_files_come_from_two_nodes_is_one_step(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run / "step_7" for node in nodes)
    write_shards(one, 7, SIZES, [0, 2])
    write_shards(two, 7, SIZES, [1])
    assert latest(nodes[0], run) == ""
    assert os.getxattr(one, "user.tierfs.state") == b"writing"
    write_marker(two, 3)
    wait_latest(nodes.nodes, "step_7", run)
    for step in (one, two):
        check_step(step, 7, SIZES)
        assert os.getxattr(step, "user.tierfs.state") == b"complete"


def test_a_step_that_is_removed_or_renamed_is_so_for_all(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run for node in nodes)
    for number in (1, 2, 3):
        write_step(one / f"step_{number}", number, SIZES)
    wait_latest(nodes.nodes, "step_3", run)
    check_step(two / "step_3", 3, SIZES)
    shutil.rmtree(two / "step_3")
    wait_latest(nodes.nodes, "step_2", run)
    assert not (one / "step_3").exists()
    (one / "step_1").rename(one / "step_8")
    wait_latest(nodes.nodes, "step_8", run)
    assert not (two / "step_1").exists()
    check_step(two / "step_8", 1, SIZES)
    write_step(two / "step_1", 11, SIZES)
    soon(lambda: os.getxattr(one / "step_1", "user.tierfs.state") == b"complete", "the name is a step again")
    check_step(one / "step_1", 11, SIZES)
    assert sorted(os.listdir(one)) == sorted(os.listdir(two)) == ["latest", "step_1", "step_2", "step_8"]


def test_who_has_the_old_generation_open_keeps_it_and_no_read_mixes_two(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run / "step_1" for node in nodes)
    write_step(one, 1, SIZES)
    wait_latest(nodes.nodes, "step_1", run)
    check_step(two, 1, SIZES)
    first, second, _ = shard_names(3)
    with (two / first).open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        write_shards(one, 2, SIZES, [0, 1, 2])
        check_step(two, 1, SIZES)
        write_marker(one, 3)
        soon(lambda: (two / second).read_bytes() == content(2, 1, SIZES[1]), "the new generation is there")
        check_step(two, 2, SIZES)
        opened.seek(0)
        assert opened.read() == mapped[:] == content(1, 0, SIZES[0])
    assert os.getxattr(two, "user.tierfs.generation") == b"2"
    # and back: the other node writes the next one
    write_step(two, 3, SIZES)
    soon(lambda: os.getxattr(one, "user.tierfs.generation") == b"3", "the third generation is there")
    check_step(one, 3, SIZES)


def test_a_node_that_starts_again_finds_what_happened_meanwhile(nodes: Cluster, run: str) -> None:
    one, two = (node.mountpoint / run for node in nodes)
    for number in (1, 2):
        write_step(one / f"step_{number}", number, SIZES)
    wait_latest(nodes.nodes, "step_2", run)
    check_step(two / "step_1", 1, SIZES)
    nodes[1].kill(wipe=False)
    shutil.rmtree(one / "step_2")
    write_step(one / "step_3", 3, SIZES)
    (one / "note").write_text("written meanwhile")
    nodes[1].start()
    soon(lambda: not (two / "step_2").exists(), "the step that was removed meanwhile is gone")
    check_step(two / "step_1", 1, SIZES)
    check_step(two / "step_3", 3, SIZES)
    assert (two / "note").read_text() == "written meanwhile"
    wait_latest(nodes.nodes, "step_3", run)
    nodes[0].kill_daemon()
    check_step(one / "step_3", 3, SIZES)
    write_step(one / "step_4", 4, SIZES)
    wait_latest(nodes.nodes, "step_4", run)
    check_step(two / "step_4", 4, SIZES)
