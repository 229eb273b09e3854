"""Pickles as data: a reader that imports, calls and changes nothing.

A pickle is a program that may name any function and have it called. Here its values are read:
plain ones as what they are, every other object as a `StandIn` that records what the file says
of it. Nothing that a file names ever becomes a live class or function.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .checksums import damaged, in_short, one_line
from .limits import check_limit, limits

_NAME = 200  # characters of a name
_INTEGER = 512  # bits of an integer; the states of random generators have 128
_MARKS = 10_000  # open at a time
_EMPTY = 4  # steps that a container or a stand-in counts: it takes so many times the memory


class Refused(ValueError):
    """The file asks for what is not given to it."""


def refused(path: Any, why: Any) -> Refused:
    """The sentence for such a file."""
    return Refused(f"{path} was not loaded: {why}")


@dataclass(frozen=True, slots=True)
class Name:
    """A class or a function that a pickle names, as text."""

    path: str


@dataclass(slots=True, eq=False)
class StandIn:
    """An object that a pickle describes; it does nothing.

    name: the class or function, such as "omegaconf.dictconfig.DictConfig".
    args: what it is called with; `named` are those with a name.
    state: what the object is set to, None if the file does not say.
    items, values: what is put into it as into a dict or a list.
    """

    name: str
    args: tuple[Any, ...] = field(repr=False)
    named: Mapping[str, Any] = field(repr=False)
    state: Any = field(default=None, repr=False)
    items: dict[Any, Any] = field(default_factory=dict, repr=False)
    values: list[Any] = field(default_factory=list, repr=False)


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


@dataclass
class _Reader:
    """One pass over the bytes. The stack and the memo hold values, never anything live."""

    data: bytes
    path: Any
    allowed: Collection[str]
    makers: Mapping[str, Callable[..., Any]]
    outside: Callable[[Any], Any] | None
    stack: list[Any] = field(default_factory=list)
    below_marks: list[list[Any]] = field(default_factory=list)  # the stacks under open marks
    memo: dict[int, Any] = field(default_factory=dict)
    place: int = 0
    work: int = 0
    most_work: int = field(default_factory=lambda: limits().opcodes)

    def read(self) -> Any:
        check_limit(
            "text", len(self.data), self.path, f"is a pickle of {len(self.data):,} bytes"
        )
        try:
            for name, argument in self.opcodes():
                if name not in _STEPS:
                    raise self.refused(f"has the opcode {name}")
                self.spend(1)
                _STEPS[name](self, argument)
            return self.pop()
        except (EOFError, IndexError, KeyError, UnicodeError):
            reason = f"its pickle is not whole at byte {self.place:,}"
        except TypeError as error:
            reason = f"its pickle puts together what does not fit ({str(error)[:100]})"
        raise damaged(self.path, reason)

    def opcodes(self) -> Iterator[tuple[str, Any]]:
        """The names of the opcodes up to STOP, with their arguments, which only are decoded."""
        try:
            for opcode, argument, place in pickletools.genops(self.data):
                self.place = place or 0
                yield opcode.name, argument
        except ValueError as error:  # of genops: what is done with an opcode fails outside
            raise EOFError from error

    def refused(self, why: str) -> Refused:
        return refused(self.path, f"its pickle {why}, which is refused")

    def spend(self, amount: int) -> None:
        self.work += amount
        if self.work > self.most_work:
            said = f"is a pickle of {self.work:,} steps or more"
            check_limit("opcodes", self.work, self.path, said, 16 * self.work)

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def text(self, text: str) -> None:
        text.encode()  # UnicodeError for half a surrogate pair, which no file may hold
        self.push(text)

    def integer(self, number: int) -> None:
        if number.bit_length() > _INTEGER:
            raise self.refused(f"has an integer of {number.bit_length():,} bits")
        self.push(number)

    def mark(self) -> None:
        if len(self.below_marks) == _MARKS:
            raise self.refused(f"nests {_MARKS:,} levels deep")
        self.below_marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below_marks.pop()
        return values

    def remember(self, index: int) -> None:
        if index > len(self.data):  # every one takes a byte or more
            raise self.refused(f"remembers {index:,} values in {len(self.data):,} bytes")
        self.memo[index] = self.stack[-1]

    # Containers

    def fresh(self, container: Any) -> None:
        """A new container on the stack."""
        self.spend(_EMPTY)
        self.push(container)

    def last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def container(self, kind: type) -> Any:
        """The list, dict or set that the following values go into."""
        target = self.stack[-1]
        if isinstance(target, StandIn) and kind is not set:
            target = target.values if kind is list else target.items
        if not isinstance(target, kind):
            raise TypeError(f"values after no {kind.__name__}")
        return target

    def append(self, values: list[Any]) -> None:
        self.container(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.container(dict)
        if len(values) % 2:
            raise TypeError("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[self.key(key, len(target))] = value

    def add(self, values: list[Any]) -> None:
        target = self.container(set)
        for value in values:
            target.add(self.key(value, len(target)))

    def frozen(self, values: list[Any]) -> None:
        self.fresh(set())
        self.add(values)
        self.push(frozenset(self.pop()))

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

    # Names and calls

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        path = f"{module}.{name}"
        known = path in self.makers or path in self.allowed
        known |= module in _BUILTINS and name in _PLAIN_TYPES
        known |= any(path.startswith(f"{package}.") for package in self.allowed)
        if len(path) > _NAME or not known or "." in name:  # os.path, say, of os
            raise self.refused(f"asks for {one_line(path, _NAME)}")
        self.push(Name(path))

    def call(self, what: Any, args: Any, named: Any) -> None:
        if not isinstance(what, Name) or not isinstance(args, tuple) or type(named) is not dict:
            raise self.refused("calls what has no name")
        self.spend(len(args))  # before they are looked at: one tuple may be used often
        self.spend(_length(args) // 64)
        if what.path not in self.makers:
            self.fresh(StandIn(what.path, args, named))
            return
        try:
            self.push(self.makers[what.path](*args))
        except Refused as error:
            raise refused(self.path, error) from None

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
        self.push(self.outside(key))

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise self.refused(f"has protocol {version}")


def _length(values: tuple[Any, ...]) -> int:
    """Of the texts among them, together."""
    return sum(len(each) for each in values if isinstance(each, (str, bytes)))


# Every opcode of protocol 2 to 5 but those that reach out of the file (extension registries,
# buffers) and those that only text pickles have; each gets its decoded argument, or None.
_STEPS: dict[str, Callable[[_Reader, Any], Any]] = {
    "PROTO": _Reader.protocol,
    **dict.fromkeys(("FRAME", "STOP"), lambda r, _: None),
    # plain values
    **dict.fromkeys(("NONE", "BININT", "BININT1", "BININT2", "BINFLOAT"), _Reader.push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Reader.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Reader.text),
    **dict.fromkeys(("LONG1", "LONG4"), _Reader.integer),
    **dict.fromkeys(  # the strings of Python 2
        ("BINSTRING", "SHORT_BINSTRING"), lambda r, text: r.push(text.encode("latin1"))
    ),
    "NEWTRUE": lambda r, _: r.push(True),
    "NEWFALSE": lambda r, _: r.push(False),
    # the stack and the memo
    "MARK": lambda r, _: r.mark(),
    "POP": lambda r, _: r.pop(),
    "POP_MARK": lambda r, _: r.since_mark(),
    "DUP": lambda r, _: r.push(r.stack[-1]),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.remember),
    "MEMOIZE": lambda r, _: r.remember(len(r.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda r, index: r.push(r.memo[index])),
    # containers
    "EMPTY_LIST": lambda r, _: r.fresh([]),
    "EMPTY_DICT": lambda r, _: r.fresh({}),
    "EMPTY_SET": lambda r, _: r.fresh(set()),
    "EMPTY_TUPLE": lambda r, _: r.push(()),
    "TUPLE": lambda r, _: r.push(tuple(r.since_mark())),
    "TUPLE1": lambda r, _: r.push(tuple(r.last(1))),
    "TUPLE2": lambda r, _: r.push(tuple(r.last(2))),
    "TUPLE3": lambda r, _: r.push(tuple(r.last(3))),
    "FROZENSET": lambda r, _: r.frozen(r.since_mark()),
    "APPEND": lambda r, _: r.append(r.last(1)),
    "APPENDS": lambda r, _: r.append(r.since_mark()),
    "SETITEM": lambda r, _: r.set_items(r.last(2)),
    "SETITEMS": lambda r, _: r.set_items(r.since_mark()),
    "ADDITEMS": lambda r, _: r.add(r.since_mark()),
    # names and calls
    "GLOBAL": lambda r, path: r.name(*path.rsplit(" ", 1)),
    "STACK_GLOBAL": lambda r, _: r.name(*r.last(2)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda r, _: r.call(*(*r.last(2), {}))),
    "NEWOBJ_EX": lambda r, _: r.call(*r.last(3)),
    "BUILD": lambda r, _: r.build(),
    "BINPERSID": lambda r, _: r.from_outside(),
}


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How old pickles spell bytes; no other codec is looked up."""
    if not isinstance(encoding, str) or encoding != "latin1":
        raise Refused(f"its pickle asks for the codec {in_short(encoding)}, which is refused")
    if not isinstance(text, str):
        raise TypeError(f"a {type(text).__name__} is encoded")
    return text.encode("latin1", "replace")


def _empty_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _no_bytes(*values: Any) -> bytes:
    if values:
        raise Refused("its pickle calls bytes with values, which is refused")
    return b""


_BUILTINS = ("builtins", "__builtin__")
_PLAIN_TYPES = {
    *("bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "long"),
    *("object", "set", "slice", "str", "tuple", "unicode"),
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "collections.OrderedDict": _empty_dict,
    "collections.defaultdict": _empty_dict,
    **{f"{module}.bytes": _no_bytes for module in _BUILTINS},
}
