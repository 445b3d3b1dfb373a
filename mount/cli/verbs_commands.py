"""`tierfs verbs-selftest`: whether RDMA does what tierfs needs of it, on this machine and between two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mount.cli.read_commands import add_json

if TYPE_CHECKING:
    import trio

    from tierfs.settings import Settings
    from tierfs.transport.verbs_devices import Found
    from tierfs.transport.verbs_port import Port

_T = TypeVar("_T")

_THREADS = 4
_RULE = "-" * 20


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    selftest = subparsers.add_parser(
        "verbs-selftest",
        help="try RDMA: READs with digests, what must be refused, and how fast it is",
        description="Tries each RDMA device of this machine, then all of them together: READs of 4 KiB, 1 MiB and a\n"
        "large one (--size) with their digests; a wrong key, a place beyond the memory and deregistered memory must\n"
        "be refused. Without PEER the devices read from themselves. With PEER from another machine, where\n"
        "`tierfs verbs-selftest --serve` runs with the same secret or certificates as a mount of the cluster.\n"
        "Nothing is mounted, and no running mount is touched. At the end it prints what to send us when it fails.",
        epilog="examples:\n"
        "  tierfs verbs-selftest\n"
        "  tierfs verbs-selftest --serve --config /etc/tierfs/job1.toml           on the one machine\n"
        "  tierfs verbs-selftest node7:7127 --config /etc/tierfs/job1.toml        on the other\n"
        "  tierfs verbs-selftest -o peer.verbs_devices=rdmap16s27 --size 256MiB\n\n"
        "exit codes: 0 all checks passed, 1 one failed, or RDMA can't be used here (it says why), 2 wrong usage",
    )
    selftest.add_argument(
        "peer", metavar="PEER", nargs="?", help="[NODE@]HOST:PORT, as the other machine's --serve prints it"
    )
    selftest.add_argument(
        "--serve",
        metavar="ADDRESS",
        nargs="?",
        const="",
        help="let another machine read from this one, at HOST:PORT or :PORT (default :7127), until Ctrl-C",
    )
    selftest.add_argument("--once", action="store_true", help="with --serve: end after the first that tested")
    selftest.add_argument(
        "--size", metavar="SIZE", help="of the large READ, whole MiB (default: 1GiB, less where memory is short)"
    )
    selftest.add_argument("-o", dest="options", metavar="K=V,...", action="append", default=[], help="as for mount")
    selftest.add_argument("--config", metavar="FILE", type=Path, help="settings file, as for mount")
    add_json(selftest)
    selftest.set_defaults(run=run_selftest)


def run_selftest(arguments: argparse.Namespace) -> int:
    import os

    import trio

    from mount.cli.main import INTERRUPTED
    from tierfs.errors import SettingsError
    from tierfs.settings_sources import load_settings

    if arguments.serve is not None and arguments.peer is not None:
        raise SettingsError("PEER is who serves, --serve is to be one: leave one of them out")
    if arguments.once and arguments.serve is None:
        raise SettingsError("--once goes with --serve")
    settings = load_settings(arguments.config, os.environ, arguments.options, {})
    size_bytes = _size(arguments.size)
    if arguments.serve is not None:
        served = partial(_serve, settings, arguments.serve, size_bytes, once=arguments.once)
        code = trio.run(_interruptible, served)
        return INTERRUPTED if code is None else int(code)
    tested = partial(_test, settings, arguments.peer or "", size_bytes, quiet=arguments.json)
    answer = trio.run(_interruptible, tested)
    if answer is None:
        return INTERRUPTED
    if arguments.json:
        from mount.cli.tables import print_json

        print_json(answer)
    else:
        _print(answer)
    return 0 if answer["passed"] else 1


def _size(text: str | None) -> int:
    from tierfs.errors import SettingsError
    from tierfs.ram.memory import available_memory_bytes
    from tierfs.transport.verbs_selftest import usual_size
    from tierfs.transport.verbs_selftest_holder import MIDDLE_BYTES
    from tierfs.units import parse_size

    if text is None:
        return usual_size(available_memory_bytes())
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise SettingsError(f"--size: {error}") from None
    if size_bytes < MIDDLE_BYTES or size_bytes % MIDDLE_BYTES:
        raise SettingsError(f"--size {text} is not some whole MiB")
    return size_bytes


async def _interruptible(work: Callable[[], Awaitable[_T]]) -> _T | None:
    """None after Ctrl-C or SIGTERM: `work` was cancelled, and what it had registered was given back."""
    import signal

    import trio

    done: list[_T] = []
    failed: list[Exception] = []

    async def cancel_by_signal(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(cancel_by_signal)
        try:
            done.append(await work())
        except Exception as error:  # out of the nursery as it is, not in a group
            failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return done[0] if done else None


# --- testing


async def _test(settings: Settings, peer: str, size_bytes: int, *, quiet: bool) -> dict[str, Any]:
    """The answer, as `--json` prints it."""
    import trio

    from tierfs.errors import PeerError, SettingsError
    from tierfs.transport.verbs_machine import describe_devices, describe_machine
    from tierfs.transport.verbs_selftest import Check

    threads = trio.CapacityLimiter(_THREADS)
    found = await _find(settings, threads)
    answer: dict[str, Any] = {
        "passed": False,
        "reason": found.reason,
        "peer": peer,
        "size_bytes": size_bytes,
        "checks": [],
        "machine": await trio.to_thread.run_sync(describe_machine, limiter=threads),
        "devices": await trio.to_thread.run_sync(describe_devices, found.devices, limiter=threads),
        "peer_machine": {},
    }
    if not found.devices:
        return answer
    checks: list[Check] = []
    ports: list[Port] = []
    try:
        ports += await _open(found, threads, checks)
        if ports:
            checks += await _checks(settings, peer, found, ports, answer, threads, quiet=quiet)
    except PeerError as error:
        answer["reason"] = error.message
    except ValueError as error:
        raise SettingsError(f"PEER is [NODE@]HOST:PORT: {error}") from None
    finally:
        for port in ports:
            port.close()
    answer["checks"] = [vars(check) for check in checks]
    answer["passed"] = bool(checks) and not answer["reason"] and all(check.verdict != "fail" for check in checks)
    return answer


async def _checks(
    settings: Settings,
    peer: str,
    found: Found,
    ports: list[Port],
    answer: dict[str, Any],
    threads: trio.CapacityLimiter,
    *,
    quiet: bool,
) -> list[Any]:
    from mount.cli.progress import ProgressLine
    from tierfs.transport.verbs_selftest import SelfTest
    from tierfs.transport.verbs_selftest_holder import Holding
    from tierfs.transport.verbs_selftest_peer import remote_holder

    stall_s = settings.peer.stall_s
    with ProgressLine("reading", enabled=not quiet) as line:
        if peer:
            async with remote_holder(settings, peer) as remote:
                answer["peer_machine"] = remote.about
                answer["size_bytes"] = size_bytes = min(answer["size_bytes"], remote.most_bytes)
                test = SelfTest(
                    ports, remote, size_bytes=size_bytes, stall_s=stall_s, threads=threads, who=peer, told=line.show
                )
                return list(await test.run())
        theirs: list[Port] = []
        try:
            theirs += await _open(found, threads, [])
            holding = Holding(theirs, threads)
            try:
                test = SelfTest(
                    ports, holding, size_bytes=answer["size_bytes"], stall_s=stall_s, threads=threads, told=line.show
                )
                return list(await test.run())
            finally:
                holding.close()
        finally:
            for port in theirs:
                port.close()


async def _find(settings: Settings, threads: trio.CapacityLimiter) -> Found:
    import trio

    from tierfs.transport.verbs_devices import find_devices

    return await trio.to_thread.run_sync(find_devices, settings.peer.verbs_devices, limiter=threads)


async def _open(found: Found, threads: trio.CapacityLimiter, checks: list[Any]) -> list[Port]:
    """Those that can be; of the others it says why in `checks`."""
    import trio

    from tierfs.transport.verbs_device import DevicePort
    from tierfs.transport.verbs_selftest import Check

    ports: list[Port] = []
    for each in found.devices:
        try:
            ports.append(await trio.to_thread.run_sync(DevicePort, each, limiter=threads))
        except OSError as error:
            checks.append(Check(each.device, "open", "fail", str(error)))
    return ports


# --- serving


async def _serve(settings: Settings, address: str, most_bytes: int, *, once: bool) -> int:
    import socket

    import trio

    from tierfs.errors import SettingsError
    from tierfs.transport.addresses import join_address, split_address
    from tierfs.transport.verbs_machine import describe_devices, describe_machine
    from tierfs.transport.verbs_selftest_peer import DEFAULT_LISTEN, SelfTestServer

    threads = trio.CapacityLimiter(_THREADS)
    found = await _find(settings, threads)
    if not found.devices:
        print(f"tierfs: RDMA can't be used here: {found.reason}", file=sys.stderr)
        return 1
    about = {
        "machine": await trio.to_thread.run_sync(describe_machine, limiter=threads),
        "devices": await trio.to_thread.run_sync(describe_devices, found.devices, limiter=threads),
    }
    settings.cluster.listen = address or DEFAULT_LISTEN
    failed: list[Any] = []
    ports = await _open(found, threads, failed)
    for check in failed:
        print(f"tierfs: warning: {check.device}: {check.found}", file=sys.stderr)
    try:
        server = SelfTestServer(
            settings, ports, about=about, most_bytes=most_bytes, threads=threads, told=partial(print, flush=True)
        )
        try:
            await server.listen()
        except OSError as error:
            raise SettingsError(f"--serve {settings.cluster.listen}: can't listen there: {error}") from None
        for each in server.addresses:
            host, port = split_address(each)
            where = join_address(socket.gethostname() if host in ("::", "0.0.0.0") else host, port)
            print(f"on the other machine: tierfs verbs-selftest {server.node}@{where}", flush=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            while not once or not server.served:
                await server.changed.wait()
            nursery.cancel_scope.cancel()
    finally:
        for each_port in ports:
            each_port.close()
    return 0


# --- for people


def _print(answer: Mapping[str, Any]) -> None:
    from mount.cli.tables import Cell, Column, Screen, plain, render_table

    screen = Screen.of(sys.stdout)
    if answer["checks"]:
        styles = {"ok": "green", "warn": "yellow", "fail": "red"}
        rows: list[list[str | Cell]] = [
            [Cell(each["verdict"], styles[each["verdict"]]), each["device"] or "all", each["check"], each["found"]]
            for each in answer["checks"]
        ]
        columns = [Column(""), Column("DEVICE"), Column("CHECK"), Column("FOUND")]
        sys.stdout.write(render_table(columns, rows, screen))
    if answer["reason"]:
        what = (
            "nothing was tested" if any(each.get("usable") for each in answer["devices"]) else "RDMA can't be used here"
        )
        print(plain(f"{what}: {answer['reason']}", screen))
    elif answer["passed"]:
        print("all checks passed")
    has_efa = any(each.get("kind") == "srd" for each in answer["devices"])
    if not answer["passed"] or has_efa:
        why = "" if not answer["passed"] else " (also now: nobody has run this on EFA before)"
        print(f"\n{_RULE} please send this{why}: versions, devices and errors, no secrets {_RULE}")
        print(plain_block(answer, screen))
        print(_RULE)


def plain_block(answer: Mapping[str, Any], screen: Any) -> str:
    """What to send, one fact a line."""
    from mount.cli.tables import plain

    lines = [f"verbs-selftest: {'passed' if answer['passed'] else 'failed'}, {answer['size_bytes']} bytes"]
    if answer["reason"]:
        lines.append(f"reason: {answer['reason']}")
    lines += _facts("machine", answer["machine"])
    for each in answer["devices"]:
        lines += _facts("device", each)
    if answer["peer_machine"]:
        lines += _facts("peer", answer["peer_machine"].get("machine"))
        devices = answer["peer_machine"].get("devices")
        for each in devices if isinstance(devices, list) else []:
            lines += _facts("peer device", each)
    for each in answer["checks"]:
        lines.append(f"{each['verdict']}: {each['device'] or 'all'}: {each['check']}: {each['found']}")
    return "\n".join(plain(line, screen) for line in lines)


def _facts(what: str, facts: Any) -> list[str]:
    if not isinstance(facts, Mapping):
        return []
    return [f"{what}: " + "; ".join(f"{key} {value}" for key, value in facts.items())]
