"""`tierfs mount`, `tierfs umount`, mount(8) and fstab, as users call them, with the real daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mount import kernel_mount
from mount.runtime import read_process
from tests.conftest import wait_until
from tests.mount.keeper_rig import AS_USER, Rig, in_namespace, rig, tierfs


@pytest.fixture
def real() -> Iterator[Rig]:
    with rig("mount.daemon") as made:
        yield made


def refused(real: Rig, *options: str) -> str:
    done = tierfs(*real.mount_arguments(*options))
    assert done.returncode in (1, 2), done.stdout
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_a_cluster_that_this_node_can_not_be_in_is_refused_before_anything_starts(real: Rig, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o644)
    catalog = "catalog=etcd://127.0.0.1:1"
    assert "mode 644): chmod 600 it" in refused(real, f"{catalog},cluster.secret_file={secret}")
    secret.chmod(0o600)
    assert "must hold 16 to 4096 bytes" in refused(real, f"{catalog},cluster.secret_file={secret}")
    assert "set cluster.secret_file" in refused(real, f"{catalog},cluster.listen=10.0.0.1:7117")
    assert "etcd.ca" in refused(real, f"{catalog},cluster.listen=:0,etcd.ca={tmp_path}/none")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(real, f"{catalog},cluster.listen=127.0.0.1:{port}")
    assert f"another program listens at 127.0.0.1:{port}" in said and f"cluster.listen=:{port + 1}" in said
    assert not real.instance.directory.exists()


def test_a_gateway_whose_steps_would_be_none_is_refused(real: Rig) -> None:
    said = refused(real, 'gateway.listen=127.0.0.1:0,steps.patterns="it_(?P<step>[0-9]+)"')
    assert "needs steps that are named step_N" in said


def test_mounts_keep_their_files_over_an_umount_until_they_are_discarded(real: Rig) -> None:
    assert f"mounted {real.name} on {real.place}" in real.mount().stdout
    (real.place / "run1").mkdir()
    (real.place / "run1" / "shard").write_bytes(b"x" * 5000)
    done = tierfs("umount", real.place)
    assert done.returncode == 0 and f"unmounted {real.place}" in done.stdout
    assert "8 KiB stay in the RAM tier" in done.stdout or "2 MiB stay in the RAM tier" in done.stdout, done.stdout
    assert read_process(real.instance.daemon_pid) is None and read_process(real.instance.keeper_pid) is None
    again = tierfs("umount", real.place)
    assert again.returncode == 4 and "is not mounted" in again.stderr and "--discard" in again.stderr

    real.mount()
    assert (real.place / "run1" / "shard").read_bytes() == b"x" * 5000
    assert tierfs("umount", real.place).returncode == 0
    done = tierfs("umount", "--discard", real.place)
    assert done.returncode == 0 and "freed the RAM tier" in done.stdout
    assert kernel_mount.find_mount(str(real.instance.ram)) is None
    assert not real.instance.directory.exists()
    assert tierfs("umount", "--discard", real.place).returncode == 4


def test_discard_unmounts_and_frees_in_one_go(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"x")
    done = tierfs("umount", "--discard", real.place)
    assert done.returncode == 0, done.stderr
    assert not real.instance.directory.exists() and not real.is_mounted()


def test_an_unmounted_empty_instance_leaves_nothing(real: Rig) -> None:
    real.mount()
    assert tierfs("umount", real.place).stdout == f"unmounted {real.place}\n"
    assert not real.instance.directory.exists()
    assert real.place.is_dir(), "the mount point was the user's own"


def test_a_missing_mount_point_is_made_and_removed_again(real: Rig) -> None:
    real.place.rmdir()
    assert f"made the directory {real.place}" in real.mount().stderr
    assert tierfs("umount", real.place).returncode == 0
    assert not real.place.exists()


def test_the_size_follows_the_setting_when_the_tier_is_found_again(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"x")
    assert tierfs("umount", real.place).returncode == 0
    real.mount("size=96MiB")
    assert os.statvfs(real.place).f_blocks * os.statvfs(real.place).f_frsize == 96 << 20


def test_a_tier_larger_than_the_memory_is_mounted_with_a_warning(real: Rig) -> None:
    assert "larger than the memory there is" in real.mount("size=64TiB").stderr
    assert tierfs("umount", real.place).returncode == 0
    assert real.mount().stderr == ""


def test_mount_points_that_can_not_be_used_are_refused_in_one_line(real: Rig) -> None:
    (real.place / "old").touch()
    assert "is not empty (it holds 'old'" in refused(real)
    assert not real.instance.mount_record.exists()
    real.mount("nonempty")
    assert "is mounted already on" in refused(real)
    assert "is mounted on" in refused(real, f"name={real.name}2", "nonempty")
    assert tierfs("umount", real.place).returncode == 0
    assert (real.place / "old").exists()
    (real.place / "old").unlink()
    real.place.rmdir()
    real.place.touch()
    assert "is not a directory" in refused(real)
    real.place.unlink()
    real.place = real.place / "deeper" / "still"
    assert "make it first" in refused(real)


def test_wrong_settings_are_refused_before_anything_is_mounted(real: Rig) -> None:
    assert "size" in refused(real, "size=lots")
    assert "ro" in refused(real, "ro")
    assert not real.is_mounted() and not real.instance.directory.exists()


def test_a_mount_in_use_names_who_uses_it_and_lazy_takes_it_out(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"x")
    with open(real.place / "shard") as held:
        done = tierfs("umount", real.place)
        assert done.returncode == 1
        assert f"(pid {os.getpid()}, open file {real.place}/shard)" in done.stderr
        assert real.is_mounted()
        done = tierfs("umount", "--lazy", "--timeout", "0.2", real.place)
        assert done.returncode == 0 and "programs still use files" in done.stdout
        assert not real.is_mounted()
        assert held.read() == "x"
    real.wait_for_end()


def test_a_daemon_adopted_over_its_control_socket_is_replaced_when_it_dies(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"kept")
    daemon = real.daemon
    with open(real.place / "shard", "r+b") as held:
        real.keeper.send_signal(signal.SIGKILL)
        wait_until(lambda: read_process(real.instance.keeper_pid) is None, "the keeper is dead")
        held.write(b"KEPT")
        held.flush()
        os.fsync(held.fileno())
        real.mount()
        assert real.daemon == daemon
        real.kill_daemon()
        assert (real.place / "shard").read_bytes() == b"KEPT"
        os.fsync(held.fileno())
    assert tierfs("umount", real.place).returncode == 0
    real.wait_for_end()


def test_a_daemon_without_a_keeper_can_be_unmounted(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"kept")
    real.keeper.send_signal(signal.SIGKILL)
    wait_until(lambda: read_process(real.instance.keeper_pid) is None, "the keeper is dead")
    done = tierfs("umount", real.place)
    assert done.returncode == 0, done.stderr
    assert "stay in the RAM tier" in done.stdout
    real.wait_for_end()


def test_a_dead_mount_can_be_unmounted(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"kept")
    keeper, daemon = real.keeper, real.daemon
    for process in (keeper, daemon):
        process.send_signal(signal.SIGKILL)
        assert process.wait(10)
    done = tierfs("umount", real.place)
    assert done.returncode == 0, done.stderr
    assert not real.is_mounted()
    assert "stay in the RAM tier" in done.stdout


def test_sigterm_to_the_keeper_unmounts_though_a_file_is_open(real: Rig) -> None:
    real.mount()
    (real.place / "shard").write_bytes(b"x")
    keeper = real.keeper
    with open(real.place / "shard") as held:
        keeper.send_signal(signal.SIGTERM)
        wait_until(lambda: not real.is_mounted(), "it is out of the tree")
        assert held.read() == "x"
    assert keeper.wait(30), real.log()
    real.wait_for_end()


# --- in a mount namespace of its own, so that nothing of the machine is changed


def test_mount_8_and_fstab_find_the_helper_for_both_type_names(real: Rig) -> None:
    helper = Path(sys.executable).parent / "mount.tierfs"
    if not helper.exists():
        pytest.skip("the package is not installed")
    options = f"runtime_dir={real.parent},size=64MiB,ram.ballast=off"
    said = in_namespace(
        """
        mkdir $D/over && mount -t tmpfs over $D/over && mkdir $D/over/upper $D/over/work
        SBIN=$(readlink -f /sbin)
        mount -t overlay o -o lowerdir=$SBIN,upperdir=$D/over/upper,workdir=$D/over/work $SBIN || { echo SKIP; exit; }
        ln -s $HELPER /sbin/mount.tierfs; ln -s mount.tierfs /sbin/mount.fuse.tierfs
        set -e
        mkdir $D/cwd $D/cwd/$NAME; cd $D/cwd  # mount(8) takes a source that exists here for a path
        for type in tierfs fuse.tierfs; do
            mount -v -t $type $NAME $D/ckpt -o $OPTIONS,nofail,_netdev,noexec,x-systemd.requires=x.service
            grep " $D/ckpt " /proc/self/mountinfo
            mkdir -p $D/ckpt/run1/$type
            umount $D/ckpt
            flock $D/run/$NAME/keeper.lock true  # until the keeper has ended
        done
        echo "$NAME $D/ckpt fuse.tierfs $OPTIONS,nofail 0 0" > $D/fstab
        cd $D
        mount -T $D/fstab -a
        mount -T $D/fstab -a && echo "a second mount -a changes nothing"
        ls $D/ckpt/run1; grep " $D/ckpt " /proc/self/mountinfo
        set +e
        mount -o remount $D/ckpt; echo "remount $?"
        umount $D/ckpt
        flock $D/run/$NAME/keeper.lock true
        mount -t tierfs $NAME $D/ckpt -o $OPTIONS,ro; echo "ro $?"
        mount -t tierfs $NAME $D/ckpt -o $OPTIONS,bogus=1; echo "bogus $?"
        mount -t tierfs $NAME $D/missing -o $OPTIONS; echo "missing $?"
        mount -f -t tierfs $NAME $D/ckpt -o $OPTIONS; echo "fake $?"
        $PY -m mount.cli.main umount --discard $D/ckpt
        umount $SBIN $D/over
        """,
        real.directory,
        HELPER=helper,
        NAME=real.name,
        OPTIONS=options,
    )
    assert said.count(f"mounted {real.name} on {real.place}") == 2
    assert said.count("nosuid,nodev,noexec") == 2
    assert f"fuse.tierfs {real.name} rw" in said, "the source is what fstab says"
    said_so = ("a second mount -a changes nothing", "\ntierfs\n", "\nfuse.tierfs\n", "can't be changed by remount")
    for expected in (*said_so, "remount 32", "ro 32", "bogus 32", "missing 32", "fake 0"):
        assert expected in said, said


def test_a_user_without_root_mounts_with_its_limits_stated(real: Rig) -> None:
    """A really unprivileged user: no capabilities, fusermount3 for the mount, the interpreter made reachable."""
    said = in_namespace(
        AS_USER
        + """
        T="as_user $PY -m mount.cli.main"; R=$D/user/tierfs/$NAME
        set -e
        $T mount $D/ckpt -o name=$NAME,size=64MiB
        as_user bash -c "mkdir $D/ckpt/run1; echo written > $D/ckpt/run1/shard"
        $T status $D/ckpt --json | tee $D/status.json
        kill -9 $(cut -d' ' -f1 $R/daemon.pid); as_user sed 's/^/takeover: /' $D/ckpt/run1/shard
        kill -9 $(cut -d' ' -f1 $R/keeper.pid); flock $R/keeper.lock true
        $T mount $D/ckpt -o name=$NAME; as_user sed 's/^/adopted: /' $D/ckpt/run1/shard
        for p in keeper daemon; do kill -9 $(cut -d' ' -f1 $R/$p.pid); done; flock $R/keeper.lock true
        $T mount $D/ckpt -o name=$NAME,size=64MiB; as_user sed 's/^/mounted anew: /' $D/ckpt/run1/shard
        readlink $R/ram
        $T umount $D/ckpt
        $T umount --discard $NAME
        test ! -e /dev/shm/tierfs-65534/$NAME; test ! -e $R
        ! $T mount $D/ckpt -o name=$NAME,size=64MiB,allow_other=on
        """,
        real.directory,
        NAME=real.name,
    )
    for expected in (
        "mounted without root: no kernel passthrough",
        "takeover: written",
        "adopted the running daemon",
        "adopted: written",
        "mounted anew: written",
        f"/dev/shm/tierfs-65534/{real.name}",
        "4 KiB stay in the RAM tier",
        "user_allow_other",
    ):
        assert expected in said, said
    status = json.loads((real.directory / "status.json").read_text())
    assert status["passthrough"] is False
