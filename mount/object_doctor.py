"""What `tierfs doctor` finds out about an object tier, by trying it in this very process."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mount.doctor import FAIL, OK, WARN, Finding
from tierfs.errors import SettingsError, TierfsError
from tierfs.objects.opening import StoreSettings, bucket_and_prefix, file_root, open_store
from tierfs.objects.store import Capabilities, ObjectStore
from tierfs.settings import Settings
from tierfs.units import format_size

CHECK = "object tier"
#: The client library tries twice, 20 s each by default; more than this nobody waits for.
_PROBE_WITHIN_S = 75.0


def of_archive(settings: Settings) -> Settings:
    """Settings whose object tier is the archive."""
    return replace(settings, object=settings.archive.object)


def examine_object_tier(settings: Settings, *, whose: str = "") -> Iterator[Finding]:
    """Opens the store and does to it what a daemon would: writes, reads and removes an object below `.tierfs/`.

    `whose` is put before what is found, where several instances have one. Never raises.
    """
    url = settings.object
    about = f"{whose}{url}"
    try:
        store = open_store(StoreSettings(url, settings.s3, 2))
    except SettingsError as error:
        yield Finding(CHECK, FAIL, f"{whose}{error.message}", f"correct {error.key or 'it'}")
        return
    try:
        yield from _probed(store, about)
        if url.startswith("file:"):
            yield from _free_space(file_root(url), about)
        else:
            yield from _s3(settings, about)
    except (TierfsError, OSError) as error:
        yield Finding(CHECK, WARN, f"{about}: could not be looked at: {error}")
    finally:
        store.close()


def _probed(store: ObjectStore, about: str) -> Iterator[Finding]:
    answers: list[Capabilities | Exception] = []

    def probe() -> None:
        try:
            answers.append(store.probe())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_WITHIN_S)
    if not answers:
        yield Finding(
            CHECK,
            WARN,
            f"{about} did not answer within {_PROBE_WITHIN_S:.0f} s",
            "look at s3.endpoint_url, proxies and firewalls; a mount works meanwhile, and steps stay in RAM",
        )
        return
    found = answers[0]
    if isinstance(found, Exception):
        yield Finding(CHECK, WARN, f"{about}: {_sentence(found)}", _advice(found))
        return
    if not found.writable:
        note = found.notes[0] if found.notes else "it can't be written to"
        yield Finding(CHECK, WARN, f"{about} is reachable: {note}", "a mount can load from it; steps stay in RAM")
        return
    yield Finding(CHECK, OK, f"{about} is reachable, written to and read back")
    if found.conditional_put:
        yield Finding("conditional PUT", OK, "kept: two nodes that commit a step at once can't both win")
    else:
        yield Finding("conditional PUT", WARN, "ignored by this store", "let only one node write to it")
    if found.checksums:
        yield Finding("checksums", OK, "the store checks what it is sent")
    else:
        yield Finding(
            "checksums", WARN, "the store checks no CRC64NVME: bytes are checked when they are read back only"
        )


def _sentence(error: Exception) -> str:
    return error.message if isinstance(error, TierfsError) else f"{type(error).__name__}: {error}"


def _advice(error: Exception) -> str:
    text = _sentence(error)
    if "RequestTimeTooSkewed" in text or "skew" in text.lower():
        return "set this machine's clock (chronyd, systemd-timesyncd)"
    return "a mount works meanwhile: steps stay in RAM and are sent once it can be reached"


def _free_space(root: Path, about: str) -> Iterator[Finding]:
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    text = f"{format_size(usage.free)} of {format_size(usage.total)} free in {place}"
    kind = _file_system(place)
    if kind in ("tmpfs", "ramfs"):
        yield Finding(
            "object tier space", WARN, f"{text}, which is memory", "name a directory on a disk or a shared file system"
        )
    elif usage.free < usage.total // 20:
        yield Finding("object tier space", WARN, text, "free some, or set retention.object_steps")
    else:
        yield Finding("object tier space", OK, text)
    if not os.access(place, os.W_OK):
        yield Finding("object tier space", WARN, f"{place} can't be written to by this user", f"chown {place}")


def _file_system(place: Path) -> str:
    """The type of the file system that holds `place`."""
    from mount.kernel_mount import mount_table

    inside = [entry for entry in mount_table() if place.resolve().is_relative_to(entry.mountpoint)]
    return max(inside, key=lambda entry: len(entry.mountpoint)).file_system if inside else ""


def _s3(settings: Settings, about: str) -> Iterator[Finding]:
    from tierfs.objects.s3_inspection import aborts_old_uploads, credentials_source

    source, problem = credentials_source(settings.s3)
    if problem:
        yield Finding("credentials", WARN, f"can't be read: {problem}", "look at s3.profile and the files of AWS")
        return
    if source:
        yield Finding("credentials", OK, f"from {source}")
    else:
        yield Finding(
            "credentials",
            WARN,
            "there are none",
            "give this process AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (s3.profile), or a role",
        )
        return
    bucket, prefix = bucket_and_prefix(settings.object)
    aborts = aborts_old_uploads(bucket, prefix, settings.s3)
    if aborts is False:
        yield Finding(
            "abandoned uploads",
            OK,
            "no lifecycle rule of the bucket ends uploads that nobody finished; tierfs ends its own only",
            "add a rule with AbortIncompleteMultipartUpload after some days",
        )
    elif aborts:
        yield Finding("abandoned uploads", OK, "a lifecycle rule of the bucket ends them")
