"""The diffusion transformer: rotary attention, layers modulated by the noise level.

Names and shapes of the parameters are those of the released Duo, MDLM and AR checkpoints. What
a checkpoint does not have (labels) is a parameter of its own that appears only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..limits import check_limit
from ..types import Level, Levels, Traits, as_count, check_unit
from .embedding import (
    CosSin,
    NoiseEmbedding,
    Noisy,
    Rotary,
    TokenEmbedding,
    apply_rotary,
    check_tables,
    class_ids,
    total_noise,
)

Condition = Tensor | tuple[Tensor, Tensor, Tensor] | None


class Attention(NamedTuple):
    """What the attention of all blocks shares: the angles of places, and who sees whom.

    mask (B, L) is True where there is a token to look at. function has the signature and the
    meaning of F.scaled_dot_product_attention.
    """

    rotary: CosSin
    mask: Tensor | None = None
    causal: bool = False
    function: Callable[..., Tensor] = F.scaled_dot_product_attention


class Norm(nn.Module):
    """LayerNorm with a weight and no bias, in float32 whatever surrounds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            normed = F.layer_norm(x.float(), x.shape[-1:]) * self.weight.float()
        return normed.to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the condition if there is one.

    checkpoint: a function such as torch.utils.checkpoint.checkpoint, by which the transformer
    calls the block in training; None: it calls the block itself.
    """

    checkpoint: Callable[..., Tensor] | None = None

    def __init__(self, width: int, heads: int, condition: int | None, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1: Norm = Norm(width)
        self.attn_qkv: nn.Linear = nn.Linear(width, 3 * width, bias=False)
        self.attn_out: nn.Linear = nn.Linear(width, width, bias=False)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.norm2: Norm = Norm(width)
        self.mlp: nn.Sequential = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        if condition is not None:
            self.adaLN_modulation: nn.Linear = _zero(nn.Linear(condition, 6 * width))

    def forward(
        self, x: Tensor, condition: Condition, shared: Attention, past: Past | None = None
    ) -> Tensor:
        if condition is None:
            x = x + self.dropout(self.attend(self.norm1(x), shared, past))
            return x + self.dropout(self.mlp(self.norm2(x)))
        parts = modulation(self.adaLN_modulation, condition, 6)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
        read = modulate(self.norm1(x), shift, scale)
        x = x + gate * self.dropout(self.attend(read, shared))
        return x + gate_mlp * self.dropout(
            self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        )

    def attend(self, x: Tensor, shared: Attention, past: Past | None = None) -> Tensor:
        """Softmax attention; with a past x is what follows it."""
        rotary, mask, causal, function = shared
        batch, length, width = x.shape
        qkv = self.attn_qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = None if mask is None else mask[:, None, None, :]
        if causal and seen is not None:
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if past is not None:
            k, v, seen = past.extend(k, v)
            causal = False
        out = function(q, k, v, attn_mask=seen, is_causal=causal and seen is None)
        return self.attn_out(out.transpose(1, 2).reshape(batch, length, width))


class Output(nn.Module):
    """A last norm, modulated, and the linear layer to the vocabulary (tied: only its bias)."""

    def __init__(
        self, width: int, vocab_size: int, condition: int | None, tied: bool = False
    ) -> None:
        super().__init__()
        self.norm_final: Norm = Norm(width)
        if tied:
            self.bias: nn.Parameter = nn.Parameter(torch.zeros(vocab_size))
        else:
            self.linear: nn.Linear = _zero(nn.Linear(width, vocab_size))
        if condition is not None:
            self.adaLN_modulation: nn.Linear = _zero(nn.Linear(condition, 2 * width))

    def hidden(self, x: Tensor, condition: Condition) -> Tensor:
        x = self.norm_final(x)
        if condition is None:
            return x
        return modulate(x, *modulation(self.adaLN_modulation, condition, 2))


class Transformer(nn.Module):
    """A diffusion transformer (DiT): logits (B, L, K) from tokens, noise level and label.

    `hidden` and `head` are its two halves: hidden states (B, L, d), and logits of rows of them.

    Args:
        vocab_size: number of tokens K.
        hidden_size: width d.
        num_blocks: number of transformer blocks.
        num_heads: attention heads; they divide hidden_size.
        cond_dim: width of the embedding of level and label.
        dropout: rate in training.
        causal: next-token prediction, without levels and labels.
        time_conditioning: False: the level is ignored.
        num_classes: number of labels; None: unconditional.
        per_position_levels: False: the smallest level of a sequence counts for all of it, as
            for networks never trained with given tokens.
        learned_positions: number of learned position vectors, for images and boards; None:
            rotary attention alone, which only knows distances.
        tied: the output layer shares the table of the input.

    Example:
        >>> from psidiff.models import Transformer
        >>> network = Transformer(11, hidden_size=16, num_blocks=1, num_heads=2, cond_dim=8)
        >>> network(torch.zeros(2, 5, dtype=torch.int64), 0.5).shape
        torch.Size([2, 5, 11])
    """

    traits: Traits = Traits(head=True, levels=True, padding=True, recordable=True, fusible=True)

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 768,
        num_blocks: int = 12,
        num_heads: int = 12,
        cond_dim: int = 128,
        dropout: float = 0.1,
        causal: bool = False,
        time_conditioning: bool = True,
        num_classes: int | None = None,
        per_position_levels: bool = True,
        learned_positions: int | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(hidden_size, num_blocks, num_heads, cond_dim)
        check_unit("dropout", dropout)
        check_tables(
            vocab_size=(vocab_size, hidden_size),
            num_classes=(num_classes, cond_dim),
            learned_positions=(learned_positions, hidden_size),
        )
        self.causal = causal
        self.time_conditioning = time_conditioning
        self.tied = tied
        self.attention: Callable[..., Tensor] = F.scaled_dot_product_attention
        self.num_classes = num_classes
        self.per_position_levels = per_position_levels
        self.traits = replace(self.traits, reader=causal, num_classes=num_classes)
        condition = None if causal else cond_dim
        self.vocab_embed: TokenEmbedding = TokenEmbedding(vocab_size, hidden_size)
        if condition is not None:
            self.sigma_map: NoiseEmbedding = NoiseEmbedding(condition)
        self.rotary_emb: Rotary = Rotary(hidden_size // num_heads)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(hidden_size, num_heads, condition, dropout) for _ in range(num_blocks)
        )
        self.output_layer: Output = Output(hidden_size, vocab_size, condition, tied)
        if num_classes is not None:
            self.label_embed: nn.Embedding = nn.Embedding(
                num_classes + 1, cond_dim
            )  # the last is no class
            nn.init.normal_(self.label_embed.weight, std=0.02)
        if learned_positions is not None:
            self.position_embed: nn.Embedding = nn.Embedding(learned_positions, hidden_size)
            nn.init.normal_(self.position_embed.weight, std=0.02)

    def forward(
        self,
        z: Noisy,
        alpha: Level | Levels = 1.0,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        then: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`then(hidden, weight, bias)` takes the place of the output layer."""
        hidden = self.hidden(z, alpha, labels, mask)
        return self.head(hidden) if then is None else then(hidden, *self.output_projection())

    def hidden(
        self,
        z: Noisy,
        alpha: Level | Levels = 1.0,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        pasts: Sequence[Past] | None = None,
        states: list[Any] | None = None,
        attention: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """What the head reads, (B, L, d); with the pasts of causal blocks z is what follows.

        states: a list that gets what each block reads, (B, L, d), and what the head reads.
        attention: in place of the network's own.
        """
        first = pasts[0].seen if pasts else 0
        x = self._add_positions(self.vocab_embed(z), first)
        condition = None if self.causal else self.condition(x, alpha, labels)
        cos, sin = self.rotary_emb(first + x.shape[1], x.device)
        function = attention or self.attention
        shared = Attention((cos[first:], sin[first:]), mask, self.causal, function)
        if pasts is not None:
            for block, past in zip(self.blocks, pasts, strict=True):
                x = block.forward(x, None, shared, past)  # not the compiled one
            return self.output_layer.hidden(x, None)
        for block in self.blocks:
            if states is not None:
                states.append(x)
            again: Any = block.checkpoint if self.training else None
            x = (block if again is None else partial(again, block))(x, condition, shared)
        x = self.output_layer.hidden(x, condition)
        if states is not None:
            states.append(x)
        return x

    def reader(self, room: int) -> Callable[[Tensor], Tensor]:
        """A function of growing rows of at most `room` tokens, (B, l), that gives the logits at
        the last of them, (B, 1, K). The tokens of one call begin with those of the call before;
        only what is new is computed."""
        if not self.causal:
            raise ValueError("only a causal transformer reads from left to right")
        pasts = [Past(room) for _ in self.blocks]

        def read(tokens: Tensor) -> Tensor:
            return self.head(self.hidden(tokens[:, pasts[0].seen :], pasts=pasts)[:, -1:])

        return read

    def head(self, rows: Tensor) -> Tensor:
        if self.tied:
            return F.linear(rows, *self.output_projection())
        return self.output_layer.linear(rows)  # which may be a quantized one

    def output_projection(self) -> tuple[Tensor, Tensor]:
        """Weight (K, d) and bias (K,) of the output layer."""
        if self.tied:
            return self.vocab_embed.embedding, self.output_layer.bias
        return self.output_layer.linear.weight, self.output_layer.linear.bias

    def _add_positions(self, x: Tensor, first: int = 0) -> Tensor:
        if not hasattr(self, "position_embed"):
            return x
        length, most = first + x.shape[1], self.position_embed.num_embeddings
        if length > most:
            raise ValueError(f"this transformer has {most} positions, got {length} tokens")
        return x + self.position_embed.weight[first:length]

    def condition(self, x: Tensor, alpha: Level | Levels, labels: Tensor | None) -> Condition:
        """Level and label as one vector a sequence (B, 1, c), or one a position (B, L, c); of
        `Levels` the vector of noisy and that of given tokens, and where the latter are."""
        if isinstance(alpha, Levels):
            noisy = self.condition(x, alpha.alpha, labels)
            if not (self.time_conditioning and self.per_position_levels):
                return noisy
            clean = self.condition(x, torch.ones_like(alpha.alpha[:1]), labels)
            assert isinstance(noisy, Tensor) and isinstance(clean, Tensor)
            return noisy, clean, alpha.given[..., None]
        sigma = total_noise(alpha, x)
        if not self.time_conditioning:
            sigma = torch.zeros_like(sigma[:, :1])
        elif not self.per_position_levels:
            sigma = sigma.amax(1, keepdim=True)
        condition: Tensor = self.sigma_map(sigma)
        ids = class_ids(labels, self.num_classes, like=x)
        return condition if ids is None else condition + self.label_embed(ids)[:, None]


def check_sizes(hidden_size: int, num_blocks: int, num_heads: int, cond_dim: int) -> None:
    """There is a transformer of these, and a machine for it."""
    as_count("hidden_size", hidden_size)
    as_count("num_blocks", num_blocks)
    as_count("num_heads", num_heads)
    as_count("cond_dim", cond_dim)
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ValueError(
            f"hidden_size must be num_heads times an even number, got {hidden_size} "
            f"and {num_heads}"
        )
    parameters = num_blocks * hidden_size * (12 * hidden_size + 6 * cond_dim)
    check_limit("blocks", num_blocks, "the network", f"has {num_blocks:,} blocks")
    check_limit("parameters", parameters, "the network", f"has {parameters:,} parameters")


class Past:
    """Keys and values of the places that a causal block has read, in one buffer."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.seen = 0
        self._read: Tensor | None = None  # (2, B, heads, room, d)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add those of new places, (B, heads, l, d): all keys, all values, and which of them
        each new place sees, (l, L); None: all of them."""
        new, first, count = torch.stack((k, v)), self.seen, k.shape[2]
        if self._read is None:
            self._read = new.new_empty((*new.shape[:3], self.room, new.shape[4]))
        self.seen += count
        self._read[..., first : self.seen, :] = new
        mask = None
        if count > 1:
            mask = torch.ones(count, self.seen, dtype=torch.bool, device=k.device).tril(first)
        keys, values = self._read[..., : self.seen, :].unbind(0)
        return keys, values, mask


def modulation(
    layer: Callable[[Tensor], Tensor], condition: Tensor | tuple[Tensor, ...], count: int
) -> list[Tensor]:
    """What a layer makes of a condition, in parts; of two, that which each position has."""
    if isinstance(condition, Tensor):
        return list(layer(condition).chunk(count, -1))
    noisy, clean, given = condition
    both = zip(layer(clean).chunk(count, -1), layer(noisy).chunk(count, -1), strict=True)
    return [torch.where(given, one, other) for one, other in both]  # never 6 d wide


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
