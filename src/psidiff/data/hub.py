"""The Hub, asked once and briefly, before a library asks it again and again for a minute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.utils import get_session

PATIENCE = 5.0  # seconds


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
