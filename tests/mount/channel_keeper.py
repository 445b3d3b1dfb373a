"""A keeper of a few lines: mounts, starts a daemon (channel_daemon.py), and starts it again when it was killed.

    python channel_keeper.py BASE KIND PASSTHROUGH [SCRIPT]

It is a process of its own because a child that a user of the mount forks would close that user's files, and wait for
the daemon that it is to become. The daemon's pid is in BASE/daemon.pid, its exit codes are in BASE/exits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from mount.kernel_mount import read_far_ahead

base, kind, passthrough = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
script = Path(__file__).with_name(sys.argv[4] if len(sys.argv) > 4 else "channel_daemon.py")
fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"channel-test", os.fsencode(base / "mount"), b"fuse.channeltest", 6, options.encode()) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
read_far_ahead(str(base / "mount"))
mode = "fresh"
while True:
    daemon = subprocess.Popen(
        [sys.executable, script, str(fd), base / "ram", mode, kind, passthrough],
        pass_fds=[fd],
    )
    (base / "daemon.pid.new").write_text(str(daemon.pid))
    (base / "daemon.pid.new").rename(base / "daemon.pid")
    code = daemon.wait()
    with (base / "exits").open("a") as exits:
        exits.write(f"{code}\n")
    if code != -signal.SIGKILL:
        break
    mode = "takeover"
