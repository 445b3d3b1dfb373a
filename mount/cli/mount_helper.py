"""`mount.tierfs`: what mount(8) and /etc/fstab run for the file system types `tierfs` and `fuse.tierfs`.

mount(8) looks for `/sbin/mount.<type>` and runs it as `mount.<type> SOURCE DIR [-sfnv] [-o OPTIONS] [-t TYPE]`
(mount(8), "external helpers"). The source names the instance:

    job1  /ckpt  fuse.tierfs  size=200GiB,nofail  0 0

Exit status as mount(8) documents: 0 mounted, 1 wrong usage, 32 mount failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

USAGE_ERROR, MOUNT_FAILURE = 1, 32
_NO_NAMES = ("", "none", "tierfs", "fuse", "default")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="mount.tierfs", allow_abbrev=False, description="Mounts a tierfs instance for mount(8).")
    parser.add_argument("source", metavar="SOURCE", help="the instance's name; `none` and `tierfs` name it by DIR")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("-o", action="append", default=[], dest="options", metavar="OPTIONS")
    parser.add_argument("-s", action="store_true", help="accepted: unknown options are an error all the same")
    parser.add_argument("-f", action="store_true", dest="fake", help="check everything, but don't mount")
    parser.add_argument("-n", action="store_true", help="accepted: there is no mtab to write")
    parser.add_argument("-v", action="store_true", dest="verbose", help="say what was mounted")
    parser.add_argument("-w", "--rw", action="store_true", help="accepted: it is always writable")
    parser.add_argument("-r", action="store_true", dest="read_only", help="refused")
    parser.add_argument("-t", dest="type", metavar="TYPE")
    given = parser.parse_args(arguments)

    from tierfs.errors import TierfsError

    try:
        return _mount(given)
    except (TierfsError, OSError) as error:
        print(f"mount.tierfs: {error}", file=sys.stderr)
        return MOUNT_FAILURE


def _mount(given: argparse.Namespace) -> int:
    from mount.launch import LaunchFailed, object_tier_problem, prepare_mount, start_detached
    from mount.runtime import instance_name, real_mountpoint
    from tierfs.errors import MountError, SettingsError
    from tierfs.settings_sources import load_settings, split_mount_options

    words = [word for option in given.options for word in option.split(",")]
    if "remount" in words:
        raise MountError("a tierfs mount can't be changed by remount: unmount it and mount it again, its steps stay")
    if given.read_only:
        raise MountError("tierfs can't be mounted read-only")
    options = [*given.options]
    named = {key: value for key, value in split_mount_options(options).settings if key in ("name", "config")}
    # mount(8) makes a source into an absolute path when the current directory happens to have a file of that name.
    source = given.source.rpartition("/")[2]
    source = "" if source in _NO_NAMES else source
    if source and named.get("name", source) != source:
        raise SettingsError(
            f"the source {source!r} and the option name={named['name']} name two instances; keep one", key="name"
        )
    flags = {"name": source} if source else {}
    if given.fake:
        import os

        load_settings(None, os.environ, options, flags, default_name=instance_name(real_mountpoint(given.directory)))
        return 0
    prepared = prepare_mount(given.directory, options, flags=flags, source=given.source, make_mountpoint=False)
    try:
        start_detached(prepared)
    except LaunchFailed as error:
        if error.log_tail:
            print(f"the last lines of {error.log_path}:\n{error.log_tail}", file=sys.stderr)
        raise
    for note in [*prepared.notes, *filter(None, [object_tier_problem(prepared)])]:
        print(f"mount.tierfs: {note}", file=sys.stderr)
    if given.verbose:
        print(f"mounted {prepared.instance.name} on {prepared.record.mountpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
