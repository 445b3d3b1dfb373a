"""Reads a pickle into inert values: nothing that the file names is imported, called or even looked up.

Python's own unpickler runs what a file says, and with `find_class` restricted it still hashes what a file says: twenty
nested pairs as a dictionary's key keep it busy for ever, with the interpreter lock held. This is an interpreter of the
pickle machine (CPython's Lib/pickletools.py documents each operation) whose every operation is a plain move of
references. So it has these bounds, whatever the file holds:

- time is linear in the file's length: each operation costs what it consumes; no hashing, no comparing, no recursion;
- memory is linear in it: lengths are checked against what is left of the file, objects are counted;
- it is Python code, so other threads get their turn every few milliseconds.
"""

from __future__ import annotations

import struct
from typing import Any

#: Objects (dictionaries, lists, tuples, instances) allowed a byte of the file. DCP's metadata has one in about
#: 10 bytes; an attack could have one in each, at 60 bytes of memory.
_BYTES_AN_OBJECT = 4
_OBJECTS_ANYWAY = 10_000
#: Longer integers than this are no size of anything; they are kept as None.
_INTEGER_BYTES = 32
#: A module's or a class's name.
_NAME_BYTES = 4096
#: Marks open at once. Python's pickler, which calls itself for each level, gives up far below.
_OPEN_MARKS = 100_000
_HIGHEST_PROTOCOL = 5


class PickleRefused(Exception):
    """The bytes are no pickle, or one that this reader does not follow (such as protocols 0 and 1); says why."""


class InertGlobal:
    """A name that the file refers to, such as a class. It is only a name."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


class InertDict(list[Any]):
    """A dictionary as a flat list, key, value, key, value…, since keys that a file made are not to be hashed."""

    __slots__ = ()


class InertObject:
    """What the file would have made by calling `made_by`. `state` is what it would have been given.

    `items` is what subclasses of dict (an InertDict), list and set (a list) hold, such as OrderedDict.
    """

    __slots__ = ("items", "made_by", "state")

    def __init__(self, made_by: object) -> None:
        self.made_by = made_by
        self.state: object = None
        self.items: list[Any] | None = None


#: Stands for values that nobody needs: floats, bytes, frozen sets, and tuples that end with an integer. Those are the
#: sizes and offsets of tensors, more than half of all objects; each object more makes the pauses of Python's garbage
#: collector longer (64,000 shards: 80 ms with them, 30 ms without).
OPAQUE = InertGlobal("", "")
_TORCH_SIZE = InertGlobal("torch", "Size")


def read_pickle(data: bytes) -> object:
    """The pickle's value, made of None, bool, int, str, tuple, list, InertDict, InertObject, InertGlobal, OPAQUE.

    Raises PickleRefused. Out-of-band buffers, persistent ids and extension codes are refused: no checkpoint's metadata
    has them.
    """
    try:
        return _run(data)
    except IndexError:
        raise PickleRefused("it uses a value that is not there, or ends early") from None
    except struct.error:
        raise PickleRefused("it ends early") from None
    except UnicodeDecodeError:
        raise PickleRefused("it holds a text that is not UTF-8") from None


def _run(data: bytes) -> object:
    # One function with the commonest operations first: 3 million of them in the metadata of 64,000 shards, and a
    # call each would double the time.
    size = len(data)
    left = _OBJECTS_ANYWAY + size // _BYTES_AN_OBJECT
    two, four, eight = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
    signed = struct.Struct("<i")
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: list[Any] = []
    at = 0
    while True:
        op = data[at]
        at += 1
        if op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[four.unpack_from(data, at)[0]])
            at += 4
        elif op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x4D:  # BININT2
            stack.append(two.unpack_from(data, at)[0])
            at += 2
        elif op == 0x4A:  # BININT
            stack.append(signed.unpack_from(data, at)[0])
            at += 4
        elif op == 0x28:  # MARK
            marked.append(stack)
            stack = []
            if len(marked) > _OPEN_MARKS:
                raise PickleRefused(f"it nests too deep (byte {at - 1})")
        elif op == 0x86:  # TUPLE2
            last = stack.pop()
            if type(last) is int:
                stack[-1] = OPAQUE
            else:
                stack[-1] = (stack[-1], last)
                left -= 1
        elif op == 0x85:  # TUPLE1
            last = stack[-1]
            if type(last) is int or last is OPAQUE:
                stack[-1] = OPAQUE
            else:
                stack[-1] = (last,)
                left -= 1
        elif op == 0x87:  # TUPLE3
            last, middle = stack.pop(), stack.pop()
            if type(last) is int:
                stack[-1] = OPAQUE
            else:
                stack[-1] = (stack[-1], middle, last)
                left -= 1
        elif op in (0x52, 0x81):  # REDUCE, NEWOBJ: the arguments go
            stack.pop()
            if stack[-1] is _TORCH_SIZE:
                stack[-1] = OPAQUE
            else:
                stack[-1] = InertObject(stack[-1])
                left -= 1
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif op == 0x7D:  # EMPTY_DICT
            stack.append(InertDict())
            left -= 1
        elif op in (0x75, 0x65, 0x90):  # SETITEMS, APPENDS, ADDITEMS
            new, stack = stack, marked.pop()
            _add(stack[-1], new, op == 0x75)
        elif op == 0x62:  # BUILD
            state = stack.pop()
            target = stack[-1]
            if type(target) is not InertObject or target.state is not None:
                raise PickleRefused(f"it gives a state to what can have none (byte {at - 1})")
            target.state = state
        elif op == 0x8C:  # SHORT_BINUNICODE
            start = at + 1
            at = start + data[at]
            stack.append(str(data[start:at], "utf-8", "surrogatepass"))
        elif op == 0x74:  # TUPLE
            new, stack = stack, marked.pop()
            stack.append(tuple(new))
            left -= 1
        elif op in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            stack.append(op == 0x88)
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
            left -= 1
        elif op in (0x73, 0x61):  # SETITEM, APPEND
            taken = 2 if op == 0x73 else 1
            new = stack[-taken:]
            del stack[-taken:]
            _add(stack[-1], new, op == 0x73)
        elif op == 0x95:  # FRAME: a hint for readers of streams
            if eight.unpack_from(data, at)[0] > size:
                raise PickleRefused("it ends early")
            at += 8
        elif op == 0x2E:  # STOP
            return stack.pop()
        elif op == 0x30:  # POP: the mark, where nothing is above it
            if stack:
                stack.pop()
            else:
                stack = marked.pop()
        elif op in _CLOSES_MARK:
            new, stack = stack, marked.pop()
            left -= 1
            if op == 0x6C:  # LIST
                stack.append(new)
            elif op == 0x64:  # DICT
                stack.append(InertDict())
                _add(stack[-1], new, True)
            elif op == 0x91:  # FROZENSET
                stack.append(OPAQUE)
            elif op == 0x6F:  # OBJ
                stack.append(InertObject(new[0]))
        else:
            at = _rare(op, data, at, stack, memo)
            left -= 1
        if left < 0:
            raise PickleRefused(f"it makes far more objects than its length allows (byte {at - 1})")
        if at > size:
            raise PickleRefused("it ends early")


def _global(module: object, name: object) -> InertGlobal:
    if type(module) is not str or type(name) is not str:
        raise PickleRefused("it refers to a class by what is no name")
    return _TORCH_SIZE if module == "torch" and name == "Size" else InertGlobal(module, name)


def _add(target: object, new: list[Any], pairs: bool) -> None:
    """What SETITEMS, APPENDS and ADDITEMS do."""
    if pairs and len(new) % 2:
        raise PickleRefused("a dictionary has a key without a value")
    if type(target) is (InertDict if pairs else list):
        target.extend(new)
    elif type(target) is InertObject:
        kind = InertDict if pairs else list
        if target.items is None:
            target.items = kind()
        elif type(target.items) is not kind:
            raise PickleRefused("it adds pairs and single values to one object")
        target.items.extend(new)
    else:
        raise PickleRefused("it adds to what is no dictionary, list or set")


#: POP_MARK, LIST, DICT, FROZENSET, OBJ: they take all that is above the mark.
_CLOSES_MARK = frozenset((0x31, 0x6C, 0x64, 0x91, 0x6F))

#: Operations followed by a length and so many bytes: how the length is written, and whether the bytes are a text.
_COUNTED = {
    0x58: ("<I", True),  # BINUNICODE
    0x8D: ("<Q", True),  # BINUNICODE8
    0x43: ("<B", False),  # SHORT_BINBYTES
    0x42: ("<I", False),  # BINBYTES
    0x8E: ("<Q", False),  # BINBYTES8
    0x96: ("<Q", False),  # BYTEARRAY8
    0x55: ("<B", False),  # SHORT_BINSTRING
    0x54: ("<I", False),  # BINSTRING
}


def _rare(op: int, data: bytes, at: int, stack: list[Any], memo: list[Any]) -> int:
    """Operations that are rare, or that only older protocols have. Returns where the next one is."""
    if op in _COUNTED:
        form, is_text = _COUNTED[op]
        start = at + struct.calcsize(form)
        end = start + int(struct.unpack_from(form, data, at)[0])
        if end > len(data):
            raise PickleRefused("it ends early")
        stack.append(str(data[start:end], "utf-8", "surrogatepass") if is_text else OPAQUE)
        return end
    if op in (0x8A, 0x8B):  # LONG1, LONG4
        form = "<B" if op == 0x8A else "<i"
        start = at + struct.calcsize(form)
        length = int(struct.unpack_from(form, data, at)[0])
        if length < 0:
            raise PickleRefused(f"it has an integer of negative length (byte {at - 1})")
        end = start + length
        stack.append(int.from_bytes(data[start:end], "little", signed=True) if length <= _INTEGER_BYTES else None)
        return end
    if op in (0x71, 0x72):  # BINPUT, LONG_BINPUT
        form = "<B" if op == 0x71 else "<I"
        number = struct.unpack_from(form, data, at)[0]
        if number < len(memo):
            memo[number] = stack[-1]
        elif number == len(memo):
            memo.append(stack[-1])
        else:
            # Every pickler, and pickletools.optimize, numbers without gaps; filling one would cost what it claims.
            raise PickleRefused(f"its memo has a gap (byte {at - 1})")
        return at + struct.calcsize(form)
    if op == 0x93:  # STACK_GLOBAL
        name = stack.pop()
        stack[-1] = _global(stack[-1], name)
    elif op == 0x63:  # GLOBAL: two lines of text
        first = data.find(b"\n", at, at + _NAME_BYTES)
        second = data.find(b"\n", first + 1, first + _NAME_BYTES) if first >= 0 else -1
        if second < 0:
            raise PickleRefused(f"it refers to a name without an end (byte {at - 1})")
        stack.append(_global(str(data[at:first], "utf-8"), str(data[first + 1 : second], "utf-8")))
        return second + 1
    elif op == 0x92:  # NEWOBJ_EX: class, arguments, named arguments
        stack.pop()
        stack.pop()
        stack[-1] = InertObject(stack[-1])
    elif op == 0x80:  # PROTO
        if data[at] > _HIGHEST_PROTOCOL:
            raise PickleRefused(f"it is of protocol {data[at]}, which is unknown")
        return at + 1
    elif op == 0x47:  # BINFLOAT
        stack.append(OPAQUE)
        return at + 8
    elif op == 0x8F:  # EMPTY_SET
        stack.append([])
    elif op == 0x32:  # DUP
        stack.append(stack[-1])
    else:
        raise PickleRefused(f"the operation {op:#04x} at byte {at - 1} is not one that checkpoint metadata uses")
    return at
