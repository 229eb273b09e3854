"""Networks that denoise, with the parameter names of the released checkpoints."""

from .parameterization import Parameterized, to_leave_one_out, to_plain
from .transformer import Transformer
from .unet import UNet

__all__ = ["Parameterized", "Transformer", "UNet", "to_leave_one_out", "to_plain"]
