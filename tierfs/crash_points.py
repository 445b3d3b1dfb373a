"""Named points at which a test makes the daemon kill itself, to see what a crash there costs.

The setting `debug_crash_at` names one (`name`, or `name:nth` for the nth time it is passed). It happens once in the
life of a RAM tier: the next daemon finds the note of it and goes on.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tierfs.errors import SettingsError

#: In the life of steps in RAM.
POINTS = (
    "overwrite:set-aside",  # the old generation is linked, no manifest names it yet
    "overwrite:recorded",  # the manifest names it, nothing is changed yet
    "overwrite:hiding",  # recorded that something is written, old markers still in sight
    "overwrite:hidden",  # old markers are gone
    "overwrite:replaced",  # a file has its new inode, the program has no answer yet
    "commit:checked",  # the marker was read and found good, not renamed yet
    "commit:renamed",  # the marker is in place, no manifest says so yet
    "commit:saved",  # the manifest says so, the old generation still lies there
    "put-back:begun",  # an overwrite is being given up
    "put-back:done",  # the old files are back, no manifest says so yet
)

#: On the way to the object tier and out of it.
OBJECT_POINTS = (
    "persist:withdrawn",  # the committed manifest of an older generation is deleted, its objects still lie there
    "persist:file-sent",  # a file is an object, others may not be yet
    "persist:gates-sent",  # so are the markers, no node file says so yet
    "persist:node-file",  # the node file says so, nothing is checked yet
    "persist:listed",  # the listing matched, what was left over is still there
    "persist:committed",  # the object tier has the manifest, this node does not know yet
    "persist:recorded",  # this node knows, its journal still lies there
    "delete:manifest",  # the manifest of a step to be deleted is gone, its data is not
    "delete:data",  # so is the data, the node files are not
)

#: On the way to the archive.
ARCHIVE_POINTS = (
    "archive:withdrawn",  # the archive has no manifest of the step any more, nothing is copied yet
    "archive:file-copied",  # a file is in the archive, others may not be yet
    "archive:copied",  # so are the markers, nothing is checked yet
    "archive:committed",  # the archive has the manifest, this node does not know yet
)

#: Of a step that goes to the object tier in part.
PART_POINTS = (
    "part:withdrawn",  # markers of an earlier save are gone where their files are about to change
    "part:sent",  # the files are objects, no part file says so yet
    "part:committed",  # the part file says so, this node does not know yet
)

STUB_POINTS = (
    "evict:made",  # a stub is made, the file still has its name
    "evict:replaced",  # the stub has the file's name, the manifest does not know yet
    "populate:saved",  # the stubs of a step are there and noted, whoever looked got no answer yet
)

#: On the way to the local disk.
DISK_POINTS = (
    "disk:begun",  # a directory for what comes is there, empty
    "disk:copied",  # all files are on the disk, no manifest says so
    "disk:committed",  # the step has its place there, this daemon does not know yet
    "disk:recorded",  # it knows, the copy that was there before still takes room
)

_KNOWN = (*POINTS, *OBJECT_POINTS, *ARCHIVE_POINTS, *PART_POINTS, *STUB_POINTS, *DISK_POINTS)


class CrashPoints:
    """`crash("name")` returns, unless the setting names that point."""

    def __init__(self, setting: str, notes: Path) -> None:
        name, _, nth = (setting, "", "1") if setting in _KNOWN else setting.rpartition(":")
        if setting and (name not in _KNOWN or not nth.isdigit() or int(nth) < 1):
            raise SettingsError(
                f"debug_crash_at = {setting!r}: known points are {', '.join(_KNOWN)}, and NAME:N for the Nth time",
                key="debug_crash_at",
            )
        self._name = name
        self._left = int(nth) if setting else 0
        self._note = notes / "%crashed"
        if setting and self._note.exists():
            self._name = ""

    def __call__(self, name: str) -> None:
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            self._note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
