"""`tierfs import` and `tierfs export`: steps from elsewhere into a mount, and out of it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mount.cli.read_commands import add_json

if TYPE_CHECKING:
    from mount.cli.targets import Target
    from mount.copying import Source
    from tierfs.settings import Settings
    from tierfs.steps.markers import MarkerRules
    from tierfs.steps.names import StepPath

COMPLETES_WITHIN_S = 30.0
REFUSED_AFTER_S = 3.0
"""How long to wait for a step of which a note says what it lacks."""


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    importing = subparsers.add_parser(
        "import",
        help="make a step of a plain checkpoint",
        description="Copies a plain checkpoint directory, or one in a bucket, into the mount as a step, its marker\n"
        "last. With DEST alone nothing is copied: objects that lie at its place in the object tier become a step.",
        epilog="examples:\n"
        "  tierfs import /data/old/step_500 /ckpt/run1/step_500\n"
        "  tierfs import s3://bucket/pretrained/llama /ckpt/base/step_0\n"
        "  tierfs import s3://bucket/base/job-7 /ckpt/job-7/step_500      SageMaker's library saved there\n"
        "  tierfs import /ckpt/run1/step_500      its objects were put into the bucket by other means\n\n"
        "exit codes: 0 the step is complete, 1 failed or the source is not whole, 2 no step's place, 4 not mounted",
    )
    importing.add_argument("source", metavar="SRC", nargs="?", help="directory, file:///path or s3://bucket/prefix")
    importing.add_argument("destination", metavar="DEST", help="the step's directory in the mount")
    importing.add_argument(
        "--force", action="store_true", help="also over a step that is there: a new generation of it"
    )
    add_json(importing)
    importing.set_defaults(run=run_import)

    export = subparsers.add_parser(
        "export",
        help="copy a step to a plain directory",
        description="Copies a complete step, or a file or directory of one, to a plain directory, with times and\n"
        "modes, and compares what was written with the checksums that the step was sealed with.",
        epilog="examples:\n  tierfs export /ckpt/run1/latest /data/keep/step_500\n\n"
        "exit codes: 0 copied, 1 some file is not as it was sealed, 4 not mounted",
    )
    export.add_argument("path", metavar="PATH", help="step, or a file or directory in one")
    export.add_argument("directory", metavar="DIRECTORY", type=Path, help="made if it is missing")
    export.add_argument(
        "--force",
        action="store_true",
        help="also into a directory that is not empty, and of a step that is not complete",
    )
    add_json(export)
    export.set_defaults(run=run_export)


def run_import(arguments: argparse.Namespace) -> int:
    from mount.cli.object_commands import count_of, shown
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from mount.cli.targets import find_target, require_inside
    from tierfs.units import format_size

    target = require_inside(find_target(arguments.destination), arguments.destination, "import to")
    settings, where = _step_place(target, arguments.destination)
    with ProgressLine("importing", enabled=not arguments.json) as line:
        if arguments.source is None:
            answer = target.request("import", force=arguments.force, on_progress=line.show)
        else:
            _refuse_existing(target, arguments.destination, force=arguments.force)
            answer = _copy_in(arguments, target, settings, where, line)
    if arguments.json:
        print_json(answer)
    else:
        print(f"{shown(target.rel)}: imported ({count_of(answer['files'], 'file')}, {format_size(answer['bytes'])})")
    return 0


def _copy_in(
    arguments: argparse.Namespace, target: Target, settings: Settings, where: StepPath, line: Any
) -> dict[str, Any]:
    from mount.copying import import_step
    from mount.sagemaker_source import as_step
    from tierfs.errors import TierfsError

    source = as_step(_source(arguments.source, settings), where.number)
    copied = import_step(source, _path(target), _rules(settings, where), line.show)
    found = _wait_complete(target) if copied["marked"] else target.request("commit")
    if found["state"] != "complete":
        why = found.get("note") or "its marker was not taken for one"
        raise TierfsError(f"{target.rel} was copied, but is not complete: {why}; `tierfs stat` tells more")
    return {"path": target.rel, "files": copied["files"], "bytes": copied["bytes"], "state": found["state"]}


def _wait_complete(target: Target) -> dict[str, Any]:
    """The step, once it is complete or the time is up: some markers are judged in the background."""
    started = time.monotonic()
    while True:
        found: dict[str, Any] = target.request("stat")["step"] or {"state": ""}
        waited_s = time.monotonic() - started
        if found["state"] == "complete" or waited_s > (REFUSED_AFTER_S if found.get("note") else COMPLETES_WITHIN_S):
            return found
        time.sleep(0.05)


def _source(text: str, settings: Settings) -> Source:
    """A directory, or what lies below a URL, with the S3 settings of the instance."""
    from mount.copying import DirectorySource, StoreSource
    from tierfs.errors import NotFound
    from tierfs.objects.opening import StoreSettings, file_root, open_store

    if text.startswith("s3:"):
        return StoreSource(open_store(StoreSettings(text, settings.s3)))
    root = file_root(text) if text.startswith("file:") else Path(text)
    if not root.is_dir():
        raise NotFound(f"{text} is not a directory; name a checkpoint's directory, or s3://bucket/prefix")
    return DirectorySource(root)


def _refuse_existing(target: Target, destination: str, *, force: bool) -> None:
    from tierfs.errors import NotFound, PathRefused, StepBusy

    try:
        step = target.request("stat")["step"]
    except NotFound:
        return
    if step is None:
        raise PathRefused(f"{destination} is there and is no step; import to a new name")
    if step["files"] and not force:
        raise StepBusy(
            f"{destination} is a {'complete step' if step['state'] == 'complete' else 'step that is being written'} "
            f"already ({step['files']} files); import to another name, or --force makes a new generation of it"
        )


def run_export(arguments: argparse.Namespace) -> int:
    from mount.cli.object_commands import count_of, print_failures, shown
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from mount.cli.targets import find_target, require_inside
    from mount.copying import export_files
    from tierfs.errors import PathRefused, StepBusy
    from tierfs.units import format_size

    target = require_inside(find_target(arguments.path, follow=True), arguments.path, "export")
    found = target.request("stat")
    step = found["step"]
    if step is None:
        raise PathRefused(f"{arguments.path} is not in a step; export one step at a time, such as run1/step_500")
    if step["state"] != "complete" and not arguments.force:
        raise StepBusy(f"{step['step']} is not complete; --force copies what there is of it")
    directory: Path = arguments.directory
    if directory.is_dir() and any(directory.iterdir()) and not arguments.force:
        raise PathRefused(f"{directory} is not empty; name another directory, or --force writes into it")
    settings, where = _step_place(target, arguments.path, inside=True)
    is_directory = found["type"] == "directory"

    def checksum_of(inner: str) -> str | None:
        rel = f"{target.rel}/{inner}" if is_directory else target.rel
        checksum = type(target)(target.instance, rel).request("stat")["checksum"]
        return str(checksum) if checksum else None

    with ProgressLine("copying", enabled=not arguments.json) as line:
        copied = export_files(_path(target), directory, _rules(settings, where), checksum_of, line.show)
    answer = {"path": target.rel, "directory": os.fspath(directory), **copied}
    if arguments.json:
        print_json(answer)
    else:
        print_failures(answer["bad"])
        amount = f"{count_of(answer['files'], 'file')}, {format_size(answer['bytes'])}"
        print(f"{shown(target.rel)}: copied to {shown(answer['directory'])} ({amount}; {answer['verified']} verified)")
    if answer["bad"]:
        print(f"tierfs: {len(answer['bad'])} files are not as they were sealed; don't use this copy", file=sys.stderr)
    return 1 if answer["bad"] else 0


def _step_place(target: Target, path: str, *, inside: bool = False) -> tuple[Settings, StepPath]:
    """The instance's settings and the step that the path is (or, with `inside`, lies in). NotAStep."""
    from mount.runtime import find_instance
    from tierfs.errors import NotAStep
    from tierfs.settings_sources import settings_from_json
    from tierfs.steps.names import StepNames

    settings = settings_from_json(find_instance(target.instance or "").settings.read_text())
    where = StepNames(settings.steps.patterns).locate(target.rel)
    if where is None or (where.inner and not inside):
        raise NotAStep(
            f"{path} is no step's place; a step is a directory below a namespace, such as run1/step_100 (see "
            f"steps.patterns in `tierfs config show`)"
        )
    return settings, where


def _rules(settings: Settings, where: StepPath) -> MarkerRules:
    from tierfs.steps.markers import MarkerRules

    return MarkerRules(settings.for_namespace(where.namespace).steps.markers)


def _path(target: Target) -> Path:
    return Path(target.instance or "/") / target.rel
