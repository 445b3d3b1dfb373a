"""The ballast: one hidden file of allocated, touched huge pages that holds the tier's free room.

The file is a stack. Room is taken from its end by making it shorter, and given back by making it longer, so its
whole state is its length and nothing has to be remembered over a crash.

The tmpfs' limit is always the tier's size plus the ballast, so that data alone can use exactly the tier's size, and a
writer that outruns the room made for it never meets ENOSPC while the ballast holds some. Taking shortens first and
lowers the limit after; giving back raises the limit first. Wherever a crash falls between the two, the limit is
too high and not too low, and the next daemon sets it right.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from tierfs.ram import syscalls
from tierfs.ram.tmpfs import HUGE_PAGE, resize_tmpfs

# Of pages that are probably warm one in so many is touched to see whether they are. Clearing a warm huge page takes
# some 0.25 ms of CPU, a cold one 1 to 5 ms (measured), so touching all of what was just freed would cost more than
# all else that the daemon does for a save.
_SAMPLE_EVERY = 16
_COLD_PAGE_S = 0.0008


class Ballast:
    """The ballast file in a tmpfs, and that tmpfs' limit. Every method may be called from any thread."""

    def __init__(self, mount: Path, size_bytes: int) -> None:
        """Find the ballast that an earlier daemon left, or start an empty one, and set the limit by it.

        Raises OSError when something else than a file has its name.
        """
        self._mount = mount
        self._path = mount / "ballast"
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._fd = self._open()
        self._settle()

    def close(self) -> None:
        """Let go of the file; it stays, and so does the memory in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def held_bytes(self) -> int:
        """Memory that the ballast holds now, from the kernel's count and not from ours."""
        return os.fstat(self._fd).st_blocks * 512

    def take(self, wanted_bytes: int, *, wait_s: float = -1) -> int:
        """Free up to `wanted_bytes` (rounded up to huge pages) for data. Returns how much became free.

        Returns 0 when another thread does not let go of the ballast for `wait_s` (-1: waits as long as it takes,
        which is bounded by one piece of filling).
        """
        if not self._lock.acquire(timeout=wait_s):
            return 0
        try:
            length = os.fstat(self._fd).st_size
            shorter = max(0, length - _round_up(wanted_bytes))
            if shorter < length:
                os.ftruncate(self._fd, shorter)
                self._set_limit()
            return length - shorter
        finally:
            self._lock.release()

    def grow(self, piece_bytes: int, *, probably_warm: bool = False) -> int:
        """Take `piece_bytes` (a multiple of huge pages) of free memory into the ballast. Returns how much it took.

        Its pages are touched to make them warm: memory that was idle has been taken away by a virtual machine's
        host. That is the slow part and runs without the lock. `probably_warm` is for memory that was freed just now:
        only samples are touched, and what lies after a sample that proves cold. Returns 0 when there is no memory.
        """
        with self._lock:
            self._replace_if_deleted()
            start = os.fstat(self._fd).st_size
            try:
                resize_tmpfs(self._mount, self._size_bytes + self.held_bytes() + piece_bytes)
                syscalls.fallocate(self._fd, 0, start, piece_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                return 0
            finally:
                self._set_limit()
            fd = os.dup(self._fd)
        try:
            _touch(fd, start, piece_bytes, sample_every=_SAMPLE_EVERY if probably_warm else 1)
        except OSError as error:
            # EFAULT: the room was taken meanwhile and is no longer in the file. EINVAL: before Linux 5.14.
            if error.errno not in (errno.EFAULT, errno.EINVAL):
                raise
        finally:
            os.close(fd)
        return piece_bytes

    def set_right(self) -> None:
        """Make up for what happened behind our back: the file deleted or cut, the limit changed by hand."""
        with self._lock:
            self._replace_if_deleted()
            self._settle()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _replace_if_deleted(self) -> None:
        """A deleted file that is still open holds memory that the next daemon could not find again."""
        with suppress(FileNotFoundError):
            found = self._path.lstat()
            ours = os.fstat(self._fd)
            if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                return
        replacement = self._open()
        os.dup2(replacement, self._fd, inheritable=False)  # Others may be asking about the same number now.
        os.close(replacement)
        self._settle()

    def _settle(self) -> None:
        """Bring the file's length to the memory it holds, and the limit to both."""
        state = os.fstat(self._fd)
        held = state.st_blocks * 512
        if held != state.st_size or held % HUGE_PAGE:
            # Holes, or pages beyond the end. Shortening gives back what is beyond; what a hole leaves missing is
            # filled again, or the stack would promise more than it has.
            length = min(state.st_size, held) // HUGE_PAGE * HUGE_PAGE
            os.ftruncate(self._fd, length)
            if length and os.fstat(self._fd).st_blocks * 512 != length:
                os.ftruncate(self._fd, 0)
        self._set_limit()

    def _set_limit(self) -> None:
        wanted = self._size_bytes + self.held_bytes()
        statistics = os.statvfs(self._mount)
        if statistics.f_blocks * statistics.f_frsize != wanted:
            resize_tmpfs(self._mount, wanted)


def _touch(fd: int, start: int, length: int, *, sample_every: int) -> None:
    """Touch a range page by page: the process's address space is locked while one is touched."""
    with syscalls.shared_mapping(fd, start, length) as address:
        cold = False
        for number in range(length // HUGE_PAGE):
            is_sample = number % sample_every == 0
            if not (is_sample or cold):
                continue
            before = time.thread_time()
            syscalls.populate(address + number * HUGE_PAGE, HUGE_PAGE)
            if is_sample:
                cold = time.thread_time() - before > _COLD_PAGE_S


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // HUGE_PAGE) * HUGE_PAGE
