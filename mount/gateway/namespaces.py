"""The library's namespaces: directories of the mount with a note of how many ranks save there. For threads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mount.gateway.daemon import Daemon, is_whole
from mount.gateway.refusal import Refusal
from mount.gateway.tree import Tree
from tierfs.sagemaker.layout import METADATA, MOST_RANKS, NAMESPACE_NOTE, rank_of, shard_name, step_name, step_of

log = logging.getLogger("tierfs.gateway")

#: What the library asks for, and can't be told otherwise.
STEPS_RETAINED = 3
#: docs/semantics.md, "Extended attributes".
RETAINED = "user.tierfs.ram_max_steps"
_NOTE_BYTES = 4096


@dataclass(frozen=True)
class Namespace:
    """`ranks` counts the metadata too. `steps_retained` is how many whole steps stay in RAM, where the settings
    (`retention.ram_max_steps`) don't say it."""

    name: str
    ranks: int
    steps_retained: int

    def answer(self) -> dict[str, int]:
        """As the service answers it, under the names that the library's own checks look for."""
        return {"num_ranks": self.ranks, "steps_to_retain_per_rank": self.steps_retained}


class Namespaces:
    def __init__(self, tree: Tree, daemon: Daemon) -> None:
        self._tree = tree
        self._daemon = daemon

    def get(self, name: str) -> Namespace | None:
        """None where nothing was made. A namespace of which only steps are left, since the nodes' RAM was lost and they
        came back from the object tier, is what its newest step says."""
        try:
            value = json.loads(self._tree.read(f"{name}/{NAMESPACE_NOTE}", _NOTE_BYTES))
            return Namespace(name, _at_least_one(value["num_ranks"]), _at_least_one(value["steps_retained"]))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning(
                "the note %s of the namespace %s can't be read (%s); its steps are looked at",
                NAMESPACE_NOTE,
                name,
                error,
            )
        for step in self.whole_steps(name):
            return Namespace(name, self._ranks(f"{name}/{step_name(step)}"), STEPS_RETAINED)
        return None

    def _ranks(self, step_rel: str) -> int:
        shards = sum(rank_of(each) is not None for each in self._tree.directories(step_rel))
        return shards + (self._tree.size(f"{step_rel}/{METADATA}") is not None)

    def create(self, name: str, ranks: int, steps_retained: int) -> None:
        """Nothing where it is there as asked for; Refusal (409) where it is another."""
        wanted = Namespace(name, ranks, steps_retained)
        found = self.get(name)
        if found is not None and (found.ranks, found.steps_retained) != (ranks, steps_retained):
            raise Refusal(
                409,
                f"the namespace {name!r} exists with {found.ranks} ranks and {found.steps_retained} steps retained, "
                f"not {ranks} and {steps_retained}; a job with another number of ranks needs another namespace",
            )
        note = json.dumps({"num_ranks": wanted.ranks, "steps_retained": wanted.steps_retained})
        with self._tree.directory(name, make=True):
            pass
        self._tree.write_whole(f"{name}/{NAMESPACE_NOTE}", note.encode())
        log.info("a namespace for %d ranks", ranks, extra={"namespace": name, "step": "", "file": "", "tier": ""})

    def keep_newest(self, namespace: Namespace) -> None:
        """Has the file system keep as many steps as the namespace retains: on each node that receives shards of it, as
        every node goes by what it was asked for itself."""
        wanted = str(namespace.steps_retained)
        try:
            if self._tree.attribute(namespace.name, RETAINED) != wanted:
                self._tree.set_attribute(namespace.name, RETAINED, wanted)
        except OSError as error:  # no such attributes on this kernel: then `retention` alone decides
            log.warning("%d steps retained is not to be had: %s", namespace.steps_retained, error.strerror,
                        extra={"namespace": namespace.name, "step": "", "file": "", "tier": ""})  # fmt: skip

    def whole_steps(self, name: str) -> Iterator[int]:
        """The steps that can be loaded, the highest number first: complete, with no rank's shard lost."""
        numbers = [number for each in self._daemon.complete_steps(name) if (number := step_of(each)) is not None]
        for number in sorted(numbers, reverse=True):
            rel = f"{name}/{step_name(number)}"
            if is_whole(self._daemon.step(rel)) and self._tree.size(f"{rel}/{shard_name(0)}") is not None:
                yield number

    def delete(self, name: str) -> None:
        """With every step that was saved here, complete or not. Refusal (404). Other things in the directory stay."""
        if self.get(name) is None:
            raise Refusal(404, f"there is no namespace {name!r}")
        for each in self._tree.directories(name):
            rel = f"{name}/{each}"
            if step_of(each) is not None and any(rank_of(inner) is not None for inner in self._tree.directories(rel)):
                self._daemon.remove(rel)
        with suppress(OSError):
            self._tree.set_attribute(name, RETAINED, "")
        with suppress(FileNotFoundError):
            self._tree.unlink(f"{name}/{NAMESPACE_NOTE}")
        with suppress(OSError):
            self._tree.rmdir(name)
        log.warning("deleted the namespace", extra={"namespace": name, "step": "", "file": "", "tier": ""})

    def reset(self) -> None:
        """Deletes every namespace that a client of the gateway made."""
        for name in self._tree.directories(""):
            if self._tree.size(f"{name}/{NAMESPACE_NOTE}") is not None:
                self.delete(name)


def _at_least_one(value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_RANKS:
        raise ValueError(f"{value!r} is no number of ranks or steps")
    return value


def wanted(text: str, what: str, default: int | None = None) -> int:
    """A whole number from 1 on out of a query. Refusal."""
    if not text and default is not None:
        return default
    if text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MOST_RANKS:
        return int(text)
    raise Refusal(400, f"{what}={text!r} is not a whole number from 1 to {MOST_RANKS}")
