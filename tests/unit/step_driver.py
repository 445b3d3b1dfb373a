"""The real steps on a plain directory, driven as the file system drives them: before, the operation, after.

A program's calls are methods; `pid` is the program that makes them. What a load would find is `loaded`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tierfs.logs import NamespaceLog
from tierfs.ram.tier import RamTier
from tierfs.settings import Settings
from tierfs.steps.operations import StepOperations
from tierfs.steps.overwrite import walk
from tierfs.steps.record import StepRecord
from tierfs.steps.recovery import recover
from tierfs.steps.registry import StepRegistry
from tierfs.steps.tracker import RENAME_EXCHANGE, Steps
from tierfs.steps.upkeep import Upkeep

SIZE = 1 << 30
MARKER = ".metadata"
#: A program that lives and is nobody's relative.
ME = 1


@dataclass
class Info:
    """As torch.distributed.checkpoint.filesystem._StorageInfo."""

    relative_path: str
    offset: int
    length: int


@dataclass
class Metadata:
    """As torch.distributed.checkpoint.metadata.Metadata, and the save that it is of."""

    storage_data: dict[int, Info]
    seed: int = 0


def marker(seed: int, files: Mapping[str, int]) -> bytes:
    return pickle.dumps(Metadata({at: Info(name, 0, size) for at, (name, size) in enumerate(files.items())}, seed))


def content(seed: int, name: str, size: int) -> bytes:
    unit = f"[{seed} {name}]".encode()
    return (unit * (size // len(unit) + 1))[:size]


FILES = {"__0_0.distcp": 3000, "__1_0.distcp": 5000}


class Program:
    """A process that does nothing, to be named as the one that writes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"])
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Handle:
    fd: int
    ino: int


@dataclass
class Driver:
    """One mount of the tier in `path`; `restart` is what a new daemon does after SIGKILL."""

    path: Path
    settings: Settings = field(default_factory=Settings)
    handles: list[Handle] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path.mkdir(exist_ok=True)
        self.restart()

    def restart(self) -> None:
        self.tier = RamTier(self.path, self.settings.ram, SIZE, None)
        self.registry = StepRegistry(self.tier, self.settings, NamespaceLog(self.path.parent / "log"))
        self.registry.open_handles = lambda nodeid: sum(handle.ino == nodeid for handle in self.handles)
        recover(self.registry)
        self.steps = Steps(self.registry)
        self.steps.resume(handle.ino for handle in self.handles)
        self.steps.invalidate = lambda directory, name: self.told.append((directory, name))
        self.upkeep = Upkeep(self.registry)
        self.operations = StepOperations(self.registry)
        self.root = self.tier.root

    # --- what programs do

    async def open(self, rel: str, *, pid: int = ME, truncate: bool = False) -> Handle:
        """open(O_RDWR | O_CREAT), as the kernel turns it into LOOKUP, then OPEN or CREATE, again after ESTALE."""
        path = self.root / rel
        for _ in range(3):
            if not self.lookup(rel, pid=pid):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                self.steps.created(rel, pid)
                break
            if not await self.steps.before_write_open(rel, pid, truncate=truncate):
                fd = os.open(path, os.O_RDWR)
                if truncate:
                    os.ftruncate(fd, 0)
                break
        else:
            raise AssertionError(f"{rel} stays stale")
        handle = Handle(fd, os.fstat(fd).st_ino)
        self.steps.opened_for_write(rel, handle.ino, pid)
        self.handles.append(handle)
        return handle

    def close(self, handle: Handle) -> None:
        name = str(Path(f"/proc/self/fd/{handle.fd}").readlink())
        prefix = f"{self.root}/"
        os.close(handle.fd)
        self.handles.remove(handle)
        if not any(other.ino == handle.ino for other in self.handles):
            rel = name.removeprefix(prefix) if name.startswith(prefix) and not name.endswith(" (deleted)") else None
            self.steps.writer_closed(rel, handle.ino)

    async def write(self, rel: str, data: bytes, *, pid: int = ME) -> None:
        handle = await self.open(rel, pid=pid, truncate=True)
        try:
            os.write(handle.fd, data)
        finally:
            self.close(handle)

    def lookup(self, rel: str, *, pid: int = ME) -> bool:
        self.steps.before_lookup(rel, pid)
        return os.path.lexists(self.root / rel)

    def mkdir(self, rel: str, *, pid: int = ME) -> None:
        (self.root / rel).mkdir()
        self.steps.created(rel, pid)

    def mkdirs(self, rel: str, *, pid: int = ME) -> None:
        if rel and not (self.root / rel).is_dir():
            self.mkdirs(rel.rpartition("/")[0], pid=pid)
            self.mkdir(rel, pid=pid)

    def symlink(self, target: str, rel: str, *, pid: int = ME) -> None:
        (self.root / rel).symlink_to(target)
        self.steps.created(rel, pid)

    def link(self, old: str, new: str, *, pid: int = ME) -> None:
        os.link(self.root / old, self.root / new)
        self.steps.created(new, pid)

    async def unlink(self, rel: str, *, pid: int = ME) -> None:
        await self.steps.before_unlink(rel, pid)
        (self.root / rel).unlink()
        self.steps.after_unlink(rel)

    def rmdir(self, rel: str) -> None:
        self.steps.before_rmdir(rel)
        (self.root / rel).rmdir()
        self.steps.after_rmdir(rel)

    async def rmtree(self, rel: str, *, pid: int = ME) -> None:
        for entry in sorted(os.listdir(self.root / rel)):
            if self.steps.hidden(rel, entry):
                continue
            below = f"{rel}/{entry}"
            path = self.root / below
            if path.is_dir() and not path.is_symlink():
                await self.rmtree(below, pid=pid)
            else:
                await self.unlink(below, pid=pid)
        self.rmdir(rel)

    async def rename(self, old: str, new: str, *, pid: int = ME, exchange: bool = False) -> None:
        flags = RENAME_EXCHANGE if exchange else 0
        await self.steps.before_rename(old, new, flags, pid)
        if exchange:
            spare = self.root / "spare"
            (self.root / old).rename(spare)
            (self.root / new).rename(self.root / old)
            spare.rename(self.root / new)
        else:
            (self.root / old).rename(self.root / new)
        self.steps.after_rename(old, new, flags, pid)

    # --- what DCP does

    async def save(self, step: str, seed: int, files: Mapping[str, int] = FILES, *, pid: int = ME) -> None:
        self.mkdirs(step, pid=pid)
        self.lookup(f"{step}/{MARKER}", pid=pid)
        for name, size in files.items():
            await self.write(f"{step}/{name}", content(seed, name, size), pid=pid)
        await self.finish(step, seed, files, pid=pid)

    async def finish(self, step: str, seed: int, files: Mapping[str, int] = FILES, *, pid: int = ME) -> None:
        await self.write(f"{step}/{MARKER}.tmp", marker(seed, files), pid=pid)
        if self.lookup(f"{step}/{MARKER}", pid=pid):
            await self.unlink(f"{step}/{MARKER}", pid=pid)
        await self.rename(f"{step}/{MARKER}.tmp", f"{step}/{MARKER}", pid=pid)

    def loaded(self, step: str, *, pid: int = 1) -> int | None:
        """The save that a load finds, None where it finds no marker. Fails on a mixture and on files that are short."""
        if not self.lookup(f"{step}/{MARKER}", pid=pid):
            return None
        found: Metadata = pickle.loads((self.root / step / MARKER).read_bytes())
        for info in found.storage_data.values():
            data = (self.root / step / info.relative_path).read_bytes()
            assert len(data) >= info.length, f"{step}/{info.relative_path} is short"
            expected = content(found.seed, info.relative_path, info.length)
            assert data[: info.length] == expected, f"{step}/{info.relative_path} is not of save {found.seed}"
        return found.seed

    # --- looking

    def record(self, step: str) -> StepRecord:
        where = self.registry.names.locate(step)
        assert where is not None
        record = self.registry.at(where)
        assert record is not None, f"{step} is not known"
        return record

    def state(self, step: str) -> str:
        return self.record(step).shown_state

    def latest(self, namespace: str = "run") -> str | None:
        try:
            return str((self.root / namespace / "latest").readlink())
        except FileNotFoundError:
            return None

    def old_generations(self) -> list[str]:
        return sorted(os.listdir(self.tier.generations))

    def tree(self, rel: str) -> dict[str, tuple[int, int]]:
        """Names with inode and times, of files and directories."""
        return {inner: (info.st_ino, info.st_mtime_ns) for inner, info in walk(self.root / rel)}

    # --- time

    def let_pass(self, seconds: float) -> None:
        going = self.registry._latest_goes_at
        going.update({namespace: at - seconds for namespace, at in going.items()})
        for record in self.registry.records.values():
            record.touched_at -= seconds
            record.looked = {pid: at - seconds for pid, at in record.looked.items()}
            record.judge_after = record.save_after = 0.0
        failed = self.upkeep._not_before
        failed.update({key: at - seconds for key, at in failed.items()})

    async def settle(self, *, seconds: float = 0.0) -> None:
        """Let so much time pass, and do all that is to be done beside the requests, but checksums."""
        for _ in range(3):
            self.let_pass(seconds)
            await self.upkeep._round()
            seconds = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """With the real background work."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.upkeep.run)
            yield
            nursery.cancel_scope.cancel()


async def until(claim: Callable[[], Any], what: str, within_s: float = 10, every_s: float = 0.01) -> None:
    with trio.move_on_after(within_s):
        while not claim():  # noqa: ASYNC110 - what is waited for is on the disk, or in a thread
            await trio.sleep(every_s)
        return
    raise AssertionError(f"not within {within_s} s: {what}")
