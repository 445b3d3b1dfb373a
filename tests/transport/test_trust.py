"""Who is let in, who is believed, and what can be read or played again on the way."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio

from rig.tcp_proxy import Fault, TcpProxy
from tierfs.checksum import checksum_fd
from tierfs.errors import PeerRefused, PeerUnavailable, RecordDamaged, SettingsError
from tierfs.settings import Settings
from tierfs.transport.tcp import TcpPeers, TcpServer
from transport.certificates import Authority
from transport.nodes import ASKER, HOLDER, FolderShelf, pair, port_of, usual_settings

MIB = 1 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca", "cluster CA")


def with_certificate(authority: Authority, name: str, secret: Path | None = None, *, alternative: str = "") -> Settings:
    settings = usual_settings(secret)
    authority.certify(settings, name, alternative=alternative)
    return settings


async def test_another_secret_is_refused_by_both_sides(settings: Settings, shelf: FolderShelf, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("f" * 32)
    other.chmod(0o600)
    shelf.add(b"bytes", "ab")
    async with pair(shelf, settings, asks=usual_settings(other)) as both:
        assert both.peers.trouble(HOLDER) == ""
        with pytest.raises(PeerRefused, match="secret"):
            await both.peers.fetch(HOLDER, f"{HOLDER}/ab", most_bytes=10)
        assert "secret" in both.peers.trouble(HOLDER), "`tierfs status` shows it"
    async with pair(shelf, settings, asks=usual_settings(None)) as both:
        with pytest.raises(PeerRefused, match="authentication by secret"):
            await both.peers.fetch(HOLDER, f"{HOLDER}/ab", most_bytes=10)
    assert shelf.asked == []
    another = usual_settings(settings.cluster.secret_file)
    another.cluster.name = "another"
    async with pair(shelf, settings, asks=another) as both:
        with pytest.raises(PeerRefused, match="cluster"):
            await both.peers.ping(HOLDER)


async def test_a_server_that_does_not_know_the_secret_is_not_believed(
    settings: Settings, shelf: FolderShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(shelf, settings) as both:
        monkeypatch.setattr("tierfs.transport.hello.Proofs.server", "0" * 64)
        both.server._credentials.secret = b"it guesses, and lets everybody in"
        monkeypatch.setattr("tierfs.transport.hello.require_proof", _believe_clients)
        with pytest.raises(PeerRefused, match="secret"):
            await both.peers.ping(HOLDER)


def _believe_clients(given: str, expected: str, who: str) -> None:
    if who == HOLDER:
        raise PeerRefused("it does not know the secret") if given != expected or given == "0" * 64 else AssertionError


async def test_what_the_shelf_raises_is_an_answer(
    settings: Settings, shelf: FolderShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = shelf.add(b"bytes")
    for error in (OSError(5, "Input/output error"), RecordDamaged("it is damaged")):
        async with pair(shelf, settings) as both:
            with monkeypatch.context() as patched:
                patched.setattr(shelf, "open_version", Mock(side_effect=error))
                with pytest.raises(PeerUnavailable, match="can't be read there"):
                    await both.peers.fetch(HOLDER, version, most_bytes=10)
            assert await both.peers.fetch(HOLDER, version, most_bytes=10) == b"bytes"


async def test_another_node_at_the_address_is_noticed(settings: Settings, shelf: FolderShelf) -> None:
    async with pair(shelf, settings) as both:
        peers = TcpPeers(settings, ASKER, lambda _: both.addresses)
        with pytest.raises(PeerUnavailable, match="this is the node holder"):
            await peers.ping("another")


async def test_what_was_recorded_can_not_be_played_again(settings: Settings, shelf: FolderShelf) -> None:
    version = shelf.add(b"a secret of the training")
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            await both.peers.fetch(HOLDER, version, most_bytes=100)
            recorded = bytes(proxy.recorded[0])
        asked = len(shelf.asked)
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(both.server.addresses[0]))
        async with stream:
            await stream.send_all(recorded)
            answer = b""
            with contextlib.suppress(trio.BrokenResourceError):
                while piece := await stream.receive_some():
                    answer += piece
        assert b"secret of the training" not in answer
        assert len(shelf.asked) == asked


async def test_a_frame_changed_on_its_way_ends_the_connection(settings: Settings, shelf: FolderShelf) -> None:
    first = shelf.add(b"this one was asked for", "ab")
    shelf.add(b"and another comes", "cd")
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            await both.peers.ping(HOLDER)
            said = len(proxy.recorded[0])
            proxy.cut()
            proxy.faults = [Fault("flip", after_bytes=said + 60, direction="up")]
            with pytest.raises((PeerRefused, PeerUnavailable)):
                await both.peers.ping(HOLDER)
                await both.peers.fetch(HOLDER, first, most_bytes=100)
        assert shelf.asked == []
        assert both.server.refused == 1


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_may_read_is_refused(shelf: FolderShelf, secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        TcpServer(shelf, usual_settings(secret), HOLDER)


def test_settings_that_contradict_each_other_say_what_to_do(shelf: FolderShelf, secret: Path) -> None:
    def refused(settings: Settings) -> str:
        with pytest.raises(SettingsError) as caught:
            TcpServer(shelf, settings, HOLDER)
        assert caught.value.key.startswith("cluster.")
        return caught.value.message

    settings = usual_settings(secret)
    settings.cluster.encryption = "on"
    assert "tls_cert" in refused(settings)
    settings = usual_settings(secret)
    settings.cluster.tls_cert = secret
    assert "tls_key" in refused(settings)
    settings.cluster.tls_key = settings.cluster.tls_ca = secret
    assert "can't be used" in refused(settings)
    settings = usual_settings(None)
    settings.cluster.listen = "0.0.0.0:7117"
    assert "secret_file" in refused(settings)
    settings.cluster.listen = "10.0.0.1"
    assert "HOST:PORT" in refused(settings)
    secret.write_text("short")
    assert "openssl rand" in refused(usual_settings(secret))


async def test_without_credentials_only_this_machine_is_served(
    shelf: FolderShelf, caplog: pytest.LogCaptureFixture
) -> None:
    settings = usual_settings(None)
    settings.cluster.listen = ":0"
    version = shelf.add(b"bytes")
    with caplog.at_level(logging.WARNING):
        async with pair(shelf, settings) as both:
            assert all(address.startswith("127.0.0.1:") for address in both.server.addresses)
            assert await both.peers.fetch(HOLDER, version, most_bytes=10) == b"bytes"
            both.addresses[:] = ["192.0.2.1:7117"]
            peers = TcpPeers(settings, ASKER, lambda _: both.addresses)
            with pytest.raises(PeerRefused, match="another machine"):
                await peers.ping(HOLDER)
    assert "other machines are not let in" in caplog.text


@pytest.mark.parametrize("encryption", ["auto", "off"])
@pytest.mark.parametrize("has_secret", [False, True])
async def test_by_certificates(
    shelf: FolderShelf, secret: Path, authority: Authority, target: int, encryption: str, has_secret: bool
) -> None:
    data = random.Random(5).randbytes(3 * MIB + 1)
    words = b"the words of the training"
    version, small = shelf.add(data + words * 100), shelf.add(words)
    size = len(data) + 100 * len(words)
    also = secret if has_secret else None
    holds = with_certificate(authority, HOLDER, also)
    asks = with_certificate(authority, "", also, alternative=f"DNS:{ASKER}.training.example")
    holds.cluster.encryption = asks.cluster.encryption = encryption
    async with pair(shelf, holds, asks=asks) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            assert (await both.peers.pull(HOLDER, version, 0, size, target)).length == size
            assert os.pread(target, size, 0) == data + words * 100
            assert await both.peers.fetch(HOLDER, small, most_bytes=100) == words
            assert (await both.peers.checksum(HOLDER, version)).size_bytes == size
            on_the_wire = b"".join(bytes(each) for each in proxy.recorded)
            assert (HOLDER.encode() + b"/" in on_the_wire) == (encryption == "off")
            await trio.to_thread.run_sync(proxy.cut)
            proxy.faults = [Fault("reset", after_bytes=2 * MIB)]
            assert (await both.peers.pull(HOLDER, version, 0, size, target)).length == size
            proxy.faults = [Fault("flip", after_bytes=2 * MIB)]
            proxy.cut()
            os.ftruncate(target, 0)
            got = await both.peers.pull(HOLDER, version, 0, size, target)
            with shelf.path(version).open("rb") as file:
                is_right = got.crc64nvme == checksum_fd(file.fileno()).full
            # TLS notices the flipped bit, and the pull goes on by another connection.
            assert is_right == (encryption == "auto") and proxy.faults[0].hits == 1


async def test_a_server_that_was_started_again_gives_new_tickets(shelf: FolderShelf, authority: Authority) -> None:
    settings = with_certificate(authority, "*")
    settings.cluster.encryption = "off"
    version = shelf.add(b"bytes")
    async with pair(shelf, settings) as both:
        assert await both.peers.fetch(HOLDER, version, most_bytes=10) == b"bytes"
        async with pair(shelf, settings) as again:
            both.addresses[:] = again.server.addresses
            both.peers._close_idle(float("inf"))
            assert await both.peers.fetch(HOLDER, version, most_bytes=10) == b"bytes"


async def test_wrong_certificates_are_refused(
    shelf: FolderShelf, secret: Path, authority: Authority, tmp_path: Path
) -> None:
    strangers = Authority(tmp_path / "strangers", "another CA")
    shelf.add(b"bytes", "ab")
    holds = with_certificate(authority, HOLDER)
    with_another_name = with_certificate(authority, "eve")
    by_secret = usual_settings(secret)
    by_another = with_certificate(strangers, ASKER)
    trusts_both = with_certificate(strangers, ASKER)
    trusts_both.cluster.tls_ca = authority.ca
    for asks in (with_another_name, by_secret, by_another, trusts_both):
        async with pair(shelf, holds, asks=asks) as both:
            with pytest.raises((PeerRefused, PeerUnavailable)):
                await both.peers.fetch(HOLDER, f"{HOLDER}/ab", most_bytes=10)
    asks = with_certificate(authority, ASKER)
    for holds in (with_another_name, by_secret, by_another):
        async with pair(shelf, holds, asks=asks) as both:
            with pytest.raises((PeerRefused, PeerUnavailable)):
                await both.peers.fetch(HOLDER, f"{HOLDER}/ab", most_bytes=10)
    assert shelf.asked == []


async def test_whoever_says_nothing_is_not_waited_for_long(
    settings: Settings, shelf: FolderShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierfs.transport.server.HELLO_WITHIN_S", 0.3)
    async with pair(shelf, settings) as both:
        silent = [socket.create_connection(("127.0.0.1", port_of(both.addresses[0]))) for _ in range(5)]
        for each in silent:
            each.settimeout(5)
            assert await trio.to_thread.run_sync(each.recv, 100) == b""
            each.close()
        assert await both.peers.ping(HOLDER) < 5
