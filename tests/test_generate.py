"""Model.sample: prompts, blanks, labels, lengths, memory, processes."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import psidiff
from psidiff import generate as generation
from psidiff.data.images import Pixels
from psidiff.data.infill import blanks, encode_prompt, encode_template
from psidiff.data.sudoku import Sudoku
from psidiff.data.tokenizers import Bytes, Characters, Subwords
from psidiff.model import Model, load
from psidiff.model_config import ModelConfig
from psidiff.process import LogLinear, Masked, Uniform
from psidiff.request import build_request
from psidiff.sampling import Confident

LETTERS = Characters("abcde ")


def toy(prior=None, codec=LETTERS, length=8, **config):
    """A float64 denoiser that prefers the token after its left neighbour's."""
    prior = prior or Uniform(6)
    K = prior.vocab_size

    def denoiser(z, alpha, labels=None):
        left = torch.roll(z, 1, 1)
        left[:, 0] = 0
        logits = torch.zeros(*z.shape, K, dtype=torch.float64)
        logits.scatter_(-1, ((left + 1) % 6)[..., None], 2.0)
        if labels is not None:
            logits[torch.arange(len(z)), :, labels] += 1
        return prior.without_mask(logits).log_softmax(-1)

    described = ModelConfig.from_dict({"length": length, **config})
    return Model(denoiser, prior, LogLinear(), codec, described)


PRIORS = [Uniform(6), Masked(7, 6)]


@pytest.mark.parametrize("prior", PRIORS, ids=["uniform", "masked"])
def test_prompts_suffixes_and_templates_stay_as_they_were_given(prior):
    model = toy(prior)
    for text in model.sample(5, 8, prompt="bad").text:
        assert text.startswith("bad") and len(text) == 8
    for text in model.sample(5, 8, prompt="ab", suffix="ed").text:
        assert text.startswith("ab") and text.endswith("ed") and len(text) == 8
    for text in model.sample(5, 8, infill="a{{3}}b{{1}}").text:
        assert text[0] == "a" and text[4] == "b" and len(text) == 6
    for text in model.sample(5, 8, infill="a{{3}}b", length=8).text:
        assert text[0] == "a" and text[4] == "b" and len(text) == 8


def test_each_sample_may_have_its_own_prompt():
    made = toy().sample(3, 8, prompt=["a", "bb", "ccc"], batch_size=2)
    assert [text[:n] for n, text in enumerate(made.text, 1)] == ["a", "bb", "ccc"]


def test_token_masks_are_given_ids():
    ids = torch.tensor([1, -1, -1, 4, -1, -1, -1, 0])
    made = toy().sample(4, 8, infill=ids)
    assert (made.tokens[:, ids >= 0] == ids[ids >= 0]).all()
    rows = ids.repeat(2, 1)
    rows[1, 1] = 3
    assert toy().sample(2, 8, infill=rows).tokens[1, 1] == 3


def test_what_is_given_may_be_shorter_than_the_sample_and_says_how_long_it_is():
    ids = torch.tensor([0, -1, 2])
    assert toy().sample(1, 4, infill=ids, length=8).tokens.shape == (1, 8)
    nameless = toy(length=None)
    assert nameless.sample(1, 4, infill="a{{3}}").tokens.shape == (1, 4)
    assert toy(codec=Pixels(1, 2, 4, levels=6), length=None).sample(1, 4).tokens.shape == (1, 8)
    with pytest.raises(ValueError, match="does not say how long"):
        nameless.sample(1, 4, prompt="a")


def test_samples_are_numbered_from_first_index():
    many, later = toy().sample(6, 8), toy().sample(2, 8, first_index=4)
    assert torch.equal(many.tokens[4:], later.tokens)


def test_a_wrapped_network_of_one_level_hears_the_smallest():
    heard = []

    def network(z, sigma):
        heard.append(tuple(sigma.shape))
        return torch.zeros(*z.shape, 6) + sigma.view(-1, 1, 1)

    model = psidiff.wrap(
        network, Uniform(6), LogLinear(), LETTERS, time="sigma", per_position_levels=False
    )
    made = model.sample(3, 4, prompt="ab", length=8, head="dense")
    assert all(text.startswith("ab") for text in made.text) and set(heard) == {(3,)}
    assert model.sample(2, 4, length=8).tokens.shape == (2, 8) and (2,) in heard


def test_a_wrapped_network_has_the_length_that_it_is_given():
    flat = lambda z, alpha: torch.zeros(*z.shape, 5).log_softmax(-1)  # noqa: E731
    model = psidiff.wrap(flat, Uniform(5), LogLinear(), length=7)
    assert model.sample(2, 4).tokens.shape == (2, 7)
    assert model.sample(2, 4, length=20).tokens.shape == (2, 20), "in windows of 7"
    with pytest.raises(ValueError, match="length must be an integer of at least 1, got 0"):
        psidiff.wrap(flat, Uniform(5), LogLinear(), length=0)


def test_a_network_is_wrapped_once():
    flat = lambda z, alpha: torch.zeros(*z.shape, 5).log_softmax(-1)  # noqa: E731
    model = psidiff.wrap(flat, Uniform(5), LogLinear())
    for again in (model, model.denoiser, model.network, load("digits", device="cpu").denoiser):
        with pytest.raises(ValueError, match="is wrapped already"):
            psidiff.wrap(again, Uniform(5), LogLinear())


def test_an_empty_prompt_is_no_prompt():
    assert torch.equal(toy().sample(3, 8, prompt="").tokens, toy().sample(3, 8).tokens)


def test_pixels_are_given_by_a_picture_with_transparency():
    codec = Pixels(1, 2, 4, levels=6)
    picture = np.zeros((2, 4, 2), np.uint8)
    picture[..., 0], picture[0, :, 1] = 255, 255  # the upper line is white, the lower one free
    made = toy(codec=codec).sample(3, 8, infill=picture)
    assert (made.tokens[:, :4] == 5).all() and not (made.tokens[:, 4:] == 5).all()
    shades = codec.decode(torch.arange(8) % 6)
    assert torch.equal(codec.encode(shades), torch.arange(8) % 6)


def test_clues_of_a_puzzle_are_kept():
    clues = "53..7...." + "." * 72
    model = toy(Uniform(9), Sudoku(), 81)
    for row in model.sample(2, 4, infill=clues).text:
        assert row.startswith("53") and row[4] == "7" and len(row.split("\n")) == 9


def test_a_template_is_read_or_refused_in_a_sentence():
    assert blanks("a {{8}} b{{1}}") == ["a ", 8, " b", 1]
    assert blanks("{x}{{2}}") == ["{x}", 2]
    for wrong, words in {
        "a {{}} b": "a blank is {{n}}",
        "a {{x}} b": "a blank is {{n}}",
        "a {{0}} b": "a blank is {{n}}",
        "a {{-3}} b": "a blank is {{n}}",
        "a {{8 b": "a blank that is not {{n}}",
        "a 8}} b {{2}}": "a blank that is not {{n}}",
        "no blank": "has no blank",
        "": "has no blank",
    }.items():
        with pytest.raises(ValueError) as said:
            blanks(wrong)
        assert words in str(said.value), wrong


def test_framed_rows_open_and_close_with_their_tokens():
    codec = Subwords.train_bpe(["a few words to learn from " * 9], 300)
    end = codec.separator_id
    row = encode_prompt(codec, "a few", "words", 20, framed=True)
    assert row[0] == end and row[-1] == end and (row == -1).sum() > 5
    row = encode_template(codec, "a {{4}} words", framed=True)
    assert row[0] == end and row[-1] == end and (row == -1).sum() == 4


def test_text_ends_before_its_first_end_of_text_unless_all_is_wanted():
    model = toy(Uniform(257), Bytes(), 6)
    rows = torch.tensor([[256, 256, 72, 105, 256, 88], [72, 105, 33, 33, 33, 33]])
    made = model.sample(2, 1)
    cut = psidiff.model.Decoded(rows, made.nfe, made.head_rows, codec=model.codec)
    whole = psidiff.model.Decoded(rows, made.nfe, made.head_rows, codec=model.codec, whole=True)
    assert cut.text == ["Hi", "Hi!!!!"] and whole.text[0] == "HiX"
    lines = Characters("ab\n")  # a line feed separates, but does not end
    made = psidiff.model.Decoded(torch.tensor([[0, 2, 1]]), 1.0, 1, codec=lines)
    assert made.text == ["a\nb"]


def test_a_longer_sample_is_made_of_windows_that_see_each_other():
    model, seen = toy(length=8), []
    inner = model.denoiser

    def spying(z, alpha, labels=None):
        seen.append(z.shape[1])
        return inner(z, alpha, labels)

    model.denoiser = spying
    made = model.sample(3, 16, length=21, overlap=3, prompt="abc", record=True)
    assert made.tokens.shape == (3, 21) and set(seen) == {8}
    assert all(text.startswith("abc") for text in made.text)
    request = build_request(model, 3, 16, length=21, overlap=3)
    assert request.starts == [0, 5, 10, 13]
    frames = made.trace.tokens
    assert len(frames) == 4 * 17 and (frames[0][:, 8:] == -1).all()
    longer = {"length": 12, "overlap": 4}
    first, second = (model.sample(1, 16, **more).tokens for more in ({"length": 8}, longer))
    assert torch.equal(first[:, :8], second[:, :8])
    follows = (made.tokens[:, 1:] - made.tokens[:, :-1]) % 6 == 1  # the toy's preference
    assert follows.double().mean() > 0.4


def test_windows_draw_other_numbers():
    model = toy(length=4)
    model.denoiser = lambda z, alpha, labels=None: torch.zeros(*z.shape, 6).log_softmax(-1)
    made = model.sample(50, 4, length=12, overlap=1).tokens
    assert not torch.equal(made[:, 1:4], made[:, 4:7])


def test_labels_are_numbers_or_names_one_for_all_or_one_for_each():
    codec = Pixels(1, 2, 4, levels=6, classes=("cat", "dog", "owl"))
    model = toy(codec=codec, network="toy", options={"num_classes": 3})
    by_name, by_number = (model.sample(4, 8, labels=label) for label in ("owl", 2))
    assert torch.equal(by_name.tokens, by_number.tokens)
    each = model.sample(2, 8, labels=["cat", 1]).tokens
    assert torch.equal(each, model.sample(2, 8, labels=torch.tensor([0, 1])).tokens)
    for wrong, words in {"cow": "the classes are cat, dog, owl", 7: "0 to 2"}.items():
        with pytest.raises(ValueError, match=f"there is no label.*{words}"):
            model.sample(2, 8, labels=wrong)
    with pytest.raises(ValueError, match="3 labels for 2 samples"):
        model.sample(2, 8, labels=[0, 1, 2])
    with pytest.raises(ValueError, match="has no classes"):
        toy(network="toy", options={"num_classes": None}).sample(2, 8, labels=1)


MISTAKES = [
    ({"prompt": "abcabcabc"}, "the prompt has 9 tokens, and a sample has 8"),
    ({"prompt": "abcabcab"}, "the prompt has 8 tokens, and a sample has 8"),
    ({"prompt": "axz"}, "'x' is not in the alphabet"),
    ({"prompt": "a", "infill": "a{{2}}"}, "not both"),
    ({"infill": "a{{2"}, "a blank that is not"),
    ({"infill": "a{{12}}", "length": 4}, "the template has 13 tokens, more than"),
    ({"infill": torch.tensor([0, 9, -1])}, "infill must hold token ids in"),
    ({"infill": torch.zeros(1, 8, dtype=torch.long)}, "every token is given"),
    ({"infill": torch.full((3, 8), -1)}, "3 rows of given tokens for 2 samples"),
    ({"length": 0}, "length must be an integer of at least 1"),
    ({"length": 12, "overlap": 8}, "overlap must be between 1 and 7"),
    ({"preset": "paper-txt"}, "paper-text"),
    ({"kappa": "cup:1"}, "no kappa rule"),
    ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ({"seed": -1}, "seed must be an integer of at least 0"),
    ({"last": "best"}, "last must be 'sample' or 'greedy'"),
    ({"temprature": 0.5}, "takes no option 'temprature': did you mean temperature?"),
    ({"given": torch.zeros(2, 8)}, "takes no option 'given'"),
    ({"labels": [1.5, 0]}, "labels must be whole numbers or names, got 1.5"),
    ({"labels": torch.tensor([0.5])}, "labels must be whole numbers"),
    ({"seed": 2**70}, "seed must be below 2**63"),
    ({"infill": torch.tensor([0, -1, -1]), "length": 2}, "3 tokens are given"),
]


@pytest.mark.parametrize("options, words", MISTAKES, ids=lambda v: str(v)[:30])
def test_a_wrong_request_is_one_sentence(options, words):
    with pytest.raises(ValueError) as said:
        toy().sample(2, 4, **options)
    assert words in str(said.value) and "\n" not in str(said.value)


def test_a_model_without_a_tokenizer_says_so():
    with pytest.raises(ValueError, match="prompts need a tokenizer"):
        toy(codec=None).sample(1, 4, prompt="a")
    with pytest.raises(ValueError, match="prompts are for models of text"):
        toy(codec=Pixels(1, 2, 4, levels=6)).sample(1, 4, prompt="a")
    with pytest.raises(ValueError, match="every image of this model has 8 tokens"):
        toy(codec=Pixels(1, 2, 4, levels=6)).sample(1, 4, length=9)


def test_presets_guidance_predictors_and_correctors_may_be_words():
    model = toy()
    labels = torch.zeros(2, dtype=torch.long)
    options = [
        {"preset": "paper-text"},
        {"preset": "remdm-loop", "top_p": 0.5},
        {"guidance": 2, "labels": labels},
        {"guidance": "ramp:3", "labels": labels},
        {"predictor": "maximal"},
        {"predictor": "confident:margin"},
        {"corrector": "1x2"},
    ]
    for each in options:
        assert model.sample(2, 8, **each).tokens.shape == (2, 8)
    request = build_request(model, 2, 8, predictor="confident")
    assert isinstance(request.sampler.options()["predictor"], Confident)
    assert all(step.kappa == 1 for step in request.steps)


def test_memory_that_runs_out_halves_the_batch_and_is_said_once_each_time():
    model, sizes = toy(), []
    inner = model.denoiser

    def hungry(z, alpha, labels=None):
        sizes.append(len(z))
        if len(z) > 3:
            raise torch.OutOfMemoryError("no more")
        return inner(z, alpha, labels)

    model.denoiser = hungry
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = model.sample(10, 8, batch_size=10)
    words = [str(w.message) for w in said if "out of memory" in str(w.message)]
    assert words == [
        "out of memory with 10 samples at a time: going on with 5",
        "out of memory with 5 samples at a time: going on with 2",
    ]
    assert max(sizes[2:]) == 2 and torch.equal(made.tokens, toy().sample(10, 8).tokens)
    model.denoiser = lambda z, alpha, labels=None: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(ValueError, match="one sample by itself does not fit"):
        model.sample(1, 8)
    model.denoiser = lambda z, alpha, labels=None: (_ for _ in ()).throw(RuntimeError("shape"))
    with pytest.raises(RuntimeError, match="shape"):
        model.sample(2, 8)


def test_the_batch_is_chosen_from_free_memory(monkeypatch):
    model = toy(options={"hidden_size": 64})
    request = build_request(model, 100, 8)
    for free, size in ((None, 64), (2**40, 64), (1, 1), (2 * 4 * (32 * 64 + 24) * 8 * 5, 5)):
        monkeypatch.setattr(generation, "_free_memory", lambda device, free=free: free)
        assert generation.largest_batch_size(model, request) == size


def test_batches_do_not_change_tokens_nor_traces():
    made = [toy().sample(7, 8, batch_size=size, record=True) for size in (1, 3, 16)]
    for other in made[1:]:
        assert (
            torch.equal(made[0].tokens, other.tokens) and other.head_rows == made[0].head_rows
        )
        for ours, theirs in zip(made[0].trace.frames(), other.trace.frames(), strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert made[0].trace.about["sampler"] == "cap:.005 steps=8"


def test_a_trace_comes_back_from_its_file(tmp_path):
    trace = toy(Masked(7, 6)).sample(3, 20, "cap:.1", prompt="a", record=True).trace
    trace.save(tmp_path / "a.trace")
    again = psidiff.sampling.Trace.load(tmp_path / "a.trace")
    assert again.about == trace.about and again.steps == trace.steps
    for ours, theirs in zip(trace.frames(), again.frames(), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert torch.equal(again.counts(), trace.counts())
    (tmp_path / "b.trace").write_text("nothing of the kind")
    with pytest.raises(ValueError, match=r"b\.trace is damaged: File is not a zip"):
        psidiff.sampling.Trace.load(tmp_path / "b.trace")


def test_a_network_without_time_reuses_its_hidden_states():
    class Timeless(torch.nn.Module):
        passes = 0

        def hidden(self, z, alpha, labels=None):
            Timeless.passes += len(z)
            return torch.nn.functional.one_hot(z, 6).double()

        def head(self, rows):
            return rows

        def forward(self, z, alpha, labels=None):
            return self.hidden(z, alpha, labels).log_softmax(-1)

    model = toy(network="toy", options={"time_conditioning": False})
    model.denoiser = Timeless()
    cached = model.sample(2, 64, "ancestral")
    assert Timeless.passes == cached.nfe * 2
    plain = model.sample(2, 64, "ancestral", micro_batch=2)
    assert cached.nfe < plain.nfe and torch.equal(cached.tokens, plain.tokens)


def test_left_to_right_takes_a_prompt_and_nothing_after_it():
    def follows(tokens):
        return 9.0 * torch.nn.functional.one_hot((tokens + 1) % 6, 7).float()

    model = Model(follows, None, LogLinear(), LETTERS, ModelConfig(length=6, bos_id=6))
    made = model.sample(2, prompt="cd", record=True)
    assert made.text == ["cde ab"] * 2 and made.nfe == 4
    assert (made.trace.tokens[2][:, 3:] == -1).all()
    with pytest.raises(ValueError, match="goes left to right"):
        model.sample(2, infill="a{{2}}b")
    for asked in ({"corrector": "1x2"}, {"kappa": "fb"}, {"last": "greedy"}, {"preset": "fb"}):
        (name,) = asked
        with pytest.raises(ValueError, match=f"it takes no {name}|is no preset"):
            model.sample(2, **asked)


SPLIT = """
import sys, torch, psidiff
sys.path.insert(0, {tests!r})
from test_generate import toy
made = toy().sample(7, 16, prompt="ab")
digits = psidiff.load("digits", device="cpu")
small = digits.sample(5, 8, labels=torch.arange(5), micro_batch=2)
import torch.distributed as dist
rank = dist.get_rank() if dist.is_initialized() else 0
torch.save((made.tokens, made.nfe, made.head_rows, small.tokens), {out!r} + f"/{{rank}}.pt")
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_samples_and_both_get_all(tmp_path):
    script = tmp_path / "split.py"
    here = os.path.dirname(__file__)
    script.write_text(SPLIT.format(tests=here, out=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--standalone", str(script)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone = toy().sample(7, 16, prompt="ab")
    digits = psidiff.load("digits", device="cpu")
    small = digits.sample(5, 8, labels=torch.arange(5), micro_batch=2)
    for rank in (0, 1):
        tokens, nfe, rows, drawn = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(tokens, alone.tokens) and rows == alone.head_rows
        assert nfe == pytest.approx(alone.nfe) and torch.equal(drawn, small.tokens)
