"""The runtime directory of an instance: its paths, who is alive in it, and how any process finds it.

An instance lives in `<parent>/<name>` (root: `/run/tierfs/<name>`). Every mount also leaves a link to it in
`<default parent>/.instances/`, so that `tierfs status /ckpt` finds an instance whose runtime directory was put
elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mount.live_process import LiveProcess, start_time
from tierfs.errors import InstanceError, MountError, NotFound, SettingsError
from tierfs.settings import Settings
from tierfs.settings_values import INSTANCE_NAME

_LINKS = ".instances"


@dataclass(frozen=True)
class Instance:
    """The paths of one instance; nothing is touched by making one."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def control_socket(self) -> Path:
        return self.directory / "control.sock"

    @property
    def keeper_lock(self) -> Path:
        """Locked (flock) by the living keeper for all its life: the truth of "a keeper lives"."""
        return self.directory / "keeper.lock"

    @property
    def keeper_pid(self) -> Path:
        return self.directory / "keeper.pid"

    @property
    def daemon_pid(self) -> Path:
        return self.directory / "daemon.pid"

    @property
    def daemon_lock(self) -> Path:
        """Locked (flock) by a living daemon for all its life, so that two never work on one RAM tier."""
        return self.directory / "daemon.lock"

    @property
    def daemon_ready(self) -> Path:
        """What the running daemon said when it was ready, as JSON, for a keeper that adopts it."""
        return self.directory / "daemon.ready"

    @property
    def spare_pid(self) -> Path:
        """The keeper that was replaced and waits whether its successor serves (`mount.replacing`)."""
        return self.directory / "spare.pid"

    @property
    def gateway_pid(self) -> Path:
        return self.directory / "gateway.pid"

    @property
    def gateway_counts(self) -> Path:
        """What the gateway has served, as JSON."""
        return self.directory / "gateway.counts"

    @property
    def channel_state(self) -> Path:
        return self.directory / "channel.state"

    @property
    def settings(self) -> Path:
        return self.directory / "settings.json"

    @property
    def next_settings(self) -> Path:
        """Of the keeper that is to replace the one that runs; `settings` once it has."""
        return self.directory / "settings.next.json"

    @property
    def mount_record(self) -> Path:
        return self.directory / "mount.json"

    @property
    def log_directory(self) -> Path:
        return self.directory / "log"

    @property
    def ram(self) -> Path:
        """Mount point of the RAM tier's tmpfs; without root a link to a directory below /dev/shm."""
        return self.directory / "ram"


def log_directory(instance: Instance, settings: Settings) -> Path:
    """Where the instance's logs go: `log.directory/NAME`, by default `R/log`."""
    return settings.log.directory / instance.name if settings.log.directory else instance.log_directory


@dataclass(frozen=True)
class MountRecord:
    """What the next process has to know of a mount, kept in `R/mount.json`."""

    mountpoint: str
    """Absolute, symlinks resolved: as the kernel shows it in mountinfo."""
    privileged: bool
    """Mounted by mount(2) as root, with the RAM tier on a tmpfs of its own; else by fusermount3."""
    made_mountpoint: bool = False
    """`tierfs mount` made the directory, so `tierfs umount` removes it."""
    source: str = "tierfs"
    """What the mount table and df call it. From fstab its first field, by which `mount -a` sees that it is mounted."""
    kernel_options: tuple[str, ...] = ()
    """Options for mount(2) that were asked for, such as noexec."""


# --- where ------------------------------------------------------------------------------------------------------


def default_parent(environ: Mapping[str, str] | None = None) -> Path:
    """Where runtime directories go when no setting says so.

    Root: /run/tierfs. Others: $XDG_RUNTIME_DIR/tierfs, else /tmp/tierfs-UID.
    """
    environ = os.environ if environ is None else environ
    if os.geteuid() == 0:
        return Path("/run/tierfs")
    if xdg := environ.get("XDG_RUNTIME_DIR"):
        return Path(xdg) / "tierfs"
    return Path(f"/tmp/tierfs-{os.geteuid()}")


def instance_name(mountpoint: Path) -> str:
    """The name of an instance that was given none: `/mnt/ckpt` is `mnt-ckpt`, and never the name of another path."""
    parts = mountpoint.parts[1:]
    name = "-".join(parts) or "root"
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if plain == name and not any("-" in part for part in parts) and INSTANCE_NAME.fullmatch(name):
        return name
    mark = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return f"{plain.lstrip('.-')[:48] or 'mount'}-{mark}"


def check_name(name: str) -> str:
    """`name` if it can be a directory's name; SettingsError otherwise."""
    if not INSTANCE_NAME.fullmatch(name):
        raise SettingsError(
            f"name: {name!r} can't name an instance; use up to 64 letters, digits, '_', '-' and '.', "
            "not starting with '-' or '.'",
            key="name",
        )
    return name


def real_mountpoint(path: str | os.PathLike[str]) -> Path:
    """`path` as the kernel shows it, without asking a file system that may be mounted there and hang."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100  resolve() would ask
    if absolute == absolute.parent:
        return absolute
    resolved = Path(os.path.realpath(absolute.parent)) / absolute.name
    if any(entry == str(resolved) for entry in _mountpoints()):
        return resolved
    return Path(os.path.realpath(resolved))


def _mountpoints() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        yield unescape_mount(line.split(" ")[4])


def unescape_mount(text: str) -> str:
    """A field of /proc/self/mountinfo, where space, tab, newline and backslash are octal escapes (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# --- making -----------------------------------------------------------------------------------------------------


def make_instance(parent: Path, name: str) -> Instance:
    """The instance's runtime directory, made with mode 0700 if it is missing.

    MountError when it belongs to someone else: below /tmp anybody could have put one there.
    """
    check_name(name)
    parent = Path(os.path.realpath(parent))
    shared = os.geteuid() == 0
    try:
        parent.mkdir(mode=0o755 if shared else 0o700, parents=True, exist_ok=True)
        if not shared:
            _refuse_foreign(parent)
        directory = parent / name
        directory.mkdir(mode=0o700, exist_ok=True)
        _refuse_foreign(directory)
        directory.chmod(0o700)
        instance = Instance(directory)
        instance.log_directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise MountError(
            f"the runtime directory {parent / name} can't be made: {error.strerror}; name another place with "
            "-o runtime_dir=DIR"
        ) from error
    return instance


def _refuse_foreign(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise MountError(
            f"{directory} is not a directory of this user; remove it or name another with -o runtime_dir=DIR"
        )


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` (mode 0600) so that a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def unix_address(path: Path) -> Iterator[str]:
    """`path` as the address of a Unix socket, of any length: the kernel takes 107 bytes (unix(7), sun_path)."""
    if len(os.fsencode(path)) < 108:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def write_record(instance: Instance, record: MountRecord) -> None:
    write_atomically(instance.mount_record, json.dumps(asdict(record)) + "\n")


def read_record(instance: Instance) -> MountRecord | None:
    """None when there is none or it can't be read."""
    try:
        values = json.loads(instance.mount_record.read_text())
        values["kernel_options"] = tuple(values.get("kernel_options", ()))
        return MountRecord(**values)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


# --- who is alive -----------------------------------------------------------------------------------------------


def write_process(path: Path, pid: int) -> LiveProcess | None:
    """Writes `pid` and its start time to a pid file; None, and nothing written, when it has ended already."""
    started = start_time(pid)
    if started is None:
        return None
    write_atomically(path, f"{pid} {started}\n")
    return LiveProcess(pid, started)


def read_process(path: Path) -> LiveProcess | None:
    """The living process a pid file names; None when it has ended, even if its pid was given to another."""
    try:
        pid, started = (int(word) for word in path.read_text().split())
    except (OSError, ValueError):
        return None
    process = LiveProcess(pid, started)
    return process if process.is_alive() else None


def read_daemon_ready(instance: Instance) -> dict[str, Any] | None:
    """What the running daemon said when it was ready, and its `pid`; None before that."""
    try:
        said = json.loads(instance.daemon_ready.read_text())
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def lock_keeper(instance: Instance, *, timeout_s: float = 2.0) -> int:
    """Becomes the instance's one keeper: a descriptor whose lock lasts as long as this process.

    MountError when another keeper lives. Waits a little, since `keeper_is_alive` holds the lock for an instant.
    """
    fd = _lock(instance.keeper_lock, timeout_s)
    if fd is None:
        raise already_mounted(instance)
    return fd


def lock_daemon(instance: Instance, *, timeout_s: float = 10.0) -> int:
    """The lock to give to a daemon: it lasts until that daemon, and whoever holds the descriptor, has ended.

    MountError when another daemon of the instance lives and doesn't end in time.
    """
    fd = _lock(instance.daemon_lock, timeout_s)
    if fd is None:
        raise MountError(
            f"an earlier daemon of {instance.name!r} still works on its RAM tier and does not end; `fuser "
            f"{instance.daemon_lock}` names it: kill it, then mount again"
        )
    return fd


def _lock(path: Path, timeout_s: float) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(0.02)


def keeper_is_alive(instance: Instance) -> bool:
    try:
        fd = os.open(instance.keeper_lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_running(instance: Instance) -> bool:
    """Whether a keeper or a daemon of it lives."""
    return keeper_is_alive(instance) or read_process(instance.daemon_pid) is not None


def already_mounted(instance: Instance) -> MountError:
    record = read_record(instance)
    keeper = read_process(instance.keeper_pid)
    where = f" on {record.mountpoint}" if record else ""
    who = f" (keeper {keeper.pid})" if keeper else ""
    return MountError(
        f"the instance {instance.name!r} is mounted already{where}{who}; unmount it first, or give this one another "
        "name with -o name=NAME"
    )


# --- finding ----------------------------------------------------------------------------------------------------


def register(instance: Instance) -> None:
    """Lets `all_instances` and `find_instance` find the instance wherever its runtime directory is."""
    links = default_parent() / _LINKS
    links.mkdir(mode=0o700, parents=True, exist_ok=True)
    for link in links.iterdir():
        if not link.exists():  # its runtime directory was removed by hand, or went with a reboot
            link.unlink(missing_ok=True)
    place = instance.directory.absolute()
    link = links / f"{instance.name}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"
    with suppress(FileExistsError):
        link.symlink_to(place)


def unregister(instance: Instance) -> None:
    """Removes the links to the instance."""
    links = default_parent() / _LINKS
    if not links.is_dir():
        return
    for link in links.iterdir():
        if link.is_symlink() and link.readlink() == instance.directory.absolute():
            link.unlink(missing_ok=True)


def all_instances(*parents: Path) -> list[Instance]:
    """Every instance below `parents` (the default one if none is named) or registered, once each, by name."""
    places: set[Path] = set()
    for parent in parents or (default_parent(),):
        if parent.is_dir():
            places.update(entry.resolve() for entry in parent.iterdir() if not entry.name.startswith("."))
    links = default_parent() / _LINKS
    if links.is_dir():
        places.update(link.resolve() for link in links.iterdir())
    return [Instance(place) for place in sorted(places) if (place / "mount.json").is_file()]


def find_instance(target: str | os.PathLike[str], *parents: Path, below: bool = False) -> Instance:
    """The instance that `target` names: its mount point, or its name.

    With `below`, any path in the mount will do. NotFound lists what there is.
    """
    text = os.fspath(target)
    instances = all_instances(*parents)
    on: dict[str, list[Instance]] = {}
    for one in instances:
        if (record := read_record(one)) is not None:
            on.setdefault(record.mountpoint, []).append(one)
    absolute = Path(os.path.abspath(text))  # noqa: PTH100  resolve() would ask
    for path in (absolute, *(absolute.parents if below else ())):  # as written first: no file system is asked
        if found := on.get(str(path)):
            return _the_one(found, f"were mounted on {path}", "name")
    if named := [one for one in instances if one.name == text]:
        return _the_one(named, f"are named {text!r}", "mount point")
    resolved = real_mountpoint(text)
    for path in (resolved, *(resolved.parents if below else ())):
        if found := on.get(str(path)):
            return _the_one(found, f"were mounted on {path}", "name")
    known = ", ".join(f"{one.name} on {where}" for where, ones in sorted(on.items()) for one in ones) or "none"
    error = NotFound(f"no tierfs instance is or was mounted on {text} or has this name; known here: {known}")
    error.exit_code = InstanceError.exit_code
    raise error


def _the_one(found: list[Instance], what: str, instead: str) -> Instance:
    """The one that runs, where one was unmounted and another mounted in its place."""
    if len(found) == 1:
        return found[0]
    running = [one for one in found if is_running(one)]
    if len(running) == 1:
        return running[0]
    places = ", ".join(str(one.directory) for one in found)
    raise InstanceError(f"several instances {what} ({places}); give the {instead} instead")


def other_on(mountpoint: str, instance: Instance) -> Instance | None:
    """Another instance that runs on this mount point, so that what is mounted there is not this one's."""
    for one in all_instances():
        record = read_record(one)
        is_there = record is not None and record.mountpoint == mountpoint and one.directory != instance.directory
        if is_there and is_running(one):
            return one
    return None
