"""Our transformer as a model of transformers: AutoModelForMaskedLM, AutoModel, Trainer.

import psidiff.integrations.transformers
model = AutoModelForMaskedLM.from_pretrained(folder)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..data.codec import Codec, codec_from
from ..model import Model
from ..model_config import ModelConfig
from ..models import Parameterized
from ..process.nelbo import integrand
from ..types import FREE, Level, as_count, working_dtype
from .hf_collator import IGNORED, DataCollatorForDiffusion
from .hf_config import PsidiffConfig, PsidiffTokenizer, tokenizer_of
from .hf_generation import Streaming, canvas, generation_options
from .hf_model import PsidiffModel

_transformers: Any = import_module("transformers")
__all__ = [
    "DataCollatorForDiffusion",
    "PsidiffConfig",
    "PsidiffForMaskedLM",
    "PsidiffModel",
    "PsidiffTokenizer",
    "tokenizer_of",
]
_Output: Any = _transformers.modeling_outputs.MaskedLMOutput


class PsidiffForMaskedLM(PsidiffModel):
    """A diffusion transformer with its loss and its generation.

    Example:
        >>> import psidiff
        >>> from psidiff.integrations.transformers import PsidiffForMaskedLM
        >>> model = PsidiffForMaskedLM.from_native(psidiff.load("shakespeare", device="cpu"))
        >>> model.generate(max_length=16, max_denoising_steps=4, seed=0).shape
        torch.Size([1, 16])
    """

    accepts_loss_kwargs = True  # num_items_in_batch

    @classmethod
    def from_native(cls, model: Model) -> PsidiffForMaskedLM:
        """A model of ours; the two share their parameters."""
        with torch.device("meta"):
            made = cls(PsidiffConfig.of(model))
        made.backbone = model.network
        return made.eval()

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

    def forward(  # type: ignore[override]  # labels stand where transformers has them
        self,
        input_ids: Tensor,
        timesteps: Tensor | None = None,
        attention_mask: Tensor | None = None,
        alpha: Level | None = None,
        cond: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Logits (B, L, K) of noisy tokens.

        timesteps   sigma = -log alpha, (B,) or (B, L), as hub models of this kind take it
        alpha       the level itself, instead
        cond        classes (B,)
        labels      clean tokens, -100 where unknown: the loss is the integrand of the NELBO at
                    this level, the mean over tokens, in nats; it needs the level, even if the
                    network does not
        output_hidden_states    what each block and the output layer reads, (B, L, d) each
        output_attentions       weights of each block (B, heads, L, L), of eager attention
        num_items_in_batch      the loss is the sum over tokens by this number instead
        """
        if labels is not None and timesteps is None and alpha is None:
            raise ValueError(
                "a loss is that of a noise level: give timesteps = -log(alpha), or alpha, with "
                "labels (DataCollatorForDiffusion draws both)"
            )
        shown = (output_hidden_states, output_attentions)
        level = self._level(timesteps, alpha)
        hidden, recorded = self._hidden(input_ids, level, attention_mask, cond, *shown)
        logits, loss = self.backbone.head(hidden), None
        if labels is not None:
            exact = level if timesteps is None else _exact_level(timesteps)
            loss = self._loss(input_ids, labels, logits, exact, num_items_in_batch)
        out = _Output(loss=loss, logits=logits, **recorded)
        return self._returned(out, return_dict)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        generation_config: Any = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        max_denoising_steps: int | None = None,
        num_return_sequences: int | None = None,
        do_sample: Any = None,
        attention_mask: Tensor | None = None,
        cond: Any = None,
        seed: int | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Tensor:
        """Token ids (B, L), the prompt among them.

        input_ids             (B, P); -1 and the mask are blanks to fill
        generation_config     a GenerationConfig; what is given beside it comes first
        max_new_tokens        None: as max_length says, or else up to the model's length
        max_length            how many tokens, with the prompt
        max_denoising_steps   None: 256
        do_sample             False: the most probable token wherever one is predicted
        seed                  None: from torch's global generator
        streamer              its put gets the prompt and what is done, its put_draft every step
        options               those of `psidiff.Model.sample`: kappa, top_p, temperature, ...

        The network is left in eval mode.
        """
        named = {"max_new_tokens": max_new_tokens, "max_length": max_length, "seed": seed}
        named |= {"num_return_sequences": num_return_sequences, "do_sample": do_sample}
        named |= {"max_denoising_steps": max_denoising_steps}
        options = generation_options(generation_config, options | named)
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("prompts must be of one length, without padding")
        lengths = (options.pop("max_new_tokens", None), options.pop("max_length", None))
        given = canvas(input_ids, *lengths, self.config.length, self.prior.mask_id)
        count = as_count("num_return_sequences", options.pop("num_return_sequences", 1))
        given, model = given.repeat_interleave(count, 0), self.native()
        if "seed" not in options:
            options["seed"] = int(torch.randint(2**62, ()))
        streaming = None if streamer is None else Streaming(streamer, given, model)
        made = model.sample(
            len(given),
            options.pop("max_denoising_steps", 256),
            labels=cond,
            length=given.shape[1],
            infill=None if bool((given == FREE).all()) else given.cpu(),
            batch_size=len(given),
            on_step=streaming,
            split=False,
            **options,
        ).tokens
        if streaming is not None:
            streaming.finish(made)
        return made

    def _loss(
        self, z: Tensor, labels: Tensor, logits: Tensor, level: Level, count: Any
    ) -> Tensor:
        """The integrand of the NELBO, the mean over the tokens that are known; 0 if none is."""
        alpha = torch.as_tensor(level, device=z.device)
        alpha = alpha if alpha.ndim else alpha.expand(len(z), 1, 1)
        denoiser = Parameterized(lambda *_: logits, self.prior, self.config.predicts)
        schedule, known = self.schedule, labels != IGNORED
        x = torch.where(known, labels, z)
        slope = schedule.dalpha(schedule.time(alpha))
        slope = torch.where(known[..., None], slope, 0.0)  # nothing is learnt elsewhere
        nats = integrand(self.prior, z, x, denoiser(z, alpha), alpha, slope)
        total = torch.where(known, nats, 0.0).sum()
        return total / (known.sum().clamp(min=1) if count is None else count)


def _exact_level(timesteps: Tensor) -> Tensor:
    """alpha of sigma (B,) or (B, L), with digits enough for 1 - alpha."""
    sigma = torch.as_tensor(timesteps)
    level = sigma.to(working_dtype(sigma.device)).neg().exp()
    return level[..., None] if level.ndim == 2 else level.reshape(-1, 1, 1)


_transformers.AutoConfig.register("psidiff", PsidiffConfig, exist_ok=True)
_transformers.AutoModel.register(PsidiffConfig, PsidiffModel, exist_ok=True)
_transformers.AutoModelForMaskedLM.register(PsidiffConfig, PsidiffForMaskedLM, exist_ok=True)
_transformers.AutoTokenizer.register(
    PsidiffConfig, fast_tokenizer_class=PsidiffTokenizer, exist_ok=True
)
