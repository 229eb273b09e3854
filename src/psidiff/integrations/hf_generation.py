"""Generation as transformers asks for it: GenerationConfig, lengths, streamers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model import Model
from ..sampling.plan import Step
from ..types import FREE, as_count

_TAKEN = (
    *("max_new_tokens", "max_length", "max_denoising_steps", "num_return_sequences"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "seed"),
)
_UNUSED = ("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "transformers_version")
_NEUTRAL = {
    **{"num_beams": 1, "num_beam_groups": 1, "early_stopping": False, "length_penalty": 1.0},
    **{"repetition_penalty": 1.0, "diversity_penalty": 0.0, "typical_p": 1.0, "min_length": 0},
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "top_h": 1.0},
    **{"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "remove_invalid_values": False},
    **{"encoder_repetition_penalty": 1.0, "renormalize_logits": False, "token_healing": False},
    **{"output_scores": False, "output_logits": False, "return_dict_in_generate": False},
    **{"output_attentions": False, "output_hidden_states": False, "guidance_scale": 1.0},
}
"""Settings of left-to-right generation, at values by which they change nothing."""


def generation_options(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of `generate`: those given, else those of a GenerationConfig.

    What do_sample and max_length mean is put in their place: top_k, max_new_tokens.
    """
    said = {} if config is None else config.to_diff_dict()
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        ignored = name in _UNUSED or name.startswith("_")
        if name not in _TAKEN and not ignored and value != _NEUTRAL.get(name, _NEUTRAL):
            raise ValueError(
                f"generation_config has {name}={value}, which text diffusion does not know: it "
                f"takes {', '.join(_TAKEN)}"
            )
    options = {name: said[name] for name in _TAKEN if name in said}
    options |= {name: value for name, value in given.items() if value is not None}
    if options.get("top_k") == 0:  # all tokens, as transformers writes it
        del options["top_k"]
    sampled = options.pop("do_sample", True)
    if not isinstance(sampled, bool):
        raise ValueError(f"do_sample must be true or false, got {sampled!r}")
    if not sampled:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if given.get(name) is not None:
                raise ValueError(
                    f"do_sample=False takes the most probable token: leave out {name}"
                )
            options.pop(name, None)
        options["top_k"] = 1  # the most probable token wherever one is predicted
    return options


def canvas(
    ids: Tensor | None, new: int | None, most: int | None, length: int | None, mask: int | None
) -> Tensor:
    """What is given, (B, L) on the CPU; -1 where free.

    Args:
        ids: the prompts (B, P), None: there is none.
        new: how many tokens follow them; None: `most` says so, or else the model's length.
        most: the number of tokens with the prompt, max_length.
        length: the model's; None: any.
        mask: an id that stands for a blank.
    """
    ids = torch.empty(1, 0, dtype=torch.long) if ids is None else ids
    if ids.ndim != 2:
        raise ValueError(f"input_ids must have shape (B, L), got {tuple(ids.shape)}")
    if new is None and most is not None:
        new = as_count("max_length", most) - ids.shape[1]
        if new < 0:
            raise ValueError(f"max_length={most} is below the prompt's {ids.shape[1]} tokens")
    if new is None:
        new = max((length or ids.shape[1]) - ids.shape[1], 0)
    given = F.pad(ids.cpu(), (0, as_count("max_new_tokens", new, least=0)), value=FREE)
    given = given if mask is None else given.masked_fill(given == mask, FREE)
    if not bool((given == FREE).any()):
        raise ValueError("there is nothing to generate: give max_new_tokens, or blanks")
    return given


class Streaming:
    """An `on_step` of `Model.sample`, which tells a streamer: put, put_draft, end.

    The prompt is put first, then every window when it is done. In between go drafts of the
    window as it is: as `value`, or as `logits` to streamers that take those. given (B, L)
    holds -1 where free.
    """

    def __init__(self, streamer: Any, given: Tensor, model: Model) -> None:
        self.streamer, self.model, self.given = streamer, model, given != FREE
        self.drafts = hasattr(streamer, "put_draft")
        self.takes_logits = bool(getattr(streamer, "_takes_logits", False))
        self.begin = self.end = _made(given)
        streamer.put(given[:, : self.begin].cpu())

    def __call__(self, i: int, step: Step, tokens: Tensor, routes: Tensor) -> None:
        end = _made(tokens)
        if end > self.end > self.begin:  # another window: the one before is done
            self._commit(tokens)
        self.end = end
        if self.drafts and self.takes_logits:
            logits = self._logits(tokens[:, :end], step)
            self.streamer.put_draft(logits=logits[:, self.begin - end :].cpu())
        elif self.drafts:
            self.streamer.put_draft(value=tokens[:, self.begin : end].cpu())

    def finish(self, tokens: Tensor) -> None:
        self.end = tokens.shape[1]
        self._commit(tokens)
        self.streamer.end()

    def _logits(self, tokens: Tensor, step: Step) -> Tensor:
        """log x_theta at what a step reached, in the last window."""
        given = self.given[:, : tokens.shape[1]].to(tokens.device)[..., None]
        level = torch.full(given.shape, step.alpha_s, device=tokens.device)
        last = slice(-(self.model.length or tokens.shape[1]), None)
        return self.model.denoiser(tokens[:, last], level.masked_fill(given, 1.0)[:, last])

    def _commit(self, tokens: Tensor) -> None:
        self.streamer.put(tokens[:, self.begin : self.end].cpu())
        self.begin = self.end


def _made(tokens: Tensor) -> int:
    """How many positions from the left have a token in every sample."""
    free = torch.as_tensor(tokens == FREE).any(0).nonzero()[:, 0]
    return int(free[0]) if len(free) else tokens.shape[1]
