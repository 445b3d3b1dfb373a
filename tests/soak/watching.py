"""Those who look all the time: at `latest` on every node, at the level that steps are told to have, and at the bucket
as somebody without tierfs sees it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from rig.cluster import Node
from soak import work
from soak.field import Field, levels, steps_of
from soak.ledger import Entry
from soak.loading import OF_ETCD, size_of
from soak.saving import ENDS

LATEST_WITHIN_S = 30.0
_MANIFEST = ".tierfs/manifest.json"
#: What keeps a node from knowing what the others know, or takes others' steps away.
CUTS = ("cut-node", "cut-pair", "cut-node-etcd", "stall-node", "slow-node")


@dataclass
class LatestWatcher:
    """`latest` of every namespace on one node never goes back but by a loss, and follows what was saved."""

    field: Field
    node: Node

    def run(self) -> None:
        seen: dict[str, str] = {}
        behind: dict[str, float] = {}
        while self.field.pause(0.5):
            if not self.node.is_started or self._is_apart():
                seen.clear()
                behind.clear()
                continue
            for namespace in {entry.namespace for entry in self.field.ledger.all()}:
                looked = time.monotonic()
                versions = self.field.ledger.versions()
                try:
                    named = os.readlink(self.node.mountpoint / namespace / "latest")
                except OSError:
                    named = ""
                self.field.report.count("looks at latest")
                before = seen.get(namespace, "")
                if self._is_apart():
                    break
                if before and number(named) < number(before) and not self._may_go_back(f"{namespace}/{before}"):
                    evidence = (
                        f"from {before} to {named or 'nothing'}: {self.field.ledger.get(f'{namespace}/{before}')}"
                    )
                    self.field.violate(
                        "latest never goes back", node=self.node.node_id, path=namespace, evidence=evidence
                    )
                seen[namespace] = named
                self._follow(namespace, named, behind, looked, versions)

    def _is_apart(self) -> bool:
        weather, now = self.field.weather, time.monotonic()
        return bool(weather.felt(*CUTS, *ENDS, node=self.node.number, since=now) or weather.felt(*OF_ETCD, since=now))

    def _may_go_back(self, path: str) -> bool:
        """Its newest step was removed, is being written again, or was lost before it was durable."""
        entry = self.field.ledger.get(path)
        if entry is None or entry.removed or entry.changing or not entry.must:
            return True
        away = self.field.weather.felt(*CUTS, *ENDS, since=time.monotonic(), aftermath_s=40)
        return bool(away) and not self.field.ledger.is_durable(path)

    def _follow(
        self, namespace: str, named: str, behind: dict[str, float], looked: float, versions: dict[str, int]
    ) -> None:
        newest = max((e.number for e in self.field.ledger.all(namespace) if e.must and not e.changing), default=0)
        if number(named) >= newest or self.field.weather.felt(*CUTS, *ENDS, since=looked):
            behind.pop(namespace, None)
        elif looked - behind.setdefault(namespace, looked) > LATEST_WITHIN_S:
            evidence = f"{named or 'nothing'} for {LATEST_WITHIN_S:g} s, though step_{newest} was saved"
            self.field.violate("latest follows", node=self.node.node_id, path=namespace, evidence=evidence)
            behind[namespace] = looked + 60


def number(name: str) -> int:
    return int(name.rpartition("_")[2]) if "_" in name else 0


def watch_levels(field: Field) -> None:
    """So that it is known what was promised to survive before a node is lost."""
    turn = 0
    while field.pause(1):
        turn += 1
        node = field.nodes[turn % len(field.nodes)]
        cut = field.weather.felt(*CUTS, node=node.number, since=time.monotonic())
        if node.is_started and not cut and not field.weather.felt(*OF_ETCD, since=time.monotonic()):
            versions = field.ledger.versions()
            if found := levels(node):
                field.ledger.told(found, versions)


@dataclass
class BucketWatcher:
    """What a node tells to be persisted is in the bucket whole, and what is committed there is whole at any moment."""

    field: Field

    def run(self) -> None:
        dice = self.field.dice("bucket")
        while self.field.pause(3):
            node = dice.choice(self.field.nodes.nodes)
            now = time.monotonic()
            if not node.is_started or self.field.weather.felt(*CUTS, *ENDS, node=node.number, since=now):
                continue
            told = {path: level for path, level in levels(node).items() if level == "object"}
            if told:
                self.check(dice.choice(sorted(told)), node)
            if dice.random() < 0.2:
                self._check_commits()

    def check(self, path: str, node: Node) -> bool:
        """Fetches it past tierfs and compares each bit; False where it is not what it must be."""
        entry = self.field.ledger.get(path)
        if entry is None or entry.changing or entry.removed:
            return True
        begin = time.monotonic()
        try:
            found, wrong = self._fetch(entry)
        except (ClientError, BotoCoreError, OSError) as error:
            if isinstance(error, FileNotFoundError) or "NoSuchKey" in str(error) or "404" in str(error):
                found, wrong = None, f"{type(error).__name__}: {error}"
            elif self.field.weather.felt("s3-kill", since=begin):
                return True
            else:
                raise
        except Exception as error:  # what DCP says of files that are missing or cut short
            found, wrong = None, f"{type(error).__name__}: {error}"
        after = self.field.ledger.get(path)
        if after is None or after.version != entry.version:
            return True
        if found is None:
            still = {f"{each['namespace']}/{each['step']}": each for each in steps_of(node)}.get(path, {})
            cut = self.field.weather.felt(*CUTS, *ENDS, node=node.number, since=begin)
            if cut or still.get("level") != "object" or self.field.weather.felt(*OF_ETCD, since=begin):
                return True
            evidence = f"seeds {entry.seeds}: {wrong}; objects {self.field.bucket.sizes(path + '/')}; {still}"
            self.field.violate("persisted is in the bucket", node=node.node_id, path=path, evidence=evidence)
            return False
        self.field.report.count("persisted steps read from the bucket without tierfs")
        return True

    def _fetch(self, entry: Entry) -> tuple[int | None, str]:
        bucket, path = self.field.bucket, entry.path
        for _ in range(3):
            manifest = bucket.get(f"{path}/{_MANIFEST}")
            if manifest is None:
                return None, "no manifest"
            with tempfile.TemporaryDirectory(prefix="tierfs-soak-") as directory:
                try:
                    bucket.download(path, Path(directory))
                    found, wrong, _ = work.whole(
                        Path(directory), entry.kind, sorted({*entry.seeds, *entry.former}), size_of(entry)
                    )
                except Exception:
                    if bucket.get(f"{path}/{_MANIFEST}") == manifest:
                        raise
                    continue
            if bucket.get(f"{path}/{_MANIFEST}") == manifest:
                return found, f"{wrong}; manifest {json.loads(manifest).get('generation')}"
        return None, "its manifest changes again and again"

    def _check_commits(self) -> None:
        begin = time.monotonic()
        try:
            self.field.report.count("commits in the bucket looked at", len(self.field.bucket.check_whole()))
        except AssertionError as error:
            self.field.violate("a commit in the bucket is whole", evidence=str(error))
        except (ClientError, BotoCoreError, OSError):
            if not self.field.weather.felt("s3-kill", since=begin):
                raise


def wait_durable(field: Field, paths: set[str], within_s: float) -> dict[str, Any]:
    """Until nodes tell of each of these steps that it is durable, or it is changed or removed. Returns those that are
    not in time, with what each node says."""
    deadline = time.monotonic() + within_s
    left = set(paths)
    told: dict[str, dict[str, str]] = {}
    while left and time.monotonic() < deadline and not field.over.is_set():
        versions = field.ledger.versions()
        for node in field.nodes:
            if node.is_started:
                told[node.node_id] = levels(node)
                field.ledger.told(told[node.node_id], versions)
        for path in list(left):
            entry = field.ledger.get(path)
            if entry is None or not entry.must or entry.changing or field.ledger.is_durable(path):
                left.discard(path)
        time.sleep(0.3)
    return {path: {node: found.get(path, "") for node, found in told.items()} for path in left}
