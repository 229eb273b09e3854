"""Networks that denoise, with the parameter names of the released checkpoints."""

from torch import nn

from ..registry import Registry
from .parameterization import Parameterized
from .transformer import Transformer
from .unet import UNet

NETWORKS = Registry("network", nn.Module)
NETWORKS.register("transformer")(Transformer)
NETWORKS.register("unet")(UNet)

__all__ = ["NETWORKS", "Parameterized", "Transformer", "UNet"]
