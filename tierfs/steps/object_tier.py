"""What the steps of this node tell the object tier, and what they ask of it.

`ObjectTier` is the boundary between `tierfs.steps`, which knows when a step is whole, and `tierfs.persist` and
`tierfs.hydrate`, which know where its bytes are besides RAM. All calls come from the trio thread and return at once,
unless they are `async`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tierfs.steps.record import StepRecord


class ObjectTier(Protocol):
    """Told by the registry and the tracker."""

    def completed(self, record: StepRecord) -> None:
        """The step (or a new generation of it) is complete now, and its manifest is saved or will be."""
        ...

    def asked_for(self, record: StepRecord) -> None:
        """A program wants the step there, which may be complete long since: soon, and ahead of others."""
        ...

    def changed(self, record: StepRecord) -> None:
        """A file was added to a complete step, or a small one in it edited or removed."""
        ...

    def removed(self, record: StepRecord) -> None:
        """A program or a person removed the step. Its copy in the object tier goes too, unless it is protected."""
        ...

    def moved(self, namespace: str, step: str, record: StepRecord | None) -> None:
        """The step of that name was renamed to what `record` is now (None: to what is no step)."""
        ...

    def is_stub(self, ino: int) -> bool:
        """The file behind the inode has (some of) its bytes only in the object tier."""
        ...

    def on_disk(self, record: StepRecord) -> bool:
        """This node's disk holds the complete step as it is now."""
        ...

    def may_come_back(self, key: tuple[str, str]) -> bool:
        """This node's disk holds what the node had of a step of that name, of whichever generation."""
        ...

    def is_readable(self, record: StepRecord) -> bool:
        """What RAM lacks of the step can be had, as far as the slower tiers of this node are asked for it."""
        ...

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        """Evicting the step would lose nothing that is owed to a slower tier. `in_need`: else a save would fail."""
        ...

    def ram_bytes(self, record: StepRecord) -> int:
        """What the step's files hold in RAM now, and evicting it would free."""
        ...

    def evict(self, record: StepRecord) -> bool:
        """Make stubs of the files of a step that a slower tier holds. False where none does, so that it can only be
        removed."""
        ...

    async def populate(self, record: StepRecord) -> None:
        """Make the stubs of a step whose directory somebody looks into. Returns once they are there.

        Raises TierfsError where the object tier can't tell what is in it.
        """
        ...

    async def hydrate(self, ino: int) -> None:
        """Bring all of a stub's bytes into RAM. Returns at once for what is no stub. NoRoom, ObjectError."""
        ...

    async def wait_persisted(self, record: StepRecord) -> None:
        """Until the step, as it is now, is committed in the object tier, or was removed or written anew."""
        ...

    async def wait_on_disk(self, record: StepRecord) -> None:
        """The same for this node's disk; returns too where it is not to be copied there."""
        ...

    def describe(self, record: StepRecord) -> dict[str, Any]:
        """The object tier's part of what `status` and `ls` tell of a step; see docs/cli.md."""
        ...


class NoObjectTier:
    """A node without an object tier."""

    def completed(self, record: StepRecord) -> None:
        pass

    def asked_for(self, record: StepRecord) -> None:
        pass

    def changed(self, record: StepRecord) -> None:
        pass

    def removed(self, record: StepRecord) -> None:
        pass

    def moved(self, namespace: str, step: str, record: StepRecord | None) -> None:
        pass

    def is_stub(self, ino: int) -> bool:
        return False

    def on_disk(self, record: StepRecord) -> bool:
        return False

    def may_come_back(self, key: tuple[str, str]) -> bool:
        return False

    def is_readable(self, record: StepRecord) -> bool:
        return True

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        return True

    def ram_bytes(self, record: StepRecord) -> int:
        return record.manifest.bytes

    def evict(self, record: StepRecord) -> bool:
        return False

    async def populate(self, record: StepRecord) -> None:
        pass

    async def hydrate(self, ino: int) -> None:
        pass

    async def wait_persisted(self, record: StepRecord) -> None:
        pass

    async def wait_on_disk(self, record: StepRecord) -> None:
        pass

    def describe(self, record: StepRecord) -> dict[str, Any]:
        return {"level": "ram", "object": None}
