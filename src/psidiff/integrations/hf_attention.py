"""The attention functions of transformers, as functions like scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

_functions: Any = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


def attention_named(name: str, keep: list[Tensor] | None = None) -> Callable[..., Tensor]:
    """What `attn_implementation` names: sdpa, eager, or one that was registered.

    keep: a list that gets the weights (B, heads, L, L) of each call, if they are ever formed.
    """
    if name == "sdpa":
        return F.scaled_dot_product_attention
    if name == "eager":
        return partial(eager_attention, keep=keep)
    if name.startswith("paged|"):
        raise ValueError(
            f"attn_implementation={name} pages a cache, and a diffusion transformer has none: "
            "take sdpa or eager"
        )
    return partial(_registered, _functions[name])


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    keep: list[Tensor] | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, with the weights in float32.

    attn_mask is True where there is something to see, and broadcasts to (B, heads, L, L).
    """
    scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:]).tril().bool()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    weights = scores.softmax(-1).to(q.dtype)
    if keep is not None:
        keep.append(weights)
    return weights @ v


def _registered(
    function: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, is_causal: bool
) -> Tensor:
    """One of transformers' functions; it answers (B, L, heads, d) and weights."""
    layer = SimpleNamespace(is_causal=is_causal, num_key_value_groups=1, training=False)
    how = {"dropout": 0.0, "scaling": q.shape[-1] ** -0.5, "is_causal": is_causal}
    out, _ = function(layer, q, k, v, attn_mask, **how)
    return out.transpose(1, 2)
