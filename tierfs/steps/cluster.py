"""What the steps and the mount of this node tell the cluster, and what they ask of it.

`Cluster` is the boundary between `tierfs.steps` and `mount`, which know this node's tree, and `tierfs.cluster`,
which knows the other nodes. `Alone` is a node without others: the embedded catalogue, where the manifests in the RAM
tier say all. All calls come from the trio thread and return at once, unless they are `async`. Paths are relative to
the mount's root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from tierfs.steps.markers import MarkerContent
    from tierfs.steps.record import StepRecord

#: What became of a commit that was asked for. `agreed`: the step is complete everywhere. `alone`: all that it names
#: is this node's, but the catalogue can't be reached; complete here, published later. `pending`: files of other nodes
#: are not known to be sealed, and can't be asked for; the step stays writing and is judged again with the next news.
Agreement = Literal["agreed", "alone", "pending"]


class Cluster(Protocol):
    """Told by the file system, the tracker and the registry."""

    @property
    def shares(self) -> bool:
        """Other nodes may write into the same steps, so what is here is not all there is."""
        ...

    # --- names: the mount's requests

    async def make_directory(self, rel: str, mode: int, uid: int, gid: int) -> None:
        """Before mkdir(2) of it here. FileExistsError where the cluster has that name: it is shown here by then."""
        ...

    async def claim(self, rel: str) -> None:
        """Before a file is made with O_EXCL. FileExistsError where another node has that name."""
        ...

    def may_have(self, rel: str) -> bool:
        """A lookup found nothing here under `rel`: True where `show` has to be asked before that is the answer."""
        ...

    async def show(self, rel: str) -> None:
        """Make what the cluster has under `rel`, as of now, if it has anything; returns once it is there.

        Bounded in time; with the catalogue away, what is known shows. Raises OSError, TierfsError.
        """
        ...

    async def show_listing(self, rel: str) -> None:
        """The same for everything in the directory `rel`, before it is listed (or removed)."""
        ...

    def made(self, rel: str) -> None:
        """Something that is no file was made or got this name: a directory by a rename, a symbolic link."""
        ...

    def gone(self, rel: str) -> None:
        """The name was removed here by a program (unlink, rmdir)."""
        ...

    async def before_move(self, old: str, new: str) -> None:
        """Before a rename of a directory, or of a file out of its step: it is published, so others make it too.

        OSError (EBUSY, EXDEV) where that can't be done now."""
        ...

    def moved(self, old: str, new: str) -> None:
        """The rename was made here."""
        ...

    # --- files

    def opened(self, rel: str, ino: int) -> None:
        """A file was opened for writing: it grows from now on."""
        ...

    async def before_write(self, rel: str, ino: int) -> None:
        """Before a file is opened for writing or truncated: its version is no longer what the cluster has of it.

        Returns once that is known to the catalogue, or the catalogue can't be reached.
        """
        ...

    def sealed(self, rel: str, ino: int) -> None:
        """A file was closed by its last writer, or came to this name whole: it is published."""
        ...

    async def flushed(self, rel: str, ino: int) -> None:
        """A file outside of steps may be closed for good: as it is now, it is published when this returns (bounded)."""
        ...

    def attributes_set(self, rel: str) -> None:
        """The mode or owner of what is there was set."""
        ...

    async def wait_file_replicated(self, rel: str, ino: int) -> None:
        """Until as many nodes as `replicas` says hold the file's bytes as they are now (fsync), or it is gone."""
        ...

    # --- steps

    async def agree(
        self,
        record: StepRecord,
        marker: str | None,
        content: MarkerContent | None,
        marker_at: str | None,
        *,
        patient: bool = True,
    ) -> Agreement:
        """Before the step is complete here: all that the marker names is sealed somewhere, and the commit is made.

        `marker` is its path inside the step once it is in place, `marker_at` where it lies now; `content` what it
        names (None: every file that is there). Waits for files that are just being sealed, `cluster.wait_s` at most;
        not `patient`: hardly, since it will be asked again.
        Once agreed, all of the step's files are shown here. CommitRefused where something is missing for good.
        """
        ...

    def completed(self, record: StepRecord) -> None:
        """The step is complete here (after `agree`, or by what another node committed)."""
        ...

    def changed(self, record: StepRecord) -> None:
        """What this node has in the step is another: sealed, added, renamed, removed, or the overwrite given up."""
        ...

    def removed(self, record: StepRecord) -> None:
        """A program removed the step: it goes everywhere."""
        ...

    def retire(self, record: StepRecord) -> bool:
        """The step's room is needed and nothing else has its bytes: it goes everywhere. False where that may not be
        done now (it is not this node's to decide, or the catalogue is away)."""
        ...

    def evicted(self, record: StepRecord) -> None:
        """The step's files became stubs here: copies that have no name in it go too."""
        ...

    # --- asked

    def room_for_next(self, record: StepRecord) -> int:
        """Bytes of this node's RAM that a next step like this one will take, copies for other nodes included."""
        ...

    def owns(self, record: StepRecord, inner: str) -> bool:
        """This node is the one to send the file to the object tier."""
        ...

    def is_readable(self, record: StepRecord) -> bool:
        """Every file of the complete step has a holder now, as far as is known."""
        ...

    def may_leave_ram(self, record: StepRecord) -> bool:
        """Something that outlives this node's copies holds the step as it is, so that they may become stubs."""
        ...

    def ram_bytes(self, record: StepRecord) -> int | None:
        """Bytes of the step in this node's RAM, copies that have no name yet included; None: what the manifest says."""
        ...

    async def wait_replicated(self, record: StepRecord) -> None:
        """Until the step, as it is now, is replicated, or was removed or written again, or there is no peer."""
        ...

    def has_peers(self) -> bool:
        """Other nodes are there to hold copies."""
        ...

    def describe(self, record: StepRecord) -> dict[str, Any]:
        """The cluster's part of what `status` and `ls` tell of a step; see docs/cli.md. {} for none."""
        ...


class Alone:
    """No other node."""

    shares = False

    async def make_directory(self, rel: str, mode: int, uid: int, gid: int) -> None:
        pass

    async def claim(self, rel: str) -> None:
        pass

    def may_have(self, rel: str) -> bool:
        return False

    async def show(self, rel: str) -> None:
        pass

    async def show_listing(self, rel: str) -> None:
        pass

    def made(self, rel: str) -> None:
        pass

    def gone(self, rel: str) -> None:
        pass

    async def before_move(self, old: str, new: str) -> None:
        pass

    def moved(self, old: str, new: str) -> None:
        pass

    def opened(self, rel: str, ino: int) -> None:
        pass

    async def before_write(self, rel: str, ino: int) -> None:
        pass

    def sealed(self, rel: str, ino: int) -> None:
        pass

    async def flushed(self, rel: str, ino: int) -> None:
        pass

    def attributes_set(self, rel: str) -> None:
        pass

    async def wait_file_replicated(self, rel: str, ino: int) -> None:
        pass

    async def agree(
        self,
        record: StepRecord,
        marker: str | None,
        content: MarkerContent | None,
        marker_at: str | None,
        *,
        patient: bool = True,
    ) -> Agreement:
        return "agreed"

    def completed(self, record: StepRecord) -> None:
        pass

    def changed(self, record: StepRecord) -> None:
        pass

    def removed(self, record: StepRecord) -> None:
        pass

    def retire(self, record: StepRecord) -> bool:
        return True

    def evicted(self, record: StepRecord) -> None:
        pass

    def room_for_next(self, record: StepRecord) -> int:
        return record.manifest.bytes

    def owns(self, record: StepRecord, inner: str) -> bool:
        return True

    def is_readable(self, record: StepRecord) -> bool:
        return True

    def may_leave_ram(self, record: StepRecord) -> bool:
        return True

    def ram_bytes(self, record: StepRecord) -> int | None:
        return None

    async def wait_replicated(self, record: StepRecord) -> None:
        pass

    def has_peers(self) -> bool:
        return False

    def describe(self, record: StepRecord) -> dict[str, Any]:
        return {}
