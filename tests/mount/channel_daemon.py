"""A small pyfuse3 file system over one directory of a tmpfs, for the tests of the kernel channel.

    python channel_daemon.py FUSE_FD DIRECTORY fresh|takeover KIND PASSTHROUGH

It dies by SIGKILL inside a handler where a file `crash/<operation>` asks for it ("before" or "after" doing the work).
An open of a file whose name ends with "held" waits while `crash/open` says "hold".
"""

# As close to the system calls as pyfuse3 itself.

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys
from pathlib import Path

from mount.channel import Channel
from mount.syscalls import name_to_handle, open_by_handle


def _text_of(order: Path) -> str:
    """An order of the test; "" where there is none. Orders come and go at any moment."""
    try:
        return order.read_text()
    except FileNotFoundError:
        return ""


def main() -> None:
    fuse_fd, base, mode, kind, passthrough = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    channel = Channel(
        fuse_fd,
        base / "channel.state",
        kind=kind,
        passthrough=passthrough == "on",
        resend=True,
        takeover=mode == "takeover",
    )
    import pyfuse3
    import trio

    class Files(pyfuse3.Operations):
        enable_writeback_cache = False

        def __init__(self) -> None:
            super().__init__()
            self.root = str(base / "root")
            self.root_number = os.stat(self.root).st_ino
            self.paths: dict[int, str] = {1: self.root}
            for directory, names, files in os.walk(self.root):
                for name in names + files:
                    path = os.path.join(directory, name)
                    self.paths[os.lstat(path).st_ino] = path

        def reopen(self) -> None:
            root = os.open(self.root, os.O_RDONLY)
            for nodeid, handle, counts in channel.open_nodes():
                if handle:
                    try:
                        fd = open_by_handle(root, handle, os.O_RDWR)
                    except OSError:
                        if counts.opens:
                            raise
                        continue  # its last RELEASE was done, but not answered
                    channel.attach(nodeid, fd, handle)
                    os.close(fd)
            os.close(root)

        def crash(self, operation: str, when: str) -> None:
            order = base / "crash" / operation
            if _text_of(order) == when:
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        async def hold(self, operation: str) -> None:
            order = base / "crash" / operation
            while _text_of(order) == "hold":  # noqa: ASYNC110 - another process ends it
                await trio.sleep(0.005)

        def attributes(self, st: os.stat_result) -> pyfuse3.EntryAttributes:
            e = pyfuse3.EntryAttributes()
            e.st_ino = 1 if st.st_ino == self.root_number else st.st_ino
            e.entry_timeout = e.attr_timeout = 60
            for name in ("mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks"):
                setattr(e, f"st_{name}", getattr(st, f"st_{name}"))
            for name in ("atime", "mtime", "ctime"):
                setattr(e, f"st_{name}_ns", getattr(st, f"st_{name}_ns"))
            return e

        def stat(self, nodeid: int) -> os.stat_result:
            fd = channel.fd(nodeid)
            try:
                return os.fstat(fd) if fd is not None else os.lstat(self.paths[nodeid])
            except (KeyError, FileNotFoundError):
                raise pyfuse3.FUSEError(errno.ESTALE) from None

        def grant(self, nodeid: int, path: str) -> pyfuse3.FileInfo:
            if channel.fd(nodeid) is not None:
                path = f"/proc/self/fd/{channel.fd(nodeid)}"
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                raise pyfuse3.FUSEError(errno.ESTALE) from None
            if os.fstat(fd).st_ino != nodeid:  # another file has the name by now
                os.close(fd)
                raise pyfuse3.FUSEError(errno.ESTALE)
            try:
                channel.attach(nodeid, fd, name_to_handle(fd))
            finally:
                os.close(fd)
            return pyfuse3.FileInfo(fh=nodeid)

        async def getattr(self, inode, ctx=None):
            return self.attributes(self.stat(inode))

        async def lookup(self, parent, name, ctx=None):
            path = os.path.join(self.paths[parent], os.fsdecode(name))
            try:
                st = os.lstat(path)
            except OSError as e:
                raise pyfuse3.FUSEError(e.errno) from None
            self.paths[st.st_ino] = path
            return self.attributes(st)

        async def mkdir(self, parent, name, mode, ctx):
            try:
                os.mkdir(os.path.join(self.paths[parent], os.fsdecode(name)), mode)
            except FileExistsError:
                if not channel.resent("mkdir", parent):
                    raise pyfuse3.FUSEError(errno.EEXIST) from None
            self.crash("mkdir", "after")
            return await self.lookup(parent, name)

        async def create(self, parent, name, mode, flags, ctx):
            self.crash("create", "before")
            path = os.path.join(self.paths[parent], os.fsdecode(name))
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | (flags & os.O_TRUNC), mode))
            attributes = await self.lookup(parent, name)
            info = self.grant(attributes.st_ino, path)
            self.crash("create", "after")
            return info, attributes

        async def open(self, inode, flags, ctx):
            self.crash("open", "before")
            if self.paths[inode].endswith("held"):
                await self.hold("open")
            info = self.grant(inode, self.paths[inode])
            if flags & os.O_TRUNC:
                os.truncate(f"/proc/self/fd/{channel.fd(inode)}", 0)
            self.crash("open", "after")
            return info

        async def setattr(self, inode, attr, fields, fh, ctx):
            fd = channel.fd(inode)
            target = fd if fd is not None else self.paths[inode]
            if fields.update_size:
                os.truncate(target, attr.st_size)
            if fields.update_mode:
                os.chmod(target, stat.S_IMODE(attr.st_mode))
            return self.attributes(self.stat(inode))

        async def opendir(self, inode, ctx):
            return inode

        async def readdir(self, inode, offset, token):
            for k, name in enumerate(sorted(os.listdir(self.paths[inode]))):
                if k >= offset:
                    attributes = await self.lookup(inode, os.fsencode(name))
                    if not pyfuse3.readdir_reply(token, os.fsencode(name), attributes, k + 1):
                        break

        async def unlink(self, parent, name, ctx):
            path = os.path.join(self.paths[parent], os.fsdecode(name))
            try:
                number = os.lstat(path).st_ino
                if channel.handles(number).opens:
                    # without passthrough nobody but this process holds the file: keep a name over its death
                    with contextlib.suppress(FileExistsError):
                        os.link(path, base / "kept" / str(number))
                os.unlink(path)
            except FileNotFoundError:
                if not channel.resent("unlink", parent):
                    raise pyfuse3.FUSEError(errno.ENOENT) from None
            self.crash("unlink", "after")

        async def getxattr(self, inode, name, ctx):
            if name == b"user.test.channel":
                nodes = {n: tuple(h) for n, _, h in channel.open_nodes()}
                info = channel.info()
                return json.dumps(
                    {
                        "pid": os.getpid(),
                        "open": nodes,
                        "kind": info.kind,
                        "passthrough": info.passthrough,
                        "resend": info.resend,
                        "proto": info.proto,
                        "reason": info.reason,
                        "takeover_active": channel.takeover_active(),
                        "counters": channel.counters(),
                    }
                ).encode()
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

        async def flush(self, fh):
            self.crash("flush", "before")

        async def fsync(self, fh, datasync):
            self.crash("fsync", "before")

        async def release(self, fh):
            self.crash("release", "before")
            if not channel.handles(fh).opens:
                (base / "kept" / str(fh)).unlink(missing_ok=True)

        async def access(self, inode, mode, ctx):
            return True

    files = Files()
    files.reopen()
    pyfuse3.init(files, channel.device(), set())
    trio.run(pyfuse3.main)


if __name__ == "__main__":
    main()
