"""A soak of a minute: everybody saves, loads and is judged, under a few faults; and what is wrong is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig.cluster_jobs import seats
from rig.instance import wait_until
from soak.crews import Crew
from soak.field import Field, field_of, levels
from soak.loading import Reader
from soak.running import soak
from soak.watching import BucketWatcher
from tests.conftest import needs_fuse

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def privileges() -> None:
    needs_fuse()


def test_a_soak_of_a_minute_ends_without_violations(tmp_path: Path) -> None:
    report = soak(
        minutes=1, seed=11, kinds=["kill-daemon", "evict", "s3-errors"], out=tmp_path, nodes=3, size="256M", pace_s=3
    )
    assert not report.violations, report.text()
    told = report.as_json()
    assert told["counts"]["steps saved"] > 10 and told["counts"]["loads checked bit by bit"] > 20
    assert told["counts"]["persisted steps read from the bucket without tierfs"] > 0
    assert set(told["faults"]) == {"kill-daemon", "evict", "s3-errors"}


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """A wrong byte in a load, a step that does not load, a persisted object that was changed behind tierfs."""
    with field_of(2, "128M", 1, 1, tmp_path) as field:
        node = field.nodes[0]
        crew = Crew(seats([node]).seats)
        try:
            for path, seed in (("run/step_1", 1), ("run/step_2", 2)):
                field.ledger.begin(path, "plain", seed)
                (answer,) = crew.order("save_plain", path, seed, timeout_s=60)
                assert "failure" not in answer, answer
                field.ledger.saved(path, seed)
        finally:
            crew.kill()
        wait_until(lambda: levels_are(field, "object"), "both are persisted", 60, every_s=0.2)
        reader = Reader(field, node, 1)
        assert reader.hire()
        try:
            for path in ("run/step_1", "run/step_2"):
                entry = field.ledger.get(path)
                assert entry is not None and reader.load(entry) and BucketWatcher(field).check(path, node)
            assert not field.report.violations
            shard = node.backing(node.mountpoint / "run/step_1/model-00000.safetensors")
            with shard.open("r+b") as file:
                file.seek(1000)
                byte = file.read(1)[0]
                file.seek(1000)
                file.write(bytes([byte ^ 1]))
            entry = field.ledger.get("run/step_1")
            assert entry is not None and not reader.load(entry)
            key = f"{field.bucket.prefix}/run/step_2/model-00001.safetensors"
            data = field.bucket.get("run/step_2/model-00001.safetensors") or b""
            field.bucket.client.put_object(Bucket=field.bucket.name, Key=key, Body=data[:-1] + bytes([data[-1] ^ 1]))
            assert not BucketWatcher(field).check("run/step_2", node)
        finally:
            reader.fire()
        assert [each.rule for each in field.report.violations] == [
            "a load is one generation",
            "persisted is in the bucket",
        ]


def levels_are(field: Field, level: str) -> bool:
    return set(levels(field.nodes[0]).values()) == {level}
