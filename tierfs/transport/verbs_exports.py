"""The memory of this node's files that others READ: registered when it is asked for, kept for the next who asks, and
given back before the file is cut or freed.

A sealed file is exported in windows on a grid of 64 MiB, which stay registered until the room on a device is wanted
for others (the one that was used longest ago goes), or until the file leaves. Of a file that grows just the range that
was asked for is registered, and given back when the connection asks for another.

What this promises to those who own the files: after `fence` nothing of the inode is registered or mapped but what was
asked for afterwards. It waits for one registration at most, not for those that others wait for, and for a device that
does not answer only `FENCE_WITHIN_S`. `leave` begins the same and does not wait. A window is given only for the inode
that the shelf opened for the request, so there is none of a version that the shelf does not give out any more.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import trio

from tierfs.transport.verbs_fabric import Fabric, OpenPort
from tierfs.transport.verbs_windows import PAGE_BYTES, WINDOW_BYTES, HasHole, Window

log = logging.getLogger("tierfs.transport")

#: How soon the room of a file that was removed comes back, where nobody said that it was.
LOOK_EVERY_S = 1.0
#: Where a device takes no more, one part in so many of the windows that nobody uses goes.
_SHARE_THROWN_OUT = 2
#: A fence takes milliseconds. EFA's driver waits 3 s for a command of its device (ADMIN_CMD_TIMEOUT_US, efa_com.c).
FENCE_WITHIN_S = 10.0
#: Each has a mapping, and each file a descriptor, whatever few bytes it holds. The kernel gives 65530 mappings
#: (vm.max_map_count), and most descriptors are for the files that programs use.
MOST_WINDOWS = 2048
_DESCRIPTORS_A_WINDOW = 16
#: Those that close do not wait for those that register.
_CLOSING_THREADS = 4
_ALL_IN_USE = "as much is in use there as may be registered"
_LEAVES = "the file is about to be changed or removed"


class NotExported(Exception):
    """Why the range can't be read as memory, in a sentence; its bytes can be had otherwise."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Export(Window):
    """A window of one file, and who uses it. `lock` is held by who registers or closes it."""

    def __init__(self, file: _File, start: int, length: int, *, kept: bool) -> None:
        super().__init__(start, length)
        self.file = file
        self.kept = kept
        self.users = 0
        self.lock = trio.Lock()
        self.closed = trio.Event()
        #: Around the wait for a thread that registers it.
        self.queueing: trio.CancelScope | None = None

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()


class _File:
    """An inode that something is exported of. It leaves as a whole; then there may be another one for the inode."""

    def __init__(self, ino: int, fd: int) -> None:
        self.ino = ino
        self.fd = fd
        #: Of what was exported as sealed; None until it is.
        self.sealed: tuple[str, int] | None = None  # version, size
        #: By their place on the grid, those that may be given to whoever asks.
        self.windows: dict[int, Export] = {}
        #: All that are not closed yet.
        self.open: set[Export] = set()
        self.has_left = False

    @property
    def end(self) -> int:
        return max((each.start + each.length for each in self.open), default=0)


class Exports:
    """Used from the trio thread. Nothing is given unless `run` runs."""

    def __init__(self, fabric: Fabric, *, most_registered_bytes: int) -> None:
        """With each port at most so many bytes are registered."""
        self._fabric = fabric
        self._most_bytes = most_registered_bytes
        self._files: dict[int, _File] = {}
        self._leaving: set[_File] = set()
        #: Windows that nobody uses, the one that was used longest ago first.
        self._idle: dict[Export, None] = {}
        self._to_close: dict[Export, None] = {}
        self._work = trio.Event()
        self._windows = 0
        self._closers = trio.CapacityLimiter(_CLOSING_THREADS)
        self._nursery: trio.Nursery | None = None
        self._troubled: set[OpenPort] = set()
        #: A removed file's room came back only now.
        self.on_freed: Callable[[], None] = lambda: None
        #: Where files lie whose memory may be exported (st_dev): inodes are told by their numbers, and a disk's pages
        #: are not to be locked. None: whatever is asked for.
        self.device: int | None = None
        #: Bytes, by port; with what is being registered and given back.
        self.registered: Counter[OpenPort] = Counter()
        self.given = 0
        self.refused: Counter[str] = Counter()

    # --- what connections ask for

    async def give(
        self, fd: int, version: str, offset: int, length: int, ports: Sequence[OpenPort], *, growing: bool
    ) -> Export:
        """Memory that holds the file from `offset` on, up to the window's end at most; the caller's until `give_back`.

        `fd` is what the shelf opened for the version just now, and the range, which is not empty, is within the file.
        Some of the ports may not have it. NotExported.
        """
        try:
            if self._nursery is None:
                raise NotExported("nothing is exported by this node now")
            if self.device not in (None, os.fstat(fd).st_dev):
                raise NotExported("the file lies on the disk")
            window = self._window(fd, version, offset, length, growing=growing)
            self._idle.pop(window, None)
            window.users += 1
            try:
                async with window.lock:
                    if not window.regions:
                        await self._make_place()
                    await self._register(window, [each for each in ports if each not in window.regions])
                if window.file.has_left:
                    raise NotExported(_LEAVES)
            except BaseException:
                self.give_back(window)
                raise
        except NotExported as error:
            self.refused[error.reason] += 1
            raise
        self.given += 1
        return window

    def give_back(self, window: Export) -> None:
        """Once for each `give`. What isn't kept is closed soon."""
        window.users -= 1
        if window.users or window.is_closed or window in self._to_close:
            return
        if window.kept and window.regions and not window.file.has_left:
            self._idle[window] = None
        else:
            self._close_soon(window)

    async def close_unless_kept(self, window: Export) -> None:
        """What was given back is not kept on for other connections: wait until it is closed."""
        if window in self._to_close:
            await self._close(window)

    # --- what becomes of the files

    def leave(self, ino: int, version: str = "") -> None:
        """The inode is another version from now on, or none, or is about to be freed: its memory is given back soon.

        The version is not needed: an inode that was exported has one.
        """
        file = self._files.pop(ino, None)
        if file is None:
            return
        file.has_left = True
        self._leaving.add(file)
        file.windows.clear()
        for window in file.open:
            self._close_soon(window)
            if window.queueing is not None:
                window.queueing.cancel()

    async def fence(self, ino: int) -> None:
        """The same, now: when this returns, nothing of the inode is registered or mapped.

        But where a device does not answer: then it is told in the log, and who READs meanwhile may get bytes that are
        no version's. Their memory is given to nobody else until the device does.
        """
        self.leave(ino)
        left = [window for file in self._leaving if file.ino == ino for window in file.open]
        with trio.move_on_after(FENCE_WITHIN_S) as patience:
            for window in left:
                if self._nursery is not None:  # else `run` closes them at its end
                    self._nursery.start_soon(self._close, window)
            for window in left:
                await window.closed.wait()
        if patience.cancelled_caught:
            log.error("memory is still registered %g s after it was to be given back", FENCE_WITHIN_S)

    async def free_tree(self, path: Path) -> None:
        """A file, or all below a directory, is about to be removed: a fence for each inode. OSError; gone already is
        fine."""
        if not self._files and not self._leaving:
            return
        try:
            below = await trio.to_thread.run_sync(_inodes_below, path, limiter=self._closers)
        except FileNotFoundError:
            return
        for ino in below & {file.ino for file in (*self._files.values(), *self._leaving)}:
            await self.fence(ino)

    def look_soon(self) -> None:
        """A file may have been removed: its room comes back now, and not only within `LOOK_EVERY_S`."""
        if self._files:
            self._work.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; nothing is registered any more then."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while True:
                    self._work = trio.Event()
                    await self._round()
                    with trio.move_on_after(LOOK_EVERY_S if self._files else math.inf):
                        await self._work.wait()
        finally:
            self._nursery = None
            # Pages that stay registered would stay locked; each call ends, since the kernel's does.
            with trio.CancelScope(shield=True):
                for ino in list(self._files):
                    self.leave(ino)
                while self._to_close:
                    await self._close(next(iter(self._to_close)))

    # --- inside: closing

    async def _round(self) -> None:
        for file in list(self._files.values()):
            info = os.fstat(file.fd)
            if not info.st_nlink or info.st_size < file.end:
                self.leave(file.ino)
        self._troubled = {port for port in self._troubled if not port.gone}
        gone = {port for port in self.registered if port.gone}
        if gone:
            for window in [each for file in self._files.values() for each in file.open]:
                await self._drop_ports(window, gone)
        while self._to_close:
            await self._close(next(iter(self._to_close)))

    def _close_soon(self, window: Export) -> None:
        """Nobody is given it from now on. It is closed by `_round`, or by who calls `_close` sooner."""
        at = window.start // WINDOW_BYTES
        if window.file.windows.get(at) is window:
            del window.file.windows[at]
        self._idle.pop(window, None)
        self._to_close[window] = None
        self._work.set()

    async def _close(self, window: Export) -> None:
        """What was marked by `_close_soon`. Cancelled before it began it stays marked."""
        async with window.lock:
            if window.is_closed:
                return
            await trio.to_thread.run_sync(window.close, limiter=self._closers)
            window.closed.set()
            self._windows -= 1
            for port in window.regions:
                self._unreserve(port, window)
            window.regions.clear()
            self._to_close.pop(window, None)
            file = window.file
            file.open.discard(window)
            if not file.open:
                self._leaving.discard(file)
                if self._files.get(file.ino) is file:
                    del self._files[file.ino]
                was_removed = not os.fstat(file.fd).st_nlink
                os.close(file.fd)
                if was_removed:
                    self.on_freed()

    async def _drop_ports(self, window: Export, ports: set[OpenPort]) -> None:
        """These are gone; others may go on reading it."""
        async with window.lock:
            left = [each for each in window.regions if each in ports]
            if left and not window.is_closed:
                await trio.to_thread.run_sync(window.deregister, left, limiter=self._closers)
                for port in left:
                    del window.regions[port]
                    self._unreserve(port, window)
        if window in self._idle and not window.regions:
            self._close_soon(window)

    # --- inside: registering

    async def _make_place(self) -> None:
        """For one more, with those that are open already and not about to be closed. NotExported."""
        while self._windows - len(self._to_close) > most_windows():
            oldest = next(iter(self._idle), None)
            if oldest is None:
                raise NotExported(_ALL_IN_USE)
            self._close_soon(oldest)
            await self._close(oldest)

    def _window(self, fd: int, version: str, offset: int, length: int, *, growing: bool) -> Export:
        """Without a checkpoint from the shelf's answer to here, so what leaves afterwards finds the window."""
        info = os.fstat(fd)
        file = self._files.get(info.st_ino)
        sealed = None if growing else (version, info.st_size)
        if file is not None and None not in (sealed, file.sealed) and file.sealed != sealed:
            # It should have left before it became another version.
            log.error("%s has memory of another version registered; it is given back", version)
            self.leave(file.ino)
            file = None
        if file is None:
            file = self._open(fd, info.st_ino)
        file.sealed = file.sealed or sealed
        if growing:
            start = offset - offset % PAGE_BYTES
            window = Export(file, start, offset + length - start, kept=False)
        else:
            at = offset // WINDOW_BYTES
            if at in file.windows:
                return file.windows[at]
            start = at * WINDOW_BYTES
            window = Export(file, start, min(WINDOW_BYTES, info.st_size - start), kept=True)
            file.windows[at] = window
        file.open.add(window)
        self._windows += 1
        return window

    def _open(self, fd: int, ino: int) -> _File:
        try:
            # A mapping that can't be written can't be registered, not even for others to read.
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotExported(f"the file can't be mapped there: {error.strerror}") from None
        self._files[ino] = file = _File(ino, own)
        self._work.set()  # `run` looks at it from now on
        return file

    async def _register(self, window: Export, ports: Sequence[OpenPort]) -> None:
        """The caller has its lock. NotExported where it is with no port."""
        failed: dict[OpenPort, OSError] = {}
        wanted = [each for each in ports if not each.gone]
        for last_try in (False, True):
            failed |= await self._try_register(window, wanted)
            wanted = [port for port, error in failed.items() if error.errno == errno.ENOMEM]
            if last_try or not wanted or not await self._throw_out(wanted):
                break
            for port in wanted:
                del failed[port]
        self._tell(failed)
        self._troubled.difference_update(window.regions)
        if not window.regions:
            if failed:
                number = next(iter(failed.values())).errno or 0
                raise NotExported(f"it can't be registered there: {os.strerror(number)}")
            raise NotExported(_ALL_IN_USE)

    async def _try_register(self, window: Export, ports: Sequence[OpenPort]) -> dict[OpenPort, OSError]:
        """Returns which did not take it. Those for which there is no room are in neither."""
        reserved: list[OpenPort] = []
        try:
            for port in ports:
                if await self._reserve(port, window):
                    reserved.append(port)
            if window.file.has_left:
                raise NotExported(_LEAVES)
            if not reserved:
                return {}
            register = partial(window.register, window.file.fd, reserved, keep_time=window.kept)
            with trio.CancelScope() as window.queueing:
                made, failed = await trio.to_thread.run_sync(register, limiter=self._fabric.threads)
                window.regions.update(made)
                return failed
            raise NotExported(_LEAVES)
        except HasHole:
            raise NotExported("part of it was never written") from None
        except OSError as error:
            raise NotExported(f"the file can't be mapped there: {error.strerror}") from None
        finally:
            window.queueing = None
            for port in reserved:
                if port not in window.regions:
                    self._unreserve(port, window)

    async def _reserve(self, port: OpenPort, window: Export) -> bool:
        """Room for it, for which the windows go that nobody uses; False where all are in use, or the port is gone."""
        while self.registered[port] + window.length > self._most_bytes:
            oldest = next((each for each in self._idle if port in each.regions), None)
            if oldest is None:
                return False
            self._close_soon(oldest)
            await self._close(oldest)
        if port.gone:
            return False
        self.registered[port] += window.length
        self._fabric.keep(port)
        return True

    def _unreserve(self, port: OpenPort, window: Export) -> None:
        self.registered[port] -= window.length
        if not self.registered[port]:
            del self.registered[port]
        self._fabric.release(port)

    async def _throw_out(self, ports: Sequence[OpenPort]) -> bool:
        """The devices took no more. False where nothing of theirs is idle."""
        idle = [each for each in self._idle if any(port in each.regions for port in ports)]
        chosen = idle[: -(-len(idle) // _SHARE_THROWN_OUT)]
        for window in chosen:
            self._close_soon(window)
        for window in chosen:
            await self._close(window)
        return bool(chosen)

    def _tell(self, failed: dict[OpenPort, OSError]) -> None:
        """Once, until it works again."""
        for port, error in failed.items():
            if port not in self._troubled and not port.gone:
                self._troubled.add(port)
                log.warning(
                    "other nodes can't read all of this node's files by RDMA: %s",
                    error.strerror or error,
                    exc_info=error.__cause__,
                )


def most_windows() -> int:
    """As many may be open at a time, of files however small."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_WINDOWS if soft == resource.RLIM_INFINITY else min(MOST_WINDOWS, soft // _DESCRIPTORS_A_WINDOW)


def _inodes_below(path: Path) -> set[int]:
    found = {path.lstat().st_ino}
    pending = [str(path)] if path.is_dir() and not path.is_symlink() else []
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    found.add(entry.inode())
    return found
