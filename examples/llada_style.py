"""A language model of the LLaDA kind: masks, a prompt, an answer block by block.

python examples/llada_style.py
python examples/llada_style.py --model GSAI-ML/LLaDA-8B-Instruct --mask-id 126336 "Why is ..."

Without --model a tiny Llama with random weights that looks both ways is made from a config:
nothing is downloaded, and what it writes means nothing. That network then also runs in the
stock LLaDA2Pipeline of diffusers with our scheduler, as LLaDA2 models do.
Needs: pip install 'psidiff[transformers,diffusers]'
"""

import argparse

import torch
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import psidiff
from psidiff.process import LogLinear, Masked


class BothWays(torch.nn.Module):
    """A Llama in which every token sees every other, as LLaDA's networks are built."""

    def __init__(self, config):
        super().__init__()
        self.llama, self.config = LlamaForCausalLM(config), config

    @property
    def device(self):
        return self.llama.device

    @property
    def dtype(self):
        return self.llama.dtype

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        batch, length = input_ids.shape
        seen = torch.zeros(batch, 1, length, length, device=input_ids.device)
        if attention_mask is not None:
            hidden = attention_mask[:, None, None, :] == 0
            seen = seen.masked_fill(hidden, torch.finfo(seen.dtype).min)
        return self.llama(input_ids, attention_mask=seen, position_ids=position_ids)


def tiny(vocab_size=64):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return BothWays(LlamaConfig(vocab_size=vocab_size, **size, **heads)).eval()


def answer(model, prompt, length, block, **options):
    """The blanks of one block at a time; all before it is given, all after it is not there."""
    tokens = prompt
    for _ in range(0, length, block):
        blanks = torch.full((len(prompt), block), -1)
        tokens = model.sample(
            len(prompt), infill=torch.cat((tokens.cpu(), blanks), 1), **options
        ).tokens
    return tokens[:, prompt.shape[1] :][:, :length]


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--model", help="a folder, or an id on the Hub; its own code is run")
    parser.add_argument("--mask-id", type=int, default=63)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="for each block")
    asked = parser.parse_args(arguments)
    if asked.model is None:
        network, tokenizer = tiny(), None
        prompt = torch.tensor([[ord(c) % 63 for c in asked.prompt]])
    else:
        network = AutoModel.from_pretrained(asked.model, trust_remote_code=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(asked.model, trust_remote_code=True)
        chat = [{"role": "user", "content": asked.prompt}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
    show = (lambda row: row.tolist()) if tokenizer is None else tokenizer.decode

    # K is the width of the logits, which may be padded beyond the tokenizer; the mask is a
    # token in the middle of it.
    vocab_size = network.config.vocab_size
    model = psidiff.wrap(
        lambda z: network(z).logits, Masked(vocab_size, asked.mask_id), LogLinear(), time=None
    )
    made = {}
    for name, options in {
        "low-confidence remasking, LLaDA's own decoder": {"predictor": "confident:argmax"},
        "ancestral": {"kappa": "ancestral"},
        "Psi, masking again with sigma = .05": {"kappa": "cap:0.05"},
    }.items():
        made[name] = answer(
            model, prompt, asked.length, asked.block, num_steps=asked.steps, **options
        )
        print(f"{name}:\n  {show(made[name][0])}")

    if asked.model is None:
        made["pipeline"] = in_the_pipeline(network, prompt, asked)
        print(f"the same network in diffusers' LLaDA2Pipeline:\n  {show(made['pipeline'][0])}")
    return made


def in_the_pipeline(network, prompt, asked):
    from diffusers import LLaDA2Pipeline

    from psidiff.integrations.diffusers import PsiScheduler

    pipe = LLaDA2Pipeline(network, PsiScheduler(kappa="cap:0.05", temperature=1.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        input_ids=prompt,
        gen_length=asked.length,
        block_length=asked.block,
        num_inference_steps=asked.steps,
        mask_token_id=asked.mask_id,
        generator=torch.Generator().manual_seed(0),
        output_type="seq",
    ).sequences


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(str(error)) from None
