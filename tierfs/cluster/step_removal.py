"""The removal of a whole step from the catalogue, which takes it from every node."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierfs.catalog.keys import holdings_prefix, parts_prefix, state_key, tree_below, tree_key
from tierfs.catalog.store import Compare, Delete, KeyStore
from tierfs.cluster.journal import Owed
from tierfs.cluster.tree_names import CATCH_UP_S, TryAgain
from tierfs.steps.registry import Key

if TYPE_CHECKING:
    from tierfs.cluster.view import View

log = logging.getLogger("tierfs.cluster")

_ROUNDS = 8


async def delete_step(store: KeyStore, view: View, key: Key, entry: Owed, *, on_kept: Callable[[str], None]) -> None:
    """In one transaction, so that no part of it outlives its directory; that compares the directory's create revision,
    so that a step of the same name made since is another one. One that another node completed again since stays, and
    `on_kept` is told. CatalogError, TryAgain."""
    rel = entry.path
    for _ in range(_ROUNDS):
        if not await view.caught_up(keys=(state_key(*key), tree_key(rel)), within_s=CATCH_UP_S):
            raise TryAgain(f"{rel} can't be looked up in the catalogue")
        state, tree = view.states.get(key), view.tree.get(rel)
        if tree is None or tree.create_revision != entry.created:
            return
        if state is not None and state.record.generation > entry.generation:
            log.warning("%s was removed here, but another node has written it again since: it stays", rel)
            on_kept(rel)
            return
        result = await store.txn(
            [
                Compare(tree_key(rel), "create", "equal", entry.created),
                Compare(state_key(*key), "mod", "equal", state.mod_revision if state is not None else 0),
            ],
            [
                Delete(tree_key(rel)),
                Delete(tree_below(rel), is_prefix=True),
                Delete(state_key(*key)),
                Delete(parts_prefix(*key), is_prefix=True),
                Delete(holdings_prefix(*key), is_prefix=True),
            ],
        )
        if result.succeeded:
            # Until the view has it too the step would be shown again.
            await view.until(lambda at=result.revision: view.revision >= at, within_s=CATCH_UP_S)  # type: ignore[misc]
            return
    raise TryAgain(f"others go on changing {rel}")
