"""Where reliable connections and EFA's SRD differ: how a queue pair is made, connected, and told where a READ goes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from tierfs.errors import PeerRefused
from tierfs.transport.verbs_library import Library, load_efa
from tierfs.transport.verbs_port import Kind, LinkAddress

#: Routers on the way (RoCE v2, EFA): IP's usual number.
_HOP_LIMIT = 64
#: READs that one queue pair may have on the wire at a time, at most; what mlx5 devices have.
_MOST_READS_ON_WIRE = 16
#: 4.096 us * 2^16 = 0.27 s until a packet is sent again, and so often: a dead node is noticed after 2 s at the least.
#: Not 7, the most: rxe takes that for ever (drivers/infiniband/sw/rxe/rxe_comp.c), as all do of "receiver not ready".
_TIMEOUT_EXPONENT = 16
_RETRIES = 6
#: `struct ibv_qp_attr.min_rnr_timer`: 0.64 ms. Nothing that is posted here needs the other side's receives.
_RECEIVER_NOT_READY_TIMER = 12
#: `enum ibv_mtu`: 256 to 4096 bytes.
_LEAST_MTU, _MOST_MTU = 1, 5
_GIDS_LOOKED_AT = 256


@dataclass(frozen=True)
class Local:
    """What a link is made of on this side: pyverbs' objects, and the port's own GID."""

    context: Any
    domain: Any
    queue: Any
    port: int
    gid_index: int
    gid: str
    depth: int


class LinkKind(Protocol):
    """pyverbs' failures pass through all of these."""

    #: After a failed READ the queue pair carries nothing any more.
    breaks_on_error: bool

    def choose_gid(self, context: Any, port: int) -> int:
        """Which of the port's GIDs others are told."""
        ...

    def make(self, local: Local) -> tuple[Any, LinkAddress]:
        """A queue pair, and what the other side needs to know of it."""
        ...

    def connect(self, local: Local, pair: Any, own: LinkAddress, peer: LinkAddress) -> Any:
        """What `address_request` needs of the peer, not None. PeerRefused."""
        ...

    def address_request(self, pair: Any, peer: Any) -> None:
        """Between the work request's start and its completion."""
        ...

    def disconnect(self, peer: Any) -> None:
        """After the queue pair was destroyed; None: it was not connected."""
        ...


def link_kind(kind: Kind, library: Library) -> LinkKind:
    """NoRdma."""
    return _Srd(library) if kind == "srd" else _Reliable(library)


class _Reliable:
    """RC. The address' key has the facts of this side's path: LID (0 with RoCE), MTU, and READs served at a time."""

    breaks_on_error = True

    def __init__(self, library: Library) -> None:
        self._library = library

    def choose_gid(self, context: Any, port: int) -> int:
        attributes = context.query_port(port)
        if attributes.link_layer != self._library["IBV_LINK_LAYER_ETHERNET"]:
            return 0
        best, best_worth = 0, -1
        for index in range(min(attributes.gid_tbl_len, _GIDS_LOOKED_AT)):
            try:
                worth = self._worth(str(context.query_gid(port, index)), context.query_gid_type(port, index))
            except self._library.failure:
                continue  # an empty place of the table
            if worth > best_worth:
                best, best_worth = index, worth
        return best

    def _worth(self, gid: str, gid_type: int) -> int:
        """RoCE v2 goes through routers; of its GIDs an IPv4 address' are those that are routed in most clusters."""
        if not gid.replace(":", "").strip("0"):
            return -1
        routed = 2 if gid.startswith("0000:0000:0000:0000:0000:ffff") else 0 if gid.startswith("fe80") else 1
        return routed + (3 if gid_type == self._library["IBV_GID_TYPE_SYSFS_ROCE_V2"] else 0)

    def make(self, local: Local) -> tuple[Any, LinkAddress]:
        attributes, port = local.context.query_device(), local.context.query_port(local.port)
        pair = self._library.qp.QPEx(local.context, _plan(self._library, local, self._library["IBV_QPT_RC"]))
        served = min(_MOST_READS_ON_WIRE, attributes.max_qp_rd_atom)
        path = served << 24 | port.active_mtu << 16 | port.lid
        return pair, LinkAddress(local.gid, pair.qp_num, secrets.randbits(24), path)

    def connect(self, local: Local, pair: Any, own: LinkAddress, peer: LinkAddress) -> Any:
        mtu, served, lid = peer.key >> 16 & 0xFF, peer.key >> 24, peer.key & 0xFFFF
        if not _LEAST_MTU <= mtu <= _MOST_MTU or not 0 < served <= _MOST_READS_ON_WIRE:
            raise PeerRefused(f"the other node's path by RDMA is none: {peer.key:#x}")
        addr = self._library.addr
        route = addr.GlobalRoute(dgid=addr.GID(peer.gid), sgid_index=local.gid_index, hop_limit=_HOP_LIMIT)
        plan = self._library.qp.QPAttr(port_num=local.port)
        plan.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=local.port, dlid=lid)
        plan.dest_qp_num, plan.rq_psn, plan.sq_psn = peer.queue_pair, peer.sequence, own.sequence
        plan.path_mtu = min(mtu, own.key >> 16 & 0xFF)
        plan.max_dest_rd_atomic = own.key >> 24
        plan.max_rd_atomic = min(served, local.context.query_device().max_qp_init_rd_atom)
        plan.qp_access_flags = self._library["IBV_ACCESS_REMOTE_READ"]
        plan.timeout, plan.retry_cnt = _TIMEOUT_EXPONENT, _RETRIES
        plan.rnr_retry, plan.min_rnr_timer = _RETRIES, _RECEIVER_NOT_READY_TIMER
        pair.to_rts(plan)
        return peer

    def address_request(self, pair: Any, peer: Any) -> None:
        pass  # the queue pair has one peer

    def disconnect(self, peer: Any) -> None:
        pass


class _Srd:
    """Scalable Reliable Datagram. A queue pair of its own for each link, so that closing a link ends its READs."""

    breaks_on_error = False

    def __init__(self, library: Library) -> None:
        self._library = library
        self._efa, self._constants = load_efa()

    def choose_gid(self, context: Any, port: int) -> int:
        return 0  # it has one

    def make(self, local: Local) -> tuple[Any, LinkAddress]:
        driver = self._efa.EfaQPInitAttr()
        driver.driver_qp_type = self._constants.EFADV_QP_DRIVER_TYPE_SRD
        plan = _plan(self._library, local, self._library["IBV_QPT_DRIVER"])
        pair = self._efa.SRDQPEx(local.context, plan, driver)
        key = secrets.randbits(31)  # keys with the highest bit are the kernel's to give
        ready = self._library.qp.QPAttr(port_num=local.port)
        ready.qkey, ready.pkey_index, ready.sq_psn = key, 0, 0
        pair.to_rts(ready)
        return pair, LinkAddress(local.gid, pair.qp_num, 0, key)

    def connect(self, local: Local, pair: Any, own: LinkAddress, peer: LinkAddress) -> Any:
        addr = self._library.addr
        route = addr.GlobalRoute(dgid=addr.GID(peer.gid), sgid_index=local.gid_index, hop_limit=_HOP_LIMIT)
        # The target of a READ needs it as well: the device serves no one whose address it was not told.
        handle = addr.AH(local.domain, attr=addr.AHAttr(gr=route, is_global=1, port_num=local.port))
        return handle, peer

    def address_request(self, pair: Any, peer: Any) -> None:
        handle, address = peer
        pair.wr_set_ud_addr(handle, address.queue_pair, address.key)

    def disconnect(self, peer: Any) -> None:
        if peer is not None:
            peer[0].close()


def _plan(library: Library, local: Local, kind: int) -> Any:
    """Of a queue pair that READs, each time with a completion. It receives nothing, but some drivers want a place."""
    return library.qp.QPInitAttrEx(
        qp_type=kind,
        cap=library.qp.QPCap(max_send_wr=local.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1),
        scq=local.queue,
        rcq=local.queue,
        pd=local.domain,
        send_ops_flags=library["IBV_QP_EX_WITH_RDMA_READ"],
        comp_mask=library["IBV_QP_INIT_ATTR_PD"] | library["IBV_QP_INIT_ATTR_SEND_OPS_FLAGS"],
        sq_sig_all=1,
    )
