"""Shapes and types are checked at every call of psidiff while its tests run."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors are small; a pool of threads only gets in the way
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

try:
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook
except ImportError:  # a machine without the development tools still runs the tests
    pass
else:
    install_import_hook("psidiff", "beartype.beartype").__enter__()


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws from torch's global generator is the same every time."""
    torch.manual_seed(0)
