"""URLs of object tiers, and settings handed to another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.errors import SettingsError
from tierfs.objects.opening import StoreSettings, open_store
from tierfs.settings import S3Settings


def test_settings_pass_through_json() -> None:
    for settings in (
        StoreSettings(url="file:///data/tier"),
        StoreSettings(
            url="s3://bucket/a/b",
            s3=S3Settings(endpoint_url="http://h:1", region="eu", addressing="virtual", ca_bundle=Path("/ca.pem")),
            connections=3,
        ),
    ):
        assert StoreSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("file:///data/my tier%20", "file:///data/my tier%20"),
        ("file:///data/tier/", "file:///data/tier"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://my.bucket-1//runs/a b/", "s3://my.bucket-1/runs/a b"),
    ],
)
def test_a_url_names_a_store(url: str, opened: str) -> None:
    store = open_store(StoreSettings(url=url))
    assert store.url == opened
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "tier",
        "/data/tier",
        "file:data",
        "file://host/data",
        "file:///",
        "file:///data/../etc",
        "s3://",
        "s3:///prefix",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "gs://bucket/x",
    ],
)
def test_what_is_no_url_of_a_store_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"write|hold|name") as caught:
        open_store(StoreSettings(url=url))
    assert caught.value.key == "object"


def test_a_ca_bundle_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"s3\.ca_bundle.*no\.pem"):
        open_store(StoreSettings(url="s3://bucket", s3=S3Settings(ca_bundle=tmp_path / "no.pem")))


def test_without_boto3_a_directory_works_and_s3_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["boto3"] = None
from tierfs.errors import SettingsError
from tierfs.objects.opening import StoreSettings, open_store
open_store(StoreSettings(url="file://{tmp_path}/x")).probe()
try:
    open_store(StoreSettings(url="s3://bucket"))
except SettingsError as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'tierfs[s3]'" in done.stdout
