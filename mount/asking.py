"""Asks the mount something, for the keeper, in a process of its own.

Not in a thread: one that waits for an answer can't be killed once the daemon has read its question (fs/fuse/dev.c,
request_wait_answer), and until it has ended its process' descriptors stay open. Were /dev/fuse among them, as it is in
the keeper, and the daemon killed as well, the connection would never end, nor the keeper, nor anybody who waits.
"""

from __future__ import annotations

import subprocess
import sys

_QUESTION = "import os, sys; os.stat(sys.argv[1]); os.statvfs(sys.argv[1])"


def ask(mountpoint: str) -> subprocess.Popen[bytes]:
    """A process that ends with 0 once the mount has answered. Neither is answered from the kernel's cache for long.

    OSError when it can't be started. Whoever asks waits for its end.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _QUESTION, mountpoint],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=True,
        cwd="/",
    )
