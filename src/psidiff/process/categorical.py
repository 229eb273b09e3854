"""Drawing tokens from distributions over them."""

from __future__ import annotations

from torch import Generator

from ..kernels.counter_rng import Purpose, Stream
from ..kernels.exponential_race import block_race
from ..types import Probs, Tokens


def categorical(probs: Probs, generator: Generator | None = None) -> Tokens:
    """Draw one token at each position, exactly in float32 and float64.

    Args:
        probs: weights (B, L, K) >= 0; rows need not sum to 1.
        generator: where one random key is drawn from; None: torch's global generator.

    Returns:
        Token ids (B, L).

    Raises:
        ValueError: if a weight is negative, or a row has none above 0.

    Example:
        >>> from psidiff.process import categorical
        >>> categorical(torch.tensor([[[0.0, 1.0], [2.0, 0.0]]]))
        tensor([[1, 0]])
    """
    if probs.ndim != 3 or not probs.is_floating_point():
        raise ValueError(
            f"probs must be floats of shape (B, L, K), got {probs.dtype} {tuple(probs.shape)}"
        )
    if bool((probs < 0).any()) or not bool((probs.sum(-1) > 0).all()):
        raise ValueError("probs must be >= 0, and some of each row above 0")
    num_samples, length, vocab_size = probs.shape
    stream = Stream.seeded(generator, (num_samples, length), probs.device)
    bits = stream.bits(0, Purpose.DRAW).flatten()
    return block_race(probs.reshape(-1, vocab_size), bits).view(num_samples, length)
