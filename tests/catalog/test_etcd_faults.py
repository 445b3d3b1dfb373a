"""The catalogue on an etcd whose members die, freeze or refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from catalog.targets import told
from rig.etcd_server import PASSWORD, USER, Etcd, running_etcd
from tierfs.catalog.etcd import EtcdStore
from tierfs.catalog.opening import open_store
from tierfs.catalog.store import Compare, KeyStore, Put
from tierfs.errors import CatalogDenied, CatalogError, CatalogUnavailable, SettingsError
from tierfs.settings import Settings

_TIMEOUT_S = 1.0
#: What a call may take beyond its time-out, on a busy machine.
_SLACK_S = 1.5
_BOUND_S = 30.0


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[KeyStore]:
    store = EtcdStore(settings, first=0)
    try:
        yield store
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()


async def eventually(store: KeyStore, key: str) -> int:
    """Put until it is answered: the revision."""
    with trio.fail_after(_BOUND_S):
        while True:
            try:
                return await store.put(key, b"")
            except CatalogUnavailable:
                await trio.sleep(0.05)


@pytest.fixture(scope="module")
def three() -> Iterator[Etcd]:
    with running_etcd(members=3) as etcd:
        yield etcd


@pytest.fixture
def all_three(three: Etcd) -> Iterator[Etcd]:
    yield three
    for member in three.members:
        member.thaw()
    three.start()


async def test_watch_and_transactions_go_on_when_the_leader_is_killed(all_three: Etcd) -> None:
    settings = all_three.settings("leader", timeout_s=5.0)
    heard: list[str] = []
    changes, all_heard = 60, trio.Event()
    leader = all_three.leader()
    # The members are asked in the order of the setting: this client begins with the one that dies.
    settings.catalog = "etcd://" + ",".join(
        member.endpoint for member in sorted(all_three.members, key=lambda each: each is not leader)
    )

    async def follow(store: KeyStore, start: int) -> None:
        revision = start
        while True:
            try:
                async with told(store, ["t/"], from_revision=revision + 1) as seen:
                    seen.revision = revision
                    while True:
                        heard.extend(event.key for event in await seen.until(revision + 1))
                        revision = seen.revision
                        if len(heard) >= changes:
                            all_heard.set()
            except CatalogUnavailable:
                await trio.sleep(0.05)

    async with opened(settings) as store, trio.open_nursery() as nursery:
        start = await store.put("begin", b"")
        nursery.start_soon(follow, store, start)
        written = []
        for number in range(changes):
            if number == 20:
                leader.kill()
            key = f"t/{number:02d}"
            while True:
                try:
                    # Only once, also where an answer was lost: then the key is there already.
                    await store.txn((Compare(key, "create", "equal", 0),), (Put(key, b""),))
                    break
                except CatalogUnavailable:
                    await trio.sleep(0.05)
            written.append(key)
        with trio.fail_after(_BOUND_S):
            await all_heard.wait()
        nursery.cancel_scope.cancel()
    assert heard == written


async def test_a_member_that_lost_the_others_is_left_for_one_that_has_them(all_three: Etcd) -> None:
    settings = all_three.settings("frozen", timeout_s=_TIMEOUT_S)
    async with opened(settings) as store:
        start = await store.put("t/1", b"")
        async with told(store, ["t/"], from_revision=start + 1) as seen:
            all_three.members[0].freeze()
            revision = await eventually(store, "t/2")
            with pytest.raises(CatalogUnavailable), trio.fail_after(_BOUND_S):
                await seen.until(revision)
        with trio.fail_after(_BOUND_S):
            async with told(store, ["t/"], from_revision=start + 1) as seen:
                assert {event.key for event in await seen.until(revision)} == {"t/2"}
        # Reads are asked of the next member at once, within the same call.
        began = trio.current_time()
        assert await store.get("t/2") is not None
        assert trio.current_time() - began < _TIMEOUT_S + _SLACK_S


async def test_without_a_majority_nothing_is_answered_until_it_is_back(all_three: Etcd) -> None:
    async with opened(all_three.settings("minority", timeout_s=_TIMEOUT_S)) as store:
        start = await store.put("t/1", b"")
        async with told(store, ["t/"], from_revision=start + 1) as seen:
            for member in all_three.members[1:]:
                member.kill()
            with pytest.raises(CatalogUnavailable), trio.fail_after(_BOUND_S):
                await seen.until(start + 1)
        for call in (store.put("t/2", b""), store.newest(["t/1"], [], newer_than=0)):
            began = trio.current_time()
            with pytest.raises(CatalogUnavailable):
                await call
            assert trio.current_time() - began < _TIMEOUT_S + _SLACK_S
        all_three.members[1].launch()
        await eventually(store, "t/3")


async def test_a_frozen_etcd_is_told_within_the_timeout_and_so_is_its_watch() -> None:
    with running_etcd() as etcd:
        async with opened(etcd.settings("frozen", timeout_s=_TIMEOUT_S)) as store:
            start = await store.put("t/1", b"")
            async with told(store, ["t/"], from_revision=start + 1) as seen:
                etcd.members[0].freeze()
                for call in (store.put("t/2", b""), store.get("t/1")):
                    began = trio.current_time()
                    with pytest.raises(CatalogUnavailable):
                        await call
                    assert trio.current_time() - began < _TIMEOUT_S + _SLACK_S
                with pytest.raises(CatalogUnavailable), trio.fail_after(1):
                    await seen.until(start + 1)
                # Whoever does not want to wait so long need not.
                with trio.move_on_after(0.1) as waiting:
                    await store.put("t/3", b"")
                assert waiting.cancelled_caught
                assert trio.current_time() - waiting.deadline < 0.5
            etcd.members[0].thaw()
            await eventually(store, "t/4")
            etcd.kill()
            began = trio.current_time()
            with pytest.raises(CatalogUnavailable):
                await store.put("t/5", b"")
            assert trio.current_time() - began < _TIMEOUT_S + _SLACK_S
            etcd.start()
            await eventually(store, "t/6")
            assert {"t/1", "t/4", "t/6"} <= {value.key for value in (await store.range("t/"))[0]}


async def test_a_silent_watch_on_a_frozen_etcd_ends_by_itself() -> None:
    with running_etcd() as etcd:
        async with opened(etcd.settings("silent", timeout_s=_TIMEOUT_S)) as store:
            start = await store.put("t/1", b"")
            async with told(store, ["t/"], from_revision=start + 1) as seen:
                etcd.members[0].freeze()
                with pytest.raises(CatalogUnavailable), trio.fail_after(2 * _TIMEOUT_S + _SLACK_S):
                    await seen.until(start + 1)


async def test_tls_and_a_password_are_asked_for_and_the_token_is_renewed() -> None:
    with running_etcd(tls=True, users=True) as etcd:
        settings = etcd.settings("secret")
        async with opened(settings) as store:
            start = await store.put("t/1", b"")
            async with told(store, ["t/"], from_revision=start) as seen:
                assert [event.key for event in await seen.until(start)] == ["t/1"]
                # Whose password is set anew needs a new token; the watch goes on.
                etcd.control("user", "passwd", USER, "--interactive=false", given=f"{PASSWORD}\n")
                start = await store.put("t/1", b"again")
                assert [event.key for event in await seen.until(start)] == ["t/1"]
            # A restart forgets all tokens: a call, and a watch, get a new one without anybody noticing.
            etcd.restart()
            await eventually(store, "t/2")
            async with told(store, ["t/"], from_revision=start + 1) as seen:
                last = await store.put("t/3", b"")
                assert [event.key for event in await seen.until(last)][-1] == "t/3"

        for wrong, name in (
            (etcd.settings("secret", password="wrong"), "etcd.password_file"),
            (_without(settings, user=""), "etcd.user"),
        ):
            async with opened(wrong) as store:
                with pytest.raises(CatalogDenied) as denied:
                    await store.get("t/1")
                assert name in denied.value.message
                with pytest.raises(CatalogDenied):
                    async with told(store, ["t/"], from_revision=1) as seen:
                        await seen.until(1 << 60)

        for wrong in (_without(settings, cert=None, key=None), _without(settings, ca=None, cert=None, key=None)):
            async with opened(wrong) as store:
                with pytest.raises(CatalogError):
                    await store.get("t/1")


async def test_what_a_user_may_not_see_is_denied() -> None:
    with running_etcd(users=True) as etcd:
        etcd.control("role", "revoke-permission", "tierfs", "--prefix=true", "tierfs/")
        etcd.control("role", "grant-permission", "tierfs", "--prefix=true", "readwrite", "tierfs/mine/")
        async with opened(etcd.settings("mine")) as store:
            await store.put("t/1", b"")
        async with opened(etcd.settings("others")) as store:
            with pytest.raises(CatalogDenied):
                await store.put("t/1", b"")
            with pytest.raises(CatalogDenied):
                async with told(store, ["t/"], from_revision=1) as seen:
                    await seen.until(1)


def test_settings_that_cannot_work_are_refused_before_anything_is_asked() -> None:
    with pytest.raises(SettingsError):
        open_store(Settings())
    settings = Settings(catalog="etcd://127.0.0.1:1")
    settings.etcd.user = "somebody"
    with pytest.raises(SettingsError, match="password_file"):
        open_store(settings)


async def test_nobody_at_the_address_is_told_at_once() -> None:
    async with opened(Settings(catalog="etcd://127.0.0.1:1")) as store:
        with pytest.raises(CatalogUnavailable, match=r"127\.0\.0\.1:1"), trio.fail_after(2):
            await store.get("t/1")


def _without(settings: Settings, **changes: object) -> Settings:
    changed = Settings(catalog=settings.catalog)
    changed.cluster.name = settings.cluster.name
    for name in ("user", "password_file", "ca", "cert", "key", "timeout_s"):
        setattr(changed.etcd, name, changes.get(name, getattr(settings.etcd, name)))
    changed.etcd.timeout_s = _TIMEOUT_S
    return changed
