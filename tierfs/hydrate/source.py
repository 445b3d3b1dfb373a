"""Where the bytes of stubs come from: the object tier (`ObjectSource`), or other nodes (`tierfs.cluster.sources`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from tierfs.checksum import CHUNK_BYTES
from tierfs.errors import ObjectCorrupt, ObjectError
from tierfs.hydrate.stubs import StubMark
from tierfs.objects.client import ObjectClient
from tierfs.persist.object_manifest import ObjectManifest


class Source(Protocol):
    """Called in the trio thread. What is raised is an ObjectError or a PeerError that a program may be told."""

    @property
    def reads_first(self) -> bool:
        """What follows a program's read shares one way with it: it begins after that, and is not urgent."""
        ...

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        """The CRC64NVME of each 16 MiB of the file. Together they are that of the whole, where the mark knows it."""
        ...

    async def read_range(
        self, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool, retry_for_s: float
    ) -> int:
        """Fetch bytes of the file into `fd` (the caller's) at the same offset; what may pass is tried again for so
        long. Returns the CRC64NVME of what was written there, for the caller to compare. Urgent: a program waits."""
        ...

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        """What `read_range` gave last from this offset on is not what was sealed: something else is asked next."""
        ...


class NoSource:
    """Of a mount whose stubs' bytes are in an object tier, or on nodes, that its settings no longer name."""

    reads_first = False

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        raise ObjectError(_nowhere(mark))

    async def read_range(
        self, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool, retry_for_s: float
    ) -> int:
        raise ObjectError(_nowhere(mark))

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        pass


def _nowhere(mark: StubMark) -> str:
    place = "on other nodes" if mark.version else "in the object tier"
    setting = "catalog" if mark.version else "object"
    return f"the bytes of {mark.key} are {place}, and this mount has none: mount with -o {setting}=..."


class ObjectSource:
    """The object tier. `manifest_of` gives its manifest of a step, from memory where it was asked for lately."""

    #: Each request takes long to begin, and many side by side are not slower.
    reads_first = False

    def __init__(self, client: ObjectClient, manifest_of: Callable[[str, str], Awaitable[ObjectManifest]]) -> None:
        self._client = client
        self._manifest_of = manifest_of

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        """ObjectError also where the object tier holds other bytes under the file's name."""
        manifest = await self._manifest_of(mark.namespace, mark.step)
        found = manifest.files.get(mark.file)
        # Where nobody summed the bytes up, a file of another save would have another time.
        is_that = found is not None and (
            (found.size_bytes, found.mtime_ns) == (mark.size_bytes, mark.mtime_ns)
            if mark.checksum is None
            else (found.size_bytes, found.checksum) == (mark.size_bytes, mark.checksum)
        )
        if found is None or not is_that:
            raise ObjectError(
                f"{mark.key} can't be fetched: the object tier holds another generation of "
                f"{mark.namespace}/{mark.step} by now"
            )
        if manifest.chunk_bytes != CHUNK_BYTES or len(found.chunks) != -(-mark.size_bytes // CHUNK_BYTES):
            raise ObjectCorrupt(f"the manifest of {mark.namespace}/{mark.step} has no checksums for chunks of 16 MiB")
        return found.chunks

    async def read_range(
        self, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool, retry_for_s: float
    ) -> int:
        return await self._client.read_range(mark.key, offset, length, fd, urgent=urgent, retry_for_s=retry_for_s)

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        """The store may answer otherwise when it is asked again."""
