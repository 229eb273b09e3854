"""The Hub: asked once and briefly, before a library asks it again and again for a minute; and
its data sets, which never run code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from ..registry import optional_module
from .source_files import HUB

PATIENCE = 5.0  # seconds
CONVERTED = "refs/convert/parquet"  # where the Hub keeps data sets that had scripts, as Parquet


class HubData(NamedTuple):
    """Rows of a data set by the `datasets` library; revision: None is the Hub's newest."""

    rows: Any
    revision: str | None = None


def datasets_module(source: str) -> Any:
    """The package that loads a `datasets:` source."""
    return optional_module("datasets", f"{source} needs: pip install datasets")


def hub_data(source: str, split: str | None) -> HubData:
    """The data of a `datasets:OWNER/NAME/CONFIG@REVISION`.

    A data set that is a script is read as the Hub has converted it to Parquet.
    """
    datasets = datasets_module(source)
    if int(getattr(datasets, "__version__", "4").split(".")[0]) < 4:
        raise ValueError(
            f"{source} needs: pip install 'datasets>=4' (version {datasets.__version__} may "
            "run a data set's own script)"
        )
    name, _, revision = source.removeprefix(HUB).partition("@")
    names, split = name.split("/"), split or "train"
    repository, config = "/".join(names[:2]), "/".join(names[2:]) or None
    where: dict[str, Any] = {"split": split} | ({"revision": revision} if revision else {})
    try:
        try:
            found = datasets.load_dataset(repository, config, **where)
        except RuntimeError as error:
            if revision or "scripts are no longer supported" not in str(error):
                raise
            files = {split: f"{config or '*'}/{split}/*.parquet"}
            where, revision = {"split": split, "data_files": files}, CONVERTED
            found = datasets.load_dataset(repository, revision=revision, **where)
        return HubData(found, revision or None)
    except Exception as error:  # of the network, of the hub, of the library: of many kinds
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source} cannot be loaded (it is read as {HUB}OWNER/NAME/CONFIG): {reason}"
        ) from error


def unreachable_reason() -> str | None:
    """Why the Hub does not answer, in words; None: it does."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of the network, of the proxy, of the library: of many kinds
        return f"{constants.ENDPOINT} cannot be reached"
    return None


@contextmanager
def hub_offline() -> Iterator[None]:
    """The libraries of the Hub take what is in their caches, and ask for nothing else."""
    loaded = [sys.modules[name] for name in _HOLDERS if name in sys.modules]
    switches = [module for module in loaded if hasattr(module, "HF_HUB_OFFLINE")]
    before = [vars(module)["HF_HUB_OFFLINE"] for module in switches]
    try:
        for module in switches:
            vars(module)["HF_HUB_OFFLINE"] = True
        yield
    finally:
        for module, value in zip(switches, before, strict=True):
            vars(module)["HF_HUB_OFFLINE"] = value


_HOLDERS = ("huggingface_hub.constants", "datasets.config")
