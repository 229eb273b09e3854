"""Judges of text: how likely a language model finds what another one wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..types import Tokens, as_count, as_tokens
from .causal_lm import CausalLM, Released
from .known_distribution import Exact
from .metric_result import Measure, mean_of, ratio_of
from .token_nats import Scored, summed, token_nats


@runtime_checkable
class Judge(Protocol):
    """Scores texts; `protocol` is plain data that says how."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> dict[str, Any]: ...

    def score(self, texts: Sequence[str]) -> list[Scored]: ...


@dataclass(frozen=True)
class OwnLM:
    """An autoregressive psidiff model as a judge, on its own codec's ids.

    It scores the first `length` tokens of a text, those it was trained on. An opening token
    that the codec does not know has probability 0, as it has in sampling.
    """

    model: Any
    batch_size: int = 32

    def __post_init__(self) -> None:
        as_count("batch_size", self.batch_size)
        if self.model.prior is not None or "bos_id" not in self.model.config:
            raise ValueError("only an autoregressive model can judge: this one is a denoiser")

    @property
    def name(self) -> str:
        return str(self.model.config.get("name") or "own")

    @property
    def protocol(self) -> dict[str, Any]:
        return {"max_length": self.model.config.get("length"), "start": "bos_id"}

    def score(self, texts: Sequence[str]) -> list[Scored]:
        if self.model.codec is None or self.model.codec.kind != "text":
            raise ValueError(f"the judge {self.name} has no codec of text: use score_tokens")
        return self._score([ids.tolist() for ids in self.model.codec.encode_all(texts)])

    def score_tokens(self, tokens: Tokens) -> list[Scored]:
        """Of ids themselves, where `agree` says that they mean the same."""
        if self.model.codec is not None:
            tokens = as_tokens("tokens", tokens, self.model.codec.vocab_size)
        return self._score(tokens.tolist())

    def log_prob(self, tokens: Tokens) -> Tensor:
        """log p of each sequence, (B,)."""
        scored = self.score_tokens(tokens)
        if any(each.cut for each in scored):
            raise ValueError(
                f"the judge {self.name} knows sequences of {self.model.config['length']} "
                f"tokens at most, got {tokens.shape[1]}"
            )
        return torch.tensor([-each.nats for each in scored], dtype=torch.float64)

    def truth(self, samples: Tokens) -> Exact:
        """This model as the known distribution, its entropy estimated from its own samples."""
        entropy = mean_of("entropy", (-self.log_prob(samples)).tolist(), "nats")
        return Exact(self.log_prob, entropy, self.name, samples.shape[1])

    def _score(self, ids: list[list[int]]) -> list[Scored]:
        if not ids:
            raise ValueError(f"there are no texts for the judge {self.name} to score")
        start, limit = self.model.config["bos_id"], self.model.config.get("length")
        rows = [[start, *row[:limit]] for row in ids]
        nats = token_nats(self._logits, rows, self.batch_size, self.model.device)
        return [summed(n, limit, len(row)) for n, row in zip(nats, ids, strict=True)]

    def _logits(self, ids: Tensor, real: Tensor) -> Tensor:
        logits, start = self.model.denoiser(ids), self.model.config["bos_id"]
        if self.model.codec is not None and start >= self.model.codec.vocab_size:
            logits[..., start] = -torch.inf
        return logits


def agree(a: Any, b: Any) -> bool:
    """Whether two codecs give the same ids the same meaning."""
    return a is not None and b is not None and a.describe() == b.describe()


def generative_perplexity(
    judge: Judge, texts: Sequence[str], protocol: str = "psidiff"
) -> tuple[Measure, Measure]:
    """sum_i nats_i / sum_i tokens_i over texts, and its exp.

    Errors over texts: of a ratio of sums by its linearisation, of the exp by the delta method.
    protocol "released" reproduces that of the released code (see `Released`).
    """
    if protocol not in ("psidiff", "released"):
        raise ValueError(f"protocol must be 'psidiff' or 'released', got {protocol!r}")
    if protocol == "released":
        if not isinstance(judge, CausalLM):
            raise ValueError("the released protocol needs a CausalLM, such as gpt2-large")
        judge = Released(judge)
    scored = judge.score(texts)
    made_by = {
        "judge": judge.name,
        **judge.protocol,
        "texts": len(scored),
        "left_out": len(texts) - len(scored),
        "tokens": sum(each.tokens for each in scored),
        "cut": sum(each.cut for each in scored),
    }
    nats, counts = [each.nats for each in scored], [each.tokens for each in scored]
    mean = ratio_of("generative NLL", nats, counts, "nats a token", made_by)
    value = math.exp(mean.value)
    error = value * (mean.error or 0.0)
    return mean, Measure("generative perplexity", value, error, "", made_by)
