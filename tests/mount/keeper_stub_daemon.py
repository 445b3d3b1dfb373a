"""A daemon as small as can be, for tests of the keeper alone: shows R/ram/root and serves nothing but attributes.

It speaks the FUSE protocol itself (include/uapi/linux/fuse.h), so that it needs neither the channel nor libfuse, and
a takeover costs it nothing: its one file system object is the root. `R/stub` says how it shall misbehave.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path

IN = struct.Struct("<IIQQIIIHH")
OUT = struct.Struct("<IiQ")
GETATTR, OPENDIR, READDIR, STATFS, RELEASEDIR, INIT, FORGET, INTERRUPT, BATCH_FORGET = 3, 27, 28, 17, 29, 26, 2, 36, 42
RESEND = 7  # FUSE_NOTIFY_RESEND


def attributes() -> bytes:
    valid, times = (0, 0, 0), (0, 0, 0)
    ids = (0o40755, 2, os.geteuid(), os.getegid())
    return struct.pack("<QII6Q10I", *valid, 1, 0, 0, *times, *times, *ids, 0, 4096, 0)


def main() -> int:
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    fuse_fd, ready_fd = int(os.environ["TIERFS_FUSE_FD"]), int(os.environ["TIERFS_READY_FD"])
    wish = (directory / "stub").read_text().split() if (directory / "stub").exists() else []
    with open(directory / "starts", "a") as file:
        file.write(f"{mode}\n")
    if "die" in wish:
        print("stub: as wished, I die before I am ready", flush=True)
        return 7
    for name in ("root", "generations", "meta", "trash"):
        (directory / "ram" / name).mkdir(exist_ok=True)
    (directory / "ram" / "ballast").write_bytes(b"\0" * 4096)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in wish else lambda *_: detach(directory))
    resend = "no-resend" not in wish

    def ready() -> None:
        with contextlib.suppress(BrokenPipeError):  # the keeper was killed meanwhile
            os.write(ready_fd, json.dumps({"resend": resend, "passthrough": False}).encode() + b"\n")
        os.close(ready_fd)

    if mode == "takeover":
        os.write(fuse_fd, OUT.pack(16, RESEND, 0))
        ready()
    while True:
        try:
            request = os.read(fuse_fd, (1 << 20) + 65536)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return 0
            raise
        _, opcode, unique, *_ = IN.unpack_from(request)
        if opcode == INIT:
            _, minor, readahead = struct.unpack_from("<III", request, 40)
            extended, has_resend = 1 << 30, 1 << 7
            sizes = (8, 6, 1 << 20, 1, 256, 0)
            said = struct.pack("<IIIIHHIIHHII24x", 7, minor, readahead, extended, *sizes, has_resend, 0)
            answer(fuse_fd, unique, said)
            ready()
        elif opcode == GETATTR:
            if (directory / "stall").exists():
                (directory / "stalled").touch()
                while (directory / "stall").exists():
                    time.sleep(0.01)
            answer(fuse_fd, unique, attributes())
        elif opcode == STATFS:
            answer(fuse_fd, unique, struct.pack("<5Q4I6I", 1, 1, 1, 1, 1, 4096, 255, 4096, 0, *[0] * 6))
        elif opcode == OPENDIR:
            answer(fuse_fd, unique, struct.pack("<QII", 1, 0, 0))
        elif opcode in (READDIR, RELEASEDIR):
            answer(fuse_fd, unique, b"")
        elif opcode not in (FORGET, INTERRUPT, BATCH_FORGET):
            answer(fuse_fd, unique, b"", error=errno.ENOSYS)


def answer(fd: int, unique: int, body: bytes, *, error: int = 0) -> None:
    with contextlib.suppress(FileNotFoundError):  # the request was interrupted
        os.write(fd, OUT.pack(16 + len(body), -error, unique) + body)


def detach(directory: Path) -> None:
    mountpoint = json.loads((directory / "mount.json").read_text())["mountpoint"]
    ctypes.CDLL(None).umount2(os.fsencode(mountpoint), 2)


if __name__ == "__main__":
    sys.exit(main())
