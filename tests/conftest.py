"""Shapes and types are checked at every call of psidiff while its tests run."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors are small; a pool of threads only gets in the way
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

if all(find_spec(tool) for tool in ("beartype", "jaxtyping")):  # elsewhere the tests run too
    from jaxtyping import install_import_hook

    install_import_hook("psidiff", "beartype.beartype").__enter__()


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws from torch's global generator is the same every time."""
    torch.manual_seed(0)
