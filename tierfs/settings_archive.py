"""The settings of the archive: copies of some persisted steps in another bucket, prefix or storage class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierfs.errors import SettingsError
from tierfs.settings_fields import setting

if TYPE_CHECKING:
    from tierfs.settings import Settings

#: There is one archive for all namespaces; which steps go there is each one's own.
_FOR_ALL_NAMESPACES = ("object", "storage_class")


@dataclass
class ArchiveSettings:
    """`[archive]`: which persisted steps are copied to a second place, and where that is. Nothing there is deleted."""

    object: str = setting(
        "",
        "The archive: s3://bucket/prefix where the object tier is one, file:///path where that is a directory; empty "
        "is none. Bytes are copied by the store.",
        kind="url",
    )
    storage_class: str = setting(
        "",
        "The storage class of the steps' files there, such as GLACIER_IR; empty is the bucket's own (s3:// only).",
        kind="text",
    )
    every_steps: int = setting(
        0, "Each so many-th persisted step of a namespace is archived; 0 is not by count.", kind="int"
    )
    every_s: float = setting(
        0.0,
        "A persisted step that completed this long after the last archived one did is archived; 0 is not by time.",
        kind="duration",
    )


def check_archive(settings: Settings) -> None:
    """SettingsError where there can't be such an archive."""
    archive, tier = settings.archive, settings.object
    for glob, sections in settings.namespaces.items():
        for name in sections.get("archive", {}):
            if name in _FOR_ALL_NAMESPACES:
                raise SettingsError(
                    f"archive.{name} is the same for all namespaces; set it in [archive]",
                    key=f'namespaces."{glob}".archive.{name}',
                )
    if not archive.object:
        if archive.every_steps or archive.every_s or archive.storage_class:
            raise SettingsError(
                "[archive] says what is archived, but not where; set archive.object", key="archive.object"
            )
        return
    if not tier:
        raise SettingsError(
            "archive.object needs an object tier (object), since what is archived is copied from there",
            key="archive.object",
        )
    scheme = archive.object.partition(":")[0]
    if scheme != tier.partition(":")[0]:
        raise SettingsError(
            f"archive.object = {archive.object!r}: the store copies the bytes itself, so it has to be of the kind that "
            f"object = {tier!r} is",
            key="archive.object",
        )
    if archive.storage_class and scheme != "s3":
        raise SettingsError("archive.storage_class is for s3:// only", key="archive.storage_class")
    inner, outer = sorted((_plain(archive.object), _plain(tier)), key=len, reverse=True)
    if inner.startswith(outer):
        raise SettingsError(
            f"archive.object = {archive.object!r} and object = {tier!r} lie in each other, so steps of the one would "
            f"show in the other; give each a prefix of its own",
            key="archive.object",
        )


def _plain(url: str) -> str:
    """Without what makes no difference: `file:///a/./b` and `s3://b//a/` are `file:///a/b` and `s3://b/a`."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{'/'.join(part for part in rest.split('/') if part not in ('', '.'))}/"
