"""Names that several nodes change at the same time, or one after the other: in the end all have the same."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rig.cluster import Cluster, Node
from rig.cluster_steps import on_each, soon
from rig.plain_steps import MIB, write_step

pytestmark = [pytest.mark.alone, pytest.mark.slow]
NODES = 3
TIMES = 15


def tree(top: Path) -> dict[str, object]:
    """What a program sees of everything below."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        looks = oct(info.st_mode), info.st_uid, info.st_gid
        if path.is_symlink():
            found[str(path.relative_to(top))] = path.readlink()
        elif path.is_dir():
            found[str(path.relative_to(top))] = looks
        else:
            found[str(path.relative_to(top))] = looks, info.st_mtime_ns, path.read_bytes()
    return found


def same_everywhere(nodes: Cluster, directory: str) -> dict[str, object]:
    def differing() -> list[tuple[str, object, object]]:
        one, *others = (tree(node.mountpoint / directory) for node in nodes)
        names = {name for each in (one, *others) for name in each}
        return [
            (name, one.get(name), each.get(name))
            for name in sorted(names)
            for each in others
            if each.get(name) != one.get(name)
        ]

    def is_told() -> bool:
        told = [node.status() for node in nodes]
        return all(each["cluster"]["pending"] == 0 and not each["problems"] for each in told)

    try:
        soon(lambda: not differing(), f"{directory} is the same everywhere")
    except AssertionError as error:
        raise AssertionError(f"{error}: {differing()}") from None
    soon(is_told, "the catalogue has all of it")
    return tree(nodes[0].mountpoint / directory)


def write_text(path: Path, text: str) -> None:
    """An open that other nodes' files of that name come between twice is refused as stale, and made again."""
    for _ in range(3):
        try:
            path.write_text(text)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        else:
            return
    raise AssertionError(f"{path} is stale again and again")


def test_the_last_of_all_writers_of_a_file_wins_everywhere(nodes: Cluster, run: str) -> None:
    for turn in range(TIMES):
        write_text(nodes[turn % NODES].mountpoint / run / "in turn", str(turn))

    def write(node: Node) -> None:
        for turn in range(TIMES):
            write_text(node.mountpoint / run / f"at once {turn}", node.node_id)

    def rename(node: Node) -> None:
        for turn in range(TIMES):
            mine = node.mountpoint / run / node.node_id
            mine.write_text(f"{node.node_id} {turn}")
            mine.replace(node.mountpoint / run / "renamed")

    on_each(nodes.nodes, write)
    on_each(nodes.nodes, rename)
    assert same_everywhere(nodes, run).keys() == {"in turn", "renamed", *(f"at once {turn}" for turn in range(TIMES))}
    for node in nodes:
        assert (node.mountpoint / run / "in turn").read_text() == str(TIMES - 1)


def test_hard_links_modes_and_owners_are_the_same_everywhere(nodes: Cluster, run: str) -> None:
    one, two, three = (node.mountpoint / run for node in nodes)
    (one / "file").write_text("one")
    (one / "link").hardlink_to(one / "file")
    (one / "dir").mkdir()
    (two / "link").write_text("two, by the other name")
    same_everywhere(nodes, run)
    for each in (one, two, three):
        assert (each / "file").read_text() == "two, by the other name" and (each / "file").stat().st_nlink == 2
    (three / "link").unlink()
    (one / "file").chmod(0o640)  # written by node 2
    os.chown(one / "file", 5, 6)
    (three / "dir").chmod(0o711)
    os.utime(one / "file", (1, 2))
    same_everywhere(nodes, run)
    info = (two / "file").stat()
    assert (info.st_mode & 0o777, info.st_uid, info.st_gid, info.st_mtime) == (0o640, 5, 6, 2)
    assert (two / "dir").stat().st_mode & 0o777 == 0o711


def test_copied_trees_are_the_same_everywhere_and_any_node_removes_them(
    nodes: Cluster, run: str, tmp_path: Path
) -> None:
    one, two, three = (node.mountpoint / run for node in nodes)
    write_step(tmp_path / "step_5", 5, [MIB, 100_000, 5])
    (tmp_path / "step_5/sub").mkdir()
    (tmp_path / "step_5/sub/file").write_text("file")
    (tmp_path / "step_5/link").symlink_to("sub")
    (tmp_path / "deep/er/and/deeper").mkdir(parents=True, mode=0o700)
    subprocess.run(["cp", "-a", tmp_path, one / "copied"], check=True)
    subprocess.run(["rsync", "-a", f"{tmp_path}/", two / "synced"], check=True)
    subprocess.run(["rsync", "-a", "--exclude=latest", f"{one}/copied/", three / "copied again"], check=True)
    seen = same_everywhere(nodes, run)
    for name, each in tree(tmp_path).items():
        for copy in ("copied", "synced", "copied again"):
            assert seen[f"{copy}/{name}"] == each, (copy, name)
    for each, copy in ((two, "copied"), (three, "synced"), (one, "copied again")):
        shutil.rmtree(each / copy)
    assert same_everywhere(nodes, run) == {}
    assert [key for key in nodes.etcd.keys(f"/{run}/") if "/o/" not in key] == []
