"""The daemon: pyfuse3 on trio over the RAM tier, started by the keeper on a connection that outlives it.

`python -m mount.daemon R fresh|takeover`. It is put together here and nowhere else; what it knows beyond the tier, the
channel's state and the manifests can be lost at any instruction.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from mount import kernel_mount
from mount.channel import Channel
from mount.control import ControlServer
from mount.gateway_process import PAUSE_S, GatewayProcess, end_leftover
from mount.gateway_status import GatewayStatus
from mount.leaving import Leaving
from mount.mending import run_again
from mount.operations import Operations
from mount.processes import FUSE_FD, NODE_DRAIN_S, READY_FD
from mount.runtime import Instance, MountRecord, log_directory, read_record
from mount.watching import Watching
from tierfs.cluster.operations import ClusterOperations
from tierfs.cluster.tier import ClusterTier
from tierfs.disk.among_nodes import DiskAmongNodes
from tierfs.disk.operations import DiskOperations
from tierfs.disk.tier import DiskTier
from tierfs.errors import MountError, TierfsError
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.source import NoSource
from tierfs.hydrate.stub_tier import StubTier
from tierfs.logs import NamespaceLog, configure_logging
from tierfs.objects.pool import WorkerPool, archive_pool
from tierfs.persist.operations import ObjectOperations
from tierfs.persist.tier import ObjectSteps
from tierfs.ram.tier import RamTier
from tierfs.ram.tmpfs import read_grant
from tierfs.settings import Settings
from tierfs.settings_sources import settings_from_json
from tierfs.steps.recovery import recover
from tierfs.steps.registry import StepRegistry
from tierfs.steps.tracker import Steps
from tierfs.steps.upkeep import Upkeep
from tierfs.units import format_size

log = logging.getLogger("tierfs.daemon")

INIT_WITHIN_S = 30.0
#: After SIGTERM: how long programs may go on with files that they have open.
DRAIN_S = 20.0
#: How long a fresh mount waits for the object tier's first listing before it calls itself ready.
LISTED_WITHIN_S = 10.0
#: The same for the catalogue.
JOINED_WITHIN_S = 5.0
#: The same for the local disk, which is read before anything is served.
DISK_WITHIN_S = 15.0
LOOK_S = 0.1
#: After so many attempts that failed the store is taken for unreachable for now.
MOST_RETRIES = 3
#: READ requests of programs that wait for the object tier hold a task each; others must find one free.
MOST_TASKS = 1000
#: The same for the gateway.
GATEWAY_WITHIN_S = 10.0
GATEWAY = "gateway"
"""What `status` names as the path of a problem of the gateway's."""


class Daemon:
    """One run of the daemon on one connection."""

    def __init__(
        self, instance: Instance, settings: Settings, record: MountRecord, fuse_fd: int, *, takeover: bool
    ) -> None:
        self.instance = instance
        self.record = record
        self.settings = settings
        self.fuse_fd = fuse_fd
        self.takeover = takeover
        self._asked_to_stop = 0
        self._draining_node = trio.CancelScope()
        self._is_draining_mounted = False
        self._is_unmounted = False
        self._leaving = Leaving()
        self._listed = trio.Event()
        self._joined = trio.Event()
        self._disk_read = trio.Event()
        self._gateway_serves = trio.Event()
        self._gateway_scope = trio.CancelScope()
        # Before pyfuse3 is imported anywhere: its calls to libfuse must find the channel's.
        self.channel = Channel(
            fuse_fd,
            instance.channel_state,
            kind=settings.channel,
            passthrough=settings.passthrough != "off",
            resend=settings.resend != "off",
            takeover=takeover,
        )
        grant = read_grant(instance.ram) if record.privileged else None
        self.tier = RamTier(instance.ram, settings.ram, settings.size, grant)
        self.lines = NamespaceLog(log_directory(instance, settings))
        self.registry = StepRegistry(self.tier, settings, self.lines)
        self.registry.open_handles = lambda nodeid: self.channel.handles(nodeid).opens
        self.tier.on_pressure = self.registry.make_room
        node = settings.node or f"{socket.gethostname()}.{instance.name}"
        self.watching = Watching(self.registry, name=instance.name, mountpoint=record.mountpoint, node=node)
        self.cluster = self._join_cluster(node)
        self.workers = WorkerPool(settings) if settings.object else None
        self.archive = archive_pool(settings) if settings.object and settings.archive.object else None
        self.objects: ObjectSteps | None = None
        hydration = self.cluster.hydration if self.cluster is not None else None
        self.disk = self._disk_tier(node)
        if self.disk is not None:
            hydration = self.disk.hydration
        if self.workers is not None:
            self.objects = ObjectSteps(
                self.registry, self.workers, node=node, hydration=hydration, archive=self.archive
            )
            self.registry.object_tier = self.objects
            hydration = self.objects.hydration
            if self.cluster is not None:
                self.cluster.sources.objects = self.objects.source
        elif hydration is not None:
            self.registry.object_tier = StubTier(hydration)
        if self.disk is not None:
            if self.objects is not None:
                self.disk.source.others = self.objects.source
            manifest_of = self.objects.index.manifest if self.objects is not None else None
            self.disk.stand_before(self.registry.object_tier, manifest_of)
            self.registry.object_tier = self.disk
        if hydration is not None:
            hydration.scan()
        else:
            hydration = self._left_stubs()
        runs_itself = (self.cluster, self.objects, self.disk) != (None, None, None)
        self._left = None if runs_itself else hydration
        recover(self.registry)
        if self.cluster is not None:
            self.cluster.scan()
        self.steps = Steps(self.registry)

        from mount.filesystem import TierFs
        from mount.nodes import raise_descriptor_limit

        raise_descriptor_limit()
        self.filesystem = TierFs(self.tier, self.channel, self.steps, hydration=hydration)
        if takeover:
            self.steps.resume(nodeid for nodeid, _, handles in self.channel.open_nodes() if handles.writers)
            self.filesystem.resume_open_files()
        operations = Operations(
            instance,
            record,
            self.registry,
            self.channel,
            path_of=self.filesystem.nodes.path,
            objects=self._object_operations(),
            cluster=ClusterOperations(self.cluster) if self.cluster is not None else None,
            disk=DiskOperations(self.disk) if self.disk is not None else None,
            gateway=self._gateway_status(),
            leaving=self._leaving,
            pages=self.watching,
        )
        self.watching.look_at(
            self.filesystem,
            self.channel,
            operations,
            hydration=hydration,
            workers=self.workers,
            objects=self.objects,
            cluster=self.cluster,
            disk=self.disk,
        )
        self.control = ControlServer(instance.control_socket, operations.table(), fuse_fd=fuse_fd)
        self.upkeep = Upkeep(self.registry)
        self.gateway = GatewayProcess(instance, settings.gateway) if settings.gateway.listen else None

    def _gateway_status(self) -> GatewayStatus | None:
        listen = self.settings.gateway.listen
        return GatewayStatus(self.instance, listen, self.tier.root) if listen else None

    def _left_stubs(self) -> Hydration | None:
        """Stubs of a mount with an object tier, or among other nodes: their holes are not to be read as data."""
        hydration = Hydration(self.registry, NoSource())
        hydration.scan()
        if not len(hydration.table):
            return None
        log.warning(
            "%d files have their bytes elsewhere; without a setting `object` or `catalog` reading them fails",
            len(hydration.table),
        )
        self.registry.object_tier = StubTier(hydration)
        return hydration

    def _disk_tier(self, node: str) -> DiskTier | None:
        if self.settings.disk.path is None:
            return None
        if self.cluster is None:
            return DiskTier(self.registry, node=node)
        disk = DiskTier(self.registry, node=node, hydration=self.cluster.hydration)
        DiskAmongNodes(disk, self.cluster)
        return disk

    def _join_cluster(self, node: str) -> ClusterTier | None:
        if not self.settings.catalog:
            return None
        from tierfs.catalog.opening import open_store

        cluster = ClusterTier(self.registry, open_store(self.settings), node=node, mountpoint=self.record.mountpoint)
        self.registry.cluster = cluster
        return cluster

    def _object_operations(self) -> ObjectOperations | None:
        tier = self.objects
        if tier is None:
            return None
        return ObjectOperations(self.registry, tier.client, tier.index, tier.persister, tier.hydration, tier.deletions)

    async def run(self, ready_fd: int) -> None:
        """Serves until the mount is gone."""
        import pyfuse3

        pyfuse3.init(self.filesystem, self.channel.device(), set())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stop_when_asked, nursery)
                await nursery.start(self.tier.run)
                await nursery.start(self.upkeep.run)
                await nursery.start(self.watching.run)
                nursery.start_soon(self.tier.trim_leftovers)
                if self.disk is not None:
                    nursery.start_soon(self._run_disk, self.disk)
                    await self._wait_for_disk()
                await nursery.start(self.control.run)
                if self._left is not None:
                    await nursery.start(self._left.run)
                if self.cluster is not None:
                    nursery.start_soon(self._run_cluster, self.cluster)
                if self.workers is not None and self.objects is not None:
                    nursery.start_soon(self._run_object_tier, self.workers, self.objects)
                if self.gateway is not None:
                    nursery.start_soon(self._run_gateway, self.gateway)
                else:  # what a daemon with other settings left
                    nursery.start_soon(trio.to_thread.run_sync, end_leftover, self.instance)
                nursery.start_soon(self._tell_ready, ready_fd)
                await pyfuse3.main(max_tasks=MOST_TASKS)
                self._is_unmounted = True
                self._gateway_scope.cancel()  # what is sent yet may take its time, and there is nothing to serve
                await self._drain()
                if self.cluster is not None:
                    await self.cluster.leave()
                await self.watching.finish()
                nursery.cancel_scope.cancel()
        finally:
            self._save()
            pyfuse3.close(unmount=False)

    async def _run_gateway(self, gateway: GatewayProcess) -> None:
        with self._gateway_scope:
            await run_again(
                [gateway.run],
                "the gateway",
                started=self._gateway_works,
                failed=lambda message: self.registry.problem("error", message, GATEWAY),
                pause_s=PAUSE_S,
            )

    def _gateway_works(self) -> None:
        self.registry.clear_problems(GATEWAY)
        self._gateway_serves.set()

    async def _run_disk(self, disk: DiskTier) -> None:
        await run_again(
            [disk.run],
            "the disk tier",
            started=self._disk_read.set,
            failed=lambda message: self.registry.problem("error", message, ""),
        )

    async def _wait_for_disk(self) -> None:
        """So that its steps are there before anybody looks. The kernel does not listen yet."""
        registry = self.registry
        tell, registry.invalidate = (
            registry.invalidate,
            lambda directory, name: registry.untold.append((directory, name)),
        )
        try:
            with trio.move_on_after(DISK_WITHIN_S):
                await self._disk_read.wait()
        finally:
            registry.invalidate = tell

    async def _run_cluster(self, cluster: ClusterTier) -> None:
        await run_again(
            [cluster.run],
            "the cluster's part",
            started=self._cluster_works,
            failed=lambda message: self.registry.problem("error", message, ""),
        )

    def _cluster_works(self) -> None:
        self.registry.clear_problems("")
        self._joined.set()

    async def _run_object_tier(self, workers: WorkerPool, objects: ObjectSteps) -> None:
        archive = [self.archive.run] if self.archive is not None else []
        await run_again(
            [workers.run, *archive, objects.run],
            "the object tier",
            started=self._object_tier_works,
            failed=lambda message: self.registry.problem("error", message, ""),
        )

    def _object_tier_works(self) -> None:
        self.registry.clear_problems("")
        self._listed.set()

    async def _drain(self) -> None:
        """The mount is gone: send what is owed to other nodes and to the object tier before going, as long as the
        settings allow."""
        self.registry.invalidate = lambda directory, name: None  # nobody listens any more
        if self.cluster is not None and self.cluster.drain.is_draining and self._asked_to_stop <= 1:
            await self._drain_node(self.cluster)
        persist = self.settings.persist
        is_to_flush = persist.flush_on_umount and self._asked_to_stop <= 1
        if (
            self.disk is not None
            and is_to_flush
            and not await self._leaving.send(self.disk.keeping.drain, within_s=persist.flush_timeout_s)
        ):
            return  # asked to stop, or the time is up
        if self.objects is None or not persist.flush_on_umount or self._asked_to_stop > 1:
            return
        persister = self.objects.persister
        if owed := persister.owed_records():
            log.info("unmounted; %d steps (%s) go to the object tier before the end", len(owed),
                     format_size(persister.bytes_owed()))  # fmt: skip
        await self._leaving.send(persister.drain, within_s=persist.flush_timeout_s)
        if left := persister.owed_records():
            log.warning("%d steps are not in the object tier yet; the next mount of %s goes on with them", len(left),
                        self.record.mountpoint)  # fmt: skip

    async def _drain_node(self, cluster: ClusterTier) -> None:
        """This node was to hand over what only it holds, and something may have come since."""
        if cluster.has_takers():
            await self._leaving.send(partial(cluster.drain.drain, within_s=NODE_DRAIN_S), within_s=NODE_DRAIN_S)

    async def _tell_ready(self, ready_fd: int) -> None:
        with trio.fail_after(INIT_WITHIN_S):
            while self.channel.info().proto == (0, 0):  # noqa: ASYNC110 - the answer passes through C
                await trio.sleep(0.002)
        if self.cluster is not None and not self.takeover:
            with trio.move_on_after(JOINED_WITHIN_S):  # so that whoever waited for the mount sees the steps of all
                await self._joined.wait()
        if self.objects is not None and not self.takeover:
            await self._wait_for_listing()
        if self.gateway is not None:
            with trio.move_on_after(GATEWAY_WITHIN_S):
                await self._gateway_serves.wait()
        self.registry.tell_untold()
        info = self.channel.info()
        said = {"resend": info.resend, "passthrough": info.passthrough, "channel": info.kind, "reason": info.reason}
        with suppress(BrokenPipeError), os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(said) + "\n")

    async def _wait_for_listing(self) -> None:
        """So that `latest` is right for whoever waited for the mount; not where the store can't be reached."""
        with trio.move_on_after(LISTED_WITHIN_S):
            while not self._listed.is_set() and self.workers is not None and self.workers.stats.retries < MOST_RETRIES:
                with trio.move_on_after(LOOK_S):
                    await self._listed.wait()

    async def _stop_when_asked(self, nursery: trio.Nursery) -> None:
        """SIGTERM: take the mount out of the tree, let open files end, then go. A second one: go at once."""
        import pyfuse3

        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                self._asked_to_stop += 1
                if self._asked_to_stop == 1:
                    nursery.start_soon(self._stop)
                elif self._is_draining_mounted:
                    self._draining_node.cancel()  # what ends it all follows
                else:
                    self._leaving.stop()
                    pyfuse3.terminate()

    async def _stop(self) -> None:
        import pyfuse3

        if self.cluster is not None and self.settings.cluster.drain_on_stop:
            # While it is mounted: programs go on, and what they write meanwhile is handed over too.
            log.info("asked to stop: what only this node holds goes to others before %s is unmounted",
                     self.record.mountpoint)  # fmt: skip
            self._is_draining_mounted = True
            with self._draining_node:
                await self.cluster.drain.drain(within_s=NODE_DRAIN_S)
            self._is_draining_mounted = False
        log.info("asked to stop: %s is unmounted", self.record.mountpoint)
        try:
            await trio.to_thread.run_sync(self._unmount)
        except (OSError, MountError) as error:
            log.warning("%s can't be unmounted: %s", self.record.mountpoint, error)
        if self._asked_to_stop > 1:
            pyfuse3.terminate()
            return
        await trio.sleep(DRAIN_S)
        if self._is_unmounted:
            return
        log.warning("programs still have files open in %s; they will get errors", self.record.mountpoint)
        pyfuse3.terminate()

    def _unmount(self) -> None:
        kernel_mount.unmount(self.record.mountpoint, lazy=True)

    def _save(self) -> None:
        for record in self.registry.records.values():
            if record.unsaved:
                with suppress(OSError):
                    self.registry.save(record)
        self.lines.close()


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[2] not in ("fresh", "takeover"):
        print("usage: python -m mount.daemon RUNTIME_DIRECTORY fresh|takeover", file=sys.stderr)
        return 2
    instance = Instance(Path(sys.argv[1]))
    settings = settings_from_json(instance.settings.read_text())
    configure_logging(settings.log, log_directory(instance, settings))
    record = read_record(instance)
    if record is None:
        log.critical("%s is missing; mount again", instance.mount_record)
        return 1
    fuse_fd, ready_fd = int(os.environ.pop(FUSE_FD)), int(os.environ.pop(READY_FD))
    for fd in (fuse_fd, ready_fd):
        os.set_inheritable(fd, False)
    try:
        daemon = Daemon(instance, settings, record, fuse_fd, takeover=sys.argv[2] == "takeover")
        log.info("serving %s", record.mountpoint)
        trio.run(daemon.run, ready_fd)
    except TierfsError as error:
        log.critical("%s", error.message)
        return 1
    except Exception:
        log.critical("the daemon failed", exc_info=True)
        return 1
    log.info("%s is unmounted", record.mountpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
