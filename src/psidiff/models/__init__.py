"""Networks that denoise, with the parameter names of the released checkpoints."""

from .parameterization import Parameterized
from .transformer import Transformer
from .unet import UNet

__all__ = ["Parameterized", "Transformer", "UNet"]
