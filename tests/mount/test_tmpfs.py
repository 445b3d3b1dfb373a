"""The RAM tier's tmpfs by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import needs_root
from tierfs.ram.tmpfs import mount_tmpfs, read_grant, resize_tmpfs, unmount_tmpfs

_CHANGES = 32


@pytest.mark.parametrize("noswap", [True, False])
def test_a_new_size_changes_nothing_else_and_the_kernel_has_nothing_to_complain_of(
    tmp_path: Path, noswap: bool
) -> None:
    """The ballast changes the size many times a second."""
    needs_root()
    if not Path("/dev/kmsg").exists():
        pytest.skip("needs the kernel's log, /dev/kmsg")
    granted = mount_tmpfs(tmp_path, 8 << 20, huge_pages="never", noswap=noswap)
    try:
        kernel_log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.lseek(kernel_log, 0, os.SEEK_END)
            for mib in range(9, 9 + _CHANGES):
                assert resize_tmpfs(tmp_path, mib << 20) == mib << 20
            said = []
            while True:
                try:
                    said.append(os.read(kernel_log, 8192).decode())
                except BlockingIOError:
                    break
        finally:
            os.close(kernel_log)
        assert len([line for line in said if "tmpfs" in line]) < _CHANGES  # other mounts may have been tried meanwhile
        assert read_grant(tmp_path).noswap == granted.noswap
    finally:
        unmount_tmpfs(tmp_path)
