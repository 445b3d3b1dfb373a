"""The same random operations on the mount and on a plain tmpfs give the same results, errnos and final state.

TIERFS_MODEL_EXAMPLES sets how many sequences are tried (soak runs use thousands).
"""

# It compares system calls, so it makes them by their own names.

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from mount import syscalls
from tests.mount.conftest import Mounted

EXAMPLES = int(os.environ.get("TIERFS_MODEL_EXAMPLES", "25"))
STEPS = 40

NAMES = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "f", "f/a", "é☃", "x" * 200]
paths = st.sampled_from(NAMES)
slots = st.integers(0, 3)
offsets = st.one_of(st.integers(0, 70), st.integers(4090, 4100), st.integers(130_000, 140_000))
data = st.binary(min_size=0, max_size=40).map(lambda b: b * 137)
modes = st.sampled_from([0o600, 0o644, 0o755, 0o777, 0o000, 0o4755, 0o2775, 0o1777])
owners = st.sampled_from([0, 1000, 1001])
times = st.integers(0, 4 * 10**18)
open_flags = st.lists(
    st.sampled_from([os.O_CREAT, os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_NOFOLLOW, os.O_DIRECTORY]),
    max_size=3,
).flatmap(lambda fs: st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]).map(lambda m: m | sum(set(fs))))
xattr_names = st.sampled_from(["user.one", "user.two"])

Action = Callable[["Side"], Any]


class Side:
    """One of the two trees, with its open files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fds: dict[int, int] = {}

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def outcome(self, action: Action) -> Any:
        try:
            return action(self)
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()

    def tree(self) -> dict[str, Any]:
        """Everything a program can see: names, types, modes, owners, links, sizes, bytes, attributes, set times."""
        seen: dict[str, Any] = {}
        for directory, names, files in os.walk(self.root):
            for name in [*names, *files]:
                path = f"{directory}/{name}"
                info = visible(os.lstat(path))
                rel = os.path.relpath(path, self.root)
                if stat.S_ISREG(info[0]):
                    seen[rel] = (*info, Path(path).read_bytes(), attributes(path))
                elif stat.S_ISLNK(info[0]):
                    seen[rel] = (*info, os.readlink(path))
                else:
                    seen[rel] = info
        return seen

    def mtimes(self) -> dict[str, int]:
        return {
            os.path.relpath(f"{directory}/{name}", self.root): os.lstat(f"{directory}/{name}").st_mtime_ns
            for directory, names, files in os.walk(self.root)
            for name in [*names, *files]
        }


def visible(info: os.stat_result) -> tuple[int, ...]:
    return info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_size, info.st_rdev


def attributes(path: str) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in sorted(os.listxattr(path))}


class TreeMachine(RuleBasedStateMachine):
    """Rules do each thing on both sides and compare. `mounted` is set by the test."""

    mounted: Mounted

    @initialize()
    def start(self) -> None:
        self.sides = [Side(self.mounted.dir / "m"), Side(self.mounted.plain / "m")]
        for side in self.sides:
            side.root.mkdir()

    def both(self, action: Action) -> None:
        ours, theirs = (side.outcome(action) for side in self.sides)
        assert ours == theirs, f"mount: {ours!r}, tmpfs: {theirs!r}"

    def on_fd(self, slot: int, action: Callable[[int], Any]) -> None:
        if slot in self.sides[1].fds:
            self.both(lambda side: action(side.fds[slot]))

    # -- files

    @rule(name=paths, flags=open_flags, mode=modes, slot=slots)
    def open(self, name: str, flags: int, mode: int, slot: int) -> None:
        def action(side: Side) -> Any:
            fd = os.open(side.at(name), flags | os.O_NONBLOCK, mode)
            if slot in side.fds:
                os.close(side.fds[slot])
            side.fds[slot] = fd
            return visible(os.fstat(fd))

        self.both(action)

    @rule(slot=slots)
    def close(self, slot: int) -> None:
        if slot in self.sides[1].fds:
            self.both(lambda side: os.close(side.fds.pop(slot)))

    @rule(slot=slots, chunk=data)
    def write(self, slot: int, chunk: bytes) -> None:
        self.on_fd(slot, lambda fd: (os.write(fd, chunk), os.lseek(fd, 0, os.SEEK_CUR), visible(os.fstat(fd))))

    @rule(slot=slots, chunk=data, offset=offsets)
    def pwrite(self, slot: int, chunk: bytes, offset: int) -> None:
        self.on_fd(slot, lambda fd: (os.pwrite(fd, chunk, offset), visible(os.fstat(fd))))

    @rule(slot=slots, size=st.integers(0, 9000), offset=offsets)
    def pread(self, slot: int, size: int, offset: int) -> None:
        self.on_fd(slot, lambda fd: os.pread(fd, size, offset))

    @rule(slot=slots, size=offsets)
    def ftruncate(self, slot: int, size: int) -> None:
        self.on_fd(slot, lambda fd: (os.ftruncate(fd, size), visible(os.fstat(fd))))

    @rule(slot=slots)
    def fsync(self, slot: int) -> None:
        self.on_fd(slot, os.fsync)

    @rule(slot=slots, mode=modes)
    def fchmod(self, slot: int, mode: int) -> None:
        self.on_fd(slot, lambda fd: (os.fchmod(fd, mode), visible(os.fstat(fd))))

    @rule(slot=slots, shared=st.booleans(), chunk=st.binary(min_size=1, max_size=9), share=st.floats(0, 1))
    def store_by_mmap(self, slot: int, shared: bool, chunk: bytes, share: float) -> None:
        def action(fd: int) -> Any:
            size = os.fstat(fd).st_size
            if size < len(chunk):
                return None
            with mmap.mmap(fd, size, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) as mapping:
                at = int((size - len(chunk)) * share)
                mapping[at : at + len(chunk)] = chunk
                if shared:
                    mapping.flush()
                return bytes(mapping), os.pread(fd, size, 0)

        self.on_fd(slot, action)

    @rule(slot=slots, kind=st.sampled_from([fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN]))
    def lock(self, slot: int, kind: int) -> None:
        self.on_fd(slot, lambda fd: fcntl.flock(fd, kind | fcntl.LOCK_NB))

    @rule(name=paths)
    def read_whole(self, name: str) -> None:
        self.both(lambda side: _read(side.at(name)))

    @rule(name=paths, size=offsets)
    def truncate(self, name: str, size: int) -> None:
        self.both(lambda side: os.truncate(side.at(name), size))

    # -- names

    @rule(name=paths)
    def unlink(self, name: str) -> None:
        self.both(lambda side: os.unlink(side.at(name)))

    @rule(name=paths, mode=modes)
    def mkdir(self, name: str, mode: int) -> None:
        self.both(lambda side: (os.mkdir(side.at(name), mode), visible(os.lstat(side.at(name)))))

    @rule(name=paths)
    def rmdir(self, name: str) -> None:
        self.both(lambda side: os.rmdir(side.at(name)))

    @rule(old=paths, new=paths, flags=st.sampled_from([0, 0, syscalls.RENAME_NOREPLACE, syscalls.RENAME_EXCHANGE]))
    def rename(self, old: str, new: str, flags: int) -> None:
        at = syscalls.AT_FDCWD
        self.both(lambda side: syscalls.rename_at(at, side.at(old).encode(), at, side.at(new).encode(), flags))

    @rule(old=paths, new=paths)
    def link(self, old: str, new: str) -> None:
        self.both(
            lambda side: (os.link(side.at(old), side.at(new), follow_symlinks=False), visible(os.lstat(side.at(new))))
        )

    @rule(to=st.sampled_from([*NAMES, "nowhere", "../m/a"]), name=paths)
    def symlink(self, to: str, name: str) -> None:
        self.both(lambda side: os.symlink(to, side.at(name)))

    @rule(name=paths)
    def readlink(self, name: str) -> None:
        self.both(lambda side: os.readlink(side.at(name)))

    @rule(name=paths, kind=st.sampled_from([stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK]), mode=modes)
    def mknod(self, name: str, kind: int, mode: int) -> None:
        self.both(lambda side: (os.mknod(side.at(name), kind | mode), visible(os.lstat(side.at(name)))))

    @rule(name=paths)
    def listdir(self, name: str) -> None:
        self.both(lambda side: sorted(os.listdir(side.at(name))))

    @rule(name=paths, follow=st.booleans())
    def look(self, name: str, follow: bool) -> None:
        self.both(lambda side: visible(os.stat(side.at(name), follow_symlinks=follow)))

    # -- attributes

    @rule(name=paths, mode=modes)
    def chmod(self, name: str, mode: int) -> None:
        self.both(lambda side: (os.chmod(side.at(name), mode), visible(os.stat(side.at(name)))))

    @rule(name=paths, uid=owners, gid=owners, follow=st.booleans())
    def chown(self, name: str, uid: int, gid: int, follow: bool) -> None:
        def action(side: Side) -> Any:
            os.chown(side.at(name), uid, gid, follow_symlinks=follow)
            return visible(os.lstat(side.at(name)))

        self.both(action)

    @rule(name=paths, atime=times, mtime=times, follow=st.booleans())
    def utimens(self, name: str, atime: int, mtime: int, follow: bool) -> None:
        def action(side: Side) -> Any:
            os.utime(side.at(name), ns=(atime, mtime), follow_symlinks=follow)
            info = os.stat(side.at(name), follow_symlinks=follow)
            return info.st_atime_ns, info.st_mtime_ns

        self.both(action)

    @rule(name=paths, key=xattr_names, value=data, flags=st.sampled_from([0, os.XATTR_CREATE, os.XATTR_REPLACE]))
    def setxattr(self, name: str, key: str, value: bytes, flags: int) -> None:
        self.both(lambda side: os.setxattr(side.at(name), key, value, flags))

    @rule(name=paths, key=xattr_names)
    def getxattr(self, name: str, key: str) -> None:
        self.both(lambda side: (os.getxattr(side.at(name), key), sorted(os.listxattr(side.at(name)))))

    @rule(name=paths, key=xattr_names)
    def removexattr(self, name: str, key: str) -> None:
        self.both(lambda side: os.removexattr(side.at(name), key))

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            ours, theirs = self.sides
            for slot in theirs.fds:
                self.on_fd(slot, lambda fd: visible(os.fstat(fd)))
            assert ours.tree() == theirs.tree()
            assert_same_order(ours.mtimes(), theirs.mtimes())
        finally:
            for side in self.sides:
                side.close()
                with suppress(FileNotFoundError):
                    shutil.rmtree(side.root)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def assert_same_order(ours: dict[str, int], theirs: dict[str, int], *, slack_ns: int = 50_000_000) -> None:
    """What is clearly older on one side is not clearly newer on the other (clocks tick in steps of some ms)."""
    for one in theirs:
        for other in theirs:
            if theirs[one] + slack_ns < theirs[other]:
                assert ours[one] < ours[other] + slack_ns, f"mtimes of {one} and {other} are the wrong way round"


def test_any_sequence_of_operations_does_what_a_tmpfs_does(mounted: Mounted) -> None:
    machine = type("Machine", (TreeMachine,), {"mounted": mounted})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
