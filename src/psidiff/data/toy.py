"""Toys: distributions small enough that the perfect denoiser can be computed.

Both give, for any prior and any level at each position, the exact leave-one-out denoiser
p(x_l | z without z_l), in float64. A mask, where the prior has one, is the last id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..process.prior import Prior, categorical
from ..types import Level, Probs, Tokens, check_float64, per_token

LikelihoodOf = Callable[[Tensor], Tensor]
"""Where tokens (B, L, N) are those of z -> the likelihood of z under each of the N cases."""

_TINY = 1e-300  # evidence that the data rules out leaves the distribution as it was


@dataclass(frozen=True)
class Joint:
    """Any distribution over sequences, by listing them: `sequences` (N, L), `weights` (N,)."""

    sequences: Tensor
    weights: Tensor
    num_tokens: int

    @classmethod
    def random(cls, num_tokens: int = 3, length: int = 3, seed: int = 0) -> Joint:
        """All sequences possible, a few of them likely."""
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.arange(num_tokens)] * length
        logits = torch.randn(num_tokens**length, generator=generator, dtype=torch.float64)
        return cls(torch.cartesian_prod(*ids), (1.5 * logits).softmax(0), num_tokens)

    @property
    def length(self) -> int:
        return self.sequences.shape[1]

    def denoiser(self, prior: Prior) -> ToyDenoiser:
        return ToyDenoiser(self, prior)

    def posterior(self, z: Tokens, likelihood_of: LikelihoodOf) -> Tensor:
        """p(x_l | z without z_l), (B, L, K), by summing over all sequences."""
        x = self.sequences.to(z.device)
        likelihood = likelihood_of(z[:, :, None] == x.T)  # (B, L, N)
        others = _product_of_others(likelihood) * self.weights.to(z.device) + _TINY
        share = others / others.sum(-1, keepdim=True)
        return torch.einsum("bln,nlk->blk", share, F.one_hot(x, self.num_tokens).to(share))


@dataclass(frozen=True)
class Chain:
    """A Markov chain over `length` tokens: `initial` (K,), `transition` (K, K), all above 0."""

    initial: Tensor
    transition: Tensor
    length: int
    alphabet: str = ""
    legal: Tensor | None = None  # (K, K), False where only a slip leads; None: all are legal

    def __post_init__(self) -> None:
        if not bool((self.initial > 0).all() and (self.transition > 0).all()):
            raise ValueError("a toy chain needs initial and transition probabilities above 0")

    @classmethod
    def random(
        cls, num_tokens: int = 24, length: int = 64, sharpness: float = 2.0, seed: int = 0
    ) -> Chain:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens + 1, num_tokens)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        probs = (sharpness * logits).softmax(-1)
        return cls(probs[0], probs[1:], length)

    @classmethod
    def syllables(cls, length: int = 64, slip: float = 1e-3) -> Chain:
        """Pronounceable nonsense: consonant, vowel, at times a closing consonant, a space.

        A reader sees at once what is wrong; `slip` is the chance of an illegal pair.
        """
        onsets, vowels, codas, space = "bcdfghjklmnprstvz", "aeiou", "nrst", " "
        alphabet = "abcdefghijklmnoprstuvz" + "y" + space
        number = {c: i for i, c in enumerate(alphabet)}
        weight = torch.full((len(alphabet), len(alphabet)), 0.0, dtype=torch.float64)

        def follow(first: str, second: str, share: float) -> None:
            for a in first:
                favourites = [1 + (7 * number[a] + 3 * number[b]) % 5 for b in second]
                for b, favour in zip(second, favourites, strict=True):
                    weight[number[a], number[b]] += (
                        share * favour**2 / sum(f**2 for f in favourites)
                    )

        follow(onsets, vowels, 0.97)
        follow(onsets, "y", 0.03)
        follow("y", space, 1.0)
        follow(vowels, onsets, 0.6)
        follow(vowels, codas, 0.15)
        follow(vowels, space, 0.25)
        follow(codas, space, 0.4)
        follow(space, onsets, 1.0)
        transition = weight / weight.sum(-1, keepdim=True)
        transition = (1 - slip) * transition + slip / len(alphabet)
        return cls(transition[number[space]], transition, length, alphabet, weight > 0)

    @property
    def num_tokens(self) -> int:
        return len(self.initial)

    def denoiser(self, prior: Prior) -> ToyDenoiser:
        return ToyDenoiser(self, prior)

    def posterior(self, z: Tokens, likelihood_of: LikelihoodOf) -> Tensor:
        """p(x_l | z without z_l), (B, L, K), by forward-backward."""
        likelihood = likelihood_of(z[..., None] == torch.arange(self.num_tokens).to(z))
        transition = self.transition.to(z.device)
        before = [self.initial.to(z.device).expand(len(z), -1)]
        after = [torch.ones_like(before[0])]
        for here in likelihood[:, :-1].unbind(1):
            before.append(_normalise((before[-1] * here) @ transition))
        for here in likelihood[:, 1:].flip(1).unbind(1):
            after.append(_normalise((after[-1] * here) @ transition.T))
        return _normalise(torch.stack(before, 1) * torch.stack(after[::-1], 1))

    def log_prob(self, tokens: Tokens) -> Tensor:
        """log p of each sequence, (B,)."""
        pairs = self.transition[tokens[:, :-1], tokens[:, 1:]]
        return self.initial[tokens[:, 0]].log() + pairs.log().sum(-1)

    def entropy(self) -> float:
        """The entropy of a sequence in nats."""
        first = torch.special.entr(self.initial).sum()
        return (first - (self.length - 1) * (self.pairs() * self.transition.log()).sum()).item()

    def illegal(self, tokens: Tokens) -> Tensor:
        """Neighbours that only a slip puts together, (B, L - 1)."""
        first, second = tokens[:, :-1], tokens[:, 1:]
        if self.legal is None:
            return torch.zeros_like(first, dtype=torch.bool)
        return ~self.legal[first, second]

    def pairs(self) -> Tensor:
        """How often each pair of neighbours occurs in a sequence, (K, K), summing to 1."""
        marginal, total = self.initial, torch.zeros_like(self.transition)
        for _ in range(self.length - 1):
            total = total + marginal[:, None] * self.transition
            marginal = marginal @ self.transition
        return total / (self.length - 1)

    def pair_divergence(self, tokens: Tokens) -> float:
        """KL in nats between the pairs in `tokens` and the chain's own."""
        numbers = (tokens[:, :-1] * self.num_tokens + tokens[:, 1:]).flatten()
        made = torch.bincount(numbers, minlength=self.num_tokens**2).double() / len(numbers)
        own = self.pairs().flatten()
        return (torch.xlogy(made, made) - torch.xlogy(made, own)).sum().item()

    def sample(self, num_samples: int, generator: Generator | None = None) -> Tokens:
        """Exact samples."""
        first = self.initial.expand(num_samples, 1, -1)
        tokens = [categorical(first, generator)]
        for _ in range(self.length - 1):
            tokens.append(categorical(self.transition[tokens[-1][:, 0]][:, None], generator))
        return torch.cat(tokens, 1)

    def text(self, tokens: Tensor, mask: str = "_") -> str:
        """One sequence as characters."""
        return "".join(self.alphabet[i] if i < len(self.alphabet) else mask for i in tokens)


@dataclass(frozen=True)
class ToyDenoiser:
    """log p(x_l | z without z_l) of a toy, exactly."""

    toy: Joint | Chain
    prior: Prior

    def __post_init__(self) -> None:
        num_tokens, mask_id = self.toy.num_tokens, self.prior.mask_id
        masks = 0 if mask_id is None else 1
        if self.prior.vocab_size != num_tokens + masks or mask_id not in (None, num_tokens):
            raise ValueError(
                f"a toy of {num_tokens} tokens needs a prior over {num_tokens + masks}"
                f"{', the mask last' if masks else ''}; got {self.prior}"
            )

    def __call__(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Probs:
        check_float64(z.device)
        pi = self.prior.probs(like=torch.zeros((), dtype=torch.float64, device=z.device))
        level = torch.as_tensor(per_token(alpha), dtype=torch.float64, device=z.device)
        level = level.expand(torch.broadcast_shapes(level.shape, (1, 1)))[..., None]
        x = self.toy.posterior(z, lambda seen: level * seen + (1 - level) * pi[z][..., None])
        x = F.pad(x, (0, self.prior.vocab_size - self.toy.num_tokens))
        clean = F.one_hot(z, self.prior.vocab_size).to(x)
        return torch.where((pi[z] == 0)[..., None], clean, x).log()  # where pi_z = 0, z is x


def perturbed(denoiser: Any, scale: float, seed: int = 0) -> Any:
    """A denoiser with the errors of a network: noise on its logits that depends on all of z.

    The same z gets the same error, so asking twice does not help; asking about another z does.
    """

    def log_x_theta(z: Tokens, alpha: Level, labels: Tensor | None = None) -> Probs:
        log_x = denoiser(z, alpha, labels)
        generator = torch.Generator().manual_seed(seed)
        width = log_x.shape[-1]
        basis = torch.randn(z.shape[1], width, 16, generator=generator, dtype=log_x.dtype)
        readout = torch.randn(z.shape[1], 16, width, generator=generator, dtype=log_x.dtype)
        place = torch.arange(z.shape[1])
        features = 3 * basis[place, z].sum(1) / math.sqrt(z.shape[1])
        error = torch.einsum("bf,lfk->blk", features.sin(), readout) / 4
        return (log_x + scale * error).log_softmax(-1)

    return log_x_theta


def _product_of_others(values: Tensor) -> Tensor:
    """The product over dimension 1 without the own entry, zeros allowed."""
    ones = torch.ones_like(values[:, :1])
    before = torch.cat((ones, values[:, :-1]), 1).cumprod(1)
    after = torch.cat((values[:, 1:], ones), 1).flip(1).cumprod(1).flip(1)
    return before * after


def _normalise(message: Tensor) -> Tensor:
    return message / message.sum(-1, keepdim=True)
