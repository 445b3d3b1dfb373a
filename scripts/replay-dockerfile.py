#!/usr/bin/env python3
"""Builds what a Dockerfile says without a container engine: each step in a chroot, over a Debian made by debootstrap.

    replay-dockerfile.py [--share PATH]... [--build-arg NAME=VALUE]... DOCKERFILE [-- COMMAND...]

As root. Then runs COMMAND in the image (by default its entry point with its CMD) and exits with its status. What is
understood: ARG, FROM debian:RELEASE, RUN and COPY (also --from) in their plain forms, ENV, WORKDIR, ENTRYPOINT, CMD; it
stops at anything else. The context is the current directory, less what DOCKERFILE.dockerignore excludes.

The base lies in ${XDG_CACHE_HOME:-~/.cache}/tierfs afterwards. The steps see this machine's network, its name servers,
its pip.conf and certificates, the variables PIP_*, SSL_* and *_proxy, and each PATH that is shared with them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

SHARED = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/xdg/pip")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PASSED = re.compile(r"PIP_.*|SSL_.*|https?_proxy|no_proxy", re.IGNORECASE)
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")


@dataclass
class Stage:
    name: str
    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    entry_point: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


class Replay:
    def __init__(self, dockerfile: Path, arguments: dict[str, str], shared: list[Path], work: Path) -> None:
        self.dockerfile = dockerfile
        self.given = arguments
        self.known: dict[str, str] = {}
        self.shared = [Path(path) for path in (*SHARED, *shared) if Path(path).exists()]
        self.work = work
        self.stages: list[Stage] = []
        self.mounts = ExitStack()

    def run(self) -> Stage:
        for number, word, rest in instructions(self.dockerfile.read_text()):
            print(f"--- {self.dockerfile.name}:{number}: {word} {rest}", flush=True)
            step = getattr(self, f"_{word.lower()}", None)
            if step is None or (not self.stages and word not in ("ARG", "FROM")):
                sys.exit(f"{self.dockerfile}:{number}: {word} can't be replayed here")
            step(rest)
        return self.stages[-1]

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self.known[name] = self.given.get(name, default)

    def _from(self, rest: str) -> None:
        image, *name = self._filled(rest).split()
        found = re.fullmatch(r"debian:([a-z]+)(-slim)?", image)
        if not found:
            sys.exit(f"only debian:RELEASE can be stood in for, not {image}: --build-arg names another base")
        root = self.work / f"stage{len(self.stages)}"
        upper, scratch = self.work / f"upper{len(self.stages)}", self.work / f"scratch{len(self.stages)}"
        for path in (root, upper, scratch):
            path.mkdir()
        self._mount(
            "-t", "overlay", "-o", f"lowerdir={base(found[1])},upperdir={upper},workdir={scratch}", "stage", root
        )
        self._mount("-t", "proc", "proc", root / "proc")
        self._mount("--rbind", "/dev", root / "dev")
        self._mount("--make-rslave", root / "dev")
        for path in self.shared:
            target = root / path.relative_to("/")
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            self._mount("--bind", "-o", "ro", path.resolve(), target)
        self.stages.append(Stage(name[1] if name[:1] in (["AS"], ["as"]) else "", root))

    def _run(self, rest: str) -> None:
        if rest.startswith(("[", "--")):
            sys.exit("RUN is replayed in its plain form only")
        if CERTIFICATES.exists():  # a copy, since the package that brings them writes there
            place = self.stages[-1].root / CERTIFICATES.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CERTIFICATES, place)
        done = self.chroot(["/bin/sh", "-c", rest])
        if done:
            sys.exit(f"the step ended with {done}")

    def _copy(self, rest: str) -> None:
        words = shlex.split(rest)
        context, from_context = Path.cwd(), True
        if words[0].startswith("--from="):
            name = words.pop(0).removeprefix("--from=")
            (context,) = [stage.root for stage in self.stages if stage.name == name]
            from_context = False

        def excluded(where: str, names: list[str]) -> set[str]:
            return {name for name in names if self._is_ignored((Path(where) / name).relative_to(context))}

        *sources, target = words
        place = self.stages[-1].root / self.stages[-1].directory.lstrip("/") / target.lstrip("/")
        for each in sources:
            source = context / each.lstrip("/")
            if not source.exists() or (from_context and self._is_ignored(source.relative_to(context))):
                sys.exit(f"{each} is not in the context")
            if source.is_dir():
                shutil.copytree(
                    source, place, symlinks=True, dirs_exist_ok=True, ignore=excluded if from_context else None
                )
            else:
                into = place / source.name if target.endswith("/") else place
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, into)

    def _env(self, rest: str) -> None:
        for assignment in shlex.split(rest):
            name, _, value = assignment.partition("=")
            self.stages[-1].environment[name] = os.path.expandvars(self._filled(value, self._environment()))

    def _workdir(self, rest: str) -> None:
        self.stages[-1].directory = rest
        (self.stages[-1].root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _entrypoint(self, rest: str) -> None:
        self.stages[-1].entry_point = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.stages[-1].command = json.loads(rest)

    # ---

    def chroot(self, command: list[str]) -> int:
        stage = self.stages[-1]
        script = 'cd "$0" && exec "$@"'
        return subprocess.run(
            ["chroot", stage.root, "/bin/sh", "-c", script, stage.directory, *command],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
        ).returncode

    def _environment(self) -> dict[str, str]:
        passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {
            "PATH": path,
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
            **passed,
            **self.stages[-1].environment,
        }

    def _filled(self, text: str, also: dict[str, str] | None = None) -> str:
        known = {**self.known, **(also or {})}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), text)

    def _mount(self, *arguments: str | Path) -> None:
        subprocess.run(["mount", *arguments], check=True)
        if arguments[0] != "--make-rslave":
            self.mounts.callback(subprocess.run, ["umount", "-R", "-l", arguments[-1]])

    def _is_ignored(self, path: Path) -> bool:
        """By the last pattern that matches the path or one of its parents, as in .dockerignore."""
        file = self.dockerfile.with_name(f"{self.dockerfile.name}.dockerignore")
        excluded = False
        for line in file.read_text().split() if file.exists() else []:
            parts = re.split(r"(\*\*/|\*)", line.removeprefix("!"))
            pattern = "".join({"**/": "(.*/)?", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
            if re.fullmatch(pattern + "(/.*)?", str(path)):
                excluded = not line.startswith("!")
        return excluded


def instructions(text: str) -> list[tuple[int, str, str]]:
    """Line number, word and rest of each instruction, with its continuation lines in it."""
    found: list[tuple[int, str, str]] = []
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not pending and not line.strip()):
            continue
        began = began if pending else number
        pending += line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        word, _, rest = pending.partition(" ")
        found.append((began, word, rest.strip()))
        pending = ""
    return found


def base(release: str) -> Path:
    """A Debian with nothing but what each has, as in debian:RELEASE-slim. Whole only once it is in its place."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tierfs"
    place = cache / f"debian-{release}"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"debian-{release}.", dir=cache))
        try:
            subprocess.run(["debootstrap", "--variant=minbase", release, made / "root", MIRROR], check=True)
            for archive in (made / "root/var/cache/apt/archives").glob("*.deb"):
                archive.unlink()
            (made / "root").rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return place


def main() -> int:
    given = sys.argv[1:]
    command: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, command = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n")[2].strip())
    parser.add_argument("--share", action="append", type=Path, default=[])
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("dockerfile", type=Path)
    options = parser.parse_args(given)
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("needs root, and the package debootstrap")
    if os.getpid() != 1:  # in namespaces of its own, with which its mounts and whatever it started go
        own = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        os.execvp(own[0], [*own, sys.executable, *sys.argv])
    arguments = dict(each.partition("=")[::2] for each in options.build_arg)
    with tempfile.TemporaryDirectory(prefix="replay-", ignore_cleanup_errors=True) as work:
        replay = Replay(options.dockerfile, arguments, options.share, Path(work))
        with replay.mounts:
            image = replay.run()
            command = command or [*image.entry_point, *image.command]
            print(f"--- {shlex.join(command)}", flush=True)
            return replay.chroot(command)


if __name__ == "__main__":
    sys.exit(main())
