"""The transformer as a PreTrainedModel without a loss: AutoModel, embeddings, all states."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..models import Transformer
from ..models.embedding import Rotary, TokenEmbedding
from ..models.transformer import Norm, Output
from ..process import NoiseSchedule, Prior
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES
from ..types import Level, align_memory, as_count
from .hf_attention import attention_named
from .hf_config import PsidiffConfig

_transformers: Any = import_module("transformers")
PreTrainedModel: Any = _transformers.PreTrainedModel
_Output: Any = _transformers.modeling_outputs.BaseModelOutput


class PsidiffModel(PreTrainedModel):
    """A diffusion transformer without its loss; parameters have the names of released files.

    Example:
        >>> from psidiff.integrations.transformers import PsidiffConfig, PsidiffModel
        >>> sizes = {"hidden_size": 8, "num_blocks": 1, "num_heads": 2}
        >>> model = PsidiffModel(PsidiffConfig(vocab_size=9, **sizes))
        >>> model(torch.zeros(2, 5, dtype=torch.int64), alpha=0.5).last_hidden_state.shape
        torch.Size([2, 5, 8])
    """

    config_class = PsidiffConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012  # transformers reads a list

    def __init__(self, config: PsidiffConfig) -> None:
        super().__init__(config)
        if config.causal:
            raise ValueError("an autoregressive transformer is no masked LM")
        if config.vocab_size != self.prior.vocab_size:
            raise ValueError(
                f"vocab_size={config.vocab_size}, but the config's prior is of "
                f"{self.prior.vocab_size} tokens: give both, or call resize_token_embeddings"
            )
        self.backbone: Any = Transformer(**config.options)
        self.backbone.attention = attention_named(config._attn_implementation)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As ever, and with the numbers that the same parameters give without a file."""
        loaded = super().from_pretrained(*args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info
        for parameter in model.parameters():
            parameter.data = align_memory(parameter.data)
        return loaded

    @property
    def prior(self) -> Prior:
        with torch.device("cpu"):  # a model may be made on the meta device
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
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """What the output layer reads, (B, L, d); see `PsidiffForMaskedLM.forward`."""
        shown = (output_hidden_states, output_attentions)
        level = self._level(timesteps, alpha)
        hidden, recorded = self._hidden(input_ids, level, attention_mask, cond, *shown)
        out = _Output(last_hidden_state=hidden, **recorded)
        return self._returned(out, return_dict)

    def get_input_embeddings(self) -> TokenEmbedding:
        """The table of the tokens."""
        table: TokenEmbedding = self.backbone.vocab_embed
        return table

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Take the table of `value`; its name in files stays."""
        table, weight = self.get_input_embeddings(), cast(nn.Parameter, value.weight)
        size, width = weight.shape
        if width != table.embedding_dim:
            raise ValueError(f"embeddings must be {table.embedding_dim} wide, got {width}")
        table.embedding, table.num_embeddings = weight, size

    def get_output_embeddings(self) -> nn.Linear | None:
        """The output layer; None if it shares the table of the input."""
        return None if self.config.tied else self.backbone.output_layer.linear

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Take another output layer; a tied model has none."""
        if self.config.tied:
            raise ValueError("a tied model has no output layer: change its input embeddings")
        self.backbone.output_layer.linear = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        """As ever; the prior then has the new number of tokens too."""
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        size = as_count("new_num_tokens", size)
        if pad_to_multiple_of is not None:
            size += -size % as_count("pad_to_multiple_of", pad_to_multiple_of)
        resized = self.config.prior_of(size)
        table = super().resize_token_embeddings(size, None, mean_resizing)
        self.config.prior = PRIORS.to_dict(resized)
        if self.config.tied:
            bias = self.backbone.output_layer.bias
            more = bias.data.mean().expand(max(size - len(bias), 0))
            bias.data = torch.cat((bias.data[:size], more))
        return table

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **how: Any) -> None:
        """As ever: sdpa, eager, or a registered function."""
        super().set_attn_implementation(attn_implementation, *args, **how)
        self.backbone.attention = attention_named(self.config._attn_implementation)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether some blocks are computed again in the backward pass."""
        return any(block.checkpoint is not None for block in self.backbone.blocks)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Tensor] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """What transformers calls to switch it on and off."""
        for i, block in enumerate(self.backbone.blocks):
            chosen = enable and i % every_n_layers == 0
            block.checkpoint = gradient_checkpointing_func if chosen else None

    def _level(self, timesteps: Tensor | None, alpha: Level | None) -> Level:
        """alpha, from what is given."""
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

    def _hidden(
        self,
        input_ids: Tensor,
        level: Level,
        attention_mask: Tensor | None,
        cond: Tensor | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """What the output layer reads, and the states and weights that are asked for."""
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_attentions and config._attn_implementation != "eager":
            raise ValueError(
                "output_attentions needs attn_implementation=eager, got "
                f"{config._attn_implementation}"
            )
        states: list[Tensor] | None = [] if output_hidden_states else None
        weights: list[Tensor] | None = [] if output_attentions else None
        mask = None if attention_mask is None else attention_mask.bool()
        attention = None if weights is None else attention_named("eager", weights)
        hidden = self.backbone.hidden(
            input_ids, level, cond, mask, states=states, attention=attention
        )
        recorded = {"hidden_states": states, "attentions": weights}
        return hidden, {n: None if v is None else tuple(v) for n, v in recorded.items()}

    def _returned(self, out: Any, return_dict: bool | None) -> Any:
        """An output as it is, or as a tuple."""
        as_output = self.config.return_dict if return_dict is None else return_dict
        return out if as_output else out.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        """As the modules initialise themselves; what gates or speaks begins at zero."""
        if isinstance(module, nn.Linear):
            module.reset_parameters()
            if any(module is each for each in self._gates()):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)
        elif isinstance(module, TokenEmbedding):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
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
