"""A DiffusionGemma from a config: random, tiny, nothing to download."""

import torch


def tiny_gemma(vocab_size, canvas_length):
    from transformers import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
        DiffusionGemmaTextConfig,
    )

    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    text = DiffusionGemmaTextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=16,
        global_head_dim=16,
        num_global_key_value_heads=1,
        num_experts=2,
        top_k_experts=1,
        moe_intermediate_size=16,
        **small,
    )
    kind = {"model_type": "gemma4_vision", "hidden_size": 16, "num_hidden_layers": 1}
    config = DiffusionGemmaConfig(
        text_config=text,
        vision_config={**kind, "head_dim": 8, **small},
        canvas_length=canvas_length,
    )
    torch.manual_seed(0)
    return DiffusionGemmaForBlockDiffusion(config).eval()
