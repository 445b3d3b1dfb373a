"""Both ends against what is no protocol: errors, bounded memory, and others are served as before."""

from __future__ import annotations

import contextlib
import random
import resource
import tracemalloc

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tierfs.catalog.records import check_version
from tierfs.errors import PeerError, PeerRefused
from tierfs.transport import requests
from tierfs.transport.frames import HEAD_BYTES, Frame, Kind, Tags, decode_head, decode_json, encode
from tierfs.transport.requests import Request, request_of
from tierfs.transport.tcp import TcpPeers
from tierfs.transport.verbs_messages import Proposal
from tierfs.transport.verbs_port import LinkAddress
from transport.nodes import HOLDER, FolderShelf, pair, port_of, usual_settings

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
usual_request = Request("pull", 100, f"{HOLDER}/ab", 0, 5).to_head()
usual_hello = {"format": 1, "node": "asker", "to": HOLDER, "cluster": "default", "by": "none", "ticket": "",
               "nonce": "0" * 64}  # fmt: skip
usual_offer = {"version": f"{HOLDER}/ab", "namespace": "run", "step": "step_1", "inner": "a/b", "generation": 1,
               "size_bytes": 5, "sealed": True, "growing": ""}  # fmt: skip
evil_texts = st.sampled_from(["../../etc/passwd", "/etc", "a//b", "a/\0", "\ud800", "", "x" * 5000, "holder/..", "."])


@given(member=st.sampled_from(sorted(usual_request)), value=json_values | evil_texts)
def test_a_request_with_a_wrong_member_is_refused(member: str, value: object) -> None:
    try:
        request = request_of(Frame(Kind.request, {**usual_request, member: value}))
    except PeerRefused:
        return
    assert request.version.startswith(f"{HOLDER}/") or request.version == value
    assert 0 <= request.length <= 64 << 20 and "\0" not in request.version and request.op != "link"
    token = request.version.partition("/")[2]
    assert request.op in ("offers", "ping", "ticket") or all(each in "0123456789abcdef" for each in token)


@given(links=st.lists(json_values | st.lists(json_values | st.sampled_from(["rc", "srd"]), max_size=6), max_size=3))
def test_links_that_are_none_are_refused(links: list[object]) -> None:
    """And what is taken is what was said."""
    head = {**usual_request, "op": "link", "links": links}
    try:
        request = request_of(Frame(Kind.request, head))
    except PeerRefused:
        return
    assert request.links and request.to_head()["links"] == links
    with pytest.raises(PeerRefused):
        request_of(Frame(Kind.request, {**head, "op": "ping"}))


def test_a_request_is_as_it_was_for_nodes_that_know_no_links() -> None:
    assert "links" not in usual_request
    assert request_of(Frame(Kind.request, usual_request)).to_head() == usual_request
    proposed = Request("link", 100, links=(Proposal("srd", LinkAddress("fe80::1", 7, 0, 9)),))
    assert request_of(Frame(Kind.request, proposed.to_head())) == proposed


@given(member=st.sampled_from(sorted(usual_offer)), value=json_values | evil_texts)
def test_an_offer_with_a_wrong_member_is_refused(member: str, value: object) -> None:
    try:
        offer = requests.offer_of({**usual_offer, member: value}, HOLDER)
    except PeerRefused:
        return
    for name in (*offer.namespace.split("/"), offer.step, *offer.inner.split("/")):
        assert name not in ("", ".", "..") and "\0" not in name and "/" not in name
    assert offer.version.startswith(f"{HOLDER}/")


@given(data=st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), text=st.binary(max_size=200))
def test_a_frame_of_anything_is_refused_or_small(data: bytes, text: bytes) -> None:
    with pytest.raises(PeerRefused):
        decode_head(data, most_body_bytes=0, most_bulk_bytes=0)
    with contextlib.suppress(PeerRefused):
        assert isinstance(decode_json(text), dict)


def test_json_that_is_too_deep_or_no_number_is_refused() -> None:
    for text in (b"[" * 60000, b'{"a":NaN}', b"[]", b'{"a":1', b"\xff", b'{"a":' * 9000):
        with pytest.raises(PeerRefused):
            decode_json(text)
    for size_bytes, chunk_bytes in ((1 << 60, 1), (9, 0), (-1, 16)):
        answer = {"size_bytes": size_bytes, "full": 1, "chunk_bytes": chunk_bytes}
        with pytest.raises(PeerRefused):
            requests.checksum_of(Frame(Kind.answer, answer, b"12345678"))


def a_conversation(dice: random.Random) -> bytes:
    """Frames of a client, some of them mutated."""
    operations = ("pull", "fetch", "checksum", "offers", "ping", "ticket", "link", "export")
    versions = (f"{HOLDER}/ab", "x", "../y/00", f"{HOLDER}/ff")
    frames = [encode(Kind.hello, usual_hello), encode(Kind.proof, {"proof": ""})]
    for _ in range(3):
        request = {**usual_request, "op": dice.choice(operations), "version": dice.choice(versions)}
        request.update(length=dice.choice([0, 5, 1 << 40]), growing=dice.random() < 0.5)
        if request["op"] == "link" or dice.random() < 0.1:
            request["links"] = [dice.choice([["rc", "fe80::1", 5, 0, 0], ["srd", "", -1, 0, 0], ["rc"], 7])]
        frames.append(encode(Kind.request, request))
    whole = bytearray()
    for number, frame in enumerate(frames):
        changed = bytearray(frame)
        if dice.random() < 0.3 and (number > 1 or dice.random() < 0.3):
            for _ in range(dice.randrange(1, 4)):
                at = dice.randrange(len(changed))
                match dice.randrange(3):
                    case 0:
                        changed[at] = dice.randrange(256)
                    case 1:
                        del changed[at : at + dice.randrange(1, 9)]
                    case 2:
                        changed[at:at] = dice.randbytes(dice.randrange(1, 9))
                if not changed:
                    break
        whole += changed
    return bytes(whole) if dice.random() < 0.9 else dice.randbytes(dice.randrange(1, 300))


async def test_the_server_outlives_garbage(shelf: FolderShelf, caplog: pytest.LogCaptureFixture) -> None:
    settings = usual_settings(None)
    shelf.add(b"bytes", "ab")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with pair(shelf, settings) as both:
        port = port_of(both.addresses[0])

        async def talk(seed: int) -> None:
            dice = random.Random(seed)
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            try:
                with trio.move_on_after(0.3):
                    await stream.send_all(a_conversation(dice))
                    if dice.random() < 0.7:
                        await stream.send_eof()
                    while await stream.receive_some(65536):
                        pass
            except trio.BrokenResourceError:
                pass
            finally:
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

        for start in range(0, 400, 50):
            async with trio.open_nursery() as nursery:
                for seed in range(start, start + 50):
                    nursery.start_soon(talk, seed)
            assert await both.peers.fetch(HOLDER, f"{HOLDER}/ab", most_bytes=10) == b"bytes"
        assert both.server.refused > 20
    assert "nobody thought of" not in caplog.text
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 << 10
    assert all(check_version(version) == version for version in shelf.asked)


@pytest.mark.parametrize("seed", range(40))
async def test_the_client_outlives_garbage(seed: int, target: int) -> None:
    """A server that greets well, as far as it likes, and then says anything."""
    dice = random.Random(seed)
    settings = usual_settings(None)
    settings.peer.stall_s = 0.2

    async def serve(stream: trio.SocketStream) -> None:
        with trio.move_on_after(2):
            try:
                await stream.receive_some(1000)
                answers = [
                    encode(Kind.hello, {"format": 1, "node": HOLDER, "nonce": "1" * 64}),
                    encode(Kind.proof, {"proof": ""}),
                    encode(dice.choice(list(Kind)), dice.choice([{}, {"kind": "lacks", "message": "\n"}, {"a": 1}]),
                           b"x" * dice.choice([0, 8, 1000])),
                ]  # fmt: skip
                data = bytearray(b"".join(answers[: dice.randrange(1, 4)]))
                if dice.random() < 0.5:
                    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
                await stream.send_all(bytes(data) + dice.randbytes(dice.randrange(0, 3000)))
                while dice.random() < 0.7 and await stream.receive_some(1000):
                    pass
            except trio.BrokenResourceError:
                pass
            finally:
                await trio.aclose_forcefully(stream)

    tracemalloc.start()
    try:
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, serve, 0)
            port = listeners[0].socket.getsockname()[1]
            peers = TcpPeers(settings, "asker", lambda _: [f"127.0.0.1:{port}"])
            for ask in (
                lambda: peers.pull(HOLDER, f"{HOLDER}/ab", 0, 1 << 20, target),
                lambda: peers.fetch(HOLDER, f"{HOLDER}/ab", most_bytes=1 << 20),
                lambda: peers.checksum(HOLDER, f"{HOLDER}/ab"),
                lambda: _first_offer(peers),
            ):
                with trio.fail_after(5):
                    with contextlib.suppress(PeerError):
                        await ask()
            nursery.cancel_scope.cancel()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


async def _first_offer(peers: TcpPeers) -> None:
    async with peers.offers(HOLDER) as offers:
        await anext(offers)


def test_tags_are_of_one_direction_and_place() -> None:
    frame = encode(Kind.answer, {"a": 1}, b"body", tags=Tags(b"k"))
    covered, tag = frame[:-16], frame[-16:]
    Tags(b"k").check(tag, covered)
    later = Tags(b"k")
    later.next(b"")
    for tags, data in ((later, covered), (Tags(b"other"), covered), (Tags(b"k"), covered + b"x")):
        with pytest.raises(PeerRefused):
            tags.check(tag, data)
