"""The service's requests: which path asks for what, and how it is done.

| request | does |
|---|---|
| `GET`, `POST`, `DELETE /v1/cp/namespaces/NS` | tells of, makes (`num_ranks`, `steps_retained`), removes a namespace |
| `POST`, `GET`, `DELETE /v1/cp/checkpoints/NS/RANK/STEP` | a rank's shard, with its checksum in `Shard-Meta` |
| `GET /v1/cp/checkpoints/NS/latest` | the newest whole steps, `limit` of them |
| `POST /v1/cp/cluster/reset` | removes every namespace, where `gateway.allow_reset` lets it |
| `GET /health` | whether the mount answers |
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import trio

from mount.gateway.daemon import Daemon, is_whole
from mount.gateway.exchange import ClientGone, Exchange, Request
from mount.gateway.namespaces import STEPS_RETAINED, Namespace, Namespaces, wanted
from mount.gateway.refusal import Refusal
from mount.gateway.shards import Incoming, Place, Shards, claimed_checksum, read_piece
from mount.gateway.tree import Tree

T = TypeVar("T")

#: What is received before it is written: a thread's turn costs some 0.1 ms.
BATCH_BYTES = 4 << 20
#: The library's client waits for an answer for 60 s (its `config/in_memory_client.py`). A completing rename may wait
#: for copies on other nodes longer than that, while the step is whole.
ANSWER_WITHIN_S = 45.0
HEALTHY_WITHIN_S = 5.0
#: Requests that do something with files at a time; more wait.
THREADS = 256
_LATEST = 5

#: What the library's README allows in a namespace's name, and dots; it is one directory, and none that is hidden.
_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class Service:
    """Answers for one mount."""

    def __init__(self, tree: Tree, daemon: Daemon, *, allow_reset: bool, wait_s: float) -> None:
        """`wait_s`: see `Shards`."""
        self._tree = tree
        self._daemon = daemon
        self._namespaces = Namespaces(tree, daemon)
        self._shards = Shards(tree, daemon, wait_s=wait_s)
        self._allow_reset = allow_reset
        self._threads = trio.CapacityLimiter(THREADS)
        self._locks: WeakValueDictionary[str, trio.Lock] = WeakValueDictionary()

    async def answer(self, request: Request, exchange: Exchange) -> None:
        """Raises Refusal, ClientGone, and what `refusal_of` knows."""
        method = request.method
        match request.parts:
            case ("health",) if method == "GET":
                await self._health(exchange)
            case ("v1", "cp", "namespaces", name):
                await self._namespace(_namespace(name), request, exchange)
            case ("v1", "cp", "checkpoints", name, "latest") if method == "GET":
                await self._latest(_namespace(name), request, exchange)
            case ("v1", "cp", "checkpoints", name, rank, step) if method in ("GET", "POST", "PUT", "DELETE"):
                namespace = await self._existing(_namespace(name))
                place = _place(namespace, _number(rank, "rank"), _number(step, "step"))
                if method == "GET":
                    await self._get(place, exchange)
                elif method == "DELETE":
                    async with self._lock(place.rel):
                        await self._in_thread(self._shards.delete, place)
                    await exchange.answer(200, {"status": "deleted"})
                else:
                    await self._in_thread(self._namespaces.keep_newest, namespace)
                    await self._put(place, request, exchange)
            case ("v1", "cp", "cluster", "reset") if method == "POST":
                if not self._allow_reset:
                    raise Refusal(403, "whoever reaches this port could delete every step; see gateway.allow_reset")
                await self._in_thread(self._namespaces.reset)
                await exchange.answer(200, {"status": "reset"})
            case _:
                raise Refusal(404, f"{method} /{'/'.join(request.parts)[:200]} is nothing that this service knows")

    async def _health(self, exchange: Exchange) -> None:
        with trio.move_on_after(HEALTHY_WITHIN_S):
            await self._in_thread(self._tree.check)
            await exchange.answer(200, {"status": "healthy"})
            return
        raise Refusal(503, "the mount does not answer")

    async def _namespace(self, name: str, request: Request, exchange: Exchange) -> None:
        if request.method == "GET":
            await exchange.answer(200, (await self._existing(name)).answer())
        elif request.method == "POST":
            ranks = wanted(request.query.get("num_ranks", ""), "num_ranks")
            retained = wanted(request.query.get("steps_retained", ""), "steps_retained", STEPS_RETAINED)
            async with self._lock(name):
                await self._in_thread(self._namespaces.create, name, ranks, retained)
            await exchange.answer(200, {"status": "created"})
        elif request.method == "DELETE":
            async with self._lock(name):
                await self._in_thread(self._namespaces.delete, name)
            await exchange.answer(200, {"status": "deleted"})
        else:
            raise Refusal(405, f"a namespace knows no {request.method}")

    async def _latest(self, name: str, request: Request, exchange: Exchange) -> None:
        limit = wanted(request.query.get("limit", ""), "limit", _LATEST)
        found = await self._in_thread(lambda: list(itertools.islice(self._namespaces.whole_steps(name), limit)))
        if not found:
            await self._existing(name)
        await exchange.answer(200, found)

    async def _existing(self, name: str) -> Namespace:
        namespace = await self._in_thread(self._namespaces.get, name)
        if namespace is None:
            raise Refusal(404, f"there is no namespace {name!r}")
        return namespace

    async def _get(self, place: Place, exchange: Exchange) -> None:
        with ExitStack() as stack:
            found = await self._in_thread(stack.enter_context, self._shards.found(place))
            headers = [("Content-Type", "application/octet-stream"), ("Shard-Meta", found.note.header())]
            await exchange.begin_answer(200, found.note.size_bytes, headers)
            offset = 0
            while offset < found.note.size_bytes:
                piece = await self._in_thread(read_piece, found.fd, offset)
                if not piece:
                    raise ClientGone(f"{place.rel} became shorter while it was sent")
                await exchange.send_piece(piece[: found.note.size_bytes - offset])
                offset += len(piece)
            await exchange.end_answer()

    async def _put(self, place: Place, request: Request, exchange: Exchange) -> None:
        claimed = claimed_checksum(request.headers.get("shard-meta"))
        async with self._lock(place.rel):
            incoming = Incoming(self._tree, place)
            is_again = await self._in_thread(self._shards.is_committed, place, claimed)
            try:
                if not is_again:
                    await self._in_thread(incoming.open, request.body_bytes)
                await self._receive(incoming, exchange)
                if is_again:
                    incoming.verified(claimed)
                else:
                    await self._in_thread(incoming.seal, claimed)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self._in_thread(incoming.discard)
                raise
        if not is_again:
            await self._complete(place)
        await exchange.answer(200, {"status": "ok"})

    async def _receive(self, incoming: Incoming, exchange: Exchange) -> None:
        batch: list[bytes] = []
        size_bytes = 0
        async with aclosing(exchange.body()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                batch.append(piece)
                size_bytes += len(piece)
                if size_bytes >= BATCH_BYTES:
                    await self._in_thread(incoming.write, batch)
                    batch, size_bytes = [], 0
        if batch:
            await self._in_thread(incoming.write, batch)

    async def _complete(self, place: Place) -> None:
        with trio.move_on_after(ANSWER_WITHIN_S):
            async with self._lock(place.step_rel):
                work = partial(self._shards.complete, place)
                await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)
            return
        if not is_whole(await self._in_thread(self._daemon.step, place.step_rel)):
            raise Refusal(503, f"{place.step_rel} is not complete within {ANSWER_WITHIN_S:.0f} s; it may be later")

    def _lock(self, name: str) -> trio.Lock:
        return self._locks.setdefault(name, trio.Lock())

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await trio.to_thread.run_sync(partial(function, *arguments), limiter=self._threads)


def _place(namespace: Namespace, rank: int, step: int) -> Place:
    if rank >= namespace.ranks:
        raise Refusal(
            400,
            f"the namespace {namespace.name!r} is for {namespace.ranks} ranks (the metadata is the last); "
            f"{rank} is none",
        )
    return Place(namespace.name, step, rank, namespace.ranks)


def _namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise Refusal(400, f"{text[:200]!r} can't name a namespace: letters, digits, '-', '_' and '.' can")
    return text


def _number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise Refusal(400, f"{text[:200]!r} is no {what}")
    return int(text)
