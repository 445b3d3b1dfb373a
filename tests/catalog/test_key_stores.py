"""What every key store promises."""

from __future__ import annotations

import pytest
import trio

from catalog.targets import Target, told
from tierfs.catalog.store import MOST_OPERATIONS, MOST_VALUE_BYTES, Compare, Delete, KeyStore, Put
from tierfs.errors import CatalogCompacted, CatalogUnavailable, LeaseLost

_BOUND_S = 20


async def test_keys_have_revisions_and_a_delete_forgets_them(store: KeyStore) -> None:
    assert await store.get("t/a") is None
    first = await store.put("t/a", b"1")
    second = await store.put("t/a", b"\0\xff")
    assert second == first + 1
    found = await store.get("t/a")
    assert found is not None
    assert (found.key, found.value, found.create_revision, found.mod_revision) == ("t/a", b"\0\xff", first, second)
    assert await store.delete("t/a") == second + 1
    assert await store.delete("t/a") == second + 1, "deleting nothing is no change"
    assert await store.get("t/a") is None
    again = await store.put("t/a", b"")
    found = await store.get("t/a")
    assert found is not None
    assert (found.value, found.create_revision) == (b"", again)


async def test_names_that_are_not_utf8_come_back_unchanged(store: KeyStore) -> None:
    names = sorted(["t/\udcff", "t/ä b", "t/\udcff/x", "t/a\nb"])
    for name in names:
        await store.put(name, b"")
    assert sorted(value.key for value in (await store.range("t/"))[0]) == names
    assert [value.key for value in (await store.range("t/\udcff/"))[0]] == ["t/\udcff/x"]
    await store.delete("t/\udcff", is_prefix=True)
    assert len((await store.range(""))[0]) == 2


async def test_a_transaction_is_made_only_where_all_it_compares_holds(store: KeyStore) -> None:
    made = await store.put("c/1", b"old")
    absent = Compare("c/2", "create", "equal", 0)
    both = (Compare("c/1", "mod", "equal", made), absent)
    result = await store.txn(both, (Put("c/1", b"new"), Put("c/2", b"new"), Delete("c/3")))
    assert result.succeeded
    assert result.revision == made + 1
    refused = await store.txn(both, (Put("c/1", b"newer"),), (Put("c/otherwise", b""),))
    assert not refused.succeeded
    assert refused.revision == result.revision + 1
    assert [(value.key, value.value) for value in (await store.range("c/"))[0]] == [
        ("c/1", b"new"), ("c/2", b"new"), ("c/otherwise", b"")
    ]  # fmt: skip
    found = await store.get("c/2")
    assert found is not None
    assert found.mod_revision == result.revision, "all of it is one revision"


async def test_no_key_below_a_prefix_may_have_changed(store: KeyStore) -> None:
    read_at = await store.put("xp/a/1/n1/0000", b"")
    unchanged = Compare("xp/a/1/", "mod", "less", read_at + 1, is_prefix=True)
    assert (await store.txn((unchanged,), (Put("c/1", b""),))).succeeded
    assert (await store.txn((Compare("xp/none/", "mod", "less", 1, is_prefix=True),), ())).succeeded
    assert (await store.txn((Compare("xp/none/", "create", "equal", 0, is_prefix=True),), ())).succeeded
    assert not (await store.txn((Compare("xp/a/", "create", "equal", 0, is_prefix=True),), ())).succeeded
    await store.put("xp/a/11/n1/0000", b"a neighbour")
    assert (await store.txn((unchanged,), ())).succeeded
    await store.put("xp/a/1/n2/0000", b"")
    assert not (await store.txn((unchanged,), ())).succeeded


async def test_a_prefix_is_deleted_with_all_below_and_nothing_beside(store: KeyStore) -> None:
    for key in ("t/a", "t/a/1", "t/a/2/3", "t/ab", "t/b"):
        await store.put(key, b"")
    await store.txn((), (Delete("t/a/", is_prefix=True), Delete("t/b")))
    assert [value.key for value in (await store.range("t/"))[0]] == ["t/a", "t/ab"]


async def test_what_can_never_be_asked_is_refused_and_nothing_is_made(store: KeyStore) -> None:
    many = [Put(f"k/{number}", b"") for number in range(MOST_OPERATIONS)]
    assert (await store.txn((), many)).succeeded
    await store.put("k/large", bytes(MOST_VALUE_BYTES))
    _, before = await store.range("k/")
    for operations in (
        [*many, Put("k/one more", b"")],
        [Put("k/0", bytes(MOST_VALUE_BYTES + 1))],
        [Put("k/0", bytes(MOST_VALUE_BYTES)), Put("k/1", bytes(MOST_VALUE_BYTES // 2))],
        [Put("k/0", b"a"), Put("k/0", b"b")],
        [Put("k/0", b"a"), Delete("k/", is_prefix=True)],
        [Put("", b"")],
    ):
        with pytest.raises(ValueError):
            await store.txn((), operations)
    with pytest.raises(ValueError):
        await store.txn((Compare("k/", "mod", "equal", 7, is_prefix=True),), ())
    assert (await store.range("k/"))[1] == before


async def test_a_range_of_many_pages_is_of_one_moment(store: KeyStore, other: KeyStore) -> None:
    for page in range(6):
        await store.txn((), [Put(f"t/{page}/{number:03d}", bytes(5000)) for number in range(100)])
    _, read_at = await store.range("nothing")
    found, revision = await store.range("t/")
    assert revision == read_at
    assert [value.key for value in found] == [f"t/{page}/{number:03d}" for page in range(6) for number in range(100)]
    changed = await store.put("t/3/050", b"new")
    newer, revision = await store.range("t/", newer_than=read_at)
    assert [(value.key, value.value) for value in newer] == [("t/3/050", b"new")]
    assert revision == changed

    # While it is read, all of it changes at once again and again: never some of the old and some of the new.
    async def change_all() -> None:
        for _ in range(12):
            await other.txn((), [Put(f"t/{number}/050", b"again") for number in range(6)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change_all)
        for _ in range(6):
            found, revision = await store.range("t/")
            assert len({value.mod_revision for value in found if value.value == b"again"}) <= 1
            assert all(value.mod_revision <= revision for value in found)


async def test_newest_tells_what_changed_since(store: KeyStore, other: KeyStore) -> None:
    first = await store.put("t/a", b"")
    second = await store.put("t/d/x", b"")
    assert await other.newest(["t/a", "t/none"], [], newer_than=0) == first
    assert await other.newest(["t/a"], ["t/d/", "c/"], newer_than=0) == second
    assert await other.newest(["t/a"], ["t/d/"], newer_than=first) == second
    assert await other.newest(["t/a"], ["t/d/"], newer_than=second) == 0
    assert await other.newest([], [], newer_than=0) == 0
    # Each change that was answered is seen by whoever asks then.
    for _ in range(20):
        made = await store.put("t/d/y", b"")
        assert await other.newest([], ["t/d/"], newer_than=second) == made
    with pytest.raises(ValueError):
        await store.newest(["t/a"] * (MOST_OPERATIONS + 1), [], newer_than=0)


async def test_a_watch_tells_whole_revisions_in_order_across_its_prefixes(store: KeyStore, other: KeyStore) -> None:
    start = await store.put("t/before", b"")
    with trio.fail_after(_BOUND_S):
        async with told(other, ["nodes/", "c/", "t/"], from_revision=start + 1) as seen:
            last = 0
            for number in range(40):
                await store.txn((), [Put(f"t/{number}", b"t"), Put(f"c/{number}", b"c"), Put(f"d/{number}", b"")])
                last = (await store.txn((), [Delete(f"t/{number}"), Put("nodes/n", b"n")])).revision
            events = await seen.until(last)
    expected = []
    for number in range(40):
        expected += [{(f"t/{number}", b"t"), (f"c/{number}", b"c")}, {(f"t/{number}", None), ("nodes/n", b"n")}]
    heard = [(event.key, event.value.value if event.value else None) for event in events]
    assert [{heard[at], heard[at + 1]} for at in range(0, len(heard), 2)] == expected


async def test_a_watch_begun_late_is_told_what_it_missed(store: KeyStore, other: KeyStore) -> None:
    start = await store.put("t/0", b"0")
    for number in range(1, 1100):  # more revisions than etcd sends at once to a watch that catches up
        await store.put("t/0", b"%d" % number)
    last = await store.delete("t/0")
    with trio.fail_after(_BOUND_S):
        async with told(other, ["t/"], from_revision=start) as seen:
            events = await seen.until(last)
            values = [event.value.value if event.value else None for event in events]
            assert values == [*(b"%d" % number for number in range(1100)), None]
            # and it goes on with what comes
            later = await store.put("t/0", b"later")
            assert [event.key for event in await seen.until(later)] == ["t/0"]


async def test_a_watch_from_forgotten_revisions_says_so(store: KeyStore, target: Target) -> None:
    start = await store.put("t/a", b"")
    await store.put("t/b", b"")
    gone = await store.delete("t/a")
    await trio.to_thread.run_sync(target.compact)
    for revision in (start, gone):
        with pytest.raises(CatalogCompacted), trio.fail_after(_BOUND_S):
            async with told(store, ["t/"], from_revision=revision) as seen:
                await seen.until(gone)
    with trio.fail_after(_BOUND_S):
        async with told(store, ["t/"], from_revision=gone + 1) as seen:
            made = await store.put("t/c", b"")
            assert [event.key for event in await seen.until(made)] == ["t/c"]
    # A store that was lost, or put back to an older state, has not reached what its clients saw.
    with pytest.raises(CatalogCompacted), trio.fail_after(_BOUND_S):
        async with told(store, ["t/"], from_revision=made + 1000) as seen:
            await seen.until(made)
    assert [value.key for value in (await store.range("t/"))[0]] == ["t/b", "t/c"]


async def test_a_watch_ends_when_the_store_restarts_and_goes_on_from_where_it_was(
    store: KeyStore, other: KeyStore, target: Target
) -> None:
    last = await store.put("t/1", b"")
    with trio.fail_after(_BOUND_S):
        async with told(other, ["t/"], from_revision=last) as seen:
            await seen.until(last)
            await trio.to_thread.run_sync(target.restart)
            with pytest.raises(CatalogUnavailable):
                await seen.until(last + 1)
        await store.put("t/2", b"")
        last = await store.put("t/3", b"")
        async with told(other, ["t/"], from_revision=seen.revision + 1) as seen:
            assert [event.key for event in await seen.until(last)] == ["t/2", "t/3"]


async def test_keys_go_with_their_lease(store: KeyStore, other: KeyStore) -> None:
    lease = await store.grant(30)
    assert await store.keep_alive(lease) == pytest.approx(30, abs=1)
    start = await store.put("nodes/n", b"", lease=lease)
    await store.put("nodes/m", b"", lease=lease)
    found = await other.get("nodes/n")
    assert found is not None
    assert found.lease == lease
    await store.put("nodes/m", b"stays")  # without the lease now
    with trio.fail_after(_BOUND_S):
        async with told(other, ["nodes/"], from_revision=start) as seen:
            await store.revoke(lease)
            events = await seen.until(start + 3)
    assert [(event.key, event.value is None) for event in events][-1] == ("nodes/n", True)
    await store.revoke(lease)
    for refused in (
        store.keep_alive(lease),
        store.put("nodes/n", b"", lease=lease),
        store.txn((), (Put("t/not alone", b""), Put("nodes/n", b"", lease))),
    ):
        with pytest.raises(LeaseLost):
            await refused
    assert [value.key for value in (await other.range(""))[0]] == ["nodes/m"]


async def test_a_lease_that_nobody_renews_runs_out(store: KeyStore, other: KeyStore) -> None:
    lease, kept = await store.grant(2), await store.grant(2)
    await store.put("nodes/kept", b"", lease=kept)
    start = await store.put("nodes/n", b"", lease=lease)
    with trio.fail_after(_BOUND_S):
        async with trio.open_nursery() as nursery:

            async def renew() -> None:
                while True:
                    await store.keep_alive(kept)
                    await trio.sleep(0.4)

            nursery.start_soon(renew)
            async with told(other, ["nodes/"], from_revision=start + 1) as seen:
                events = await seen.until(start + 1)
            nursery.cancel_scope.cancel()
    assert [(event.key, event.value) for event in events] == [("nodes/n", None)]
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)


async def test_a_closed_store_answers_nothing(store: KeyStore) -> None:
    await store.put("t/a", b"")
    await store.aclose()
    with pytest.raises(CatalogUnavailable):
        await store.get("t/a")
    with pytest.raises(CatalogUnavailable):
        async with told(store, ["t/"], from_revision=1) as seen:
            await seen.until(2)
