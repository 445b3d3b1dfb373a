"""A `file://` store that fails by script, for worker processes: `--store-module scripted_store`.

The script is a directory, named by TIERFS_TEST_SCRIPT, which lives as long as the test and so outlives workers:
`calls` gets a line for each call; each file in `faults` is one fault, JSON, and whoever removes it has it. A fault
names the `op` it strikes, maybe a `key`, and what it `does`:

    error NAME      raises that error of tierfs.errors        lost   does the call, then raises ObjectUnavailable
    flip            changes a byte of what was read           kill   kills the process half way
    hold            waits as long as the file `holding` is there, and can be stopped
    wedge           the same, but can't be stopped
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierfs import errors
from tierfs.objects.opening import StoreSettings
from tierfs.objects.opening import open_store as open_file_store
from tierfs.objects.store import Flow, Page, PartInfo, SentPart

SCRIPT = "TIERFS_TEST_SCRIPT"


@dataclass(frozen=True)
class Script:
    """Both sides of it: the test writes faults and reads calls, a store does the opposite."""

    directory: Path

    def begin(self) -> Script:
        (self.directory / "faults").mkdir(parents=True)
        (self.directory / "calls").touch()
        return self

    # --- the test's side

    def fault(self, op: str, does: str, *, times: int = 1, key: str = "") -> None:
        for _ in range(times):
            name = f"{len(list((self.directory / 'faults').iterdir())):03}-{time.monotonic_ns()}"
            scratch = self.directory / name
            scratch.write_text(json.dumps({"op": op, "does": does, "key": key}))
            scratch.rename(self.directory / "faults" / name)

    def hold(self) -> None:
        self.holding.touch()

    def let_go(self) -> None:
        self.holding.unlink()

    def calls(self, op: str) -> list[str]:
        """What was asked of the store: `key` or `key#part`, in order."""
        lines = [line.split(" ", 1) for line in (self.directory / "calls").read_text().splitlines()]
        return [what for name, what in lines if name == op]

    @property
    def md5_etags(self) -> Path:
        """Where this directory is, parts and the objects made of them get ETags as Amazon S3 gives them."""
        return self.directory / "etags"

    # --- the store's side

    @property
    def holding(self) -> Path:
        return self.directory / "holding"

    def called(self, op: str, what: str) -> None:
        with open(self.directory / "calls", "a") as calls:
            calls.write(f"{op} {what}\n")

    def take(self, op: str, key: str) -> str:
        for path in sorted((self.directory / "faults").iterdir()):
            try:
                fault = json.loads(path.read_text())
                if fault["op"] != op or fault["key"] not in ("", key):
                    continue
                path.unlink()
            except FileNotFoundError:
                continue
            return str(fault["does"])
        return ""


class ScriptedStore:
    def __init__(self, settings: StoreSettings, script: Script) -> None:
        self._store = open_file_store(settings)
        self._script = script
        self.url = self._store.url

    def __getattr__(self, op: str) -> Callable[..., Any]:
        call = getattr(self._store, op)

        def scripted(*arguments: Any, **options: Any) -> Any:
            return self._struck(op, str(arguments[0]) if arguments else "", lambda: call(*arguments, **options))

        return scripted

    def put(self, key: str, data: memoryview, crc64nvme: int, flow: Flow, *, only_if_absent: bool = False) -> str:
        def call() -> str:
            return self._store.put(key, data, crc64nvme, flow, only_if_absent=only_if_absent)

        return str(self._struck("put", key, call, flow=flow))

    def read_range(self, key: str, offset: int, into: memoryview, flow: Flow) -> None:
        self._struck("read_range", key, lambda: self._store.read_range(key, offset, into, flow), flow=flow, into=into)

    def put_part(self, key: str, upload_id: str, number: int, data: memoryview, crc64nvme: int, flow: Flow) -> str:
        def call() -> str:
            etag = self._store.put_part(key, upload_id, number, data, crc64nvme, flow)
            if self._script.md5_etags.exists():
                etag = hashlib.md5(data).hexdigest()
                (self._script.md5_etags / f"{upload_id}#{number}").write_text(etag)
            return etag

        return str(self._struck("put_part", key, call, what=f"{key}#{number}", flow=flow))

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        parts = self._struck("list_parts", key, lambda: self._store.list_parts(key, upload_id))
        return [replace(part, etag=self._etag(f"{upload_id}#{part.number}", part.etag)) for part in parts]

    def finish_upload(self, key: str, upload_id: str, parts: Sequence[SentPart]) -> str:
        def call() -> str:
            real = {part.number: part.etag for part in self._store.list_parts(key, upload_id)}
            etag = self._store.finish_upload(key, upload_id, [replace(part, etag=real[part.number]) for part in parts])
            if self._script.md5_etags.exists():
                joined = b"".join(bytes.fromhex(part.etag) for part in parts)
                etag = f"{hashlib.md5(joined).hexdigest()}-{len(parts)}"
                (self._script.md5_etags / key.replace("/", "%")).write_text(etag)
            return etag

        return str(self._struck("finish_upload", key, call))

    def list_page(self, prefix: str, *, delimiter: str = "", more: str = "") -> Page:
        page = self._struck("list_page", prefix, lambda: self._store.list_page(prefix, delimiter=delimiter, more=more))
        objects = tuple(replace(each, etag=self._etag(each.key.replace("/", "%"), each.etag)) for each in page.objects)
        return replace(page, objects=objects)

    def _etag(self, name: str, otherwise: str) -> str:
        path = self._script.md5_etags / name
        return path.read_text() if path.exists() else otherwise

    def _struck(
        self,
        op: str,
        key: str,
        call: Callable[[], Any],
        *,
        what: str = "",
        flow: Flow | None = None,
        into: memoryview | None = None,
    ) -> Any:
        self._script.called(op, what or key)
        does, _, name = self._script.take(op, key).partition(" ")
        if does == "error":
            raise getattr(errors, name)(f"{op} was scripted to fail")
        if does == "kill":
            if into is not None:
                into[: len(into) // 2] = bytes(len(into) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        while does in ("hold", "wedge") and self._script.holding.exists():
            time.sleep(0.005)
            if does == "hold" and flow is not None:
                flow.passing(0)
        result = call()
        if does == "lost":
            raise errors.ObjectUnavailable(f"the answer to {op} was lost")
        if does == "flip":
            assert into is not None
            into[len(into) // 3] ^= 1
        return result


def open_store(settings: StoreSettings) -> ScriptedStore:
    return ScriptedStore(settings, Script(Path(os.environ[SCRIPT])))
