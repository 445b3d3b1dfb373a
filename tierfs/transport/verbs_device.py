"""A device's `Port` by pyverbs: reliable connections (InfiniBand, RoCE) and EFA's SRD.

The two differ in `verbs_link_kinds` alone. Both are used the same way: one queue pair for each link, READs only, each
signalled, one completion queue with its completion channel for the port.

pyverbs holds the interpreter lock in every call. What can take long by that is `register` alone.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfs.errors import PeerRefused, PeerUnavailable
from tierfs.transport.verbs_devices import active_port
from tierfs.transport.verbs_library import Library, NoRdma, load_library
from tierfs.transport.verbs_link_kinds import LinkKind, Local, link_kind
from tierfs.transport.verbs_port import Capabilities, Completion, LinkAddress, QueueFull, Region

log = logging.getLogger("tierfs.transport")

#: Queue pairs 0 and 1 are the subnet manager's and the connection manager's (InfiniBand Architecture Specification).
_FIRST_QUEUE_PAIR = 2
_MOST_24_BITS = (1 << 24) - 1
_MOST_32_BITS = (1 << 32) - 1
_MOST_64_BITS = (1 << 64) - 1
#: How many completions are taken at a time: each becomes a Python object.
_POLLED_AT_ONCE = 32
#: `enum ibv_wc_status` (libibverbs/verbs.h): those that tell something about the other side.
_STATUS = {
    5: "given up, as another READ of the link had failed",
    10: "the other node does not let this memory be read",
    11: "the other node could not carry the READ out",
    12: "the other node did not answer",
}
_SUCCESS = 0


def check_address(address: LinkAddress) -> LinkAddress:
    """An address that came from the wire, its GID as libibverbs reads it. PeerRefused where it can be no address."""
    gid = address.gid
    try:
        if not isinstance(gid, str) or "%" in gid:
            raise ValueError
        parsed = ipaddress.IPv6Address(gid)
    except ValueError:
        raise PeerRefused(f"the other node's GID is none: {gid!r:.80}") from None
    if parsed.is_multicast or parsed.is_unspecified:
        raise PeerRefused(f"the other node's GID is no single port's: {gid}")
    _check_number("queue pair", address.queue_pair, _FIRST_QUEUE_PAIR, _MOST_24_BITS)
    _check_number("first sequence number", address.sequence, 0, _MOST_24_BITS)
    _check_number("key", address.key, 0, _MOST_32_BITS)
    return LinkAddress(parsed.exploded, address.queue_pair, address.sequence, address.key)


def _check_number(what: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise PeerRefused(f"the other node's {what} is not from {least} to {most}: {value!r:.80}")


class DevicePort:
    """`Port` (see there) of one device."""

    def __init__(self, capabilities: Capabilities) -> None:
        """As `find_devices` gives them. OSError where the device can't be used now."""
        self._capabilities = capabilities
        self._links: set[DeviceLink] = set()
        self._outstanding: dict[int, tuple[DeviceLink, int]] = {}
        self._numbers = itertools.count(1)
        self._gathered: list[Completion] = []
        self._closed = False
        try:
            self._library = library = load_library()
            self._context = library.device.Context(name=capabilities.device)
        except NoRdma as error:
            raise OSError(errno.ENODEV, error.reason) from error
        except Exception as error:
            raise _os_error(error, f"{capabilities.device} can't be opened") from error
        try:
            self._open(library)
        except NoRdma as error:
            self._context.close()
            raise OSError(errno.ENODEV, f"{capabilities.device}: {error.reason}") from error
        except library.failure as error:
            self._context.close()
            raise _os_error(error, f"{capabilities.device} can't be set up") from error
        except BaseException:
            self._context.close()
            raise

    def _open(self, library: Library) -> None:
        port = active_port(library, self._context)
        self._kind: LinkKind = link_kind(self._capabilities.kind, library)
        self._domain = library.pd.PD(self._context)
        self._channel, self._fd = _completion_channel(library, self._context)
        # Twice the READs that may be outstanding: those of closed links leave completions here until they are polled.
        places = 2 * self._capabilities.queue_depth
        self._queue = library.cq.CQ(self._context, places, None, self._channel, 0)
        gid_index = self._kind.choose_gid(self._context, port)
        self._local = Local(
            self._context,
            self._domain,
            self._queue,
            port,
            gid_index,
            ipaddress.IPv6Address(str(self._context.query_gid(port, gid_index))).exploded,
            self._capabilities.queue_depth,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def fd(self) -> int:
        return self._fd

    def register(self, address: int, length: int, *, remote: bool) -> DeviceRegion:
        access = self._library["IBV_ACCESS_LOCAL_WRITE"]
        if remote:
            access |= self._library["IBV_ACCESS_REMOTE_READ"]
        try:
            registration = self._library.mr.MR(self._domain, length, access, address)
        except self._library.failure as error:
            raise _os_error(error, f"{length} bytes can't be registered with {self._capabilities.device}") from error
        return DeviceRegion(registration, address, length, int(registration.lkey), int(registration.rkey))

    def link(self) -> DeviceLink:
        if self._closed:
            raise OSError(errno.ENODEV, f"{self._capabilities.device} was closed")
        try:
            queue_pair, address = self._kind.make(self._local)
        except self._library.failure as error:
            raise _os_error(error, f"{self._capabilities.device} gives no further queue pair") from error
        link = DeviceLink(self, self._kind, self._local, queue_pair, address)
        self._links.add(link)
        return link

    def arm(self) -> None:
        try:
            self._queue.req_notify()
        except self._library.failure as error:
            raise self._gone(error) from error

    def completions(self) -> list[Completion]:
        self._take_events()
        self._gather()
        gathered, self._gathered = self._gathered, []
        return gathered

    def close(self) -> None:
        """Closes its links; memory that is still registered stays locked until its regions are closed, so those come
        first."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._links):
            link.close()
        with contextlib.suppress(PeerUnavailable):  # the device is gone, and so are its events
            self._take_events()
        self._context.close()  # and what was made of it, in the order that libibverbs wants

    # --- for its links

    @property
    def library(self) -> Library:
        return self._library

    def note(self, link: DeviceLink, work: int) -> int:
        """A number for a READ's completion, which no other one ever has: a closed link's may still come. QueueFull."""
        if len(self._outstanding) >= self._capabilities.queue_depth:
            raise QueueFull
        number = next(self._numbers)
        self._outstanding[number] = (link, work)
        return number

    def forget(self, number: int) -> None:
        self._outstanding.pop(number, None)

    def drop(self, link: DeviceLink) -> None:
        """Its queue pair is gone. What came until now stays to be had; the rest is nobody's."""
        self._links.discard(link)
        with contextlib.suppress(PeerUnavailable):  # `completions` says it again to those who wait for others
            self._gather()
        for number in [number for number, (whose, _) in self._outstanding.items() if whose is link]:
            del self._outstanding[number]

    # --- completions

    def _take_events(self) -> None:
        """All that are there: an unacknowledged one would block the queue's destruction for ever."""
        while True:
            try:
                self._channel.get_cq_event(self._queue)
            except self._library.failure as error:
                if getattr(error, "error_code", -1) == errno.EAGAIN:
                    return
                if getattr(error, "error_code", -1) == errno.EINTR:
                    continue
                raise self._gone(error) from error
            self._queue.ack_events(1)

    def _gather(self) -> None:
        while True:
            try:
                count, polled = self._queue.poll(_POLLED_AT_ONCE)
            except self._library.failure as error:
                raise self._gone(error) from error
            for each in polled:
                self._take(int(each.wr_id), int(each.status))
            if count < _POLLED_AT_ONCE:
                return

    def _take(self, number: int, status: int) -> None:
        link, work = self._outstanding.pop(number, (None, 0))
        if link is None:
            return  # of a link that was closed
        if status == _SUCCESS:
            self._gathered.append(Completion(work))
            return
        link.note_error()
        reason = _STATUS.get(status, "the READ failed")
        self._gathered.append(Completion(work, f"{reason} (status {status})"))

    def _gone(self, error: Exception) -> PeerUnavailable:
        return PeerUnavailable(f"the RDMA device {self._capabilities.device} is gone: {error}")


@dataclass
class DeviceRegion:
    """`Region` (see there)."""

    registration: Any
    address: int
    length: int
    local_key: int
    remote_key: int

    def close(self) -> None:
        self.registration.close()  # once is enough, and twice does no harm


class DeviceLink:
    """`Link` (see there): one queue pair."""

    def __init__(self, port: DevicePort, kind: LinkKind, local: Local, queue_pair: Any, address: LinkAddress) -> None:
        self._port = port
        self._kind = kind
        self._local = local
        self._queue_pair = queue_pair
        self._address = address
        self._peer: Any = None
        self._broken = False
        self._closed = False

    @property
    def address(self) -> LinkAddress:
        return self._address

    @property
    def is_broken(self) -> bool:
        return self._broken

    def connect(self, peer: LinkAddress) -> None:
        """PeerRefused where the address can be none."""
        checked = check_address(peer)
        self._check_usable()
        try:
            self._peer = self._kind.connect(self._local, self._queue_pair, self._address, checked)
        except self._port.library.failure as error:
            self._broken = True
            raise PeerUnavailable(f"no way by RDMA to {checked.gid}: {error}") from error

    def read(self, work: int, into: Region, at: int, length: int, remote_address: int, remote_key: int) -> None:
        if not isinstance(into, DeviceRegion):
            raise TypeError("a READ goes into memory that this port registered")
        if at < 0 or not 0 < length <= self._port.capabilities.most_read_bytes or at + length > into.length:
            raise ValueError(f"no READ of {length} bytes into byte {at} of {into.length}")
        if not 0 <= remote_address <= _MOST_64_BITS - length or not 0 <= remote_key <= _MOST_32_BITS:
            raise PeerRefused(f"the other node's memory can't be at {remote_address} with the key {remote_key}")
        self._check_usable()
        if self._peer is None:
            raise PeerUnavailable("the link was not connected")
        number = self._port.note(self, work)
        pair, library = self._queue_pair, self._port.library
        try:
            pair.wr_start()
            pair.wr_id = number
            pair.wr_flags = library["IBV_SEND_SIGNALED"]
            pair.wr_rdma_read(remote_key, remote_address)
            self._kind.address_request(pair, self._peer)
            pair.wr_set_sge(library.wr.SGE(into.address + at, length, into.local_key))
            pair.wr_complete()
        except library.failure as error:
            self._port.forget(number)
            if getattr(error, "error_code", -1) == errno.ENOMEM:  # the device's own queue is smaller than it said
                raise QueueFull from error
            self._broken = True
            raise PeerUnavailable(f"the device did not take a READ: {error}") from error

    def note_error(self) -> None:
        """One of its READs failed."""
        self._broken = self._broken or self._kind.breaks_on_error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._queue_pair.close()
            self._kind.disconnect(self._peer)
        except self._port.library.failure as error:  # the device is gone, and writes nothing any more
            log.warning("a link of %s did not close: %s", self._port.capabilities.device, error)
        finally:
            self._peer = None
            self._port.drop(self)

    def _check_usable(self) -> None:
        if self._closed or self._broken:
            raise PeerUnavailable(f"the link by RDMA {'was closed' if self._closed else 'broke'}")


def _completion_channel(library: Library, context: Any) -> tuple[Any, int]:
    """And its descriptor, which does not block. pyverbs tells it from 57 on only."""
    before = _event_fds()
    channel = library.cq.CompChannel(context)
    fd = getattr(channel, "fd", None)
    if fd is None:
        new = _event_fds() - before
        if len(new) != 1:  # another thread opened a device at the same moment
            channel.close()
            raise OSError(errno.EAGAIN, "which descriptor the device's completion channel has can't be told")
        fd = new.pop()
    # get_cq_event would otherwise wait in the kernel, with the interpreter lock.
    os.set_blocking(fd, False)
    return channel, fd


def _event_fds() -> set[int]:
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in str(each.readlink()):
                found.add(int(each.name))
        except FileNotFoundError:
            continue  # the descriptor that lists the directory
    return found


def _os_error(error: Exception, what: str) -> OSError:
    number = getattr(error, "error_code", -1)
    if number <= 0:
        number = errno.EIO
    hint = {
        errno.ENOMEM: ": raise the locked-memory limit (LimitMEMLOCK=infinity), or the device's table is full",
        errno.EFAULT: ": it must be mapped for reading and writing",
    }.get(number, "")
    return OSError(number, f"{what} ({error}){hint}")
