"""psidiff: discrete diffusion with any noise prior, sampled exactly."""

__version__ = "0.1.0"
