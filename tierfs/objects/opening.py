"""An object store from a URL: `file:///path` or `s3://bucket/prefix`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfs.errors import SettingsError
from tierfs.objects.store import ObjectStore
from tierfs.settings import S3Settings

#: Amazon S3's rules for names of buckets, as far as a URL needs them; compatible servers allow '_' and capitals too.
_S3_URL = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9])(?:/(?P<prefix>.*))?", re.DOTALL)


@dataclass(frozen=True)
class StoreSettings:
    """All that a process needs to open the store. No secrets: credentials come from the process's environment.

    `connections` is how many calls are made at a time, `storage_class` that of objects in S3 ("" is the bucket's own).
    """

    url: str
    s3: S3Settings = dataclasses.field(default_factory=S3Settings)
    connections: int = 16
    storage_class: str = ""

    def to_json(self) -> dict[str, Any]:
        s3 = dataclasses.asdict(self.s3)
        s3["ca_bundle"] = str(self.s3.ca_bundle) if self.s3.ca_bundle else None
        return {**dataclasses.asdict(self), "s3": s3}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StoreSettings:
        s3 = dict(value["s3"])
        s3["ca_bundle"] = Path(s3["ca_bundle"]) if s3["ca_bundle"] else None
        return cls(**{**value, "s3": S3Settings(**s3)})


def open_store(settings: StoreSettings) -> ObjectStore:
    """Nothing is asked of the store yet. SettingsError for a URL that is none, or where boto3 is not installed."""
    url = settings.url
    if url.startswith("file:"):
        from tierfs.objects.file_store import FileStore

        root = file_root(url)
        return FileStore(f"file://{root}", root)
    if url.startswith("s3:"):
        bucket, prefix = bucket_and_prefix(url)
        try:
            from tierfs.objects.s3_store import S3Store
        except ModuleNotFoundError as error:
            if error.name not in ("boto3", "botocore"):
                raise
            raise SettingsError(
                f"the object tier {url} needs the package boto3: pip install 'tierfs[s3]'", key="object"
            ) from None
        return S3Store(bucket, prefix, settings.s3, settings.connections, settings.storage_class)
    raise SettingsError(f"{url!r} is no object tier; write file:///path or s3://bucket/prefix", key="object")


def file_root(url: str) -> Path:
    """The directory of a `file://` URL: absolute, and of this host. What stands there is the path, without escapes."""
    text = url.removeprefix("file://")
    if text == url or not text.startswith("/"):
        raise SettingsError(f"{url!r}: write file:///path, an absolute path of this host", key="object")
    if "\0" in text or ".." in text.split("/"):
        raise SettingsError(f"{url!r}: the path must not hold '..' or a NUL byte", key="object")
    if not text.strip("/"):
        raise SettingsError(
            f"{url!r}: the root directory can't be an object tier; name a directory below it", key="object"
        )
    return Path(text)


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Of an `s3://` URL; the prefix without slashes around it, "" where there is none."""
    match = _S3_URL.fullmatch(url)
    if match is None:
        raise SettingsError(f"{url!r}: write s3://bucket/prefix", key="object")
    prefix = (match["prefix"] or "").strip("/")
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise SettingsError(f"{url!r}: the prefix must not hold empty, '.' or '..' components", key="object")
    return match["bucket"], prefix
