"""`tierfs verbs-selftest`: READs of a few sizes over each RDMA device and over all of them, what must be refused, and
how fast it is. By the very code that moves files, and with digests of what came.

What a link of SRD does after an error is looked at: nobody who wrote this has seen it. One of a reliable connection is
not used again (`tierfs.transport.verbs_device`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import trio
import trio.lowlevel

from tierfs.errors import PeerError
from tierfs.transport.verbs_messages import MOST_LINKS, Proposal
from tierfs.transport.verbs_port import Link, LinkAddress, Port, Region, Remote
from tierfs.transport.verbs_reading import Lane, Reader, read_range
from tierfs.transport.verbs_selftest_holder import MIDDLE_BYTES, PAGE_BYTES, SMALL_BYTES, Held, Holder, Memory
from tierfs.units import format_rate, format_size

Verdict = Literal["ok", "warn", "fail"]

DEFAULT_BYTES = 1 << 30
#: Of the memory that is available, for each side.
_SHARE_OF_MEMORY = 4
#: A pull's length at most, and how many are under way: while one is written the next is read.
_RANGE_BYTES = 64 << 20
_RANGES_AT_ONCE = 2
#: Another index of the device's table, and another variant of the key: whatever the device keeps where.
_KEY_FLIP = 0x5A5A5A
#: Of READs that go by no `Reader`, which counts from 1 on: late completions must be nobody else's.
_FIRST_WORK = 1 << 32


@dataclass(frozen=True)
class Check:
    """One line of the answer. `device` is "" for what concerns all of them; `bytes_s` is 0 where nothing was timed."""

    device: str
    check: str
    verdict: Verdict
    found: str
    bytes_s: int = 0


@dataclass(frozen=True)
class _Found:
    text: str
    bytes_s: float = 0


class _Failed(Exception):
    """The check; the text is what was found."""

    verdict: Verdict = "fail"


class _Unexpected(_Failed):
    """And yet it is nothing that tierfs needs."""

    verdict: Verdict = "warn"


def usual_size(available_bytes: int) -> int:
    """Of the large READ: DEFAULT_BYTES, or less where memory is short. Whole MiB, and at least two."""
    return max(2 * MIDDLE_BYTES, min(DEFAULT_BYTES, available_bytes // _SHARE_OF_MEMORY) // MIDDLE_BYTES * MIDDLE_BYTES)


class SelfTest:
    """`ports` READ what `holder` holds; both stay the caller's. `told` is what progress is told of, as
    `mount.cli.progress` shows it."""

    def __init__(
        self,
        ports: Sequence[Port],
        holder: Holder,
        *,
        size_bytes: int,
        stall_s: float,
        threads: trio.CapacityLimiter,
        who: str = "this node",
        told: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """`size_bytes` of the large READs: whole MiB. `stall_s` without a completion is a failure."""
        if size_bytes < MIDDLE_BYTES or size_bytes % MIDDLE_BYTES:
            raise ValueError(f"{size_bytes} bytes are not some whole MiB")
        self._ports = ports[:MOST_LINKS]
        self._holder = holder
        self._size_bytes = size_bytes
        self._stall_s = stall_s
        self._threads = threads
        self._who = who
        self._told = told
        self._checks: list[Check] = []
        self._works = itertools.count(_FIRST_WORK)

    async def run(self) -> list[Check]:
        """One after the other; what fails ends its own check, and a device without a link those of the device."""
        memory = Memory(self._size_bytes)
        try:
            linked = []
            for index, port in enumerate(self._ports):
                device = port.capabilities.device
                self._told({"path": device})
                if await self._try(device, "link", partial(self._link_there_is, index)):
                    linked.append(index)
                    await self._with_target(index, memory)
            await self._large_ones(linked, memory)
        finally:
            memory.close()
        return self._checks

    async def _with_target(self, index: int, memory: Memory) -> None:
        try:
            async with self._target(index, memory) as into:
                await self._small(index, memory, into)
        except OSError as error:
            self._checks.append(Check(self._ports[index].capabilities.device, "memory", "fail", str(error)))

    async def _small(self, index: int, memory: Memory, into: Region) -> None:
        device = self._ports[index].capabilities.device
        for name, length in (("READ of 4 KiB", SMALL_BYTES), ("READ of 1 MiB", MIDDLE_BYTES)):
            await self._try(device, name, partial(self._read_and_compare, index, memory, into, length))
        for name, check in (
            ("wrong key", self._wrong_key),
            ("link after an error", self._link_after_an_error),
            ("beyond the memory", self._beyond),
            ("deregistered memory", self._deregistered),
        ):
            await self._try(device, name, partial(check, index, memory, into))
        name = "after errors"
        await self._try(device, name, partial(self._read_and_compare, index, memory, into, SMALL_BYTES))

    async def _large_ones(self, indices: Sequence[int], memory: Memory) -> None:
        name = f"READ of {format_size(self._size_bytes)}"
        readers = {index: Reader(self._ports[index]) for index in indices}
        async with trio.open_nursery() as nursery:
            for reader in readers.values():
                await nursery.start(reader.run)
            for index, reader in readers.items():
                await self._try(reader.device, name, partial(self._large, {index: reader}, memory))
            if len(indices) > 1:
                await self._try("", "all devices together", partial(self._large, readers, memory))
            nursery.cancel_scope.cancel()

    async def _try(self, device: str, name: str, check: Callable[[], Awaitable[_Found]]) -> bool:
        try:
            found = await check()
        except (_Failed, PeerError, OSError) as error:
            verdict = error.verdict if isinstance(error, _Failed) else "fail"
            self._checks.append(Check(device, name, verdict, str(error)))
            return False
        self._checks.append(Check(device, name, "ok", found.text, int(found.bytes_s)))
        return True

    async def _link_there_is(self, index: int) -> _Found:
        async with self._linked(index) as link:
            return _Found(f"{self._ports[index].capabilities.kind}, from {link.address.gid}")

    async def _read_and_compare(self, index: int, memory: Memory, into: Region, length: int) -> _Found:
        async with self._linked(index) as link:
            held = await self._holder.hold(MIDDLE_BYTES)
            remote = _first(held)
            await self._clear(memory, length)
            began = time.perf_counter()
            error = await self._read(index, link, into, length, remote.address, remote.key)
            took_s = time.perf_counter() - began
            if error:
                raise _Failed(error)
            await self._compare(memory, held, length)
        return _Found(f"digest equal, {took_s * 1000:.2f} ms")

    # --- what must be refused

    async def _wrong_key(self, index: int, memory: Memory, into: Region) -> _Found:
        async with self._linked(index) as link:
            held = await self._holder.hold(MIDDLE_BYTES)
            remote = _first(held)
            return await self._refused(index, link, memory, into, remote, held, key=remote.key ^ _KEY_FLIP)

    async def _link_after_an_error(self, index: int, memory: Memory, into: Region) -> _Found:
        """Whether it carries another READ. tierfs makes a new one either way."""
        kind = self._ports[index].capabilities.kind
        async with self._linked(index) as link:
            held = await self._holder.hold(MIDDLE_BYTES)
            remote = _first(held)
            await self._refused(index, link, memory, into, remote, held, key=remote.key ^ _KEY_FLIP)
            await self._clear(memory, SMALL_BYTES)
            try:
                error = await self._read(index, link, into, SMALL_BYTES, remote.address, remote.key)
            except (PeerError, _Failed) as failure:
                error = str(failure)
            if error:
                is_expected, found = kind == "rc", f"it carries nothing any more ({error})"
            else:
                await self._compare(memory, held, SMALL_BYTES)
                is_expected, found = kind == "srd", "it goes on"
        if not is_expected:
            raise _Unexpected(f"{found}, which was not expected of {kind}; tierfs works with it")
        return _Found(found)

    async def _beyond(self, index: int, memory: Memory, into: Region) -> _Found:
        async with self._linked(index) as link:
            held = await self._holder.hold(MIDDLE_BYTES)
            remote = _first(held)
            at = remote.length - PAGE_BYTES // 2  # half of it within
            return await self._refused(index, link, memory, into, remote, held, at=at)

    async def _deregistered(self, index: int, memory: Memory, into: Region) -> _Found:
        async with self._linked(index) as link:
            held = await self._holder.hold(MIDDLE_BYTES)
            await self._holder.let_go()
            return await self._refused(index, link, memory, into, _first(held), held)

    async def _refused(
        self,
        index: int,
        link: Link,
        memory: Memory,
        into: Region,
        remote: Remote,
        held: Held,
        *,
        key: int | None = None,
        at: int = 0,
    ) -> _Found:
        """How. `_Failed` where bytes came, whatever the device said of them."""
        await self._clear(memory, SMALL_BYTES)
        key = remote.key if key is None else key
        error = await self._read(index, link, into, SMALL_BYTES, remote.address + at, key)
        if not error:
            raise _Failed("the READ was carried out: memory can be read by whoever should not")
        if await self._sum(memory, SMALL_BYTES) == held.sums[SMALL_BYTES]:
            raise _Failed(f"the READ ended with an error ({error}), and the bytes came all the same")
        return _Found(f"refused: {error}")

    # --- large READs

    async def _large(self, readers: Mapping[int, Reader], memory: Memory) -> _Found:
        """The ports of the indices, each with its reader, together."""
        ports = [self._ports[index] for index in readers]
        links: list[Link] = []
        regions: list[Region] = []
        try:
            links += [port.link() for port in ports]
            proposals = [
                Proposal(port.capabilities.kind, link.address) for port, link in zip(ports, links, strict=True)
            ]
            answer = await self._holder.link(min(readers), proposals)
            await self._clear(memory, self._size_bytes)
            began = time.perf_counter()
            held = await self._holder.hold(self._size_bytes)
            held_s = time.perf_counter() - began
            began = time.perf_counter()
            for port in ports:
                regions.append(await self._registered(port, memory, self._size_bytes))
            registered_s = (time.perf_counter() - began) / len(ports)
            lanes = []
            for reader, link, address, region, remote in zip(
                readers.values(), links, answer.addresses, regions, held.remotes, strict=True
            ):
                if address is None or remote is None:
                    raise _Failed(f"{reader.device}: {answer.reason or 'no device there for it'}")
                link.connect(address)
                lanes.append(Lane(reader, link, region, remote, self._who))
            took_s, cpu_s = await self._read_all(lanes, " ".join(port.capabilities.device for port in ports))
            for lane in lanes:
                if lane.is_dead:
                    raise _Failed(f"{lane.reader.device}: {lane.trouble}; the other devices read the rest")
            await self._compare(memory, held, self._size_bytes)
        finally:
            for link in links:
                link.close()
            with trio.CancelScope(shield=True):
                for region in regions:
                    await trio.to_thread.run_sync(region.close, limiter=self._threads)
        await self._holder.let_go()
        gib = self._size_bytes / (1 << 30)
        return _Found(
            f"digest equal, {format_rate(self._size_bytes, took_s)}, {cpu_s / gib:.2f} s of CPU a GiB; registered here "
            f"within {registered_s:.2f} s, made ready there within {held_s:.2f} s",
            self._size_bytes / took_s,
        )

    async def _read_all(self, lanes: Sequence[Lane], path: str) -> tuple[float, float]:
        """Seconds, and seconds of this process' CPU."""
        done, failed = 0, []
        waiting = iter(range(0, self._size_bytes, _RANGE_BYTES))

        async def read() -> None:
            nonlocal done
            for at in waiting:
                length = min(_RANGE_BYTES, self._size_bytes - at)
                try:
                    await read_range(lanes, at, length, stall_s=self._stall_s)
                except PeerError as error:
                    failed.append(error)
                    return
                done += length
                self._told({"bytes": done, "bytes_total": self._size_bytes, "path": path})

        began, began_cpu = time.perf_counter(), time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(_RANGES_AT_ONCE):
                nursery.start_soon(read)
        if failed:
            raise failed[0]
        return time.perf_counter() - began, time.process_time() - began_cpu

    # --- parts of it

    @asynccontextmanager
    async def _linked(self, index: int) -> AsyncIterator[Link]:
        port = self._ports[index]
        link = port.link()
        try:
            answer = await self._holder.link(index, [Proposal(port.capabilities.kind, link.address)])
            address: LinkAddress | None = answer.addresses[0]
            if address is None:
                raise _Failed(answer.reason)
            link.connect(address)
            yield link
        finally:
            link.close()

    @asynccontextmanager
    async def _target(self, index: int, memory: Memory) -> AsyncIterator[Region]:
        region = await self._registered(self._ports[index], memory, MIDDLE_BYTES)
        try:
            yield region
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(region.close, limiter=self._threads)

    async def _registered(self, port: Port, memory: Memory, length: int) -> Region:
        def register() -> Region:
            return port.register(memory.address, length, remote=False)

        return await trio.to_thread.run_sync(register, limiter=self._threads)

    async def _read(self, index: int, link: Link, into: Region, length: int, address: int, key: int) -> str:
        """One READ to the region's start: its error, "" for none. `_Failed` where it does not end."""
        port, work = self._ports[index], next(self._works)
        link.read(work, into, 0, length, address, key)
        with trio.move_on_after(self._stall_s):
            while True:
                port.arm()
                found = port.completions()
                for each in found:
                    if each.work == work:
                        return each.error
                if not found:
                    await trio.lowlevel.wait_readable(port.fd)
        raise _Failed(f"no completion within {self._stall_s:g} s")

    async def _clear(self, memory: Memory, length: int) -> None:
        await trio.to_thread.run_sync(memory.clear, length, limiter=self._threads)

    async def _sum(self, memory: Memory, length: int) -> int:
        return await trio.to_thread.run_sync(memory.checksum, length, limiter=self._threads)

    async def _compare(self, memory: Memory, held: Held, length: int) -> None:
        if await self._sum(memory, length) != held.sums[length]:
            raise _Failed(f"the {format_size(length)} that came are not those that are there")


def _first(held: Held) -> Remote:
    if held.remotes[0] is None:
        raise _Failed("the memory there is not for this link")
    return held.remotes[0]
