"""The file system as the kernel sees it: one method for each request, on the tree of the RAM tier.

A file of the mount is a file of the tier under the same relative path, so most requests are one system call on the
backing file, and what it answers is the answer. What is added: the caller becomes the owner of what it makes, steps are
told what happens (`StepTracker`), the tier learns which shards grow, and a request that the kernel sends again after
the daemon was replaced finds its own work done and says so.

File handles are node ids, for files and for directories. This module holds no state that a new daemon could not
make again from the tier and the channel. `docs/semantics.md` says what each call promises.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyfuse3

from mount import syscalls, xattrs
from mount.answers import answered
from mount.attributes import entry_of, set_owner_and_mode, set_times, statfs_of
from mount.listings import DOT, DOTDOT, Listings
from mount.nodes import ROOT, NodeTable
from mount.open_files import OpenFiles, is_writing
from mount.replays import Replays
from mount.stub_files import StubFiles
from mount.wishes import Wishes

if TYPE_CHECKING:
    from mount.channel import Channel
    from tierfs.hydrate.hydration import Hydration
    from tierfs.ram.tier import RamTier
    from tierfs.steps.events import StepTracker


@answered
class TierFs(pyfuse3.Operations):
    """Request handlers of one mount. pyfuse3 calls them all from one thread."""

    supports_dot_lookup = False

    def __init__(
        self,
        tier: RamTier,
        channel: Channel,
        tracker: StepTracker,
        *,
        hydration: Hydration | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        super().__init__()
        self.log = log or logging.getLogger("tierfs.mount")
        self.tier = tier
        self.channel = channel
        self.tracker = tracker
        self.nodes = NodeTable(tier.path, tier.root)
        self._listings = Listings()
        self._files = OpenFiles(self.nodes, channel, tier, self.log)
        self._stubs = StubFiles(hydration, self.nodes, self._files, channel, tier, self.log)
        self._replays = Replays(self.nodes, channel)
        self._wishes = Wishes(self.nodes, self._files, self._stubs, tier, tracker)
        tracker.invalidate = self.invalidate
        os.umask(0)

    # -- for the daemon

    def resume_open_files(self) -> None:
        """After a takeover, before the first request: attach again what programs have open."""
        self._files.resume(self._stubs)

    def invalidate(self, directory: str, name: str) -> None:
        """The entry was changed behind the kernel's back. Returns at once; safe inside a request."""
        try:
            nodeid = self.nodes.nodeid(os.stat(self.tier.root / directory, follow_symlinks=False))
        except OSError:
            return  # the directory is gone, and the kernel with it forgot the entry
        pyfuse3.invalidate_entry_async(nodeid, os.fsencode(name), ignore_enoent=True)
        with suppress(OSError):  # ENOENT: the kernel does not know the directory
            pyfuse3.invalidate_inode(nodeid, attr_only=True)
        with suppress(OSError):  # who is at work in it, or has it open, sees its mode, owner and time too
            entry = os.stat(self.tier.root / directory / name, follow_symlinks=False)
            pyfuse3.invalidate_inode(self.nodes.nodeid(entry), attr_only=True)

    def close(self) -> None:
        self.nodes.close()

    # -- names

    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        rel = self._rel(parent_inode, name)
        if rel is not None and self.tracker.before_lookup(rel, ctx.pid):
            await self.tracker.populate(rel, listing=False)
        node, st = self.nodes.lookup(parent_inode, name)
        self._stubs.has_name(node.nodeid)
        return self._entry(st)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for nodeid, lookups in inode_list:
            if nodeid in self._files.growing and not self.channel.handles(nodeid).writers:
                # Its writer was killed while the daemon was being replaced, so no RELEASE came.
                self._end_writing(nodeid)
            fd = self.nodes.forget(nodeid, lookups)
            self._stubs.forgotten(nodeid)
            if fd >= 0:
                await self._files.close(fd)

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if (rel := self._rel(parent_inode, name)) is not None:
            await self.tracker.before_mkdir(rel, mode, ctx.uid, ctx.gid)
        try:
            os.mkdir(name, stat.S_IMODE(mode), dir_fd=self.nodes.fd(parent_inode))
        except FileExistsError:
            self._replays.must_be_own("mkdir", parent_inode, name, stat.S_IFDIR)
        return self._born(parent_inode, name, mode, ctx)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        try:
            os.mknod(name, mode, rdev, dir_fd=self.nodes.fd(parent_inode))
        except FileExistsError:
            self._replays.must_be_own("mknod", parent_inode, name, stat.S_IFMT(mode) or stat.S_IFREG)
        return self._born(parent_inode, name, mode, ctx)

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        try:
            os.symlink(target, name, dir_fd=self.nodes.fd(parent_inode))
        except FileExistsError:
            self._replays.must_be_own("symlink", parent_inode, name, stat.S_IFLNK)
        return self._born(parent_inode, name, 0o777, ctx)

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        await self.tracker.before_link(self.nodes.path(inode), self._rel(new_parent_inode, new_name), inode)
        try:
            os.link(self.nodes.proc(inode), new_name, dst_dir_fd=self.nodes.fd(new_parent_inode))
        except FileExistsError:
            self._replays.must_be_own("link", new_parent_inode, new_name, None)
        node, st = self.nodes.lookup(new_parent_inode, new_name)
        self._tell_created(self._rel(new_parent_inode, new_name), node.nodeid, ctx.pid)
        return self._entry(st)

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return os.readlink(b"", dir_fd=self.nodes.fd(inode))

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        rel = self._rel(parent_inode, name)
        if rel is not None:
            await self.tracker.before_unlink(rel, ctx.pid)
        victim = self.nodes.losing_name(parent_inode, name)
        self._files.keep(victim)
        try:
            os.unlink(name, dir_fd=self.nodes.fd(parent_inode))
        except FileNotFoundError:
            if rel is not None and self.tracker.is_out_of_sight(rel):
                return  # the kernel hears of that a moment later, and DCP removes the old marker where it sees one
            if not self._replays.resent("unlink", parent_inode):
                raise
        if victim is not None:
            self.nodes.check_name(victim.nodeid)
        if rel is not None:
            self.tracker.after_unlink(rel)
        if victim is not None:
            await self._files.free(victim.nodeid)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        rel = self._rel(parent_inode, name)
        if rel is not None and self.tracker.before_rmdir(rel):
            await self.tracker.populate(rel, listing=True)
        victim = self.nodes.losing_name(parent_inode, name)
        try:
            os.rmdir(name, dir_fd=self.nodes.fd(parent_inode))
        except FileNotFoundError:
            if not self._replays.resent("rmdir", parent_inode):
                raise
        if victim is not None:
            self.nodes.check_name(victim.nodeid)
        if rel is not None:
            self.tracker.after_rmdir(rel)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        if flags & ~(syscalls.RENAME_NOREPLACE | syscalls.RENAME_EXCHANGE):
            raise pyfuse3.FUSEError(errno.EINVAL)
        old, new = self._rel(parent_inode_old, name_old), self._rel(parent_inode_new, name_new)
        victim = None
        if not self._replays.was_renamed(parent_inode_old, name_old, parent_inode_new, name_new, flags):
            if old is not None and new is not None:
                await self.tracker.before_rename(old, new, flags, ctx.pid)
            if not flags & syscalls.RENAME_EXCHANGE:
                victim = self.nodes.losing_name(parent_inode_new, name_new)
                self._files.keep(victim)
            self._replays.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)
        self._note_moved(parent_inode_new, name_new)
        if flags & syscalls.RENAME_EXCHANGE:
            self._note_moved(parent_inode_old, name_old)
            self._replays.forget_exchange(parent_inode_new, name_new)
        if victim is not None:
            self.nodes.check_name(victim.nodeid)
        if old is not None and new is not None:
            self.tracker.after_rename(old, new, flags, ctx.pid)
        if victim is not None:
            await self._files.free(victim.nodeid)
        if new is not None:
            await self.tracker.wait_for_level(new)

    # -- attributes

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._entry(self._files.stat(inode))

    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if fields.update_size:
            if attr.st_size:
                await self._stubs.before_change(inode)
            if fh is None:
                rel = self.nodes.path(inode)
                is_kept = rel is None and self._files.links(self.nodes.stat(inode)) > 0  # in an old generation
                if is_kept or (rel is not None and await self.tracker.before_truncate(rel, ctx.pid)):
                    raise pyfuse3.FUSEError(errno.ESTALE)
                await self._stubs.empty(inode, rel)
            await self._files.truncate(inode, attr.st_size, privileged=ctx.uid == 0)
        path = self.nodes.proc(inode)
        set_owner_and_mode(path, attr, fields)
        if fields.update_atime or fields.update_mtime:
            await self.tier.before_times_are_set(inode)
            before = self.nodes.stat(inode)
            set_times(path, attr, fields)
            if fields.update_mtime:
                self._stubs.times_set(inode)
                self.tracker.times_set(self._path_or_none(inode), before, self.nodes.stat(inode))
        if fields.update_uid or fields.update_gid or fields.update_mode or fields.update_mtime:
            self.tracker.attributes_set(self._path_or_none(inode))
        return self._entry(self.nodes.stat(inode))

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if not xattrs.is_virtual(name):
            return xattrs.get(self.nodes, inode, name)
        return self._wishes.get(inode, os.fsdecode(name))

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        if xattrs.is_virtual(name):
            await self._wishes.put(inode, os.fsdecode(name), value)
        else:
            xattrs.put(self.nodes, inode, name, value)
        if name.startswith(b"system."):  # an access control list, which sets the mode: `cp -a` does it so
            self.tracker.attributes_set(self._path_or_none(inode))

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return xattrs.names(self.nodes, inode)

    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        xattrs.remove(self.nodes, inode, name)

    # -- files

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        how = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        if (wanted := self._rel(parent_inode, name)) is not None:
            await self.tracker.before_create(wanted, ctx.pid, exclusive=bool(flags & os.O_EXCL))
        try:
            fd = os.open(name, how, stat.S_IMODE(mode), dir_fd=self.nodes.fd(parent_inode))
        except FileExistsError:
            fd = self._replays.open_own_creation(parent_inode, name, flags)
        try:
            node, st = self.nodes.lookup(parent_inode, name)
            try:
                st = self._own(node.nodeid, st, parent_inode, mode, ctx)
                rel = self._rel(parent_inode, name)
                if rel is not None:
                    self.tracker.created(rel, ctx.pid)
                if is_writing(flags):
                    await self._reserve(rel, fd)
                    self._begin_writing(rel, node.nodeid, fd, ctx.pid)
                self._files.attach(node.nodeid, fd)
            except BaseException:
                self._end_writing(node.nodeid)
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.nodes.fd(parent_inode))
                self._uncount(node.nodeid)
                raise
        finally:
            os.close(fd)
        return pyfuse3.FileInfo(fh=node.nodeid), self._entry(st)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        changing = is_writing(flags) or bool(flags & os.O_TRUNC)
        self._stubs.refuse_replaced(inode)
        if not changing and self._stubs.open(inode):
            return pyfuse3.FileInfo(fh=inode)
        rel = self.nodes.path(inode) if changing else None
        if changing and rel is None and self._files.links(self.nodes.stat(inode)):
            # Kept in an old generation, which nothing may change: under its name there is another inode now.
            raise pyfuse3.FUSEError(errno.ESTALE)
        if changing and not flags & os.O_TRUNC:
            await self._stubs.before_change(inode)
        if rel is not None and await self.tracker.before_write_open(rel, ctx.pid, truncate=bool(flags & os.O_TRUNC)):
            raise pyfuse3.FUSEError(errno.ESTALE)
        if flags & os.O_TRUNC:
            await self._stubs.empty(inode, rel)
            await self._files.truncate(inode, 0, privileged=ctx.uid == 0)
            if is_writing(flags) and inode not in self._files.growing:
                with self._files.backing(inode) as backing:
                    await self._reserve(rel, backing)
        # No checkpoint from here to the answer: a release of another handle must not detach the file in between.
        fd = self.channel.fd(inode)
        opened = -1 if fd is not None else self._files.open_backing(inode, flags)
        try:
            if is_writing(flags):
                self._begin_writing(rel, inode, opened if fd is None else fd, ctx.pid)
            if opened >= 0:
                self._files.attach(inode, opened)
        except BaseException:
            self._end_writing(inode)
            raise
        finally:
            if opened >= 0:
                os.close(opened)
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Only where neither the kernel nor the channel reads the backing file itself."""
        fd = self.channel.fd(fh)
        return await self._stubs.read(fh, off, size) if fd is None else os.pread(fd, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Only where neither the kernel nor the channel writes the backing file itself."""
        fd, written = self._attached(fh), 0
        view = memoryview(buf)
        while written < len(buf):
            written += os.pwrite(fd, view[written:], off + written)
        return written

    async def flush(self, fh: int) -> None:
        if self.channel.handles(fh).writers:
            await self.tracker.flushed(self._path_or_none(fh) or "", fh)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """The RAM tier has no slower place to write to; `durability.fsync` says what else is waited for."""
        await self.tracker.synced(self._path_or_none(fh) or "", fh)

    async def release(self, fh: int) -> None:
        # Before any checkpoint, so that a rename that follows a close finds the file closed.
        self._end_writing(fh)
        self._stubs.released(fh)
        await self._files.free(fh)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        return statfs_of(self.tier.usage())

    # -- directories

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        rel = self.nodes.path(inode)
        if rel is not None and self.tracker.before_listing(rel):
            await self.tracker.populate(rel, listing=True)
        return inode

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        fd = self.nodes.fd(fh)
        rel = self.nodes.path(fh)
        for place, name in ((DOT, b"."), (DOTDOT, b"..")):
            # The parent of the root is not ours to show.
            if start_id < place and not pyfuse3.readdir_reply(
                token, name, self._entry(os.stat(b"." if fh == ROOT else name, dir_fd=fd)), place
            ):
                return
        for place, name in self._listings.after(fh, fd, start_id):
            if rel is not None and self.tracker.hidden(rel, os.fsdecode(name)):
                continue
            try:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not pyfuse3.readdir_reply(token, name, self._entry(st), place):
                return
            self.nodes.listed(self.nodes.nodeid(st), fh, name)

    async def releasedir(self, fh: int) -> None:
        self._listings.drop(fh)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Names are as durable as the tier the moment they are made."""

    # -- inside

    def _rel(self, directory: int, name: bytes) -> str | None:
        """Where the entry is below the root; None inside a directory that was removed or moved aside."""
        path = self.nodes.path(directory)
        if path is None:
            return None
        return f"{path}/{os.fsdecode(name)}" if path else os.fsdecode(name)

    def _path_or_none(self, nodeid: int) -> str | None:
        try:
            return self.nodes.path(nodeid)
        except OSError:
            return None

    def _entry(self, st: os.stat_result) -> pyfuse3.EntryAttributes:
        nodeid = self.nodes.nodeid(st)
        return entry_of(
            st,
            nodeid,
            links=self._files.links(st),
            mtime_ns=self._stubs.mtime_ns(st),
            is_growing=nodeid in self._files.growing,
        )

    def _born(self, directory: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Something new has this name: it gets its owner, the kernel its attributes, the tracker the news."""
        node, st = self.nodes.lookup(directory, name)
        try:
            st = self._own(node.nodeid, st, directory, mode, ctx)
        except BaseException:
            self._uncount(node.nodeid)
            raise
        self._tell_created(self._rel(directory, name), node.nodeid, ctx.pid)
        return self._entry(st)

    def _own(
        self, nodeid: int, st: os.stat_result, directory: int, mode: int, ctx: pyfuse3.RequestContext
    ) -> os.stat_result:
        """Make the caller the owner. In a set-group-ID directory the group is the directory's, as the tmpfs did."""
        gid = ctx.gid
        if st.st_gid != gid and self.nodes.stat(directory).st_mode & stat.S_ISGID:
            gid = st.st_gid
        if (st.st_uid, st.st_gid) == (ctx.uid, gid):
            return st
        path = self.nodes.proc(nodeid)
        os.chown(path, ctx.uid, gid)
        if mode & (stat.S_ISUID | stat.S_ISGID) and not stat.S_ISDIR(st.st_mode):
            os.chmod(path, stat.S_IMODE(mode))  # noqa: PTH101 - chown took these bits away
        return self.nodes.stat(nodeid)

    def _tell_created(self, rel: str | None, nodeid: int, pid: int) -> None:
        if rel is None:
            return
        try:
            self.tracker.created(rel, pid)
        except BaseException:
            self._uncount(nodeid)  # the kernel gets an error, not an entry
            raise

    def _uncount(self, nodeid: int) -> None:
        fd = self.nodes.forget(nodeid, 1)
        if fd >= 0:
            os.close(fd)

    def _attached(self, fh: int) -> int:
        fd = self.channel.fd(fh)
        if fd is None:
            raise pyfuse3.FUSEError(errno.EBADF)
        return fd

    async def _reserve(self, rel: str | None, fd: int) -> None:
        """Room for a file that starts empty, before its writer gets it."""
        if rel is not None:
            await self.tier.reserve(fd, self.tracker.expected_size(rel), likely_large=self.tracker.is_likely_large(rel))

    def _begin_writing(self, rel: str | None, nodeid: int, fd: int, pid: int) -> None:
        expected_bytes = None if rel is None else self.tracker.expected_size(rel)
        likely_large = rel is not None and expected_bytes is None and self.tracker.is_likely_large(rel)
        self._files.begin_writing(nodeid, fd, expected_bytes, likely_large=likely_large)
        if rel is not None:
            self.tracker.opened_for_write(rel, nodeid, pid)

    def _end_writing(self, nodeid: int) -> None:
        if self._files.ended_writing(nodeid):
            self.tracker.writer_closed(self._path_or_none(nodeid), nodeid)

    def _note_moved(self, directory: int, name: bytes) -> None:
        with suppress(OSError):
            self.nodes.moved(directory, name, os.stat(name, dir_fd=self.nodes.fd(directory), follow_symlinks=False))
