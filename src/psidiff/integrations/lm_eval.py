"""lm-evaluation-harness: its questions put to our models.

lm_eval.simple_evaluate("psidiff", "pretrained=shakespeare,num_samples=256", tasks=[...])
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.infill import before_blank, frame, text_ids
from ..evaluation.sequence_nll import (
    autoregressive_nll,
    estimate_mean,
    is_greedy_in_one_pass,
    sequence_nelbo,
)
from ..generate import until_end
from ..model import Model, load
from ..types import as_count, check_choice

INSTALLED = find_spec("lm_eval") is not None
NEEDS = "the harness needs: pip install 'psidiff[harness]'"
_AT_A_TIME = 256  # requests, of which all draws are kept
_MOST_PROBS = {"cuda": 2**28, "cpu": 2**25}  # probabilities in memory at a time
_LM: Any = import_module("lm_eval.api.model").LM if INSTALLED else object


class Margin(NamedTuple):
    """By how many nats the best answer to a question leads, and the error of that."""

    nats: float
    error: float


class PsidiffLM(_LM):
    """A model of ours as the harness sees one, registered there as "psidiff".

    `errors` has the standard error of every log-likelihood in the order of the answers,
    `margins` how far apart the two best answers to a question are; `summary` is both in a few
    numbers. Of an autoregressive model all is exact.

    Args:
        pretrained: a `Model`, or what `psidiff.load` takes.
        likelihood: "full": log p(context, continuation), between the codec's bos and eos if it
            has them, as in the paper. "suffix": log p(continuation | context), the context
            given clean. None: full; suffix for an autoregressive model.
        reduction: "sum", or "mean" over the scored tokens, as in the released code.
        num_samples: draws of (t, z_t) for each bound, an even number; the answers to a question
            share them.
        num_steps: steps of a sampler, for generation.
        kappa: its rule in words; "auto": what the model recommends.
        top_p: mass of the most probable tokens that it keeps.
        seed: of all draws.
        batch_size: sequences in a forward pass; None or "auto": what fits.
        max_batch_size: of these, at most; None: 64.
        device: where a model that is loaded runs; None: a GPU if there is one.
        dtype: of a model that is loaded.

    Raises:
        ValueError: if the harness is not installed, the model is not one of text, or a value is
            out of range.

    Example:
        >>> from psidiff.integrations.lm_eval import PsidiffLM
        >>> model = PsidiffLM("shakespeare", num_samples=256)  # doctest: +SKIP
        >>> model.protocol["likelihood"]  # doctest: +SKIP
        'full'
    """

    def __init__(
        self,
        pretrained: str | Path | Model,
        *,
        likelihood: str | None = None,
        reduction: str = "sum",
        num_samples: int = 1024,
        num_steps: int = 256,
        kappa: str = "auto",
        top_p: float | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
    ) -> None:
        if not INSTALLED:
            raise ValueError(NEEDS)
        super().__init__()
        if not isinstance(pretrained, Model):
            pretrained = load(pretrained, device or "auto", dtype)
        if pretrained.codec is None or pretrained.codec.kind != "text":
            raise ValueError("the harness asks in words, and this model has no codec of text")
        usual = "full" if pretrained.prior is not None else "suffix"
        self.model, self.codec = pretrained, pretrained.codec
        self.seed = as_count("seed", seed, least=0)
        self.likelihood, self.reduction = likelihood or usual, reduction
        check_choice("likelihood", self.likelihood, ("full", "suffix"))
        check_choice("reduction", reduction, ("sum", "mean"))
        self.num_samples = as_count("num_samples", num_samples, least=2)
        if self.num_samples % 2:
            raise ValueError(f"num_samples must be even, got {num_samples}")
        self.generation = dict[str, Any](num_steps=num_steps, kappa=kappa, top_p=top_p)
        self.batch_size = None if batch_size in (None, "auto") else int(str(batch_size))
        self.max_batch_size = as_count("max_batch_size", max_batch_size or 64)
        self.errors: list[float] = []
        self.margins: list[Margin] = []
        self._device = pretrained.device

    @property
    def max_length(self) -> int | None:
        """The most tokens that the model reads; None: it does not say."""
        return self.model.config.length

    @property
    def protocol(self) -> dict[str, Any]:
        """How the numbers are made, as plain data."""
        exact = self.model.prior is None
        return {
            "model": self.model.config.name or self.model.config.network,
            "likelihood": self.likelihood,
            "reduction": self.reduction,
            "num_samples": None if exact else self.num_samples,
            "seed": self.seed,
            "is_greedy": "exact" if exact else "argmax of one pass from pure noise",
        }

    def get_model_info(self) -> dict[str, Any]:
        """What the harness copies into its results."""
        return {"psidiff": self.protocol}

    def summary(self) -> dict[str, float | int]:
        """How sure the answers are. `unsure`: the share of questions whose two best answers
        are within two standard errors of their difference."""
        margins = self.margins or [Margin(0.0, 0.0)]
        return {
            "requests": len(self.errors),
            "mean_error": fmean(self.errors or [0.0]),
            "largest_error": max(self.errors, default=0.0),
            "questions": len(self.margins),
            "mean_margin": fmean(margin.nats for margin in margins),
            "mean_margin_error": fmean(margin.error for margin in margins),
            "unsure": fmean(margin.nats < 2 * margin.error for margin in margins),
        }

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is_greedy) of each (context, continuation).

        is_greedy: every token of the continuation is the likeliest. A diffusion model is asked
        once, with pure noise in place of the continuation, as the released code does.
        """
        tokens = [self._tokenize(*request.args) for request in requests]
        found: list[Any] = [None] * len(requests)
        errors = [0.0] * len(requests)
        for questions in _pieces(requests):
            numbers = [i for question in questions for i in question]
            labels = [_label(requests[i]) for i in numbers]
            values, likeliest = self._score([tokens[i] for i in numbers], labels)
            draws = dict(zip(numbers, values, strict=True))
            for i, greedy in zip(numbers, likeliest, strict=True):
                nats, errors[i] = estimate_mean(draws[i])
                found[i] = (-nats, greedy)
                self.cache_hook.add_partial("loglikelihood", requests[i].args, found[i])
            for question in questions:
                if len(question) > 1:
                    self.margins.append(_margin([draws[i] for i in question]))
        self.errors += errors
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of each document: the sum over pieces of at most the model's length.

        A piece knows nothing of the others. If rows of the model are framed, each stands
        between bos and eos, which are given.
        """
        found = []
        for request in requests:
            (text,) = request.args
            rows, scored = self._split(text)
            labels = [(text, number) for number in range(len(rows))]
            parts = [estimate_mean(values) for values in self._values(rows, scored, labels)]
            found.append(-math.fsum(part.mean for part in parts))
            self.errors.append(math.hypot(*(part.stderr for part in parts)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its `until`, the end of the text, or
        max_gen_toks tokens.

        The answer is a function of the request and the seed; who asks the same several times
        gets several samples. Without do_sample and temperature only the likeliest token of
        x_theta is ever drawn.
        """
        alike = defaultdict(list)
        for i, request in enumerate(requests):
            alike[repr(request.args)].append(i)
        found = [""] * len(requests)
        for numbers in alike.values():
            context, options = requests[numbers[0]].args
            texts = self._continuations(context, options, len(numbers))
            for i, text in zip(numbers, texts, strict=True):
                found[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _tokenize(self, context: str, continuation: str) -> tuple[Tensor, Tensor]:
        """The tokens of a request, bos first, and which of them are the continuation's.

        Spaces at the end of the context belong to the continuation, as in the harness.
        """
        opening, closing = frame(self.codec, True)
        ids = torch.cat((opening, text_ids(self.codec, context + continuation)))
        front = len(opening) + len(text_ids(self.codec, context.rstrip()))
        length = len(ids) + (len(closing) if self.likelihood == "full" else 0)
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"a request has {length} tokens, more than the {self.max_length} of the model: "
                f"{(context + continuation)[:40]!r}..."
            )
        if front >= len(ids):
            raise ValueError(f"the continuation {continuation!r} has no tokens of its own")
        return ids, torch.arange(len(ids)) >= front

    def _score(
        self, tokens: list[tuple[Tensor, Tensor]], labels: list[Any]
    ) -> tuple[list[Tensor], list[bool]]:
        """Nats of each request at each draw, and whether its continuation is the likeliest."""
        rows, scored = (list(each) for each in zip(*tokens, strict=True))
        if self.model.prior is None:
            exact = self._ask(autoregressive_nll, rows, scored, labels)
            likeliest = [each.is_greedy for each in exact]
        else:
            likeliest = self._ask(is_greedy_in_one_pass, rows, scored, labels)
        full = self.likelihood == "full"
        if full:
            closing = frame(self.codec, True)[1]
            rows = [torch.cat((row, closing)) for row in rows]
            scored = [torch.ones_like(row, dtype=torch.bool) for row in rows]
        values = self._values(rows, None if full else scored, labels)
        if self.reduction == "mean":
            values = [each / mark.sum() for each, mark in zip(values, scored, strict=True)]
        return values, likeliest

    def _values(
        self, rows: list[Tensor], scored: list[Tensor] | None, labels: list[Any]
    ) -> list[Tensor]:
        """Nats of rows at each draw; an exact value stands for two draws that agree."""
        if self.model.prior is None:
            exact = self._ask(autoregressive_nll, rows, scored, labels)
            return [torch.full((2,), each.nats, dtype=torch.float64) for each in exact]
        return self._ask(sequence_nelbo, rows, scored, labels, draws=self.num_samples)

    def _ask(
        self, function: Any, rows: list[Tensor], scored: Any, labels: list[Any], **options: Any
    ) -> list[Any]:
        """What `function` says of the model at these rows, as many at a time as fit."""
        model, size = self.model, self.batch_size
        if size is None:
            most = _MOST_PROBS.get(model.device.type, _MOST_PROBS["cpu"])
            longest = max([1, *map(len, rows)])
            size = max(1, min(self.max_batch_size, most // ((model.vocab_size or 1) * longest)))
        options |= {"scored": scored, "batch_size": size, "device": model.device}
        if model.prior is None:
            return function(model.denoiser, model.config.start_id, rows, **options)
        options |= {"groups": labels, "seed": self.seed}
        return function(model.denoiser, model.prior, model.schedule, rows, **options)

    def _split(self, text: str) -> tuple[list[Tensor], list[Tensor]]:
        """A document as rows, and which of their tokens are its own."""
        opening, closing = frame(self.codec, self.model.config.framed)
        ends = (len(opening), len(closing))
        ids = text_ids(self.codec, text)
        size = max((self.max_length or len(ids)) - sum(ends), 1)
        parts = ids.split(size)
        rows = [torch.cat((opening, part, closing)) for part in parts]
        return rows, [F.pad(torch.ones_like(part, dtype=torch.bool), ends) for part in parts]

    def _continuations(self, context: str, options: dict[str, Any], count: int) -> list[str]:
        most = as_count("max_gen_toks", options.get("max_gen_toks", 256))
        heat = float(options.get("temperature") or 0.0)
        sampled = options.get("do_sample", heat > 0)
        how: dict[str, Any] = {"temperature": heat or 1.0} if sampled else {"top_k": 1}
        opening = frame(self.codec, bool(context) and self.model.config.framed)[0]
        text = before_blank(self.codec, context)
        front = len(opening) + len(text_ids(self.codec, text))
        row = 0 if self.model.prior is None else self.max_length or 0  # it knows whole rows
        made = self.model.sample(
            count,
            prompt=context or None,
            seed=self.seed,
            length=max(front + most, row),
            split=False,
            **self.generation,
            **how,
        )
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        made_tokens = made.tokens[:, front : front + most].cpu()
        return [self._text(row, until, context[len(text) :]) for row in made_tokens]

    def _text(self, tokens: Tensor, until: Sequence[str], before: str) -> str:
        """Tokens up to the end of the text, in words up to the first of `until`, and without
        the space `before` them that their first one may bring."""
        made, _ = until_end(tokens, self.codec.end_id, prompted=True)
        text = self.codec.decode(made).removeprefix(before)
        cuts = [text.find(stop) for stop in until if stop and stop in text]
        return text[: min(cuts, default=len(text))]


if INSTALLED:
    import_module("lm_eval.api.registry").register_model("psidiff")(PsidiffLM)


def _label(request: Any) -> Any:
    """What the answers to one question have in common, whatever else is asked."""
    return repr(request.doc) if request.doc else request.args[0]


def _pieces(requests: Sequence[Any]) -> Iterator[list[list[int]]]:
    """Questions, each as the numbers of its requests, so many requests at a time."""
    questions = defaultdict(list)
    for i, request in enumerate(requests):
        questions[request.task_name, request.doc_id, _label(request)].append(i)
    piece: list[list[int]] = []
    for question in questions.values():
        piece.append(question)
        if sum(map(len, piece)) >= _AT_A_TIME:
            yield piece
            piece = []
    if piece:
        yield piece


def _margin(draws: Sequence[Tensor]) -> Margin:
    """Common random numbers make the error of a difference small: it is taken draw by draw."""
    best, second = sorted(draws, key=lambda values: float(values.mean()))[:2]
    return Margin(*estimate_mean(second - best))
