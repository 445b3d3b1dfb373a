"""Uploads a file, with a journal in a file, in a process that may be killed: `upload_driver.py URL FILE JOURNAL`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import trio

from tierfs.objects.pool import WorkerPool
from tierfs.objects.store import SentPart
from tierfs.settings import Settings


class FileJournal:
    """A `PartJournal`: JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.forget_in_memory()
        for line in path.read_text().splitlines() if path.exists() else ():
            said = json.loads(line)
            if "upload_id" in said:
                self.forget_in_memory()
                self.upload_id = said["upload_id"]
            else:
                part = SentPart(**said["part"])
                self.parts[part.number], self.chunks[part.number] = part, tuple(said["chunks"])

    def forget_in_memory(self) -> None:
        self.upload_id = ""
        self.parts: dict[int, SentPart] = {}
        self.chunks: dict[int, tuple[int, ...]] = {}

    def started(self, upload_id: str) -> None:
        self._write({"upload_id": upload_id})
        self.forget_in_memory()
        self.upload_id = upload_id

    def sent(self, part: SentPart, chunks: tuple[int, ...]) -> None:
        self._write({"part": asdict(part), "chunks": chunks})
        self.parts[part.number], self.chunks[part.number] = part, chunks

    def forget(self) -> None:
        self._write({"upload_id": ""})
        self.forget_in_memory()

    def _write(self, said: dict[str, object]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(said) + "\n")


async def main(url: str, path: str, journal: str) -> None:
    settings = Settings()
    settings.object = url
    settings.transfer.connections = 1
    settings.transfer.upload_bytes_s = 128 << 20  # slow enough to be killed at any point
    pool = WorkerPool(settings, store_module="scripted_store")
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        fd = os.open(path, os.O_RDONLY)
        await pool.upload("run/step_1/shard", fd, os.fstat(fd).st_size, journal=FileJournal(Path(journal)))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
