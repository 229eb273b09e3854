"""Pickles as data: a reader that imports, calls and changes nothing.

A pickle is a program that may name any function and have it called. Here its values are read:
plain ones as what they are, every other object as a `StandIn` that records what the file says
of it. Nothing that a file names ever becomes a live class or function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .checksums import Damaged, damaged, in_short
from .limits import check_limit, limits

__all__ = ["Name", "Refused", "StandIn", "plain_values", "read_pickle"]

_NAME = 200  # characters of a name
_INTEGER = 64  # bytes of an integer; the states of random generators have 16
_MARKS = 10_000  # open at a time
_EMPTY = 4  # steps that a container or a stand-in counts: it takes so many times the memory


class Refused(ValueError):
    """The file asks for what is not given to it."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or a function that a pickle names, as text."""

    path: str


class StandIn:
    """An object that a pickle describes; it does nothing.

    name: the class or function, such as "omegaconf.dictconfig.DictConfig".
    args: what it is called with; `named` are those with a name.
    state: what the object is set to, None if the file does not say.
    items, values: what is put into it as into a dict or a list.
    """

    __slots__ = ("args", "items", "name", "named", "state", "values")

    def __init__(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.name, self.args, self.named = name, args, named
        self.state: Any = None
        self.items: dict[Any, Any] = {}
        self.values: list[Any] = []

    def __repr__(self) -> str:
        return f"<StandIn for {self.name}>"


def read_pickle(
    data: bytes,
    path: Any,
    allowed: Collection[str] = (),
    makers: Mapping[str, Callable[..., Any]] | None = None,
    outside: Callable[[Any], Any] | None = None,
) -> Any:
    """The value that a pickle of protocol 2 to 5 describes.

    Args:
        data: the bytes of the pickle; what follows its end is not looked at.
        path: what errors call the file.
        allowed: packages ("omegaconf", "torch.distributed") and full names ("torch.Size")
            whose objects become stand-ins; every other name is refused.
        makers: our own functions by the name that a file calls, such as
            "torch._utils._rebuild_tensor_v2"; what they return stands for the call.
        outside: the value for a persistent id; without it such ids are refused.

    Raises:
        Refused: it asks for another name, for too much, or for what honest files never do.
        Damaged: the bytes are no whole pickle.
    """
    return _Reader(data, path, allowed, {**_MAKERS, **(makers or {})}, outside).read()


def plain_values(
    value: Any, path: Any, convert: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Dicts, lists and tuples (as lists) copied to the bounds of depth and nodes; a value
    that is used twice counts twice. `convert` sees every value first."""
    bounds, count = limits(), 0

    def copy(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > bounds.nodes:
            check_limit("nodes", count, path, f"has {count:,} values or more")
        if depth > bounds.depth:
            check_limit("depth", depth, path, f"nests {depth} levels deep or deeper")
        value = convert(value)
        if isinstance(value, dict):
            return {name: copy(inner, depth + 1) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [copy(inner, depth + 1) for inner in value]
        return value

    return copy(value, 0)


class _Reader:
    """One pass over the bytes. The stack and the memo hold values, never anything live."""

    def __init__(
        self,
        data: bytes,
        path: Any,
        allowed: Collection[str],
        makers: Mapping[str, Callable[..., Any]],
        outside: Callable[[Any], Any] | None,
    ) -> None:
        self.data, self.path, self.place = data, path, 0
        self.allowed, self.makers, self.outside = allowed, makers, outside
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # the stacks below the open marks
        self.memo: dict[int, Any] = {}
        self.work, self.most = 0, limits().opcodes

    def read(self) -> Any:
        check_limit(
            "text", len(self.data), self.path, f"is a pickle of {len(self.data):,} bytes"
        )
        try:
            while True:
                code = self.take(1)
                step = _STEPS.get(code)
                if step is None:
                    raise self.refused(f"has the opcode {code!r}")
                if code == b".":
                    return self.pop()
                self.spend(1)
                step(self)
        except (Refused, Damaged):
            raise
        except (IndexError, KeyError, struct.error, UnicodeDecodeError):
            reason = f"its pickle is not whole at byte {self.place:,}"
        except TypeError as error:
            reason = f"its pickle puts together what does not fit ({str(error)[:100]})"
        raise damaged(self.path, reason)

    def refused(self, why: str) -> Refused:
        return Refused(f"{self.path} was not loaded: its pickle {why}, which is refused")

    def spend(self, amount: int) -> None:
        self.work += amount
        if self.work > self.most:
            said = f"is a pickle of {self.work:,} steps or more"
            check_limit("opcodes", self.work, self.path, said, 16 * self.work)

    # Bytes

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > len(self.data):
            raise IndexError
        part = self.data[self.place : end]
        self.place = end
        return part

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.place, self.place + _NAME + 1)
        if end < 0:
            raise self.refused(f"has a name of more than {_NAME} bytes")
        text = self.take(end - self.place).decode("utf-8")
        self.place += 1
        return text

    def text(self, size: str) -> None:
        self.stack.append(self.take(self.number(size)).decode("utf-8"))

    def bytes(self, size: str) -> None:
        self.stack.append(self.take(self.number(size)))

    def integer(self, size: str) -> None:
        count = self.number(size)
        if not 0 <= count <= _INTEGER:
            raise self.refused(f"has an integer of {count:,} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    # The stack

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self) -> None:
        if len(self.marked) == _MARKS:
            raise self.refused(f"nests {_MARKS:,} levels deep")
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.marked.pop()
        return values

    def remember(self, index: int) -> None:
        if index > len(self.data):  # every one takes a byte or more
            raise self.refused(f"remembers {index:,} values in {len(self.data):,} bytes")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def pop_mark(self) -> None:
        self.since_mark()

    # Containers

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, StandIn):
            target = target.values
        elif not isinstance(target, list):
            raise TypeError("values after no list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, StandIn):
            target = target.items
        elif not isinstance(target, dict):
            raise TypeError("items of no dict")
        self.put(target, values)

    def put(self, target: dict[Any, Any], values: list[Any]) -> None:
        if len(values) % 2:
            raise TypeError("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[self.key(key, len(target))] = value

    def add(self) -> None:
        values, target = self.since_mark(), self.stack[-1]
        if not isinstance(target, set):
            raise TypeError("members of no set")
        self.put_members(target, values)

    def frozen(self) -> None:
        self.spend(_EMPTY)
        members: set[Any] = set()
        self.put_members(members, self.since_mark())
        self.stack.append(frozenset(members))

    def put_members(self, target: set[Any], values: list[Any]) -> None:
        for value in values:
            target.add(self.key(value, len(target)))

    def key(self, value: Any, others: int) -> Any:
        """A value that may be a key beside so many others; it does not nest.

        Anyone can make numbers that collide with all others in a table, so they count for what
        that would take, but 0, 1, 2, ... in their order, which cannot. Texts are hashed with a
        secret of this process, and may only be long.
        """
        texts = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple):
            fits = len(value) < 16 and all(isinstance(each, (str, bytes)) for each in value)
        elif isinstance(value, int):
            fits = abs(value) < 2**64
        else:
            fits = not isinstance(value, frozenset)
        if not fits:
            raise self.refused(f"has a {type(value).__name__} as a key that is no plain one")
        if isinstance(value, (int, float)) and value != others:
            self.spend(others // 16)
        self.spend(_length(texts) // 64)
        return value

    def fresh(self, made: Any) -> None:
        """A new container on the stack."""
        self.spend(_EMPTY)
        self.stack.append(made)

    # Names and calls

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        path = f"{module}.{name}"
        known = path in self.makers or path in self.allowed or path in _PLAIN_TYPES
        inside = any(path.startswith(f"{package}.") for package in self.allowed)
        if len(path) > _NAME or not (known or inside) or "." in name:  # os.path, say, of os
            raise self.refused(f"asks for {_printable(path)}")
        self.stack.append(Name(path))

    def named(self) -> None:
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def call(self, what: Any, args: Any, named: Any) -> None:
        if not isinstance(what, Name) or not isinstance(args, tuple) or type(named) is not dict:
            raise self.refused("calls what has no name")
        self.spend(len(args))  # before they are looked at: one tuple may be used often
        self.spend(_length(args) // 64)
        if what.path not in self.makers:
            self.fresh(StandIn(what.path, args, named))
            return
        try:
            self.stack.append(self.makers[what.path](*args))
        except Refused as error:
            raise Refused(f"{self.path} was not loaded: {error}") from None

    def reduce(self) -> None:
        args, what = self.pop(), self.pop()
        self.call(what, args, {})

    def new_with_names(self) -> None:
        named, args, what = self.pop(), self.pop(), self.pop()
        self.call(what, args, named)

    def build(self) -> None:
        """What an object is set to. Only a stand-in takes it: all else has no attributes."""
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, StandIn):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict may have attributes
            raise self.refused("sets the state of what is no object")

    def from_outside(self) -> None:
        key = self.pop()
        if self.outside is None:
            raise self.refused("asks for values outside of it")
        self.stack.append(self.outside(key))

    def protocol(self) -> None:
        version = self.take(1)[0]
        if not 2 <= version <= 5:
            raise self.refused(f"has protocol {version}")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_NAME])


def _length(values: tuple[Any, ...]) -> int:
    """Of the texts among them, together."""
    return sum(len(each) for each in values if isinstance(each, (str, bytes)))


def _push(make: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        value = make(reader)  # which may change what the stack is
        reader.stack.append(value)

    return step


def _as_tuple(reader: _Reader, count: int) -> None:
    if len(reader.stack) < count:
        raise IndexError
    reader.stack[-count:] = [tuple(reader.stack[-count:])]


def _no_step(reader: _Reader) -> None: ...


# Every opcode of protocol 2 to 5 but those that reach out of the file (extension registries,
# buffers) and those that only text pickles have.
_STEPS: dict[bytes, Callable[[_Reader], None]] = {
    b"\x80": _Reader.protocol,
    b"\x95": lambda r: r.number("Q") and None,  # a frame
    b".": _no_step,
    # plain values
    b"N": _push(lambda r: None),
    b"\x88": _push(lambda r: True),
    b"\x89": _push(lambda r: False),
    b"J": _push(lambda r: r.number("i")),
    b"K": _push(lambda r: r.number("B")),
    b"M": _push(lambda r: r.number("H")),
    b"\x8a": lambda r: r.integer("B"),
    b"\x8b": lambda r: r.integer("i"),
    b"G": _push(lambda r: struct.unpack(">d", r.take(8))[0]),
    b"X": lambda r: r.text("I"),
    b"\x8c": lambda r: r.text("B"),
    b"\x8d": lambda r: r.text("Q"),
    b"B": lambda r: r.bytes("I"),
    b"C": lambda r: r.bytes("B"),
    b"\x8e": lambda r: r.bytes("Q"),
    b"\x96": _push(lambda r: r.take(r.number("Q"))),  # a bytearray
    b"U": lambda r: r.bytes("B"),  # the strings of Python 2
    b"T": lambda r: r.bytes("I"),
    # the stack and the memo
    b"(": _Reader.mark,
    b"0": lambda r: r.pop() and None,
    b"1": _Reader.pop_mark,
    b"2": lambda r: r.stack.append(r.stack[-1]),
    b"q": lambda r: r.remember(r.number("B")),
    b"r": lambda r: r.remember(r.number("I")),
    b"\x94": lambda r: r.remember(len(r.memo)),
    b"h": lambda r: r.recall(r.number("B")),
    b"j": lambda r: r.recall(r.number("I")),
    # containers
    b"]": lambda r: r.fresh([]),
    b"}": lambda r: r.fresh({}),
    b")": _push(lambda r: ()),
    b"\x8f": lambda r: r.fresh(set()),
    b"t": _push(lambda r: tuple(r.since_mark())),
    b"\x85": lambda r: _as_tuple(r, 1),
    b"\x86": lambda r: _as_tuple(r, 2),
    b"\x87": lambda r: _as_tuple(r, 3),
    b"\x91": _Reader.frozen,
    b"a": lambda r: r.append([r.pop()]),
    b"e": lambda r: r.append(r.since_mark()),
    b"s": lambda r: r.set_items([r.pop(), r.pop()][::-1]),
    b"u": lambda r: r.set_items(r.since_mark()),
    b"\x90": _Reader.add,
    # names and calls
    b"c": lambda r: r.name(r.line(), r.line()),
    b"\x93": _Reader.named,
    b"R": _Reader.reduce,
    b"\x81": _Reader.reduce,
    b"\x92": _Reader.new_with_names,
    b"b": _Reader.build,
    b"Q": _Reader.from_outside,
}


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How old pickles spell bytes; no other codec is looked up."""
    if not isinstance(encoding, str) or encoding != "latin1":
        raise Refused(f"its pickle asks for the codec {in_short(encoding)}, which is refused")
    if not isinstance(text, str):
        raise TypeError(f"a {type(text).__name__} is encoded")
    return text.encode("latin1", "replace")


def _empty(kind: Callable[[], Any]) -> Callable[..., Any]:
    def make(*values: Any) -> Any:
        if values and kind is bytes:
            raise Refused("its pickle calls bytes with values, which is refused")
        return kind()

    return make


_BUILTINS = ("builtins", "__builtin__")
_PLAIN_TYPES = {
    f"{module}.{name}"
    for module in _BUILTINS
    for name in (
        *("bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "long"),
        *("object", "set", "slice", "str", "tuple", "unicode"),
    )
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "collections.OrderedDict": _empty(dict),
    "collections.defaultdict": _empty(dict),
    **{f"{module}.bytes": _empty(bytes) for module in _BUILTINS},
}
