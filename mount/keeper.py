"""The keeper: holds /dev/fuse and the RAM tier, and keeps a daemon running on them.

It does nothing else, so it has nothing to crash on. As long as it lives the mount never shows "Transport endpoint
is not connected": when the daemon dies, programs wait for the next one. When the keeper itself is killed the daemon
serves on, and the next `tierfs mount` of the instance starts a keeper that adopts it.

`mount.daemon_process` says how the two talk.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mount import kernel_mount
from mount.asking import ask
from mount.daemon_process import DaemonProcess, describe_status, start_daemon
from mount.handover import take_over_connection
from mount.notify import service_is_stopping, service_main_process, service_needs_longer
from mount.processes import NODE_DRAIN_S
from mount.ram_mount import end_instance, prepare_ram
from mount.replacing import LET_GO, has_spare
from mount.runtime import (
    Instance,
    MountRecord,
    read_daemon_ready,
    read_process,
    register,
    write_atomically,
    write_process,
)
from mount.watchdog import Watchdog
from tierfs.errors import MountError
from tierfs.settings import Settings

log = logging.getLogger("tierfs.keeper")

_MOST_FAILED_STARTS = 5
#: A mount that has worked is not given up sooner: programs have files open in it, and whatever kills the daemon as it
#: starts (an operator, the kernel for want of memory) may stop.
_PATIENCE_S = 10.0
_PAUSES_BEFORE_READY_S = (0.0, 0.1, 0.5, 1.0, 2.0)
_PAUSES_AFTER_READY_S = (0.0, 0.0, 0.1, 0.2, 0.5, 1.0)
_SERVED_WELL_S = 30.0
_READY_WITHIN_S = 120.0
_DRAIN_WITHIN_S = 60.0
_END_WITHIN_S = 5.0
#: While the daemon ends, systemd is told every so often that it takes so much longer (its own limit is 90 s).
_EXTEND_EVERY_S = 10.0
_EXTEND_BY_S = 30.0

_UNMOUNTED = "is unmounted; what is in the RAM tier stays"


class Keeper:
    """One mount, from mount(2) to its end. The caller holds the instance's keeper lock.

    `on_ready` is called once, when the mount has answered a request. With a `connection`, which it then owns, it goes
    on with the mount of another keeper (`mount.replacing`). A daemon whose mount is silent for `watchdog_s` is killed.
    """

    def __init__(
        self,
        instance: Instance,
        settings: Settings,
        record: MountRecord,
        *,
        daemon_module: str = "mount.daemon",
        on_ready: Callable[[], None] = lambda: None,
        connection: int = -1,
        watchdog_s: float | None = None,
    ) -> None:
        self._instance = instance
        self._settings = settings
        self._record = record
        self._daemon_module = daemon_module
        self._on_ready = on_ready
        self._watchdog = Watchdog(record.mountpoint, watchdog_s) if watchdog_s else None
        self._fuse_fd = connection
        self._replaces = connection >= 0
        self._lets_go = False
        self._mount_id = -1
        self._can_resend = False
        """Whether a new daemon can go on with this connection: one was ready on it, and the kernel resends."""
        self._announced = False
        self._stopping = 0
        self._deadline: float | None = None
        self._extend_at: float | None = None
        self._forced = False
        self._wake, self._signalled = socket.socketpair()
        for end in (self._wake, self._signalled):
            end.setblocking(False)

    def run(self) -> int:
        """Returns the exit status: 0 when the mount ended as somebody wished, 1 when it was given up.

        MountError when it never came to a mount.
        """
        self._listen_for_signals()
        try:
            write_process(self._instance.keeper_pid, os.getpid())
            daemon = self._replace() if self._replaces else self._adopt()
            if daemon is None:
                prepare_ram(self._instance, self._settings, privileged=self._record.privileged)
                self._mount()
                daemon = self._start("fresh")
            register(self._instance)
            status = self._keep(daemon)
        except BaseException:
            if not self._leaves_it():
                self._end(keep_log=True)
            raise
        if not self._leaves_it():
            self._end(keep_log=status != 0 or not self._announced)
        return status

    @property
    def let_go(self) -> bool:
        """`run` returned since another keeper asked for the mount; `connection` is its descriptor, the caller's now."""
        return self._lets_go

    @property
    def connection(self) -> int:
        return self._fuse_fd

    @property
    def wake(self) -> socket.socket:
        """Readable when a signal came; what it holds are the signals' numbers."""
        return self._wake

    def _leaves_it(self) -> bool:
        """Whether the mount is another's: of the keeper that asked for it, or of the one that this one replaced, which
        takes it back as it never came to serve."""
        return self._lets_go or (self._replaces and not self._announced and has_spare(self._instance))

    # --- the loop

    def _keep(self, daemon: DaemonProcess) -> int:
        failed_starts = quick_deaths = 0
        failing_since = 0.0
        while True:
            status = self._watch(daemon)
            os.close(daemon.pidfd)
            if self._lets_go or (self._stopping and self._leaves_it()):
                return 0
            served_s = time.monotonic() - daemon.started
            left = status == 0 and kernel_mount.connection_is_alive(self._fuse_fd)  # of its own accord
            if self._stopping or left or self._is_unmounted():
                log.info("the daemon %d has ended, and the mount with it", daemon.process.pid)
                return 0
            how = "" if status is None else f" ({describe_status(status)})"
            log.error("the daemon %d died after %.1f s%s", daemon.process.pid, served_s, how)
            if daemon.ready and self._announced:
                failed_starts = 0
                quick_deaths = 0 if served_s >= _SERVED_WELL_S else quick_deaths + 1
                pause_s = _PAUSES_AFTER_READY_S[min(quick_deaths, len(_PAUSES_AFTER_READY_S) - 1)]
            else:
                failing_since = time.monotonic() if failed_starts == 0 else failing_since
                failed_starts += 1
                failing_s = time.monotonic() - failing_since
                if failed_starts >= _MOST_FAILED_STARTS and (failing_s >= _PATIENCE_S or not self._announced):
                    log.critical(
                        "given up: the daemon died %d times in a row as it started. %s %s. The reason is in "
                        "daemon.log, or in the lines above",
                        failed_starts,
                        self._record.mountpoint,
                        "is left to the keeper that was" if self._leaves_it() else _UNMOUNTED,
                    )
                    return 1
                pause_s = _PAUSES_BEFORE_READY_S[min(failed_starts, len(_PAUSES_BEFORE_READY_S)) - 1]
            if self._pause(pause_s):
                return 0
            # Before any daemon was ready on this connection, the kernel's INIT may have been read and not answered; and
            # where the kernel can't resend, requests went with the daemon and would hang for ever. Both need a new one.
            if self._can_resend and kernel_mount.connection_is_alive(self._fuse_fd):
                daemon = self._start("takeover")
            else:
                log.warning("mounting %s anew: programs that had files open there get errors", self._record.mountpoint)
                self._mount()
                daemon = self._start("fresh")

    def _watch(self, daemon: DaemonProcess) -> int | None:
        """Until the daemon ends; its exit status if that can be known."""
        with selectors.DefaultSelector() as selector:
            selector.register(daemon.pidfd, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            if daemon.ready_pipe is not None:
                selector.register(daemon.ready_pipe, selectors.EVENT_READ)
            if daemon.ready:
                self._announce_when_it_answers()
            try:
                while True:
                    events = {key.fd for key, _ in selector.select(self._time_left(daemon))}
                    if daemon.ready_pipe in events:
                        selector.unregister(daemon.ready_pipe)
                        self._hear_ready(daemon)
                    if self._wake.fileno() in events:
                        self._hear_wake(daemon)
                    if self._lets_go:
                        return None
                    if daemon.pidfd in events:
                        return daemon.exit_status()
                    self._press(daemon)
            finally:
                daemon.close_ready_pipe()

    def _time_left(self, daemon: DaemonProcess) -> float | None:
        looks_at = self._watchdog.look_at if self._watchdog is not None else None
        deadlines = [at for at in (self._deadline, self._extend_at, looks_at) if at is not None]
        if not daemon.ready:
            deadlines.append(daemon.started + _READY_WITHIN_S)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _press(self, daemon: DaemonProcess) -> None:
        """Goes one step further with a daemon that is late: to be ready, or to end when asked."""
        now = time.monotonic()
        if self._extend_at is not None and now >= self._extend_at:
            service_needs_longer(_EXTEND_BY_S)
            self._extend_at = now + _EXTEND_EVERY_S
        serves = daemon.ready and self._announced
        if self._watchdog is not None and self._watchdog.look(now, is_serving=serves) and self._deadline is None:
            log.error(
                "the mount did not answer for %g s; killing the daemon %d", self._watchdog.within_s, daemon.process.pid
            )
            self._watchdog.forgive()
            daemon.process.send_signal(signal.SIGKILL)
        if self._deadline is not None and now >= self._deadline:
            if not self._forced:
                log.warning("the daemon %d does not end; aborting the connection", daemon.process.pid)
                self._forced = True
                self._deadline = now + _END_WITHIN_S
                self._detach(force=True)
            else:
                log.error("the daemon %d does not end; killing it", daemon.process.pid)
                self._deadline = None
                daemon.process.send_signal(signal.SIGKILL)
        elif not daemon.ready and now >= daemon.started + _READY_WITHIN_S:
            log.error("the daemon %d was not ready within %.0f s; killing it", daemon.process.pid, _READY_WITHIN_S)
            daemon.process.send_signal(signal.SIGKILL)
            daemon.started = now  # a new term, in case the kill takes its time

    def _pause(self, seconds: float) -> bool:
        """Waits; True when asked to stop, or to let go, meanwhile."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            while not (self._stopping or self._lets_go):
                left_s = deadline - time.monotonic()
                if selector.select(max(0.0, left_s)):
                    self._hear_wake(None)
                elif left_s <= 0:
                    break
        return self._stopping > 0 or self._lets_go

    # --- what it hears

    def _listen_for_signals(self) -> None:
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, LET_GO):
            signal.signal(number, lambda *_: None)  # the byte on the wakeup descriptor is what counts
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _hear_wake(self, daemon: DaemonProcess | None) -> None:
        try:
            heard = self._wake.recv(64)
        except BlockingIOError:
            return
        if 0 in heard and not self._announced:
            self._announced = True
            log.info("%s is ready", self._record.mountpoint)
            self._on_ready()
        if LET_GO in heard and not self._stopping:  # one that ends is not to be had
            log.info("asked to let go: another keeper takes %s", self._record.mountpoint)
            self._lets_go = True
        stops = sum(number in (signal.SIGTERM, signal.SIGINT) for number in heard)
        if not stops:
            return
        self._stopping += stops
        if daemon is None:
            return
        if self._leaves_it():
            log.info("asked to stop: %s goes back to the keeper that was", self._record.mountpoint)
            daemon.process.send_signal(signal.SIGKILL)
            return
        if self._stopping == stops:
            log.info("asked to stop: the daemon %d finishes what it does", daemon.process.pid)
            service_is_stopping()
            self._deadline = time.monotonic() + self._ends_within_s()
            self._extend_at = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
        if self._stopping > 1 and not self._forced:
            self._deadline = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)

    def _ends_within_s(self) -> float:
        """How long the daemon may take after SIGTERM: for programs to close their files, and to send what is owed."""
        persist = self._settings.persist
        sends = self._settings.object and persist.flush_on_umount
        hands_over = self._settings.catalog and self._settings.cluster.drain_on_stop
        # Before it is unmounted, and what came meanwhile after that.
        return _DRAIN_WITHIN_S + (persist.flush_timeout_s if sends else 0.0) + 2 * NODE_DRAIN_S * bool(hands_over)

    def _hear_ready(self, daemon: DaemonProcess) -> None:
        said = daemon.hear_ready()
        if said is None:
            return  # it is ending; its pidfd will tell
        self._can_resend = bool(said.get("resend", False)) and self._settings.resend != "off"
        write_atomically(self._instance.daemon_ready, json.dumps({**said, "pid": daemon.process.pid}) + "\n")
        log.info("the daemon %d is ready %s", daemon.process.pid, json.dumps(said))
        self._announce_when_it_answers()

    def _announce_when_it_answers(self) -> None:
        """Asks the mount point, and waits for the answer in a thread, since nobody can say how long that takes."""
        if self._announced:
            return

        def wait() -> None:
            with suppress(OSError):
                if ask(self._record.mountpoint).wait() == 0:
                    self._signalled.send(b"\0")

        threading.Thread(target=wait, name="first answer", daemon=True).start()

    def _read_ready(self) -> bool:
        """What an adopted daemon said to the keeper before, if it was ready at all."""
        said = read_daemon_ready(self._instance)
        if said is None:
            return False
        self._can_resend = bool(said.get("resend", False)) and self._settings.resend != "off"
        return True

    # --- what it does

    def _adopt(self) -> DaemonProcess | None:
        """The living daemon of a keeper that was killed, or None when there is none."""
        process = read_process(self._instance.daemon_pid)
        if process is None:
            return None
        self._fuse_fd = take_over_connection(self._instance, process)
        pidfd = process.pidfd()
        if pidfd is None or not kernel_mount.connection_is_alive(self._fuse_fd):
            if not process.wait(_END_WITHIN_S):
                raise MountError(
                    f"the daemon {process.pid} of an earlier mount has no connection and does not end; "
                    f"kill {process.pid}, then mount again"
                )
            os.close(self._fuse_fd)
            self._fuse_fd = -1
            return None
        entry = kernel_mount.find_mount(self._record.mountpoint)
        if entry is None or not entry.is_tierfs:
            os.close(self._fuse_fd)
            self._fuse_fd = -1
            os.close(pidfd)
            raise MountError(
                f"{self._record.mountpoint} was unmounted lazily and programs still use files in it (daemon "
                f"{process.pid}): end them, or kill the daemon, then mount again"
            )
        self._mount_id = entry.mount_id
        log.info("adopted the daemon %d, whose keeper was killed", process.pid)
        return DaemonProcess(process, pidfd, ready=self._read_ready())

    def _replace(self) -> DaemonProcess:
        """A daemon of ours on the connection of another keeper, which let go of it; its daemon may have died."""
        entry = kernel_mount.find_mount(self._record.mountpoint)
        if entry is None or not entry.is_tierfs or not kernel_mount.connection_is_alive(self._fuse_fd):
            raise MountError(f"{self._record.mountpoint} was unmounted just now; mount again")
        self._mount_id = entry.mount_id
        service_main_process()
        self._can_resend = True  # or nobody would have let go
        self._instance.daemon_ready.unlink(missing_ok=True)
        if (old := read_process(self._instance.daemon_pid)) is not None:
            log.info("ending the daemon %d, to go on with another", old.pid)
            old.send_signal(signal.SIGKILL)  # a daemon that ends by itself takes the mount with it
            old.wait(_END_WITHIN_S)
        return self._start("takeover")

    def _mount(self) -> None:
        """A new connection on the mount point; what is left there of an old one goes."""
        if self._fuse_fd >= 0:
            os.close(self._fuse_fd)
            self._fuse_fd = -1
        self._can_resend = False
        kernel_mount.detach_dead(self._record.mountpoint)
        self._instance.daemon_ready.unlink(missing_ok=True)
        wanted = self._settings.allow_other
        allowed = kernel_mount.other_users_allowed()
        if wanted == "on" and not allowed:
            raise MountError("allow_other needs the line `user_allow_other` in /etc/fuse.conf, which root can add")
        allow_other = allowed and wanted != "off" and (wanted == "on" or self._record.privileged)
        where, source, options = self._record.mountpoint, self._record.source, self._record.kernel_options
        if self._record.privileged:
            fd = kernel_mount.open_device()
            try:
                kernel_mount.mount_device(fd, where, source=source, allow_other=allow_other, kernel_options=options)
            except MountError:
                os.close(fd)
                raise
            self._fuse_fd = fd
        else:
            self._fuse_fd = kernel_mount.fusermount_mount(
                where, source=source, allow_other=allow_other, kernel_options=options
            )
        entry = kernel_mount.find_mount(self._record.mountpoint)
        self._mount_id = -1 if entry is None else entry.mount_id

    def _start(self, mode: str) -> DaemonProcess:
        return start_daemon(self._instance, self._daemon_module, mode, self._fuse_fd)

    # --- the end

    def _is_unmounted(self) -> bool:
        """Whether somebody unmounted it. A connection that was only aborted still has its mount, and gets a new one.

        After `umount -l` programs may use open files, and the connection lives: then it is not unmounted yet, unless
        the daemon can't be replaced on this connection.
        """
        entry = kernel_mount.find_mount(self._record.mountpoint)
        gone = entry is None or entry.mount_id != self._mount_id
        return gone and not (kernel_mount.connection_is_alive(self._fuse_fd) and self._can_resend)

    def _detach(self, *, force: bool = False) -> None:
        entry = kernel_mount.find_mount(self._record.mountpoint)
        if entry is None or entry.mount_id != self._mount_id:
            return
        try:
            kernel_mount.unmount(self._record.mountpoint, lazy=True, force=force)
        except (OSError, MountError) as error:
            log.error("%s can't be unmounted: %s", self._record.mountpoint, error)

    def _end(self, *, keep_log: bool) -> None:
        self._detach()
        if self._fuse_fd >= 0:
            os.close(self._fuse_fd)
            self._fuse_fd = -1
        end_instance(self._instance, keep_log=keep_log)
