"""The Gaussian process beneath uniform-state diffusion."""

from .relaxation import relax_dense, relax_sparse
from .transform import diffusion_transform, gamma_at

__all__ = ["diffusion_transform", "gamma_at", "relax_dense", "relax_sparse"]
