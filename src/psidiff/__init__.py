"""psidiff: discrete diffusion with any noise prior, sampled exactly."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import Model, from_pretrained, load
    from .wrapping import wrap

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "from_pretrained", "load", "wrap"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Models come with torch and networks; they are imported when they are asked for."""
    if name in ("Model", "from_pretrained", "load"):
        from . import model

        return getattr(model, name)
    if name == "wrap":
        from .wrapping import wrap

        return wrap
    raise AttributeError(f"module 'psidiff' has no attribute {name!r}")
