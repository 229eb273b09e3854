"""Reading a torch checkpoint without running what its pickle says.

A pickle may name any function and have it called. Here the few names that tensors and plain
containers need are known; names of some packages that honest files mention become inert objects
that are never imported; every other name is refused.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import torch

_INERT_PACKAGES = {
    "collections",
    "dataloader",
    "lightning",
    "omegaconf",
    "pytorch_lightning",
    "tokenizers",
    "transformers",
    "typing",
}


class Refused(pickle.UnpicklingError):
    """The file asks for what is not given to it."""


class Inert:
    """An object of a class we do not load. It keeps what it is given, and does nothing."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inert_items: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"inert_state": state})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("inert_items", {})[key] = value

    def append(self, value: Any) -> None:
        self.__dict__.setdefault("inert_list", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("inert_list", []).extend(values)

    def __hash__(self) -> int:
        return id(self)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How old pickles spell bytes; no other codec is looked up."""
    if encoding != "latin1":
        raise Refused(f"the pickle asks for the codec {encoding!r}; refused")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("_codecs", "encode"): _encode,
    **{
        (m, n): t
        for m in ("builtins", "__builtin__")
        for n, t in (("dict", dict), ("list", list))
    },
    **{(m, n): int for m in ("builtins", "__builtin__") for n in ("int", "long")},
}
_STORAGES = {
    f"{kind}Storage"
    for kind in (
        *(
            "Double",
            "Float",
            "Half",
            "BFloat16",
            "Long",
            "Int",
            "Short",
            "Char",
            "Byte",
            "Bool",
        ),
        *("ComplexDouble", "ComplexFloat", "Untyped"),
    )
}


class Unpickler(pickle.Unpickler):
    """pickle's own, with our answer to every global name."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return getattr(torch, name)
        if module.split(".")[0] in _INERT_PACKAGES and "." not in name:
            return type(name, (Inert,), {"origin": f"{module}.{name}"})
        raise Refused(f"the file asks for {module}.{name}, which is refused")


class _PickleModule:
    """What torch.load wants of a pickle module."""

    __name__ = "psidiff.integrations.unpickle"
    Unpickler = Unpickler
    UnpicklingError = pickle.UnpicklingError

    @staticmethod
    def load(file: Any, **kwargs: Any) -> Any:
        return Unpickler(file, **kwargs).load()


def read_checkpoint(path: str | Path) -> Any:
    """The contents of a .ckpt file on the CPU. Nothing that it names is imported or run."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return torch.load(
            path, map_location="cpu", pickle_module=_PickleModule(), weights_only=False
        )
    except Refused as error:
        raise ValueError(f"{path.name} was not loaded: {error}") from None
    except (OSError, MemoryError):
        raise
    except Exception:  # a pickle of other bytes fails in every way there is
        raise ValueError(f"{path.name} is not a checkpoint, or a damaged one") from None
