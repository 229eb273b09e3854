"""Model: what ships, what a folder holds, what a sample means."""

import inspect

import pytest
import torch
from typer.testing import CliRunner

import psidiff
from psidiff.cli.main import app
from psidiff.data.images import Pixels
from psidiff.data.tokenizers import Characters
from psidiff.distributed import Processes
from psidiff.generate import generate
from psidiff.model import Model, list_pretrained
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import LogLinear, Uniform
from psidiff.request import Request
from psidiff.sampling import LEFT_TO_RIGHT, Sampler
from psidiff.types import device_here


def small(codec=None, **config):
    torch.manual_seed(0)
    network = Transformer(5, 16, 1, 2, 16, dropout=0.0)
    torch.nn.init.normal_(network.output_layer.linear.weight)
    options = {"vocab_size": 5, "hidden_size": 16, "num_blocks": 1, "num_heads": 2}
    described = {"network": "transformer", "options": options | {"cond_dim": 16}, "length": 6}
    prior = Uniform(5)
    denoiser = Parameterized(network.eval(), prior)
    return Model(denoiser, prior, LogLinear(), codec, ModelConfig.from_dict(described | config))


@pytest.mark.parametrize("codec", [Characters("abcde"), Pixels(1, 2, 3, levels=5), None])
def test_a_saved_model_has_its_codec_and_samples_the_same(tmp_path, codec):
    model = small(codec)
    model.save(tmp_path)
    again = psidiff.load(tmp_path, device="cpu")
    assert again.codec == codec
    assert torch.equal(model.sample(4, 8).tokens, again.sample(4, 8).tokens)
    z = torch.arange(12).reshape(2, 6) % 5
    assert torch.equal(model.network(z, 0.5), again.network(z, 0.5))
    assert all(p.data_ptr() % 64 == 0 for p in again.network.parameters())


def test_a_model_stored_in_half_precision_is_half_the_size_and_loads_in_float32(tmp_path):
    model = small()
    model.save(tmp_path / "full")
    model.save(tmp_path / "half", dtype=torch.float16)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]
    for name, value in psidiff.load(tmp_path / "half").network.named_parameters():
        assert value.dtype == torch.float32
        torch.testing.assert_close(
            value.cpu(), model.network.get_parameter(name), rtol=1e-3, atol=1e-6
        )


def test_samples_are_text_or_images_as_the_codec_says():
    made = small(Characters("abcde")).sample(3, 4)
    assert all(len(text) == 6 for text in made.text)
    with pytest.raises(ValueError, match="its samples are not image"):
        _ = made.images
    assert small(Pixels(1, 2, 3, levels=5)).sample(2, 4).images[0].shape == (2, 3)
    with pytest.raises(ValueError, match="tokens only"):
        _ = small().sample(1, 2).text


def test_the_batch_size_does_not_change_the_samples_of_a_model():
    model = small()
    model.denoiser.double()
    one, many = (model.sample(5, 8, batch_size=size, head="dense") for size in (1, 5))
    assert (one.tokens == many.tokens).double().mean() > 0.95  # float32 logits may flip one


def test_kappa_auto_is_what_the_model_recommends():
    recommended = small(kappa="constant:.5").sample(4, 16)
    assert torch.equal(recommended.tokens, small().sample(4, 16, "constant:.5").tokens)
    assert torch.equal(small().sample(4, 16).tokens, small().sample(4, 16, "cap:.005").tokens)


def left_to_right(network, bos_id, shape, seed, given=None):
    """An autoregressive network as a model, sampled; tokens may be given anywhere."""
    model = Model(network, None, LogLinear(), config=ModelConfig(bos_id=bos_id))
    count, length = shape
    sampler = Sampler(LEFT_TO_RIGHT)
    request = Request(count, length, length, 0, seed, (), sampler, given)
    return generate(model, request).tokens


def test_left_to_right_draws_each_token_from_those_before_it():
    """A network that repeats what came last: after the first token all are equal."""

    def repeats(tokens):
        logits = 50.0 * torch.nn.functional.one_hot(tokens, 5).float()
        logits[tokens == 4] = torch.tensor([1.0, 1.0, 1.0, 1.0, 99.0])
        return logits

    made = left_to_right(repeats, 4, (400, 7), 0)
    assert (made == made[:, :1]).all()
    counts = made[:, 0].bincount(minlength=5)
    assert counts[4] == 0 and counts[:4].min() > 60


@pytest.mark.parametrize("name", ["digits", "shakespeare"])
def test_the_shipped_models_load_by_name_and_are_small(name):
    assert name in list_pretrained()
    model = psidiff.load(name, device="cpu")
    labels = torch.arange(2) if name == "digits" else None
    made = model.sample(2, 4, labels=labels)
    assert made.images[1].shape == (8, 8) if name == "digits" else len(made.text[0]) == 128
    from pathlib import Path

    folder = Path(psidiff.__file__).parent / "pretrained" / name
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 2_000_000


@pytest.mark.slow
def test_a_classifier_of_real_digits_agrees_with_the_labels_of_made_ones():
    svm = pytest.importorskip("sklearn.svm")
    from psidiff.data.images import digits

    real = digits("train")
    tokens, labels, *_ = real.rows(torch.arange(len(real)))
    judge = svm.SVC(gamma=0.001).fit(tokens.numpy(), labels.numpy())
    wanted = torch.arange(200) % 10
    made = psidiff.load("digits", device="cpu").sample(200, 64, labels=wanted)
    assert (judge.predict(made.tokens.numpy()) == wanted.numpy()).mean() >= 0.85


def test_a_model_that_is_not_there_is_said_in_a_sentence(tmp_path, monkeypatch):
    for name in ("no-such-model", str(tmp_path / "nothing")):
        with pytest.raises(ValueError, match=r"there is no model at .* one that ships"):
            psidiff.load(name)
    with pytest.raises(ValueError, match="a folder without a model in it"):
        psidiff.load(tmp_path)

    def fails(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(ValueError, match="the Hub did not send it: no network"):
        psidiff.load("some-owner/some-model")


def test_a_lone_file_of_parameters_is_loaded_by_what_lies_beside_it(tmp_path):
    model = small()
    model.save(tmp_path / "whole")
    (tmp_path / "whole/model.safetensors").rename(tmp_path / "whole/m.safetensors")
    again = psidiff.load(tmp_path / "whole/m.safetensors", device="cpu")
    assert torch.equal(model.sample(4, 8).tokens, again.sample(4, 8).tokens)
    with pytest.raises(ValueError, match=r"has no model.safetensors yet"):
        psidiff.load(tmp_path / "whole")
    (tmp_path / "whole/psidiff.json").unlink()
    for more in ({}, {"config.json": "{}"}):
        for name, text in more.items():
            (tmp_path / "whole" / name).write_text(text)
        with pytest.raises(ValueError, match=r"parameters only: .* that has psidiff.json"):
            psidiff.load(tmp_path / "whole/m.safetensors")


@pytest.mark.parametrize("file", ["psidiff.json", "codec.json", "config.json"])
@pytest.mark.parametrize("text, words", [("[]", "a mapping, got a list"), ("{", "is not JSON")])
def test_a_file_that_describes_nothing_is_named(file, text, words, tmp_path):
    small(Characters("abcde")).save(tmp_path)
    if file == "config.json":
        (tmp_path / "psidiff.json").unlink()
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"{file} .*{words}"):
        psidiff.load(tmp_path)


OPTIONS = {
    "per_position_levels": ["../../x", 1, []],
    "causal": ["yes", None],
    "vocab_size": ["5", 5.0, True, 0, -1, 2**62],
    "num_heads": [None, "2", [2], 0],
    "num_blocks": [10**5, -1],
    "dropout": ["a", 2.0, [0.1]],
    "learned_positions": [-1, "x", 2**62],
    "num_classes": [-1, 1e9, 2**62],
    "no such option": [1],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_another_kind_is_said_of_the_file(name, tmp_path):
    model = small()
    for value in OPTIONS[name]:
        options = {**model.config.options, name: value}
        Model(
            model.denoiser,
            model.prior,
            model.schedule,
            None,
            ModelConfig.from_dict({**model.config, "options": options}),
        ).save(tmp_path)
        with pytest.raises(ValueError, match=r"psidiff\.json: "):
            psidiff.load(tmp_path, device="cpu")
    model.config.name = "\x1b[31m"
    model.save(tmp_path)
    with pytest.raises(ValueError, match=r"psidiff\.json: name has '\\x1b"):
        psidiff.load(tmp_path, device="cpu")
    for value in ("no", 1, [True]):
        model = small()
        model.config.framed = value
        model.save(tmp_path)
        with pytest.raises(ValueError, match=r"psidiff\.json: framed must be true or false"):
            psidiff.load(tmp_path, device="cpu")


def test_a_bug_of_ours_is_not_called_damage_of_a_file(tmp_path, monkeypatch):
    def broken(*values, **options):
        raise KeyError("a bug")

    small().save(tmp_path)
    monkeypatch.setattr("psidiff.models.transformer.Block.__init__", broken)
    with pytest.raises(KeyError):
        psidiff.load(tmp_path, device="cpu")


@pytest.mark.parametrize("value", ["x", 0, -1, 2**62, ["1"], True, None])
@pytest.mark.parametrize(
    "name", ["width", "image_size", "channels", "vocab_size", "width_mult"]
)
def test_a_u_net_has_sizes(name, value):
    from psidiff.registry import check_options

    with pytest.raises(ValueError), torch.device("meta"):
        check_options("the unet", UNet, {name: value})
        UNet(**{name: value})


def test_wrap_takes_what_the_contract_says_and_keeps_which_levels_a_network_hears():
    heard = []

    def network(z, alpha):
        heard.append(tuple(alpha.shape))
        return torch.zeros(*z.shape, 5)

    names = ["module_or_callable", "prior", "schedule", "codec", "time", "predicts"]
    parameters = inspect.signature(psidiff.wrap).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names
    for choice, shape in ((False, (2,)), (True, (2, 3, 1))):
        model = psidiff.wrap(network, Uniform(5), LogLinear(), per_position_levels=choice)
        model.sample(2, 4, infill=[0, -1, -1], head="dense")
        assert set(heard) == {shape} and model.network.per_position_levels is choice
        heard.clear()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": 4}, "did you mean num_steps"),
        ({"kapa": "fb"}, "did you mean kappa"),
        ({"batchsize": 4}, "did you mean batch_size"),
        ({"recrd": True}, "did you mean record"),
        ({"lst": "greedy"}, "did you mean last"),
        ({"overlap": 3}, "overlap is of windows, and 6 tokens fit into one"),
        ({"prompt": []}, "prompt holds no texts"),
        ({"prompt": [], "suffix": "a"}, "prompt holds no texts"),
        (
            {"predictor": "confident", "kappa": "cap:.02"},
            "by itself: leave kappa and preset out",
        ),
        (
            {"predictor": "confident", "preset": "remdm-cap"},
            "by itself: leave kappa and preset out",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_said(options, words):
    with pytest.raises(ValueError, match=words):
        small(Characters("abcde")).sample(2, **options)


def test_a_damaged_model_or_a_device_that_is_not_there_is_said_in_a_sentence(tmp_path):
    small().save(tmp_path)
    assert psidiff.load(tmp_path / "model.safetensors", device="cpu").prior == Uniform(5)
    for device, dtype, words in (
        ("nowhere", "auto", "device must be auto, cpu, cuda, cuda:N or mps, got 'nowhere'"),
        ("cpu", "int8", "dtype must be 'auto', 'float32', .*, got 'int8'"),
        ("cpu", torch.float8_e4m3fn, "'float64', got 'float8_e4m3fn'"),
    ):
        with pytest.raises(ValueError, match=words):
            psidiff.load(tmp_path, device=device, dtype=dtype)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: "):
        psidiff.load(tmp_path)
    (tmp_path / "psidiff.json").write_text('{"format_version": 1}')
    with pytest.raises(ValueError, match="does not say its prior, schedule and network"):
        psidiff.load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_model_samples_in_every_precision_it_is_loaded_in(dtype):
    model = psidiff.load("digits", "cpu", dtype)
    assert {p.dtype for p in model.network.parameters()} == {getattr(torch, dtype)}
    assert model.sample(2, 2).tokens.max() < 17
    assert psidiff.load("digits", "cpu", getattr(torch, dtype)).device.type == "cpu"


def test_loading_and_training_ask_for_the_same_devices(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:1", 1)):
        assert Processes.join(name).device == chosen.pop() == torch.device("cuda", index)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_here("cuda") == torch.device("cuda:1")
    for name, words in (
        ("cuda:9", "device cuda:9 is asked for, and the last here is cuda:1"),
        ("mps", "device mps is asked for, and torch sees no Apple GPU here"),
        ("cuda:x", "got 'cuda:x'"),
    ):
        for ask in (Processes.join, lambda name: psidiff.load("digits", name)):
            with pytest.raises(ValueError, match=words):
                ask(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda:0 is asked for, and torch sees no GPU"):
        Processes.join("cuda:0")
    assert Processes.join().device.type == "cpu" and not chosen


def test_a_model_comes_from_the_hub_by_its_id(tmp_path, monkeypatch):
    small(Characters("abcde")).save(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path)
    )
    assert psidiff.load("some-owner/some-model", device="cpu").codec == Characters("abcde")


def test_the_doctor_says_what_is_there_and_examines_a_checkpoint(tmp_path):
    said = CliRunner().invoke(app, ["doctor", "digits"]).output
    for word in ("torch", "device: ", "PSIDIFF_DATA", "datasets", "digits: it answers"):
        assert word in said
    model = small()
    with torch.no_grad():
        model.network.blocks[0].mlp[0].bias[0] = torch.nan
    model.save(tmp_path)
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 1 and "not finite" in done.output


@pytest.mark.parametrize("ask", ("library", "command line"))
def test_compile_takes_the_blocks_and_leaves_the_samples(ask, monkeypatch):
    compiled = []

    def compile_part(part, options):
        wrong = ("triton.mix_order_reduction", "comprehensive_padding")  # they lose gradients
        assert options == dict.fromkeys(wrong, False)
        compiled.append(part)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_part)
    if ask == "library":
        model = psidiff.load("shakespeare", "cpu")
        assert model.compile() is model
        assert compiled == list(model.network.blocks)
    else:
        words = ["sample", "sudoku", "--steps", "2", "--device", "cpu", "--compile"]
        assert CliRunner().invoke(app, words).exit_code == 0
        assert len(compiled) == 10


def causal(positions=None, dtype=torch.float64):
    torch.manual_seed(0)
    network = Transformer(
        9, hidden_size=16, num_blocks=2, num_heads=2, causal=True, learned_positions=positions
    )
    torch.nn.init.normal_(network.output_layer.linear.weight)
    return network.to(dtype).eval()


@pytest.mark.parametrize("positions", [None, 12])
def test_a_reader_gives_the_logits_of_the_whole_row(positions):
    network, tokens = causal(positions), torch.randint(8, (3, 12))
    with torch.no_grad():
        reader = network.reader(12)
        for stop in (1, 2, 6, 7, 12):  # one new token, or several
            torch.testing.assert_close(
                reader(tokens[:, :stop])[:, 0], network(tokens[:, :stop])[:, -1]
            )
    with pytest.raises(ValueError, match="causal"):
        Transformer(9, hidden_size=16, num_blocks=1, num_heads=2).reader(4)


def test_left_to_right_with_and_without_memory_draws_the_same_tokens():
    network = causal()
    given = torch.full((5, 10), -1)
    given[:, 2:5] = torch.randint(8, (5, 3))

    def forgetful(tokens):
        return network(tokens)

    for known in (None, given):
        made = [left_to_right(each, 8, (5, 10), 1, known) for each in (network, forgetful)]
        assert torch.equal(*made)
