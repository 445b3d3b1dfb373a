"""The gateway's process: `python -m mount.gateway.main R`, started by the daemon of the runtime directory R.

It outlives its daemon, as the mount does, and serves on with the next one; it ends when it is told to (SIGTERM), or
when the mount is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import trio

from mount.gateway.counts import Counts
from mount.gateway.daemon import Daemon
from mount.gateway.exchange import ClientGone, Exchange, close
from mount.gateway.refusal import Refusal, refusal_of
from mount.gateway.service import Service
from mount.gateway.tree import Tree, Unmounted
from mount.gateway_process import READY_FD
from mount.runtime import Instance, log_directory, read_record
from tierfs.errors import TierfsError
from tierfs.logs import configure_logging
from tierfs.settings_sources import settings_from_json
from tierfs.transport.addresses import join_address, split_setting

log = logging.getLogger("tierfs.gateway")

#: Connections at a time. A rank has one, or two while it saves and loads.
MOST_CONNECTIONS = 4096
LOOK_S = 5.0


class Gateway:
    def __init__(self, tree: Tree, service: Service) -> None:
        self._tree = tree
        self._service = service
        self._connections = trio.CapacityLimiter(MOST_CONNECTIONS)
        self._counts = Counts()

    async def run(self, addresses: list[tuple[str, int]], counts_file: Path, ready_fd: int) -> None:
        """Until the mount is gone, or SIGTERM. OSError where it can't listen."""
        listeners: list[trio.SocketListener] = []
        for host, port in addresses:
            listeners += await trio.open_tcp_listeners(port, host=host or None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_with_mount, nursery.cancel_scope)
            nursery.start_soon(_end_when_told, nursery.cancel_scope)
            nursery.start_soon(self._counts.keep, counts_file)
            await nursery.start(partial(trio.serve_listeners, self._serve, listeners))
            os.write(ready_fd, b"\n")
            os.close(ready_fd)
            log.info("listening at %s", ", ".join(join_address(host, port) for host, port in addresses))

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with self._connections:
            exchange = Exchange(stream, self._counts)
            self._counts.connections += 1
            try:
                while await self._one(exchange) and await exchange.begin_next():
                    pass
            except ClientGone as error:
                log.debug("a client is gone: %s", error)
            except Exception:
                log.exception("a connection failed")
            finally:
                self._counts.connections -= 1
                await close(stream)

    async def _one(self, exchange: Exchange) -> bool:
        what = "the request"
        try:
            request = await exchange.next_request()
            if request is None:
                return False
            what = "/".join(request.parts)[:200]
            await self._service.answer(request, exchange)
        except ClientGone:
            raise
        except Exception as error:
            refusal = refusal_of(error, what)
            if refusal is None:
                log.exception("%s failed", what)
                refusal = Refusal(500, f"{what} failed in the gateway; its log has the details")
            else:
                log.log(logging.WARNING if refusal.status >= 500 else logging.DEBUG, "%s: %d, %s", what, refusal.status,
                        refusal.message)  # fmt: skip
            await exchange.refuse(refusal)
        return True

    async def _end_with_mount(self, scope: trio.CancelScope) -> None:
        while True:
            await trio.sleep(LOOK_S)
            try:
                await trio.to_thread.run_sync(self._tree.check, abandon_on_cancel=True)
            except Unmounted as error:
                log.info("%s", error.message)
                scope.cancel()


async def _end_when_told(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m mount.gateway.main RUNTIME_DIRECTORY", file=sys.stderr)
        return 2
    instance = Instance(Path(sys.argv[1]))
    settings = settings_from_json(instance.settings.read_text())
    configure_logging(settings.log, log_directory(instance, settings), name="gateway")
    os.umask(0o022)
    record = read_record(instance)
    if record is None:
        log.critical("%s is missing", instance.mount_record)
        return 1
    with ExitStack() as stack:
        stack.callback(log.info, "ended")
        try:
            tree = Tree(Path(record.mountpoint))
            # As long as a completing rename waits for files that other nodes are still sealing.
            wait_s = settings.cluster.wait_s if settings.catalog else 0.0
            service = Service(tree, Daemon(instance), allow_reset=settings.gateway.allow_reset, wait_s=wait_s)
            addresses = split_setting(settings.gateway.listen, "gateway.listen")
            trio.run(Gateway(tree, service).run, addresses, instance.gateway_counts, int(os.environ.pop(READY_FD)))
        except (OSError, TierfsError) as error:
            log.critical("the gateway can't run: %s", error)
            return 1
        except Exception:
            log.critical("the gateway failed", exc_info=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
