"""Objects by name: words, plain data, and files of the user's that nothing else imports."""

import json
from dataclasses import dataclass

import pytest
import torch
from serving import tiny

from psidiff import registry, wrap
from psidiff.data import tokenization
from psidiff.data.codec import CODECS, codec_from
from psidiff.model import Model, load
from psidiff.process import LogLinear, Uniform
from psidiff.process.prior import PRIORS, prior_over
from psidiff.process.schedule import SCHEDULES
from psidiff.registry import Registry, import_file, import_named, load_object
from psidiff.request import build_request
from psidiff.sampling import Sampler, parse_kappa
from psidiff.serve.samples import Sampling, is_batchable

RULE = """
from dataclasses import dataclass
from subprocess import Popen
from psidiff.process import Prior
import torch

@dataclass(frozen=True)
class Pulse:
    every: int
    num_steps: int = 8
    kappa: float = 0.2

    def __call__(self, t, alpha_s, alpha_t):
        return self.kappa if round((1 - t) * self.num_steps) % self.every == 0 else 1.0


def half(t, alpha_s, alpha_t):
    return 0.5


gentle = Pulse(2, kappa=0.9)


@dataclass(frozen=True)
class Slope(Prior):
    vocab_size: int
    width: float = 1.0

    def probs(self, like):
        return torch.linspace(0, self.width, self.vocab_size).softmax(0).to(like)
"""


@pytest.fixture
def rules(tmp_path):
    (tmp_path / "rules.py").write_text(RULE)
    return tmp_path / "rules.py"


def test_a_file_is_imported_only_when_the_user_names_it(rules):
    with pytest.raises(ValueError, match=r"imports rules.py only when you name it"):
        parse_kappa("rules.py:Pulse:4")
    with pytest.raises(ValueError, match=r"by psidiff --import rules.py"):
        PRIORS.from_dict({"name": "rules.py:Slope", "vocab_size": 4})
    import_named(f"{rules}:Pulse:4", None, "cap:.1")
    rule = parse_kappa("rules.py:Pulse:4")
    assert rule == parse_kappa(f"{rules}:Pulse:every=4") and rule.num_steps == 8
    assert import_file(rules) is import_file(str(rules))


def test_words_of_ones_own_are_read_and_printed(rules):
    import_file(rules)
    for words in (
        "rules.py:Pulse:4,num_steps=32 steps=32 top_p=.9",
        "rules.py:half steps=8",
        "rules.py:half steps=8 predictor=rules.py:half",
    ):
        assert str(Sampler.parse(words)) == words
    assert parse_kappa("rules.py:gentle") == parse_kappa("rules.py:Pulse:2,kappa=.9")
    assert str(Sampler.parse("rules.py:Pulse:num-steps=9,every=3")) == (
        "rules.py:Pulse:3,num_steps=9 steps=256"
    )
    for words in (
        "rules.py:Pulse",
        "rules.py:Pulse:x",
        "rules.py:Pulse:4,5",
        "rules.py:half:3",
    ):
        with pytest.raises(ValueError, match=r"is no kappa rule|takes no parameters"):
            Sampler.parse(words)
    with pytest.raises(ValueError, match="nothing can call it"):
        Sampler.parse("rules.py:Slope:4")


def test_what_a_file_imported_is_out_of_reach(rules):
    import_file(rules)
    for name in ("Popen", "Prior", "torch", "nothing"):
        with pytest.raises(ValueError, match=f"rules.py defines no '{name}'"):
            PRIORS.from_dict({"name": f"rules.py:{name}", "args": ["true"]})
    with pytest.raises(ValueError, match="is no prior: make it a Prior"):
        PRIORS.from_dict({"name": "rules.py:Pulse", "every": 3})


def test_a_prior_of_ones_own_is_saved_and_loaded(rules, tmp_path):
    slope = load_object(f"{rules}:Slope")(17)
    held = load("digits", "cpu")
    held.denoiser.prior = slope
    Model(held.denoiser, slope, held.schedule, held.codec, held.config).save(tmp_path / "m")
    described = json.loads((tmp_path / "m" / "psidiff.json").read_text())["prior"]
    assert described == {"name": "rules.py:Slope", "vocab_size": 17, "width": 1.0}
    loaded = load(tmp_path / "m", "cpu")
    assert loaded.prior == slope and loaded.sample(1, 2, split=False).tokens.shape == (1, 64)
    registry._modules.clear()
    with pytest.raises(ValueError, match=r"imports rules.py only when you name it"):
        load(tmp_path / "m", "cpu")


def test_a_prior_that_is_in_no_file_is_not_saved():
    space = {"__name__": "typed", "dataclass": dataclass, "Uniform": Uniform}
    exec("@dataclass(frozen=True)\nclass Typed(Uniform):\n    pass", space)
    with pytest.raises(
        ValueError, match="cannot be saved: a prior is saved by the name of its"
    ):
        PRIORS.to_dict(space["Typed"](3))


def test_two_files_of_one_name_are_refused(rules, tmp_path):
    import_file(rules)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "rules.py"
    other.write_text("")
    with pytest.raises(ValueError, match="have one name: rename one of them"):
        import_file(other)
    with pytest.raises(ValueError, match="is not a Python file that exists"):
        import_file(tmp_path / "none.py")
    other.with_name("bad.py").write_text("\n1 / 0\n")
    with pytest.raises(ValueError, match="cannot be imported: line 2: ZeroDivisionError"):
        import_file(other.with_name("bad.py"))


def test_a_class_that_is_registered_has_words_and_plain_data():
    kinds = Registry("thing")

    @kinds.register("two", "two:1,b=x")
    @dataclass(frozen=True)
    class Two:
        a: int
        b: str = "y"
        c: bool = False
        d: float | None = None

    for words, value in (("two:3", Two(3)), ("two:3,c=yes,d=.5", Two(3, c=True, d=0.5))):
        assert kinds.parse(words) == value and kinds.format(value) == words
        assert kinds.from_dict(kinds.to_dict(value)) == value
    assert kinds.parse("two:b=q", a=1) == Two(1, "q") and kinds.names == ("two",)
    with pytest.raises(ValueError, match="'three' is no thing; these are: two:1,b=x"):
        kinds.parse("three")
    with pytest.raises(ValueError, match="has no option 'e'"):
        kinds.from_dict({"name": "two", "a": 1, "e": 2})


def test_priors_in_words_are_over_the_tokens_of_data(rules):
    import_file(rules)
    assert prior_over("uniform", 3) == Uniform(3)
    assert prior_over("mixed:uniform=.2", 3).mask_id == 3
    assert prior_over("rules.py:Slope:width=2", 3).vocab_size == 3
    assert set(PRIORS.names) == {"masked", "uniform", "mixed", "unigram"}
    assert SCHEDULES.to_dict(LogLinear()) == {"name": "loglinear", "eps": 1e-3}
    probs = prior_over("rules.py:Slope:width=2", 3).probs(torch.zeros(()))
    torch.testing.assert_close(probs.sum(), torch.ones(()))


PROCESSOR = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Without:
    token: int

    def __call__(self, logits):
        logits = logits.clone()
        logits[:, self.token] = -float("inf")
        return logits


def narrow(logits):
    return logits[:, 1:]
"""


def test_a_processor_of_ones_own_changes_logits_in_the_library_and_a_server(tmp_path):
    (tmp_path / "mine.py").write_text(PROCESSOR)
    import_file(tmp_path / "mine.py")
    model, words = load("digits", "cpu"), "ancestral steps=4 processor=mine.py:Without:0"
    made = model.sample(2, sampler=words, split=False)
    assert str(Sampler.parse(words)) == words and not Sampler.parse(words).keeps_marginals
    assert not (made.tokens == 0).any() and (model.sample(2, 4, split=False).tokens == 0).any()
    request = build_request(model, 2, sampler=words)
    source, again = (Sampling(model, request, (), None) for _ in range(2))
    assert is_batchable(model, request) and source.shared
    assert source.context.logits_processor == again.context.logits_processor
    with pytest.raises(ValueError, match=r"must return logits of shape \(\d+, 17\), got"):
        model.sample(1, 2, processor="mine.py:narrow", split=False)
    with pytest.raises(ValueError, match=r"is no logits processor; these are: FILE.py:NAME"):
        Sampler.parse("processor=typical")


CODEC = """
from dataclasses import dataclass
import numpy as np
from psidiff.data.codec import Codec

@dataclass(frozen=True)
class Digits(Codec):
    vocab_size: int = 10
    sign: str = "-"

    def encode(self, value):
        return np.array([int(c) for c in value])

    def decode(self, tokens):
        return self.sign + "".join(map(str, tokens.tolist()))


@dataclass(frozen=True)
class Silent:
    vocab_size: int = 10
"""


def test_a_codec_of_ones_own_is_saved_loaded_and_wrapped(tmp_path):
    (tmp_path / "mine.py").write_text(CODEC)
    with pytest.raises(ValueError, match=r"imports mine.py only when you name it"):
        codec_from({"name": "mine.py:Digits"})
    import_file(tmp_path / "mine.py")
    codec = codec_from({"name": "mine.py:Digits", "sign": "+"})
    tiny(codec, length=8).save(tmp_path / "m")
    described = json.loads((tmp_path / "m" / "codec.json").read_text())
    assert described["name"] == "mine.py:Digits" and described["vocab_size"] == 10
    model = load(tmp_path / "m", "cpu")
    assert codec.pieces(torch.tensor([4, 5])) == ["+4", "+5"]
    assert model.codec == codec and model.sample(1, 2, prompt="123").text[0][:4] == "+123"
    flat = lambda z, alpha: torch.zeros(*z.shape, 10)  # noqa: E731
    wrapped = wrap(flat, Uniform(10), LogLinear(), codec="mine.py:Digits:sign=+", length=8)
    assert wrapped.codec == codec
    with pytest.raises(ValueError, match="is no codec: make it a Codec"):
        wrap(flat, Uniform(10), LogLinear(), codec="mine.py:Silent")
    registry._modules.clear()
    with pytest.raises(ValueError, match=r"codec.json.*imports mine.py only when you name it"):
        load(tmp_path / "m", "cpu")


def test_a_server_reads_prompts_in_the_words_of_a_codec_of_ones_own(tmp_path):
    pytest.importorskip("fastapi")
    from psidiff.serve.config import Settings
    from psidiff.serve.request_parsing import parse_request
    from psidiff.serve.responses import decode_text
    from psidiff.serve.schemas import CompletionBody

    (tmp_path / "mine.py").write_text(CODEC)
    import_file(tmp_path / "mine.py")
    model = tiny(codec_from({"name": "mine.py:Digits", "sign": "+"}), length=8)
    body = CompletionBody(model="tiny", prompt="45", max_tokens=3)
    (asked,) = parse_request(model, body, Settings(name="tiny"))
    assert asked.request.given.tolist() == [[4, 5, -1, -1, -1]]
    assert decode_text(model.codec, torch.tensor([4, 5])) == "+45"


def test_processes_that_tokenize_know_a_codec_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CODEC)
    import_file(tmp_path / "mine.py")
    monkeypatch.setattr(tokenization, "SMALL", 1)
    codec = codec_from({"name": "mine.py:Digits"})
    (found,) = tokenization.tokenize_documents(["12", "3"], codec, None, workers=2)
    assert found[0].tolist() == [1, 2, 3] and found[1].tolist() == [2, 3]


def test_codecs_by_name_are_those_of_the_library():
    assert set(CODECS.names) == {
        *("3sat", "bytes", "characters", "countdown", "pixels", "subwords", "sudoku")
    }
    for described in ({"name": "words"}, {"name": ["bytes"]}, {}, "bytes", None):
        with pytest.raises(
            ValueError, match="characters, bytes, countdown, pixels, 3sat, sudoku, subwords"
        ):
            codec_from(described)


def test_a_processor_that_cannot_be_compared_is_refused():
    @dataclass
    class Mutable:
        shift: float = 0.0

        def __call__(self, logits):
            return logits + self.shift

    with pytest.raises(ValueError, match="or a frozen dataclass that is called with them"):
        Sampler(processor=Mutable())


def test_what_fails_in_a_file_of_the_user_is_said_of_that_file(psidiff, tmp_path):
    (tmp_path / "broken.py").write_text("def shift(logits):\n    return logits.missing\n")
    own = f"{tmp_path}/broken.py:shift"
    done = psidiff("sample", "digits", "--steps", 2, "--processor", own, check=False)
    assert done.returncode == 2
    assert "broken.py failed: line 2: AttributeError" in done.stderr
