"""Language models that score text: how likely one finds what another model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.hub import unreachable_reason
from ..data.tokenizer_json import check_tokenizer
from ..registry import optional_module
from ..types import Tokens, as_count, as_tokens, check_choice, device_here
from .metric_result import KnownDistribution, MetricResult, exp_of, mean_of, ratio_of
from .released_protocol import RELEASED_CONTEXT, score_as_released
from .sequence_nll import autoregressive_nll

INSTALL = "pip install 'psidiff[judge]'"


class TextScore(NamedTuple):
    """-log p of a text, summed over its scored tokens; `cut`: only its beginning was scored."""

    nats: float
    tokens: int
    cut: bool = False


@runtime_checkable
class ScoringLM(Protocol):
    """Scores texts; `protocol` is plain data that says how."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> dict[str, Any]: ...

    def score(self, texts: Sequence[str]) -> list[TextScore]: ...


@runtime_checkable
class ReleasedScoringLM(ScoringLM, Protocol):
    """Also scores as the released code does: see `released_protocol.score_as_released`.

    context: how many tokens it reads at once. max_length: how many of its tokens a text is cut
    to, as many as the sample has; None: the context.
    """

    @property
    def context(self) -> int: ...

    def score_as_released(
        self, texts: Sequence[str], max_length: int | None = None
    ) -> list[TextScore]: ...


@dataclass(frozen=True)
class PsidiffScoringLM:
    """An autoregressive psidiff model as a judge, on its own codec's ids.

    It scores the first `length` tokens of a text, those it was trained on. An opening token
    that the codec does not know has probability 0, as it has in sampling.
    """

    model: Any
    batch_size: int = 32

    def __post_init__(self) -> None:
        as_count("batch_size", self.batch_size)
        if self.model.prior is not None or self.model.config.bos_id is None:
            raise ValueError("only an autoregressive model can judge: this one is a denoiser")

    @property
    def name(self) -> str:
        return self.model.config.name or "own"

    @property
    def protocol(self) -> dict[str, Any]:
        return {"max_length": self.model.config.length, "start": "bos_id"}

    @property
    def context(self) -> int:
        return min(RELEASED_CONTEXT, self.model.config.length or RELEASED_CONTEXT)

    def score(self, texts: Sequence[str]) -> list[TextScore]:
        return self._score(self._encode(texts))

    def score_as_released(
        self, texts: Sequence[str], max_length: int | None = None
    ) -> list[TextScore]:
        """By the protocol of the released code, on its own codec's ids."""
        rows, cut = self._encode(texts), max_length or self.context
        ends = (self.model.codec.end_id, cut, self.context)
        how = {"batch_size": self.batch_size, "device": self.model.device}
        return [
            TextScore(*each) for each in score_as_released(self._logits, rows, *ends, **how)
        ]

    def score_tokens(self, tokens: Tokens) -> list[TextScore]:
        """Of ids themselves, where `same_codec` says that they mean the same."""
        if self.model.codec is not None:
            tokens = as_tokens("tokens", tokens, self.model.codec.vocab_size)
        return self._score(tokens.tolist())

    def log_prob(self, tokens: Tokens) -> Tensor:
        """log p of each sequence, (B,)."""
        scored = self.score_tokens(tokens)
        if any(each.cut for each in scored):
            raise ValueError(
                f"the judge {self.name} knows sequences of {self.model.config.length} "
                f"tokens at most, got {tokens.shape[1]}"
            )
        return torch.tensor([-each.nats for each in scored], dtype=torch.float64)

    def ground_truth(self, samples: Tokens) -> KnownDistribution:
        """This model as the known distribution, its entropy estimated from its own samples."""
        entropy = mean_of("entropy", (-self.log_prob(samples)).tolist(), "nats")
        return KnownDistribution(self.log_prob, entropy, self.name, samples.shape[1])

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self.model.codec is None or self.model.codec.kind != "text":
            raise ValueError(f"the judge {self.name} has no codec of text: use score_tokens")
        _check_texts(texts, self.name)
        return [ids.tolist() for ids in self.model.codec.encode_all(texts)]

    def _score(self, ids: list[list[int]]) -> list[TextScore]:
        _check_texts(ids, self.name)
        start, limit = self.model.config.start_id, self.model.config.length
        how = {"batch_size": self.batch_size, "device": self.model.device}
        return _score_texts(self._logits, start, ids, limit, **how)

    def _logits(self, ids: Tensor) -> Tensor:
        logits, start = self.model.denoiser(ids), self.model.config.start_id
        if self.model.codec is not None and start >= self.model.codec.vocab_size:
            logits[..., start] = -torch.inf
        return logits


class LoadedLM(NamedTuple):
    """A causal LM of `transformers`, the token it reads first, and the most it reads."""

    tokenizer: Any
    network: Any
    start: int
    limit: int | None


@dataclass(frozen=True)
class CausalLM:
    """A causal language model of `transformers`: a folder, a name on the hub or a .gguf file.

    It reads its own ids of a text after its beginning-of-text token (or, like GPT-2, that of
    the end), and scores the first `max_length` of them; None: as many as it has positions.
    It is loaded when first asked, and once.
    """

    path_or_name: str | Path
    device: str = "auto"
    dtype: str | torch.dtype = "float32"
    batch_size: int = 8
    max_length: int | None = None

    def __post_init__(self) -> None:
        as_count("batch_size", self.batch_size)
        if self.max_length is not None:
            as_count("max_length", self.max_length, least=2)
        kind = getattr(torch, self._dtype_name, None)
        if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")

    @property
    def name(self) -> str:
        path = Path(self.path_or_name)
        return path.name if path.exists() else str(self.path_or_name)

    @property
    def protocol(self) -> dict[str, Any]:
        start = self._lm.tokenizer.convert_ids_to_tokens(self._lm.start)
        return {"max_length": self._lm.limit, "dtype": self._dtype_name, "start": start}

    def ready(self) -> CausalLM:
        """Loaded now, so that what is wrong with it is said before anything is made."""
        _ = self._lm
        return self

    def score(self, texts: Sequence[str]) -> list[TextScore]:
        rows, start, limit = self._encode(texts), self._lm.start, self._lm.limit
        return _score_texts(self._logits, start, rows, limit, **self._how)

    @property
    def context(self) -> int:
        return min(RELEASED_CONTEXT, self._lm.limit or RELEASED_CONTEXT)

    def score_as_released(
        self, texts: Sequence[str], max_length: int | None = None
    ) -> list[TextScore]:
        """By the protocol of the released code, whose numbers the papers print."""
        rows, end = self._encode(texts, special=True), self._lm.tokenizer.eos_token_id
        where = (end, max_length or self.context, self.context)
        found = score_as_released(self._logits, rows, *where, **self._how)
        return [TextScore(*each) for each in found]

    def features(self, texts: Sequence[str]) -> np.ndarray:
        """The last hidden state at the last token of each text, (N, d), as MAUVE reads it.

        Nothing comes before a text, but the opening token stands for one without tokens.
        """
        _, network, start, limit = self._lm
        rows = [torch.tensor(row[:limit] or [start]) for row in self._encode(texts)]
        found, how = [], {"output_hidden_states": True, "use_cache": False}
        with torch.no_grad():
            for first in range(0, len(rows), self.batch_size):
                some = rows[first : first + self.batch_size]
                ids = pad_sequence(some, batch_first=True).to(network.device)
                states = network(ids, **how).hidden_states[-1]
                last = torch.tensor([len(row) - 1 for row in some])
                found.append(states[torch.arange(len(ids)), last].float().cpu().numpy())
        return np.concatenate(found)

    @property
    def _how(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "device": self._lm.network.device}

    def _logits(self, ids: Tensor) -> Tensor:
        """No mask is needed: a causal network never sees the padding on the right."""
        return self._lm.network(ids, use_cache=False).logits

    def _encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Ids; special: with what the tokenizer adds to a text, which GPT-2's does not."""
        _check_texts(texts, self.name)
        read = self._lm.tokenizer(list(texts), add_special_tokens=special, verbose=False)
        return read["input_ids"]

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def _lm(self) -> LoadedLM:
        tokenizer, network = self._load()
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        start = next((i for i in known if i is not None), None)
        if start is None:
            raise ValueError(f"the judge {self.name} has no token that begins or ends a text")
        own = getattr(network.config, "max_position_embeddings", None)
        if own is not None and self.max_length is not None and self.max_length > own:
            raise ValueError(
                f"max_length must be at most the {own} positions of {self.name}, "
                f"got {self.max_length}"
            )
        limit = own if self.max_length is None else self.max_length
        return LoadedLM(tokenizer, network, start, limit)

    def _load(self) -> tuple[Any, Any]:
        """The tokenizer and the network."""
        needs = f"the judge {self.name} needs: {INSTALL}"
        transformers = optional_module("transformers", needs)
        place, inside = str(Path(self.path_or_name).expanduser()), dict[str, Any]()
        bare = {"trust_remote_code": False}  # else it asks, and a yes runs code
        if place.endswith(".gguf"):
            file = Path(place)
            place, inside = file.parent.as_posix(), {"gguf_file": file.name}
        silent = None if Path(place).exists() else unreachable_reason()
        how = inside | bare | ({"local_files_only": True} if silent else {})
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **how)
            if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
                check_tokenizer(backend.to_str())
            weights = {} if inside else {"use_safetensors": True}  # no pickles
            network = transformers.AutoModelForCausalLM.from_pretrained(place, **how, **weights)
        except Exception as error:  # of the hub, of the files, of the library: of many kinds
            if silent:
                raise ValueError(
                    f"there is no judge {self.path_or_name} here or in the Hub's cache, and "
                    f"{silent}: give the folder or .gguf file of a causal language model"
                ) from error
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"the judge {self.path_or_name} cannot be loaded: give the folder, .gguf file "
                f"or hub name of a causal language model, after {INSTALL}: {reason}"
            ) from error
        network.eval().requires_grad_(False)
        dtype = getattr(torch, self._dtype_name)
        return tokenizer, network.to(device=device_here(self.device), dtype=dtype)


def _check_texts(texts: Sequence[Any], name: str) -> None:
    if not len(texts):
        raise ValueError(f"there are no texts for the judge {name} to score")


def _score_texts(
    logits: Callable[[Tensor], Tensor],
    start: int | None,
    rows: Sequence[Sequence[int]],
    limit: int | None,
    **how: Any,
) -> list[TextScore]:
    """Scores of the first `limit` tokens of texts."""
    tokens = [torch.tensor(row[:limit], dtype=torch.long) for row in rows]
    found = autoregressive_nll(logits, start, tokens, **how)
    return [
        TextScore(each.nats, each.num_tokens, limit is not None and len(row) > limit)
        for each, row in zip(found, rows, strict=True)
    ]


def generative_perplexity(
    judge: ScoringLM,
    texts: Sequence[str],
    protocol: str = "exact",
    max_length: int | None = None,
) -> tuple[MetricResult, MetricResult]:
    """sum_i nats_i / sum_i tokens_i over texts, and its exp.

    Args:
        judge: the language model that scores them.
        texts: generated text.
        protocol: "exact": all tokens that the judge reads, after its opening token. "released":
            as the papers' numbers were made (`released_protocol.score_as_released`).
        max_length: of the released protocol: how many of the judge's tokens a text is cut to.
            The papers cut to the length of the model that wrote it; None: to the judge's own.
    Returns:
        The NLL in nats a token and the perplexity, with standard errors over texts: of a ratio
        of sums by its linearisation, of the exp by the delta method.
    Raises:
        ValueError: if there are no texts, or the judge has no released protocol.
    """
    check_choice("protocol", protocol, ("exact", "released"))
    if protocol == "exact":
        return perplexity_of(judge.score(texts), len(texts), judge)
    able = check_released(judge)
    how: dict[str, Any] = {"max_length": max_length or able.context, "context": able.context}
    how |= {"start": None, "convention": "released"}
    return perplexity_of(able.score_as_released(texts, max_length), len(texts), judge, how)


def check_released(judge: ScoringLM) -> ReleasedScoringLM:
    """The judge, if it can score by the released protocol."""
    if not isinstance(judge, ReleasedScoringLM):
        raise ValueError(
            f"the judge {judge.name} has no released protocol: it needs a context and "
            "score_as_released(texts, max_length)"
        )
    return judge


def perplexity_of(
    scored: Sequence[TextScore], texts: int, judge: ScoringLM, how: dict[str, Any] | None = None
) -> tuple[MetricResult, MetricResult]:
    """NLL and perplexity of the scores that a judge gave; `how` is added to its protocol."""
    made_by = {
        "judge": judge.name,
        **judge.protocol,
        **(how or {}),
        "texts": len(scored),
        "left_out": texts - len(scored),
        "tokens": sum(each.tokens for each in scored),
        "cut": sum(each.cut for each in scored),
    }
    nats, counts = [each.nats for each in scored], [each.tokens for each in scored]
    mean = ratio_of("generative NLL", nats, counts, "nats a token", made_by)
    return mean, exp_of("generative perplexity", mean)
