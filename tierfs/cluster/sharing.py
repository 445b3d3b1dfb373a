"""One answer for all who ask the same at the same time, and never one that was asked for before they did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar, cast

import trio

from tierfs.errors import TierfsError

_T = TypeVar("_T")


class _Round(Generic[_T]):
    def __init__(self) -> None:
        self.ended = trio.Event()
        self.answer: list[_T] = []
        self.error: TierfsError | None = None


class SharedQuestions:
    """A linearizable read answers who asked before it began: who comes later shares the next one with others like him.

    So of any number of programs that look for one name there are two requests at a time at most, one after the other.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, _Round[object]] = {}

    async def ask(self, about: Hashable, question: Callable[[], Awaitable[_T]]) -> _T:
        """The answer of `question`, or of another's equal one that began after this call. Raises what it raises."""
        before = self._running.get(about)
        while before is not None:
            await before.ended.wait()
            # What runs now began when `before` ended or later, so after this call.
            now = self._running.get(about)
            if now is None or now is before:
                break
            await now.ended.wait()
            if now.error is not None:
                raise now.error
            if now.answer:
                return cast("_T", now.answer[0])
            before = now  # who asked was cancelled
        return await self._lead(about, question)

    async def _lead(self, about: Hashable, question: Callable[[], Awaitable[_T]]) -> _T:
        mine: _Round[object] = _Round()
        self._running[about] = mine
        try:
            answer = await question()
            mine.answer.append(answer)
            return answer
        except TierfsError as error:
            mine.error = error
            raise
        finally:
            del self._running[about]
            mine.ended.set()
