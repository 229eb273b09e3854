"""A masked LM of Hugging Face, sampled as what it is: a denoiser of masked diffusion.

python examples/foreign_masked_lm.py
python examples/foreign_masked_lm.py --model bert-base-uncased "the [MASK] of [MASK] is paris ."

Without --model a tiny BERT with random weights is made from a config: nothing is downloaded,
and what it writes means nothing. Needs: pip install 'psidiff[transformers]'
"""

import argparse

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
)

import psidiff
from psidiff.data.tokenizers import Subwords
from psidiff.process import LogLinear, Masked

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a of is in paris rome capital city old ."


def tiny():
    """A BERT of sixteen words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(WORDS.split())}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "mask")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=len(words), num_attention_heads=2, **size)
    return BertForMaskedLM(config).eval(), tokenizer


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", default="the [MASK] of [MASK] is [MASK] .")
    parser.add_argument("--model", help="a masked LM, by folder or by its id on the Hub")
    parser.add_argument("--kappa", default="cap:0.1", help="how much is masked again")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    asked = parser.parse_args(arguments)
    if asked.model is None:
        network, tokenizer = tiny()
    else:
        network = AutoModelForMaskedLM.from_pretrained(asked.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(asked.model)

    # The whole adapter: tokens in, logits out. A BERT is told no noise level (time=None), and
    # at a mask p(x | z) is p(x | z without that position), so there is nothing to convert.
    model = psidiff.wrap(
        lambda z: network(input_ids=z).logits,
        prior=Masked(network.config.vocab_size, tokenizer.mask_token_id),
        schedule=LogLinear(),
        codec=Subwords(tokenizer.backend_tokenizer.to_str()),
        time=None,
    )

    ids = tokenizer(asked.text, return_tensors="pt").input_ids
    blanks = ids.masked_fill(ids == tokenizer.mask_token_id, -1)
    made = model.sample(asked.samples, asked.steps, asked.kappa, infill=blanks)
    for row in made.tokens:
        print(tokenizer.decode(row, skip_special_tokens=True))
    print(f"{made.nfe:.1f} forward passes a text, {asked.steps + 1} steps")
    return made


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(str(error)) from None
