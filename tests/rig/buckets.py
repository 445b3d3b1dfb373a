"""A bucket as somebody without tierfs sees it: what lies in it, and which steps are committed and whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from rig.s3_servers import S3Server

_MANIFEST = "/.tierfs/manifest.json"


@dataclass
class Bucket:
    """What lies below `prefix` in the bucket. Steps are named "namespace/step"."""

    server: S3Server
    name: str
    prefix: str
    client: Any = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.server.client()

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{self.prefix}"

    def sizes(self, below: str = "") -> dict[str, int]:
        """Size of each object by its key without the prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=f"{self.prefix}/{below}")
        found = (entry for page in pages for entry in page.get("Contents", ()))
        return {entry["Key"][len(self.prefix) + 1 :]: entry["Size"] for entry in found}

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that were begun and not ended."""
        answer = self.client.list_multipart_uploads(Bucket=self.name)
        return [entry["Key"] for entry in answer.get("Uploads", ()) if entry["Key"].startswith(f"{self.prefix}/")]

    def get(self, key: str) -> bytes | None:
        try:
            data: bytes = self.client.get_object(Bucket=self.name, Key=f"{self.prefix}/{key}")["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise
        return data

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"{self.prefix}/{key}", Body=data)

    def committed(self) -> set[str]:
        return {key.removesuffix(_MANIFEST) for key in self.sizes() if key.endswith(_MANIFEST)}

    def check_whole(self) -> set[str]:
        """The committed steps; fails where one lacks a file that its manifest names, or has it in another size.

        May be called at any moment: a manifest that is withdrawn meanwhile is looked at again.
        """
        steps = self.committed()
        for step in list(steps):
            while (manifest := self.get(step + _MANIFEST)) is not None:
                there = self.sizes(f"{step}/")
                if self.get(step + _MANIFEST) == manifest:
                    break
            if manifest is None:
                steps.remove(step)
                continue
            named = {f"{step}/{name}": file["size_bytes"] for name, file in json.loads(manifest)["files"].items()}
            wrong = {key: (size, there.get(key)) for key, size in named.items() if there.get(key) != size}
            assert not wrong, f"{step} is committed, but of these (size named, size there) is another: {wrong}"
        return steps

    def leftovers(self) -> list[str]:
        """Objects and uploads that belong to no committed step, nor to the tier as a whole.

        The scratch object of a node that was killed while it probed the store may lie there for a day.
        """
        expected: Counter[str] = Counter()
        for step in self.check_whole():
            manifest = json.loads(self.get(step + _MANIFEST) or b"{}")
            expected.update(f"{step}/{name}" for name in manifest["files"])
            expected[step + _MANIFEST] += 1
        expected[".tierfs/tier.json"] += 1
        of_the_tier = (".tierfs/tier.json", ".tierfs/probe-")
        others = [key for key in self.sizes() if not key.startswith(of_the_tier)]
        extra = [key for key in others if key not in expected and "/.tierfs/nodes/" not in key]
        extra += [key for key in self._node_files() if key.split("/.tierfs/")[0] not in self.committed()]
        return extra + [f"upload of {key}" for key in self.uploads()]

    def download(self, step: str, directory: Path) -> None:
        """A plain copy of a step's objects, as `aws s3 cp --recursive` makes it."""
        for key in self.sizes(f"{step}/"):
            path = directory / key.removeprefix(f"{step}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.client.download_file(self.name, f"{self.prefix}/{key}", str(path))

    def _node_files(self) -> Iterator[str]:
        return (key for key in self.sizes() if "/.tierfs/nodes/" in key)
