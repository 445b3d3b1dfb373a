"""The tools people move checkpoints with. Each must end with 0 and leave exactly what was there before."""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.synchronize
import os
import stat
import subprocess
from pathlib import Path

import pytest

MIB = 1 << 20


def sh(script: str, cwd: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{script!r} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    assert not done.stderr, f"{script!r} complained: {done.stderr}"
    return done.stdout


def plant(root: Path) -> Path:
    """A tree with what checkpoints have: sizes of all kinds, links, modes, times, odd names."""
    tree = root / "tree"
    for step in (1, 2):
        folder = tree / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(os.urandom(2 * MIB + step))
        (folder / "__1_0.distcp").write_bytes(os.urandom(MIB - 1))
        (folder / "empty").touch()
        (folder / "name with spaces and ünïcode").write_text("x")
        os.link(folder / "__0_0.distcp", folder / "hard link")
    (tree / "last").symlink_to("step_2")
    (tree / "dangling").symlink_to("nowhere")
    (tree / "step_1" / "private").write_text("secret")
    (tree / "step_1" / "private").chmod(0o600)
    (tree / "step_1").chmod(0o750)
    for path in sorted(tree.rglob("*"), reverse=True):
        os.utime(path, ns=(10**18 + 123456789, 10**18 + 987654321), follow_symlinks=False)
    return tree


def facts(tree: Path) -> dict[str, tuple[object, ...]]:
    """What a faithful copy must have: kind and mode, owner, size, time, content, and which names are one file."""
    groups: dict[int, list[str]] = {}
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() and path.name == "latest":
            continue
        name, info = str(path.relative_to(tree)), path.lstat()
        if stat.S_ISREG(info.st_mode):
            groups.setdefault(info.st_ino, []).append(name)
            content: object = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = str(path.readlink()) if stat.S_ISLNK(info.st_mode) else None
        size = info.st_size if not stat.S_ISDIR(info.st_mode) else None
        found[name] = (stat.filemode(info.st_mode), info.st_uid, info.st_gid, size, info.st_mtime_ns, content)
    found["names of one file"] = tuple(sorted(tuple(names) for names in groups.values() if len(names) > 1))
    return found


COPIES = {
    "cp -a": "cp -a {source} {target}",
    "rsync -aHAX": "rsync -aHAX {source}/ {target}/",
    "tar": "mkdir {target} && tar -C {source} --format=posix -cf - . | tar -C {target} -xpf -",
}


@pytest.mark.parametrize("tool", COPIES)
@pytest.mark.parametrize("way", ["to", "from", "within"])
def test_a_copy_is_faithful(ckpt_root: Path, tmp_path: Path, tool: str, way: str) -> None:
    source_root, target_root = {
        "to": (tmp_path, ckpt_root),
        "from": (ckpt_root, tmp_path),
        "within": (ckpt_root, ckpt_root),
    }[way]
    source, target = plant(source_root), target_root / "copy"
    sh(COPIES[tool].format(source=source, target=target), ckpt_root)
    assert facts(target) == facts(source)


def test_rsync_again_finds_nothing_to_do(ckpt_root: Path, tmp_path: Path) -> None:
    source = plant(tmp_path)
    sh(f"rsync -aHAX {source}/ {ckpt_root}/copy/", ckpt_root)
    changes = sh(f"rsync -aHAXi {source}/ {ckpt_root}/copy/", ckpt_root)
    assert changes == ""


def test_mv_of_directories_and_rm(ckpt_root: Path, tmp_path: Path) -> None:
    tree = plant(ckpt_root)
    before = facts(tree)
    sh("mv tree moved && mkdir deeper && mv moved deeper/", ckpt_root)
    assert facts(ckpt_root / "deeper" / "moved") == before
    sh(f"mv deeper/moved {tmp_path}/out && mv {tmp_path}/out back", ckpt_root)
    assert facts(ckpt_root / "back") == before
    sh("rm -rf back deeper", ckpt_root)
    assert [path.name for path in ckpt_root.iterdir()] == []


def test_find_du_df(ckpt_root: Path) -> None:
    tree = plant(ckpt_root)
    assert len(sh("find tree -type f", ckpt_root).splitlines()) == 11
    assert sh("find tree -name '__*' -size +1M | sort", ckpt_root).splitlines() == [
        f"tree/step_{step}/__0_0.distcp" for step in (1, 2)
    ]
    apparent = int(sh("du -s --apparent-size -B1 tree", ckpt_root).split()[0])
    occupied = int(sh("du -s -B1 tree", ckpt_root).split()[0])
    content = sum(path.stat().st_size for path in tree.glob("step_*/__*"))
    assert content <= apparent <= content + MIB
    assert content <= occupied <= content + 16 * MIB
    size, used, free = map(int, sh("df -B1 --output=size,used,avail . | tail -1", ckpt_root).split())
    assert content <= used <= size
    assert free <= size - content


def test_df_sees_what_is_written_and_removed(ckpt_root: Path) -> None:
    def free() -> int:
        return int(sh("df -B1 --output=avail . | tail -1", ckpt_root))

    before = free()
    (ckpt_root / "file").write_bytes(bytes(64 * MIB))
    assert before - free() >= 64 * MIB - MIB
    (ckpt_root / "file").unlink()
    assert before - free() <= 4 * MIB


def test_dd_direct(ckpt_root: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(8 * MIB))
    sh(f"dd if={tmp_path}/in of=out bs=1M oflag=direct status=none && cmp {tmp_path}/in out", ckpt_root)
    sh("dd if=out of=again bs=1M iflag=direct oflag=direct,append conv=notrunc status=none && cmp out again", ckpt_root)


def test_shell_redirects(ckpt_root: Path) -> None:
    script = "echo one > f; echo two >> f; { echo three; echo four; } >> f; cat < f; : > f; wc -c < f"
    assert sh(script, ckpt_root).split() == ["one", "two", "three", "four", "0"]
    sh("exec 3<> f; echo abc >&3; echo defg > f; exec 3>&-; [ $(cat f) = defg ]", ckpt_root)
    assert sh("(flock 9; echo locked) 9> lock", ckpt_root) == "locked\n"
    sh("truncate -s 5M sparse && [ $(stat -c %s sparse) = 5242880 ]", ckpt_root)
    sh("sed -i s/defg/x/ f && [ $(cat f) = x ] && touch -d 2020-01-01 f", ckpt_root)
    assert sh("stat -c %y f", ckpt_root).startswith("2020-01-01")


def race(root: str, barrier: multiprocessing.synchronize.Barrier, rounds: int) -> None:
    for turn in range(rounds):
        barrier.wait(30)
        path = Path(root) / f"step_{turn}" / "deep"
        path.mkdir(parents=True, exist_ok=True)
        if not stat.S_ISDIR(path.stat().st_mode) or not path.parent.is_dir():
            raise AssertionError(f"{path} is no directory right after mkdir")


def test_64_processes_make_the_same_directories_at_once(ckpt_root: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(64)
    racers = [context.Process(target=race, args=(str(ckpt_root), barrier, 10)) for _ in range(64)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * 64
