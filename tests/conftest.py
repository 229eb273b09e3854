"""Shapes and types are checked at every call of psidiff while its tests run."""

import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # the tensors are small; two workers of a pool only get in the way
hook = install_import_hook("psidiff", "beartype.beartype")
hook.__enter__()
