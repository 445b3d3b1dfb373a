"""Node ids of the kernel and the backing files they stand for.

A node id is the inode number of the backing file (a tmpfs never uses one twice while it is mounted), and 1 is the
root of what the mount shows. A node is held by an O_PATH descriptor, so the kernel itself follows it through renames,
also of the directories above it: its path is what /proc/self/fd says. Where no descriptor is held (a listing names
thousands of files, a new daemon knows none) the node has only a hint, directory and name, which is checked by
inode number when it is used; a hint that is wrong or missing is looked for by a scan of the whole tier.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

ROOT = 1
# The tier's own directory, in hints. Not its inode number: that is 1 on a tmpfs, as the root's node id is.
_TOP = 0
_DELETED = b" (deleted)"
_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# A scan costs about 1 ms per thousand files; ids that can't be found must not make every request pay for one.
_SCAN_AT_MOST_EVERY_S = 1.0


def raise_descriptor_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit and return it: the daemon holds a descriptor per node in use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


class Node:
    """One node the kernel may know. `fd` is -1 where none is held; `where` is the last known (directory, name)."""

    __slots__ = ("fd", "last_stat", "lookups", "nodeid", "pinned", "where")

    def __init__(self, nodeid: int, where: tuple[int, bytes] | None, fd: int = -1) -> None:
        self.nodeid = nodeid
        self.where = where
        self.fd = fd
        self.lookups = 0
        self.pinned = False  # has no name any more, so the descriptor is the only way to it
        self.last_stat: os.stat_result | None = None  # of a file that is gone; see `let_go`


class NodeTable:
    """The nodes of one mount. Not for use from more than one thread.

    `top` is the tier's directory, `root` what the mount shows, inside it. At most `budget` descriptors are held;
    beyond that the longest unused are closed and found again by their hints.
    """

    def __init__(self, top: Path, root: Path, *, budget: int | None = None) -> None:
        self._top = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._prefix = os.fsencode(os.path.realpath(root))
        self._root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.root_ino = os.fstat(self._root_fd).st_ino
        self._nodes: dict[int, Node] = {}
        self._held: OrderedDict[int, Node] = OrderedDict()
        self._budget = budget or max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 8 // 10)
        self._hints: dict[int, tuple[int, bytes]] = {}
        self._scanned_at: float | None = None
        self._root_node = Node(ROOT, None, self._root_fd)
        self._nodes[ROOT] = self._root_node

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def descriptors(self) -> int:
        """How many descriptors are held."""
        return len(self._held)

    @property
    def mount_fd(self) -> int:
        """A descriptor on the tier's file system, for `open_by_handle`."""
        return self._top

    def nodeid(self, st: os.stat_result) -> int:
        return ROOT if st.st_ino == self.root_ino else st.st_ino

    # -- from node id to file

    def fd(self, nodeid: int) -> int:
        """An O_PATH descriptor of the node, owned by the table. ESTALE when the node can't be found."""
        if nodeid == ROOT:
            return self._root_fd
        node = self._nodes.get(nodeid)
        if node is not None and node.fd >= 0:
            self._held.move_to_end(nodeid)
            return node.fd
        return self._find(nodeid, node)

    def proc(self, nodeid: int) -> str:
        """A path that means exactly this inode, whatever its name is now. Also right for a symbolic link itself."""
        return f"/proc/self/fd/{self.fd(nodeid)}"

    def stat(self, nodeid: int) -> os.stat_result:
        node = self._nodes.get(nodeid)
        if node is not None and node.last_stat is not None:
            return node.last_stat
        return os.fstat(self.fd(nodeid))

    def path(self, nodeid: int) -> str | None:
        """The path below the root (the root is ""), or None when it has no name there (unlinked, or moved aside)."""
        if nodeid == ROOT:
            return ""
        fd = self.fd(nodeid)
        path = _name_of(fd)
        if path.endswith(_DELETED) and not _is_same(path, nodeid):
            # Unlinked by the name it was looked up by; another hard link may be left.
            found = self._search(nodeid) if os.fstat(fd).st_nlink else None
            if found is None:
                return None
            path = found
        if not path.startswith(self._prefix + b"/"):
            return None
        return os.fsdecode(path[len(self._prefix) + 1 :])

    # -- what the kernel says

    def lookup(self, directory: int, name: bytes) -> tuple[Node, os.stat_result]:
        """Open the entry and count the lookup."""
        fd = os.open(name, _OPEN, dir_fd=self.fd(directory))
        try:
            st = os.fstat(fd)
            nodeid = self.nodeid(st)
        except BaseException:
            os.close(fd)
            raise
        node = self._nodes.get(nodeid)
        if node is None:
            node = self._nodes[nodeid] = Node(nodeid, (directory, name))
        if node.fd >= 0:
            # Keep the descriptor that carries the newest name: hard links have several, one may be gone.
            os.close(node.fd)
            self._held.pop(nodeid, None)
        node.where = (directory, name)
        node.pinned = False
        node.last_stat = None
        self._hold(node, fd)
        node.lookups += 1
        return node, st

    def listed(self, nodeid: int, directory: int, name: bytes) -> None:
        """A listing named this node, which counts as a lookup. No descriptor is opened for it."""
        node = self._nodes.get(nodeid)
        if node is None:
            node = self._nodes[nodeid] = Node(nodeid, (directory, name))
        node.lookups += 1

    def forget(self, nodeid: int, lookups: int) -> int:
        """The kernel gave back `lookups`. Returns a descriptor for the caller to close once it gave back all, or -1."""
        node = self._nodes.get(nodeid)
        if node is None or nodeid == ROOT:
            return -1
        node.lookups -= lookups
        # After a takeover fewer lookups are known than the kernel counted; it gives them back all at once.
        if node.lookups > 0:
            return -1
        del self._nodes[nodeid]
        self._held.pop(nodeid, None)
        return node.fd

    def losing_name(self, directory: int, name: bytes) -> Node | None:
        """The entry is about to be unlinked or replaced: hold its node by a descriptor.

        The kernel knows the node, since it looks an entry up before it asks to remove it.
        """
        try:
            st = os.stat(name, dir_fd=self.fd(directory), follow_symlinks=False)
        except FileNotFoundError:
            return None
        node = self._nodes.get(st.st_ino)
        if node is None:
            node = self._nodes[st.st_ino] = Node(st.st_ino, (directory, name))
        self.fd(st.st_ino)
        return node

    def knows(self, nodeid: int) -> bool:
        """The kernel may know this node."""
        return nodeid in self._nodes

    def check_name(self, nodeid: int) -> None:
        """The node lost a name: if that was the last, only the descriptor leads to it from now on."""
        node = self._nodes.get(nodeid)
        if node is not None and node.fd >= 0:
            node.pinned = os.fstat(node.fd).st_nlink == 0

    def is_nameless(self, nodeid: int) -> bool:
        node = self._nodes.get(nodeid)
        return node is not None and node.pinned

    def let_go(self, nodeid: int) -> int:
        """Give up the descriptor of a nameless file that nobody has open, so that its room is free at once.

        Returns the descriptor for the caller to close (which frees the room, and so can take a while), or -1. The
        kernel may still ask for its attributes (a program holds it by O_PATH): the last ones are kept.
        """
        node = self._nodes.get(nodeid)
        if node is None or node.fd < 0 or not node.pinned:
            return -1
        node.last_stat = os.fstat(node.fd)
        node.pinned = False
        fd, node.fd = node.fd, -1
        del self._held[nodeid]
        return fd

    def moved(self, directory: int, name: bytes, st: os.stat_result) -> None:
        """A rename put this inode under this name."""
        nodeid = self.nodeid(st)
        node = self._nodes.get(nodeid)
        if node is not None:
            node.where = (directory, name)
        if nodeid in self._hints:
            self._hints[nodeid] = (directory, name)

    def adopt(self, nodeid: int, fd: int) -> None:
        """Hold an unlinked node by this descriptor (opened by handle after a takeover), which the table now owns."""
        node = self._nodes.setdefault(nodeid, Node(nodeid, None))
        if node.fd >= 0:
            os.close(fd)
            return
        node.pinned = True
        self._hold(node, fd)

    def close(self) -> None:
        for node in list(self._held.values()):
            os.close(node.fd)
        self._held.clear()
        self._nodes.clear()
        os.close(self._root_fd)
        os.close(self._top)

    # -- inside

    def _hold(self, node: Node, fd: int) -> None:
        node.fd = fd
        self._held[node.nodeid] = node
        if len(self._held) > self._budget:
            self._shed()

    def _shed(self) -> None:
        """Close the longest unused eighth of the descriptors, so that this is rare."""
        wanted = len(self._held) - self._budget * 7 // 8
        newest = next(reversed(self._held))
        for node in [n for n in self._held.values() if not n.pinned and n.nodeid != newest][:wanted]:
            del self._held[node.nodeid]
            os.close(node.fd)
            node.fd = -1

    def _find(self, nodeid: int, node: Node | None) -> int:
        where = node.where if node is not None else self._hints.get(nodeid)
        fd = self._open_hint(nodeid, where)
        if fd < 0:
            self._scan()
            fd = self._open_hint(nodeid, self._hints.get(nodeid))
        if fd < 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if node is None:
            node = self._nodes.setdefault(nodeid, Node(nodeid, self._hints.get(nodeid)))
        self._hold(node, fd)
        return fd

    def _open_hint(self, nodeid: int, where: tuple[int, bytes] | None) -> int:
        if where is None:
            return -1
        directory, name = where
        try:
            parent = self._top if directory == _TOP else self.fd(directory)
            fd = os.open(name, _OPEN, dir_fd=parent)
        except OSError:
            return -1
        if os.fstat(fd).st_ino == nodeid:
            return fd
        os.close(fd)
        return -1

    def _search(self, nodeid: int) -> bytes | None:
        """A path of the inode by a scan made now."""
        self._scan(at_once=True)
        fd = self._open_hint(nodeid, self._hints.get(nodeid))
        if fd < 0:
            return None
        node = self._nodes[nodeid]
        if node.fd >= 0:
            os.close(node.fd)
        node.where = self._hints[nodeid]
        self._hold(node, fd)
        return _name_of(fd)

    def _scan(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and self._scanned_at is not None and now - self._scanned_at < _SCAN_AT_MOST_EVERY_S:
            return
        self._scanned_at = now
        hints: dict[int, tuple[int, bytes]] = {}
        for ino, directory, name in self._walk():
            # What the mount shows comes first: a file may also be kept, as a hard link, in an old generation.
            hints.setdefault(ino, (directory, name))
        self._hints = hints

    def _walk(self) -> Iterator[tuple[int, int, bytes]]:
        """Every entry of the tier, as (inode, directory's node, name): below the root first, then the rest."""
        shown = os.path.relpath(self._prefix, os.readlink(b"/proc/self/fd/%d" % self._top))  # noqa: PTH115
        yield from self._walk_from([(shown, ROOT)], skipped=b"")
        yield from self._walk_from([(b".", _TOP)], skipped=b"./" + shown)

    def _walk_from(self, pending: list[tuple[bytes, int]], *, skipped: bytes) -> Iterator[tuple[int, int, bytes]]:
        while pending:
            path, directory = pending.pop()
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._top)
            except OSError:
                continue  # removed meanwhile
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        name = os.fsencode(entry.name)
                        yield entry.inode(), directory, name
                        below = path + b"/" + name
                        if entry.is_dir(follow_symlinks=False) and below != skipped:
                            pending.append((below, entry.inode()))
            finally:
                os.close(fd)


def _name_of(fd: int) -> bytes:
    return os.readlink(b"/proc/self/fd/%d" % fd)  # noqa: PTH115 - a name need not be valid text


def _is_same(path: bytes, ino: int) -> bool:
    try:
        return os.lstat(path).st_ino == ino
    except OSError:
        return False
