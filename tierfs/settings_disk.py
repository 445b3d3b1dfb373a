"""Settings of the local-disk tier; see `tierfs.settings`."""

# ruff: noqa: RUF009  (`setting` makes a dataclass field, which is what the rule asks for)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierfs.settings_fields import setting

#: What is of the whole instance: these can't be set for some namespaces.
OF_THE_INSTANCE = ("disk.path", "disk.size", "disk.write_bytes_s")


@dataclass
class DiskSettings:
    """`[disk]`: a directory on a local disk (NVMe) that complete steps are copied to. `policy` and `every_steps` may
    differ by namespace; the others are of the instance."""

    path: Path | None = setting(
        None,
        "The directory, made where its parent exists: name one two below the disk's mount point, so that the parent is "
        "missing where the disk is not mounted. Empty is no disk tier.",
        kind="path",
    )
    size: int = setting(
        0,
        "How much of the disk the steps may take, bytes; 0 is all of it but for 5 %, which are left free in any case.",
        kind="size",
    )
    write_bytes_s: int = setting(
        0, "Bandwidth of copying to the disk at most, bytes a second; 0 is no limit.", kind="size"
    )
    policy: str = setting(
        "all",
        "Which complete steps are copied to the disk: all, every (see every_steps), or none.",
        kind="choice",
        choices=("all", "every", "none"),
    )
    every_steps: int = setting(
        1, "With policy every: each so many-th complete step of a namespace.", kind="int", least=1
    )
