"""The object tier for the daemon: requests go to worker processes, started as needed and replaced when they die.

Here requests are bounded in number, repeated where that may help, and counted; a worker does each of them once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import trio

from tierfs.checksum import FileChecksum
from tierfs.errors import (
    ObjectError,
    ObjectExists,
    ObjectMissing,
    ObjectThrottled,
    ObjectUnavailable,
    TierfsError,
    UploadMissing,
)
from tierfs.objects.client import ClientStats, Listing, PartJournal, SentFile
from tierfs.objects.limits import RequestSlots
from tierfs.objects.messages import Frame
from tierfs.objects.opening import StoreSettings
from tierfs.objects.retries import RetryPlan
from tierfs.objects.store import BATCH_KEYS, Capabilities, ObjectInfo, UnfinishedUpload
from tierfs.objects.uploads import FileUpload
from tierfs.objects.worker_process import WorkerProcess
from tierfs.settings import Settings

log = logging.getLogger("tierfs.objects")

#: These are what a store that works says, no trouble of its.
_ANSWERS = (ObjectMissing, ObjectExists, UploadMissing)
_WARN_EVERY_S = 30.0
#: Longer than the stores' own time-outs and repetitions together.
STALLED_AFTER_S = 300.0
#: A worker that gives no sign of life for so long is ended, seconds. On a busy machine one waits for the processor.
SILENT_AFTER_S = 60.0


def archive_pool(settings: Settings) -> WorkerPool:
    """The same for the archive. Its bytes don't come by here, so one process is enough."""
    elsewhere = replace(settings, object=settings.archive.object, transfer=replace(settings.transfer, workers=1))
    return WorkerPool(elsewhere, storage_class=settings.archive.storage_class)


class WorkerPool:
    """An `ObjectClient` (see there) of `transfer.workers` processes. Requests before `run`, and after it, fail."""

    def __init__(
        self,
        settings: Settings,
        *,
        storage_class: str = "",
        store_module: str = "tierfs.objects.opening",
        stalled_after_s: float = STALLED_AFTER_S,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> None:
        """`store_module` has `open_store(StoreSettings)`; tests put a store of their own there. An attempt in which no
        byte moves for `stalled_after_s` has failed. `storage_class` is of what is stored there."""
        transfer = settings.transfer
        store = StoreSettings(
            url=settings.object, s3=settings.s3, connections=transfer.connections, storage_class=storage_class
        )
        share = max(1, transfer.workers)
        self.url = settings.object
        self.stats = ClientStats(concurrency=transfer.connections)
        self._transfer = transfer
        self._store_module = store_module
        self._silent_after_s = silent_after_s
        self._configuration = {
            "store": store.to_json(),
            "bytes_s": {"up": transfer.upload_bytes_s / share, "down": transfer.download_bytes_s / share},
            "stalled_after_s": stalled_after_s,
            "log_level": settings.log.level,
        }
        self._slots = RequestSlots(transfer.connections)
        self._workers: list[WorkerProcess] = []
        self._nursery: trio.Nursery | None = None
        self._warned = float("-inf")

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Owns the workers, until cancelled; they have ended when it returns."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    @property
    def idle(self) -> bool:
        """No worker does anything, nor anything that was cancelled."""
        return not any(worker.load for worker in self._workers)

    # --- ObjectClient

    async def probe(self) -> Capabilities:
        said = (await self._request("probe", {})).header["ok"]
        return Capabilities(**{**said, "notes": tuple(said["notes"])})

    async def put(self, key: str, data: bytes, *, only_if_absent: bool = False) -> str:
        frame = await self._request("put", {"key": key, "only_if_absent": only_if_absent}, body=data)
        self.stats.bytes_sent += len(data)
        return str(frame.header["ok"]["etag"])

    async def get(self, key: str, *, most_bytes: int, retry_for_s: float | None = None) -> tuple[bytes, str]:
        frame = await self._request("get", {"key": key, "most_bytes": most_bytes}, retry_for_s=retry_for_s)
        self.stats.bytes_received += len(frame.body)
        return frame.body, str(frame.header["ok"]["etag"])

    async def list_all(self, prefix: str, *, delimiter: str = "") -> Listing:
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        more = ""
        while True:
            page = await self._ask("list_page", {"prefix": prefix, "delimiter": delimiter, "more": more})
            objects += (ObjectInfo(*each) for each in page["objects"])
            prefixes += page["prefixes"]
            more = page["more"]
            if not more:
                return Listing(tuple(objects), tuple(prefixes))

    async def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), BATCH_KEYS):
            await self._ask("delete", {"keys": list(keys[start : start + BATCH_KEYS])})

    async def upload(
        self,
        key: str,
        fd: int,
        size_bytes: int,
        *,
        journal: PartJournal,
        on_sent: Callable[[int], None] = lambda sent_bytes: None,
    ) -> SentFile:
        return await FileUpload(self._ask, key, fd, size_bytes, journal, on_sent).send(self._transfer.connections)

    async def read_range(
        self, key: str, offset: int, length: int, fd: int, *, urgent: bool = False, retry_for_s: float | None = None
    ) -> int:
        arguments = {"key": key, "offset": offset, "length": length}
        frame = await self._request("read_range", arguments, fd=fd, urgent=urgent, retry_for_s=retry_for_s)
        self.stats.bytes_received += length
        return int(frame.header["ok"]["crc64nvme"])

    async def copy(self, source_url: str, key: str, checksum: FileChecksum) -> str:
        arguments = {"source_url": source_url, "key": key, "checksum": asdict(checksum)}
        return str((await self._ask("copy", arguments))["etag"])

    async def list_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        said = await self._ask("list_uploads", {"prefix": prefix})
        return [UnfinishedUpload(*each) for each in said["uploads"]]

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._ask("abort_upload", {"key": key, "upload_id": upload_id})

    # --- requests

    async def _ask(
        self, op: str, arguments: dict[str, Any], *, fd: int | None = None, retry_for_s: float | None = None
    ) -> dict[str, Any]:
        said: dict[str, Any] = (await self._request(op, arguments, fd=fd, retry_for_s=retry_for_s)).header["ok"]
        if op in ("put_file", "put_part"):
            self.stats.bytes_sent += arguments["length"]
        return said

    async def _request(
        self,
        op: str,
        arguments: dict[str, Any],
        *,
        body: bytes = b"",
        fd: int | None = None,
        urgent: bool = False,
        retry_for_s: float | None = None,
    ) -> Frame:
        """Attempts until one succeeds or the plan gives up; each waits for a slot, none holds one while it pauses."""
        plan = RetryPlan(self._transfer.retry_for_s if retry_for_s is None else retry_for_s)
        while True:
            try:
                async with self._slots.slot(urgent=urgent):
                    return await self._attempt({**arguments, "op": op}, body, fd)
            except TierfsError as error:
                pause_s = plan.pause_after(error, trio.current_time())
                if pause_s is None:
                    raise
                self.stats.retries += 1
            await trio.sleep(pause_s)

    async def _attempt(self, header: dict[str, Any], body: bytes, fd: int | None) -> Frame:
        began = time.monotonic()
        self.stats.requests += 1
        try:
            worker = await self._worker()
            frame = await worker.ask(header, body, fd, waits_for_file=header["op"] == "read_range")
        except _ANSWERS:
            self._went_well()
            raise
        except ObjectError as error:
            self._went_wrong(header, error, began)
            raise
        self._went_well()
        return frame

    async def _worker(self) -> WorkerProcess:
        """The one with the least to do; another one is started while all are busy and fewer than allowed."""
        if self._nursery is None:
            raise ObjectUnavailable("the workers for the object tier are not running")
        self._workers = [worker for worker in self._workers if worker.alive]
        least = min(self._workers, key=lambda worker: worker.load, default=None)
        if least is None or (least.load and len(self._workers) < self._transfer.workers):
            least = WorkerProcess(self._configuration, self._store_module, self._silent_after_s)
            self._workers.append(least)
            self._nursery.start_soon(least.run)
        await least.started.wait()
        return least

    def _went_well(self) -> None:
        self._slots.succeeded()
        self.stats.concurrency = self._slots.allowed
        if self.stats.last_error:
            log.info("the object tier %s answers again", self.url, extra={"tier": "object"})
            self.stats.last_error = ""

    def _went_wrong(self, header: dict[str, Any], error: ObjectError, began: float) -> None:
        stats = self.stats
        if isinstance(error, ObjectThrottled):
            stats.throttled += 1
            self._slots.throttled(began)
            stats.concurrency = self._slots.allowed
        stats.errors_by_kind[error.kind] = stats.errors_by_kind.get(error.kind, 0) + 1
        stats.last_error, stats.last_error_at = error.message, time.time()
        now = trio.current_time()
        level = logging.WARNING if now - self._warned >= _WARN_EVERY_S else logging.DEBUG
        self._warned = now if level == logging.WARNING else self._warned
        facts = {"file": header.get("key"), "tier": "object"}
        log.log(level, "%s in the object tier failed: %s", header["op"], error.message, extra=facts)
