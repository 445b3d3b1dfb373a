"""What a daemon shows and tells of itself, put together: metrics, the status page, events.

Nothing of the mount depends on it: where its address is taken, that is a problem of `status` and is tried again.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from mount.log_counts import LogCounts
from mount.mending import run_again
from mount.request_times import RequestTimes
from mount.status_page import CONTENT_SECURITY_POLICY, render_page
from tierfs.steps.registry import StepRegistry
from tierfs.transport.addresses import join_address, split_setting
from tierfs.watch.cluster_news import ClusterNews
from tierfs.watch.telling import Telling

if TYPE_CHECKING:
    import pyfuse3

    from mount.channel import Channel
    from mount.control import Operation
    from mount.http_pages import Page, PageMaker, PageServer
    from mount.metrics import Metrics
    from mount.operations import Operations
    from tierfs.cluster.tier import ClusterTier
    from tierfs.disk.tier import DiskTier
    from tierfs.hydrate.hydration import Hydration
    from tierfs.objects.pool import WorkerPool
    from tierfs.persist.tier import ObjectSteps

log = logging.getLogger("tierfs.pages")

FRESH_S = 0.5
#: How long the end of a daemon waits for events that are on their way.
TOLD_WITHIN_S = 5.0


class Watching:
    """Made before the steps are looked at, so that nothing is missed; `look_at` adds what there is by then."""

    def __init__(self, registry: StepRegistry, *, name: str, mountpoint: str, node: str) -> None:
        """SettingsError."""
        settings = registry.settings
        self._registry = registry
        self._name, self._mountpoint, self._node = name, mountpoint, node
        self._addresses = split_setting(settings.metrics.listen, "metrics.listen")
        self.telling = Telling(
            registry.news, settings.events, {"instance": name, "mountpoint": mountpoint, "node": node}
        )
        self._logged = LogCounts()
        self._times = RequestTimes()
        self._cluster_news: ClusterNews | None = None
        self._metrics: Metrics | None = None
        self._server: PageServer | None = None
        self._problem = ""
        self._limiter = trio.CapacityLimiter(1)

    def look_at(
        self,
        filesystem: pyfuse3.Operations,
        channel: Channel,
        operations: Operations,
        *,
        hydration: Hydration | None,
        workers: WorkerPool | None,
        objects: ObjectSteps | None,
        cluster: ClusterTier | None,
        disk: DiskTier | None = None,
    ) -> None:
        """`operations` are those of the control socket: the pages show what they answer."""
        if cluster is not None:
            self._cluster_news = ClusterNews(cluster)
            self.telling.is_told_here = self._cluster_news.is_told_here
        if not self._addresses:
            return
        self._problem = _lacking()
        if self._problem:
            log.warning("%s", self._problem)
            return
        from mount.answers import measure  # late, as all that imports pyfuse3: the channel comes first
        from mount.http_pages import PageServer
        from mount.metrics import Metrics, Sources

        measure(filesystem, self._times)
        self._metrics = Metrics(
            Sources(
                name=self._name,
                mountpoint=self._mountpoint,
                node=self._node,
                registry=self._registry,
                channel=channel,
                times=self._times,
                logged=self._logged,
                telling=self.telling,
                hydration=hydration,
                workers=workers,
                objects=objects,
                cluster=cluster,
                disk=disk,
            )
        )
        self.telling.on_event = self._metrics.seen
        self._server = PageServer(self._addresses, self._pages(operations, self._metrics))

    def urls(self) -> list[str]:
        """Where the pages are now."""
        if self._server is None:
            return []
        return [f"http://{join_address(host, port)}" for host, port in self._server.listening]

    def problems(self) -> list[dict[str, str]]:
        """Of `status`: the pages can't be served."""
        return [{"severity": "warning", "message": self._problem, "path": ""}] if self._problem else []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        with self._logged.counting():
            async with trio.open_nursery() as nursery:
                await nursery.start(self.telling.run)
                if self._cluster_news is not None:
                    await nursery.start(self._cluster_news.run)
                if self._server is not None:
                    nursery.start_soon(self._run_server, self._server)
                task_status.started()

    async def finish(self) -> None:
        """The end is near: what was told has a moment to be passed on."""
        await self.telling.finish(within_s=TOLD_WITHIN_S)

    async def _run_server(self, server: PageServer) -> None:
        def note(message: str) -> None:
            self._problem = message

        await run_again([server.run], "the page for metrics and status", started=lambda: note(""), failed=note)

    # --- pages

    def _pages(self, operations: Operations, metrics: Metrics) -> dict[str, PageMaker]:
        from prometheus_client.exposition import choose_encoder

        from mount.http_pages import Page

        status, nodes = Fresh(operations.status), Fresh(operations.table()["nodes"])

        async def status_page(fields: Mapping[str, str]) -> Page:
            shown = await status.get(), await nodes.get(), time.time()
            text = await trio.to_thread.run_sync(render_page, *shown, limiter=self._limiter)
            policy = ("Content-Security-Policy", CONTENT_SECURITY_POLICY)
            return Page(text.encode(), "text/html; charset=utf-8", headers=(policy,))

        async def status_json(fields: Mapping[str, str]) -> Page:
            return Page(json.dumps(await status.get()).encode() + b"\n", "application/json")

        async def health(fields: Mapping[str, str]) -> Page:
            if operations.is_mounted:
                return Page(b"mounted\n", "text/plain")
            return Page(b"unmounted; what is owed is being sent\n", "text/plain", 503)

        async def metrics_page(fields: Mapping[str, str]) -> Page:
            problems = Counter(each["severity"] for each in await operations.problems())
            figures = await metrics.figures(problems=problems, is_mounted=operations.is_mounted)
            encoder, content_type = choose_encoder(fields.get("accept", ""))
            return Page(await trio.to_thread.run_sync(encoder, figures, limiter=self._limiter), content_type)

        return {"/": status_page, "/status.json": status_json, "/healthz": health, "/metrics": metrics_page}


class Fresh:
    """The answer of an operation, at most FRESH_S old: many readers cost no more than one."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._at, self._answer = float("-inf"), None
        self._asking = trio.Lock()

    async def get(self) -> Any:
        async with self._asking:
            if trio.current_time() - self._at > FRESH_S:
                self._answer = await self._operation({}, _nobody)
                self._at = trio.current_time()
            return self._answer


async def _nobody(values: Mapping[str, Any], /) -> None:
    """Progress that nobody is told of."""


def _lacking() -> str:
    """What is not installed and should be, in a sentence; "" for nothing. A mount must not go because of that."""
    try:
        import h11  # noqa: F401
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        return f"metrics.listen needs the package {error.name}, and nothing is served: pip install 'tierfs[metrics]'"
    return ""
