"""The library's metadata in DCP's words, so that every DCP reader loads what the library saved.

Both are a pickle of `torch.distributed.checkpoint.metadata.Metadata`, and the shards hold the same bytes: what
`torch.save` wrote for each tensor, one after the other. They differ in one class: where DCP says in which file an item
lies, the library says of which rank it is (`_SageMakerStorageInfo(rank, offset, length)`). So each of these objects is
exchanged for DCP's, and all other bytes stay as they are. Nothing is unpickled: no class is imported, nothing of the
file runs. See CPython's Lib/pickletools.py for the operations.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tierfs.errors import MarkerUnreadable
from tierfs.sagemaker.layout import MOST_RANKS, shard_name

#: storage_info.py of the library, and torch/distributed/checkpoint/filesystem.py.
_THEIRS = ("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info", "_SageMakerStorageInfo")
_DCPS = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_KEYS = ("rank", "offset", "length")

_PROTO, _FRAME, _STOP = 0x80, 0x95, 0x2E
_MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = 0x94, 0x71, 0x72, 0x68, 0x6A
_SHORT_BINUNICODE, _BINUNICODE, _STACK_GLOBAL, _POP = 0x8C, 0x58, 0x93, 0x30
_BININT, _BININT1, _BININT2, _LONG1 = 0x4A, 0x4B, 0x4D, 0x8A
_EMPTY_TUPLE, _NEWOBJ, _EMPTY_DICT, _MARK, _SETITEMS, _BUILD = 0x29, 0x81, 0x7D, 0x28, 0x75, 0x62

#: How many bytes follow each operation that Python's pickler writes with the protocols 4 and 5.
_FIXED = dict.fromkeys(b"().NRabdelostu}]\x30\x31\x32\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0) | {
    _PROTO: 1, _FRAME: 8, _BINPUT: 1, _LONG_BINPUT: 4, _BINGET: 1, _LONG_BINGET: 4, 0x47: 8,
    _BININT: 4, _BININT1: 1, _BININT2: 2,
}  # fmt: skip
#: Operations followed by a length, written like this, and as many bytes.
_COUNTED = {
    _SHORT_BINUNICODE: "<B", _BINUNICODE: "<I", 0x8D: "<Q", 0x43: "<B", 0x42: "<I", 0x8E: "<Q", 0x96: "<Q",
    _LONG1: "<B", 0x8B: "<I",
}  # fmt: skip

_Value = str | tuple[str, str] | None
"""What is known of a value: a text, a class, or nothing."""


@dataclass(frozen=True)
class Translated:
    """`data` is the metadata for DCP, `ranks` are those whose shards it names."""

    data: bytes
    ranks: frozenset[int]


def is_library_metadata(data: bytes) -> bool:
    """Whether it is worth an attempt: the library's class is spoken of."""
    return _THEIRS[1].encode() in data


def for_dcp(data: bytes) -> Translated:
    """Raises MarkerUnreadable where it is not what the library writes. Takes some 0.25 s a MB: call it in a thread."""
    try:
        return _Translation(data).run()
    except (IndexError, struct.error):
        raise MarkerUnreadable("the library's metadata ends early") from None
    except UnicodeDecodeError:
        raise MarkerUnreadable("the library's metadata holds a text that is not UTF-8") from None


class _Translation:
    """One pass over the operations. `_copied` is how far the input is in the output."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._copied = 0
        self._out: list[bytes] = []
        self._memo: list[_Value] = []
        self._ranks: set[int] = set()

    def run(self) -> Translated:
        before: _Value = None
        last: _Value = None
        while True:
            op, argument = self._next()
            if op == _STOP:
                break
            if op == _MEMOIZE or op in (_BINPUT, _LONG_BINPUT):
                self._remember(op, argument, last)
                continue
            if op == _STACK_GLOBAL:
                before, last = None, self._named(before, last)
                is_theirs = last == _THEIRS
            else:
                before, last = last, self._value(op, argument)
                is_theirs = last == _THEIRS
            if is_theirs:
                self._info()
                before = last = None
        if not self._ranks:
            raise MarkerUnreadable("it is not the metadata of the SageMaker library: it names no rank's shard")
        self._copy()
        return Translated(b"".join(self._out), frozenset(self._ranks))

    # --- reading

    def _next(self) -> tuple[int, bytes]:
        """The next operation and what follows it. Frames, a hint for readers of streams, are left out."""
        data = self._data
        while True:
            start = self._at
            op = data[start]
            size = _FIXED.get(op)
            if size is None:
                form = _COUNTED.get(op)
                if form is None:
                    raise MarkerUnreadable(f"the operation {op:#04x} at byte {start} is not one that metadata uses")
                begin = start + 1 + struct.calcsize(form)
                size = int(struct.unpack_from(form, data, start + 1)[0])
            else:
                begin = start + 1
            self._at = begin + size
            if self._at > len(data):
                raise MarkerUnreadable("the library's metadata ends early")
            if op != _FRAME:
                return op, data[begin : self._at]
            self._copy(start)
            self._copied = self._at

    def _value(self, op: int, argument: bytes) -> _Value:
        if op in (_SHORT_BINUNICODE, _BINUNICODE):
            return str(argument, "utf-8", "surrogatepass") if len(argument) < 256 else None
        if op in (_BINGET, _LONG_BINGET):
            return self._memo[int.from_bytes(argument, "little")]
        return None

    def _named(self, module: _Value, name: _Value) -> _Value:
        """A class by the two texts on the stack; the library's is exchanged for DCP's."""
        if not isinstance(module, str) or not isinstance(name, str):
            return None
        if (module, name) == _THEIRS:
            # What the texts left in the memo has to stay there, for others.
            self._copy(self._at - 1)
            self._out += [bytes((_POP, _POP)), _text(_DCPS[0]), _text(_DCPS[1]), bytes((_STACK_GLOBAL,))]
            self._copied = self._at
        return (module, name)

    def _remember(self, op: int, argument: bytes, value: _Value) -> None:
        number = len(self._memo) if op == _MEMOIZE else int.from_bytes(argument, "little")
        if number > len(self._memo):
            raise MarkerUnreadable("the memo of the library's metadata has a gap")
        self._memo[number : number + 1] = [value]

    # --- one object of the library's

    def _info(self) -> None:
        """Its class was just pushed. What follows is how Python pickles an object of three attributes."""
        self._expect(_EMPTY_TUPLE, skipping=_THEIRS)
        self._expect(_NEWOBJ)
        self._expect(_EMPTY_DICT, skipping=None)
        self._expect(_MARK, skipping=None)
        for wanted in _KEYS:
            key, start = self._key()
            if key != wanted:
                raise MarkerUnreadable(f"an item of the library's metadata has the attribute {key!r}, not {wanted!r}")
            if key == "rank":
                self._copy(start)
                self._place_by_rank()
            elif self._number() < 0:
                raise MarkerUnreadable(f"an item of the library's metadata has a negative {key}")
        self._expect(_SETITEMS)
        self._expect(_BUILD)

    def _key(self) -> tuple[_Value, int]:
        """An attribute's name, and where to copy to before it is exchanged: behind it where it is said here for the
        first time, since others refer to it, and before it where it is only referred to."""
        op, argument = self._next()
        value = self._value(op, argument)
        start = self._at - 1 - len(argument)
        if op in (_SHORT_BINUNICODE, _BINUNICODE):
            put, number = self._next()
            if put not in (_MEMOIZE, _BINPUT, _LONG_BINPUT):
                raise MarkerUnreadable("an attribute's name in the library's metadata is not remembered")
            self._remember(put, number, value)
            start = self._at
        return value, start

    def _place_by_rank(self) -> None:
        is_said_here = self._copied == self._at
        self._copied = self._at
        rank = self._number()
        if not 0 <= rank < MOST_RANKS:
            raise MarkerUnreadable(f"an item of the library's metadata is of the rank {rank}")
        self._ranks.add(rank)
        if is_said_here:
            self._out.append(bytes((_POP,)))
        self._out += [_text("relative_path"), _text(shard_name(rank))]
        self._copied = self._at

    def _number(self) -> int:
        op, argument = self._next()
        if op in (_BININT1, _BININT2):
            return int.from_bytes(argument, "little")
        if op in (_BININT, _LONG1) and len(argument) <= 8:
            return int.from_bytes(argument, "little", signed=True)
        raise MarkerUnreadable("an item of the library's metadata has no whole number where one belongs")

    def _expect(self, wanted: int, *, skipping: _Value = "") -> None:
        """The next operation. With `skipping` the value before may be remembered first (as what it says)."""
        op, argument = self._next()
        while skipping != "" and op in (_MEMOIZE, _BINPUT, _LONG_BINPUT):
            self._remember(op, argument, skipping)
            op, argument = self._next()
        if op != wanted:
            raise MarkerUnreadable(f"an item of the library's metadata is not what it writes (byte {self._at - 1})")

    def _copy(self, until: int | None = None) -> None:
        until = self._at if until is None else until
        if until > self._copied:
            self._out.append(self._data[self._copied : until])
            self._copied = until


def _text(value: str) -> bytes:
    encoded = value.encode()
    return bytes((_SHORT_BINUNICODE, len(encoded))) + encoded
