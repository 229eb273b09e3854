"""Shapes and types are checked at every call of psidiff while its tests run."""

import torch

torch.set_num_threads(1)  # the tensors are small; a pool of threads only gets in the way

try:
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook
except ImportError:  # a machine without the development tools still runs the tests
    pass
else:
    install_import_hook("psidiff", "beartype.beartype").__enter__()
