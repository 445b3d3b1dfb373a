"""The process around a keeper: in the foreground of `tierfs mount --foreground`, or what `tierfs mount` starts.

It may hold several keepers, one after the other: where another process took the mount and then did not come to serve
it, this one takes it back (`mount.replacing`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mount.keeper import Keeper
from mount.notify import watchdog_s as service_watchdog_s
from mount.replacing import become_spare, stand_by, take_from_keeper
from mount.runtime import Instance, is_running, lock_keeper, read_record, write_atomically
from tierfs.errors import MountError, TierfsError
from tierfs.settings_sources import settings_from_json, settings_to_json

log = logging.getLogger("tierfs.keeper")


def keep(
    instance: Instance,
    *,
    daemon_module: str = "mount.daemon",
    on_ready: Callable[[], None],
    on_let_go: Callable[[], None] = lambda: None,
    replace: bool = False,
    stays: bool = False,
    watchdog_s: float | None = None,
) -> int:
    """Runs the keeper of an instance in this process until its mount ends; see `Keeper.run`.

    With `replace` an instance that is mounted already is taken from its keeper; with `stays` this process waits to be
    told to stop after another one has taken it. `on_ready` is called again when the mount was taken back.
    """
    takes = replace and is_running(instance)
    # Before anything is taken: who replaces it at the same time removes the file.
    settings = settings_from_json((instance.next_settings if takes else instance.settings).read_text())
    connection = take_from_keeper(instance) if takes else -1
    while True:
        lock = lock_keeper(instance)
        try:
            record = read_record(instance)
            if record is None:
                raise MountError(f"{instance.mount_record} is missing or damaged; mount with `tierfs mount`")
            _raise_file_limit()
            write_atomically(instance.settings, settings_to_json(settings))
            instance.next_settings.unlink(missing_ok=True)
            keeper = Keeper(
                instance,
                settings,
                record,
                daemon_module=daemon_module,
                on_ready=on_ready,
                connection=connection,
                watchdog_s=watchdog_s,
            )
            status = keeper.run()
            if not keeper.let_go:
                return status
            served_by = become_spare(instance)
        finally:
            os.close(lock)
        on_let_go()
        connection = keeper.connection
        if not stand_by(instance, record.mountpoint, connection, keeper.wake, served_by=served_by, stays=stays):
            log.info("%s is kept by another keeper, or unmounted", record.mountpoint)
            return 0
        log.error("the keeper that took %s does not serve it; taking it back", record.mountpoint)


def _raise_file_limit() -> None:
    """The daemon, which inherits it, holds a descriptor for each file that the kernel knows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in ((1 << 20, max(hard, 1 << 20)), (hard, hard)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            return
        except (OSError, ValueError):
            continue


def set_up_log(notes: Sequence[str] = ()) -> None:
    """The keeper's lines, `notes` first, go to standard error: the terminal, the journal, or `R/log/keeper.log`."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s keeper %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for note in notes:
        log.warning("%s", note)


def main(arguments: list[str] | None = None) -> int:
    """`python -m mount.keeping R`: what `tierfs mount` starts. Says how it went on `--report-fd`, a line of JSON."""
    parser = argparse.ArgumentParser(prog="mount.keeping")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--daemon-module", default="mount.daemon")
    parser.add_argument("--replace", action="store_true")
    given = parser.parse_args(arguments)
    set_up_log()

    def report(said: dict[str, Any]) -> None:
        if given.report_fd is not None:
            with suppress(OSError):
                os.write(given.report_fd, json.dumps(said).encode() + b"\n")
                os.close(given.report_fd)
            given.report_fd = None

    if given.report_fd is not None:
        os.set_inheritable(given.report_fd, False)
    try:
        return keep(
            Instance(given.directory),
            daemon_module=given.daemon_module,
            on_ready=lambda: report({"ready": True}),
            replace=given.replace,
            watchdog_s=service_watchdog_s(),
        )
    except (TierfsError, OSError) as error:
        log.error("%s", error)
        report({"error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
