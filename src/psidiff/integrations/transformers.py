"""Our transformer as a model of transformers: AutoModelForMaskedLM, generation with streamers.

import psidiff.integrations.transformers
model = AutoModelForMaskedLM.from_pretrained(folder)
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.codec import Codec, codec_from
from ..model import Model
from ..model_config import ModelConfig
from ..models import Parameterized, Transformer
from ..models.embedding import Rotary, TokenEmbedding
from ..models.transformer import Norm, Output
from ..process import NoiseSchedule, Prior
from ..process.nelbo import integrand
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES
from ..sampling.plan import Step
from ..types import FREE, Level, align_memory, as_count
from .hf_config import PsidiffConfig, tokenizer_of

_transformers: Any = import_module("transformers")
__all__ = ["PsidiffConfig", "PsidiffForMaskedLM", "tokenizer_of"]
PreTrainedModel: Any = _transformers.PreTrainedModel
_Output: Any = _transformers.modeling_outputs.MaskedLMOutput
_IGNORED = -100  # labels that transformers leaves out of a loss


class PsidiffForMaskedLM(PreTrainedModel):
    """A diffusion transformer; its parameters have the names of the released checkpoints."""

    config_class = PsidiffConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012  # transformers reads a list

    def __init__(self, config: PsidiffConfig) -> None:
        super().__init__(config)
        if config.causal:
            raise ValueError("an autoregressive transformer is no masked LM")
        self.backbone: Any = Transformer(**config.options)
        self.post_init()

    @classmethod
    def from_native(cls, model: Model) -> PsidiffForMaskedLM:
        """A model of ours; the two share their parameters."""
        with torch.device("meta"):
            made = cls(PsidiffConfig.of(model))
        made.backbone = model.network
        return made.eval()

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As ever, and with the numbers that the same parameters give without a file."""
        loaded = super().from_pretrained(*args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info
        for parameter in model.parameters():
            parameter.data = align_memory(parameter.data)
        return loaded

    def native(self, codec: Codec | None = None) -> Model:
        """This as a model of ours, with the same parameters; the network is in eval mode.

        codec: what its tokens mean, where the config does not say.
        """
        config = self.config
        if codec is None and config.codec is not None:
            codec = codec_from(config.codec)
        described = {name: getattr(config, name) for name in ("options", "predicts", "length")}
        described |= {"network": "transformer", **config.card}
        denoiser = Parameterized(self.backbone, self.prior, config.predicts).eval()
        card = ModelConfig.from_dict(described)
        return Model(denoiser, self.prior, self.schedule, codec, card)

    @property
    def prior(self) -> Prior:
        return PRIORS.from_dict(self.config.prior)

    @property
    def schedule(self) -> NoiseSchedule:
        return SCHEDULES.from_dict(self.config.schedule)

    def forward(
        self,
        input_ids: Tensor,
        timesteps: Tensor | None = None,
        attention_mask: Tensor | None = None,
        alpha: Level | None = None,
        cond: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, L, K) of noisy tokens.

        timesteps   sigma = -log alpha, (B,) or (B, L), as hub models of this kind take it
        alpha       the level itself, instead
        cond        classes (B,)
        labels      clean tokens, -100 where unknown: the loss is the integrand of the NELBO at
                    this level, the mean over tokens, in nats
        """
        level = self._level(timesteps, alpha)
        mask = None if attention_mask is None else attention_mask.bool()
        hidden = self.backbone.hidden(input_ids, level, cond, mask)
        logits = self.backbone.head(hidden)
        loss = None if labels is None else self._loss(input_ids, labels, logits, level)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        shown = (hidden,) if output_hidden_states else None
        out = _Output(loss=loss, logits=logits, hidden_states=shown)
        as_output = self.config.return_dict if return_dict is None else return_dict
        return out if as_output else out.to_tuple()

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        max_denoising_steps: int = 256,
        num_return_sequences: int = 1,
        attention_mask: Tensor | None = None,
        cond: Any = None,
        seed: int | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Tensor:
        """Token ids (B, L), the prompt among them.

        input_ids        (B, P); -1 and the mask are blanks to fill
        max_new_tokens   None: up to the model's length
        seed             None: from torch's global generator
        streamer         its put gets the prompt and what is done, its put_draft every step
        options          those of `psidiff.Model.sample`: kappa, top_p, temperature, ...

        The network is left in eval mode.
        """
        model, count = self.native(), as_count("num_return_sequences", num_return_sequences)
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("prompts must be of one length, without padding")
        given = self._canvas(input_ids, max_new_tokens).repeat_interleave(count, 0)
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        streaming = None if streamer is None else _Streaming(streamer, given, model)
        free = bool((given == FREE).all())
        made = model.sample(
            len(given),
            max_denoising_steps,
            seed=seed,
            labels=cond,
            length=given.shape[1],
            infill=None if free else given.cpu(),
            batch_size=len(given),
            on_step=streaming,
            split=False,
            **options,
        ).tokens
        if streaming is not None:
            streaming.finish(made)
        return made

    def _canvas(self, input_ids: Tensor | None, new: int | None) -> Tensor:
        """What is given, (B, L); -1 where free."""
        ids = torch.empty(1, 0, dtype=torch.long) if input_ids is None else input_ids
        if ids.ndim != 2:
            raise ValueError(f"input_ids must have shape (B, L), got {tuple(ids.shape)}")
        if new is None:
            new = max((self.config.length or ids.shape[1]) - ids.shape[1], 0)
        given = F.pad(ids.cpu(), (0, as_count("max_new_tokens", new, least=0)), value=FREE)
        mask = self.prior.mask_id
        given = given if mask is None else given.masked_fill(given == mask, FREE)
        if not bool((given == FREE).any()):
            raise ValueError("there is nothing to generate: give max_new_tokens, or blanks")
        return given

    def _level(self, timesteps: Tensor | None, alpha: Level | None) -> Level:
        if timesteps is not None and alpha is not None:
            raise ValueError("give timesteps or alpha, not both")
        if timesteps is not None:
            level = torch.as_tensor(timesteps).float().neg().exp()
            return level[..., None] if level.ndim == 2 else level.reshape(-1, 1, 1)
        if alpha is None and self.config.time_conditioning:
            raise ValueError(
                "this model is told the noise level: give timesteps = -log(alpha), or alpha"
            )
        return 1.0 if alpha is None else alpha

    def _loss(self, z: Tensor, labels: Tensor, logits: Tensor, level: Level) -> Tensor:
        """The integrand of the NELBO, the mean over the tokens that are known."""
        alpha = torch.as_tensor(level, device=z.device)
        alpha = alpha if alpha.ndim else alpha.expand(len(z), 1, 1)
        denoiser = Parameterized(lambda *_: logits, self.prior, self.config.predicts)
        schedule, known = self.schedule, labels != _IGNORED
        nats = integrand(
            self.prior,
            z,
            labels.masked_fill(~known, 0),
            denoiser(z, alpha),
            alpha,
            schedule.dalpha(schedule.time(alpha)),
        )
        return nats[known].mean()

    def _init_weights(self, module: nn.Module) -> None:
        """As the modules initialise themselves; what gates or speaks begins at zero."""
        if isinstance(module, nn.Linear):
            module.reset_parameters()
            if any(module is each for each in self._gates()):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, TokenEmbedding):
            nn.init.kaiming_uniform_(module.embedding, a=math.sqrt(5))
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            if not getattr(module.inv_freq, "_is_hf_initialized", False):  # not from a file
                module.inv_freq.copy_(Rotary(2 * len(module.inv_freq)).inv_freq)
        elif isinstance(module, Output) and self.config.tied:
            nn.init.zeros_(module.bias)

    def _gates(self) -> list[nn.Module]:
        ends = ("adaLN_modulation", "output_layer.linear")
        return [module for name, module in self.named_modules() if name.endswith(ends)]


class _Streaming:
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


_transformers.AutoConfig.register("psidiff", PsidiffConfig, exist_ok=True)
_transformers.AutoModelForMaskedLM.register(PsidiffConfig, PsidiffForMaskedLM, exist_ok=True)
