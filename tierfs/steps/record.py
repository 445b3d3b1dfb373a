"""One step as this node knows it: its manifest, and what only a running daemon knows (writers, who asked lately)."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import trio

from tierfs.hydrate.stubs import MarkDamaged, read_mark
from tierfs.steps import overwrite, participants
from tierfs.steps.manifest import FileEntry, Manifest
from tierfs.steps.markers import MarkerRules, is_data_file_name

#: Files that hold a model's state, by their suffix. A small file of another kind (a config, a README) may be edited
#: inside a complete step without that being taken for the start of another save.
SHARD_SUFFIXES = frozenset(
    [
        ".distcp",
        ".safetensors",
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
        ".npy",
        ".npz",
        ".pkl",
        ".gguf",
        ".msgpack",
        ".h5",
        ".index",
        ".zarr",
    ]
)
SMALL_FILE_BYTES = 64 << 10

#: A process that looked for the marker this long before an overwrite takes part in it, where a child of it writes:
#: DCP looks for the old marker in the trainer when it plans a save, and Megatron forks processes that write and end
#: before the trainer goes on. Others that look (an evaluation, a monitor) have no part in it.
LOOKED_LATELY_S = 60.0
LOOKS_KEPT = 256


@dataclass
class Writer:
    """An inode of the step that is open for writing."""

    inner: str
    pid: int
    since: float


@dataclass
class StepRecord:
    """A step's manifest and its running state. `directory` is the step's directory in the RAM tier."""

    manifest: Manifest
    directory: Path
    writers: dict[int, Writer] = field(default_factory=dict)
    looked: dict[int, float] = field(default_factory=dict)
    #: Participants of the overwrite that only looked, as far as this daemon knows.
    only_looked: set[int] = field(default_factory=set)
    unsaved: bool = False
    #: Trees that go once the manifest is saved that no longer names them.
    superseded: list[Path] = field(default_factory=list)
    #: Counts the changes, and when the last one was (time.monotonic: the clock may be set at any time).
    changes: int = 0
    touched_at: float = field(default_factory=time.monotonic)
    #: Not judged and not saved before: both cost time by the number of files.
    judge_after: float = 0.0
    save_after: float = 0.0
    first_write_at: float | None = None
    writer_left: trio.Event = field(default_factory=trio.Event)
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def key(self) -> tuple[str, str]:
        return self.manifest.namespace, self.manifest.step

    @property
    def rel(self) -> str:
        return f"{self.manifest.namespace}/{self.manifest.step}"

    @property
    def is_complete(self) -> bool:
        """The step is whole and nothing is being changed in it."""
        return self.manifest.state == "complete" and self.manifest.overwrite is None

    @property
    def is_persisted(self) -> bool:
        """The object tier holds the step as it is now, committed."""
        persisted = self.manifest.persisted
        return (
            self.is_complete
            and persisted is not None
            and persisted.generation == self.manifest.generation
            and not self.manifest.owed
        )

    @property
    def shown_state(self) -> str:
        """The state that people are shown: a complete step that is being changed is `writing`."""
        return self.manifest.state if self.manifest.overwrite is None else "writing"

    def generation_of(self, inner: str) -> int:
        """The generation that the file under this name belongs to."""
        current = self.manifest.overwrite
        if current is None or self.is_of_old_generation(inner):
            return self.manifest.generation
        return current.generation

    def looked_for_marker(self, pid: int) -> None:
        pid = participants.process_of(pid)
        self.looked.pop(pid, None)
        if len(self.looked) >= LOOKS_KEPT:
            self.looked.pop(next(iter(self.looked)))
        self.looked[pid] = time.monotonic()

    def touch(self, pid: int = 0) -> None:
        """Something in the step changed; `pid` did it (0: unknown)."""
        self.manifest.changed_at = time.time()
        self.touched_at = time.monotonic()
        self.changes += 1
        self.unsaved = True
        current = self.manifest.overwrite
        if current is not None and pid > 0:
            self._joins(current.participants, pid)

    @property
    def idle_s(self) -> float:
        """How long ago the last change was."""
        return time.monotonic() - self.touched_at

    def participants_with(self, pid: int) -> dict[str, int]:
        """Who takes part in an overwrite that `pid` begins now."""
        self.only_looked.clear()
        found: dict[str, int] = {}
        if pid > 0:
            self._joins(found, pid)
        return found

    def _joins(self, known: dict[str, int], pid: int) -> None:
        """A process changes the step: it takes part, and so do those of its ancestors that looked for the marker."""
        pid = participants.process_of(pid)
        self.only_looked.discard(pid)
        if str(pid) in known:
            return
        since = time.monotonic() - LOOKED_LATELY_S
        lookers = [looker for looker in participants.ancestors(pid) if self.looked.get(looker, -1e9) >= since]
        for candidate in (pid, *lookers):
            started = participants.start_time(candidate)
            if started is not None and str(candidate) not in known:
                known[str(candidate)] = started
                if candidate != pid:
                    self.only_looked.add(candidate)

    def is_left_by_all(self, *, but: int = 0) -> bool:
        """True when an overwrite goes on that nobody will finish: nothing is open, and who took part is gone.

        The process `but` doesn't count where it never did more than look: it asks for the step, to load it.
        """
        current = self.manifest.overwrite
        if current is None or self.writers or self.lock.locked():
            return False
        but = participants.process_of(but) if but > 0 else 0
        counted = {
            pid: start for pid, start in current.participants.items() if int(pid) != but or but not in self.only_looked
        }
        return participants.all_gone(counted)

    def is_protected(self, inner: str, rules: MarkerRules) -> bool:
        """True for a file of the complete step whose change would make the step another one."""
        entry = self.manifest.files.get(inner)
        if self.manifest.state != "complete" or entry is None:
            return False
        if inner == self.manifest.marker or rules.match(inner) is not None:
            return True
        if inner in self.manifest.added:
            return False  # a program may write, close and open again what it adds to a complete step
        return PurePosixPath(inner).suffix in SHARD_SUFFIXES or entry.size_bytes >= SMALL_FILE_BYTES

    def is_of_old_generation(self, inner: str) -> bool:
        """True when what stands under the name is still the inode of the generation that was set aside."""
        current = self.manifest.overwrite
        if current is None or inner not in current.old_files:
            return False
        try:
            return os.lstat(self.directory / inner).st_ino == current.old_files[inner].ino
        except FileNotFoundError:
            return False

    def is_not_written_again(self, inner: str) -> bool:
        """True when the file has the old generation's bytes: its inode, or a copy in which nothing was changed."""
        current = self.manifest.overwrite
        if current is None or inner not in current.old_files:
            return False
        try:
            info = os.lstat(self.directory / inner)
        except FileNotFoundError:
            return False
        old = current.old_files[inner]
        is_as_old = (info.st_size, info.st_mtime_ns) == (old.size_bytes, old.mtime_ns)
        return info.st_ino == old.ino or (info.st_ino == current.copied.get(inner) and is_as_old)

    def open_names(self) -> set[str]:
        # A thread that judges the step asks too, while this one changes the writers: hence the copy.
        return {writer.inner for writer in list(self.writers.values())}

    def is_written_by_dcp(self) -> bool:
        """True when the step holds files that only DCP makes, so that a marker is to be expected."""
        return any(is_data_file_name(inner.rpartition("/")[2]) is not None for inner in list(self.manifest.files))

    def scan(self) -> dict[str, FileEntry]:
        """The regular files that are there now. What is known of an unchanged inode (its checksum) is kept."""
        known = self.manifest.files
        is_open = self.open_names()
        found: dict[str, FileEntry] = {}
        try:
            for inner, info in overwrite.walk(self.directory):
                if not stat.S_ISREG(info.st_mode):
                    continue
                sealed = inner not in is_open
                entry = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, None, sealed)
                before = known.get(inner)
                if sealed and before is not None and same_bytes(before, entry):
                    entry = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, before.checksum, True)
                elif sealed:
                    # Bringing a stub's bytes moves its inode's time; and a daemon that died may not have noted it.
                    entry = sealed_stub(self.directory / inner, entry) or entry
                found[inner] = entry
        except FileNotFoundError:
            pass
        return found


def sealed_stub(path: Path, entry: FileEntry) -> FileEntry | None:
    """What the mark of a stub says of it, as `entry` is of the file as it lies there; None for what is no stub."""
    try:
        mark = read_mark(path)
    except (OSError, MarkDamaged):
        return None
    if mark is None or mark.size_bytes != entry.size_bytes:
        return None
    return FileEntry(entry.size_bytes, mark.mtime_ns, entry.ino, mark.checksum_text, True)


def same_bytes(one: FileEntry, other: FileEntry) -> bool:
    """True when both entries describe the same inode with the same size and modification time."""
    return (one.ino, one.size_bytes, one.mtime_ns) == (other.ino, other.size_bytes, other.mtime_ns)
