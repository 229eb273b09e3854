"""Released checkpoints are loaded, their averaged weights first, and nothing in them is run."""

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from toys import generator

import psidiff
from psidiff.data.images import Pixels
from psidiff.integrations import official
from psidiff.models import Transformer, UNet
from psidiff.pickles import StandIn
from psidiff.process import Cosine, LogLinear, Masked, Mixed, Uniform, Unigram
from psidiff.released_checkpoints import plain, read_checkpoint, resolve
from psidiff.sampling import Cap, plan, sample


@pytest.fixture
def omegaconf(monkeypatch):
    """Classes that pickle under omegaconf's names; loading finds no such package."""
    module = types.ModuleType("omegaconf.dictconfig")

    def make(name):
        cls = type(name, (), {"__module__": module.__name__, "__qualname__": name})
        setattr(module, name, cls)
        return cls

    kinds = {name: make(name) for name in ("DictConfig", "ListConfig", "AnyNode", "Tokenizer")}
    parent = types.ModuleType("omegaconf")
    parent.dictconfig = module
    monkeypatch.setitem(sys.modules, "omegaconf", parent)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def tree(value):
        if isinstance(value, dict):
            node = kinds["DictConfig"]()
            node.__dict__["_content"] = {k: tree(v) for k, v in value.items()}
        elif isinstance(value, list):
            node = kinds["ListConfig"]()
            node.__dict__["_content"] = [tree(v) for v in value]
        else:
            node = kinds["AnyNode"]()
            node.__dict__["_val"] = value
        return node

    return tree, kinds["Tokenizer"]


CONFIG = {
    "model": {
        "hidden_size": 32,
        "cond_dim": 16,
        "n_heads": 4,
        "n_blocks": 2,
        "length": "${.max_length}",
        "max_length": 64,
        "dropout": 0.1,
    },
    "algo": {
        "name": "duo",
        "backbone": "dit",
        "causal_attention": False,
        "time_conditioning": True,
    },
    "data": {"tokenizer_name_or_path": "gpt2", "cache": "${cwd:}/x"},
    "noise": {"type": "log-linear", "eps": 1e-3},
    "loader": {"n": "${model.length}"},
}


def lightning(path, network, omegaconf, config, ema=True):
    tree, tokenizer = omegaconf
    state = {f"backbone.{k}": v for k, v in network.state_dict().items()}
    shadow = [p.detach() + 1 for p in network.parameters()]
    content = {
        "state_dict": state,
        "hyper_parameters": {"config": tree(config), "tokenizer": tokenizer()},
        "epoch": 3,
        "global_step": 1000,
    }
    if ema:
        content["ema"] = {"decay": 0.9999, "num_updates": 5, "shadow_params": shadow}
    torch.save(content, path)
    return path


def changed(**parts):
    config = json.loads(json.dumps(CONFIG))
    for name, values in parts.items():
        config[name].update(values)
    return config


def test_a_lightning_file_gives_its_averaged_weights(tmp_path, omegaconf, monkeypatch):
    network = Transformer(11, 32, 2, 4, 16)
    path = lightning(tmp_path / "duo.ckpt", network, omegaconf, CONFIG)
    monkeypatch.delitem(sys.modules, "omegaconf.dictconfig")
    monkeypatch.delitem(sys.modules, "omegaconf")
    model, raw = official.load(path), official.load(path, ema=False)
    for name, p in network.named_parameters():
        assert torch.equal(dict(model.network.named_parameters())[name], p + 1)
        assert torch.equal(dict(raw.network.named_parameters())[name], p)
    assert model.prior == Uniform(11) and model.schedule == LogLinear(1e-3)
    assert model.config.length == 64 and not model.network.per_position_levels
    assert "omegaconf" not in sys.modules and not model.network.training
    log_x = model.denoiser(torch.zeros(2, 5, dtype=torch.int64), 0.4)
    assert log_x.dtype == torch.float32 and log_x.shape == (2, 5, 11)


@pytest.mark.parametrize(
    ("algo", "tokenizer", "prior"),
    [
        ("mdlm", "gpt2", Masked(110, 109)),
        ("mdlm", "bert-base-uncased", Masked(110, 103)),
        ("mdlm", "text8", Masked(110, 4)),
        ("duo_base", "gpt2", Uniform(110)),
        ("ar", "gpt2", None),
    ],
)
def test_the_prior_follows_from_the_algorithm(tmp_path, omegaconf, algo, tokenizer, prior):
    causal = algo == "ar"
    network = Transformer(110, 32, 2, 4, 16, causal=causal)
    config = changed(
        algo={"name": algo, "causal_attention": causal, "time_conditioning": algo != "mdlm"},
        data={"tokenizer_name_or_path": tokenizer},
        noise={"type": "cosine", "eps": 1e-4},
    )
    model = official.load(lightning(tmp_path / "m.ckpt", network, omegaconf, config))
    assert model.prior == prior and model.schedule == Cosine(1e-4)
    assert model.network.causal == causal
    assert model.network.time_conditioning == (algo != "mdlm")


@pytest.mark.parametrize("algo", ["duo", "mdlm"])
def test_the_unet_s_vocabulary_follows_from_the_algorithm(tmp_path, omegaconf, algo):
    network = UNet(width=16, image_size=8, channels=3, width_mult=(1, 2))
    shape = {"ch": 16, "ch_mult": [1, 2], "num_res_blocks": 2, "num_scales": 2, "size": 64}
    more = {"input_channels": 3, "scale_count_to_put_attn": 1, "skip_rescale": True}
    more |= {"time_embed_dim": "${.ch}", "time_scale_factor": 1000, "name": "unet"}
    config = changed(model={**shape, **more}, algo={"name": algo})
    model = official.load(lightning(tmp_path / "u.ckpt", network, omegaconf, config))
    assert model.prior == (Masked(257, 256) if algo == "mdlm" else Uniform(256))
    z = torch.randint(256, (1, 192), generator=generator())
    assert model.denoiser(z, 0.5).shape == (1, 192, model.prior.vocab_size)
    assert model.codec == Pixels(3, 8, 8) and not model.config.framed
    assert model.sample(1, num_steps=1).images[0].shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("kind", "prior"), [("DUO", Uniform(11)), ("mdlm", Masked(11, 10)), ("udlm", Uniform(11))]
)
def test_a_hub_folder_loads(tmp_path, kind, prior):
    network = Transformer(11, 32, 2, 4, 16)
    state = {f"backbone.{k}": v.contiguous() for k, v in network.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    config = {"model_type": kind, "vocab_size": 11, "model_length": 64, "hidden_dim": 32}
    config |= {"cond_dim": 16, "n_blocks": 2, "n_heads": 4, "dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = official.load(tmp_path)
    assert model.prior == prior and model.network.time_conditioning == (kind != "mdlm")
    made = sample(
        model.denoiser, model.prior, plan(4, model.schedule, Cap(0.1)), (2, 6), generator()
    )
    assert made.tokens.shape == (2, 6)
    loaded = psidiff.load(tmp_path, device="cpu", dtype="bfloat16")
    assert next(loaded.network.parameters()).dtype == torch.bfloat16
    assert loaded.denoiser(made.tokens, 0.5).dtype == torch.float32


class Payload:
    """What an attacker would put into a file."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def test_a_file_that_runs_code_is_refused_and_nothing_runs(tmp_path):
    import os

    witness = tmp_path / "witness"
    for i, payload in enumerate(
        (
            Payload(os.system, f"touch {witness}"),
            Payload(eval, f"open({str(witness)!r}, 'w')"),
            Payload(exec, f"open({str(witness)!r}, 'w')"),
            Payload(__import__, "os"),
        )
    ):
        path = tmp_path / f"{i}.ckpt"
        torch.save({"state_dict": {}, "x": payload}, path)
        with pytest.raises(ValueError, match=r"asks for .*, which is refused"):
            read_checkpoint(path)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("omegaconf", "os.system"),
        ("transformers.utils", "importlib.import_module"),
        ("collections", "abc.sys.modules"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_parameter"),
        ("builtins", "getattr"),
        ("posix", "system"),
    ],
)
def test_a_payload_behind_an_allowed_name_is_refused(tmp_path, module, name):
    """Protocol 4 lets a name have dots, which would walk from a package to anything."""
    code = _call(module, name) + _text("true") + b"\x85R."
    with pytest.raises(ValueError, match="refused"):
        read_checkpoint(_archive(tmp_path, code))


def test_an_inert_object_is_never_called_for_effect(tmp_path, monkeypatch):
    """subprocess-like calls on inert names make an object that does nothing."""
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    code = (
        b"\x80\x04" + _text("transformers") + _text("system") + b"\x93" + _text("x") + b"\x85R."
    )
    made = read_checkpoint(_archive(tmp_path, code))
    assert isinstance(made, StandIn) and made.name == "transformers.system"
    assert "transformers" not in sys.modules
    code = (
        b"\x80\x04" + _text("_codecs") + _text("encode") + b"\x93" + _text("x") + _text("rot13")
    )
    with pytest.raises(ValueError, match="codec 'rot13', which is refused"):
        read_checkpoint(_archive(tmp_path, code + b"\x86R."))


def _call(module, name):
    """The opening of a protocol-4 pickle that names a global."""
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93"


def _text(word):
    return b"\x8c" + bytes([len(word)]) + word.encode()


def _archive(folder, code):
    """A torch file whose pickle is these bytes."""
    import zipfile

    source, path = folder / "plain.ckpt", folder / "made.ckpt"
    torch.save({"a": 1}, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.namelist():
            new.writestr(item, code if item.endswith("data.pkl") else old.read(item))
    return path


def test_references_in_a_config_are_followed():
    config = {
        "a": {"x": "${b.y}", "z": "${.w}", "w": 3, "deep": {"v": "${..w}"}},
        "b": {"y": "${c}", "custom": "${eval:1+1}", "list": ["${a.w}"]},
        "c": 7,
        "loop": "${loop}",
        "nowhere": "${x.y}",
    }
    got = resolve(config)
    assert got["a"] == {"x": 7, "z": 3, "w": 3, "deep": {"v": 3}}
    assert got["b"] == {"y": 7, "custom": "${eval:1+1}", "list": [3]}
    assert got["nowhere"] == "${x.y}" and got["loop"] == "${loop}"
    assert resolve({"a": "${b}", "b": {"c": 1}})["a"] == "${b}"
    wide = {f"k{i}": [f"${{k{i + 1}}}"] * 10 for i in range(18)} | {"k18": 1}
    got = resolve(wide)  # not 10^18 values
    assert got["k17"] == [1] * 10 and got["k0"] == ["${k1}"] * 10
    long = "${" + "a." * 10**6 + "a}"
    assert resolve({"x": [long] * 1000})["x"][0] is long
    assert plain({"a": (1, [2])}) == {"a": [1, [2]]}


@pytest.mark.parametrize(
    "prior",
    [Uniform(11), Masked(11, 10), Mixed(11, 10, 0.2), Unigram(range(1, 12)), None],
    ids=str,
)
def test_our_own_format_gives_the_same_model_back(tmp_path, prior):
    options = {
        "vocab_size": 11,
        "hidden_size": 32,
        "num_blocks": 1,
        "num_heads": 4,
        "cond_dim": 16,
    }
    network = Transformer(**options, causal=prior is None)
    config = {
        "network": "transformer",
        "options": {**options, "causal": prior is None},
        "predicts": "loo",
        "length": 8,
    }
    model = psidiff.model.assemble(network.state_dict(), prior, Cosine(1e-2), config)
    model.save(tmp_path / "saved")
    again = psidiff.load(tmp_path / "saved", device="cpu")
    assert again.prior == prior and again.schedule == Cosine(1e-2) and again.config == config
    z = torch.randint(10, (2, 6), generator=generator())
    assert torch.equal(model.denoiser(z, 0.3), again.denoiser(z, 0.3))


def test_somebody_s_network_is_wrapped():
    seen = []

    def network(z, *rest):
        seen.append(rest)
        return torch.zeros(*z.shape, 5)

    z, schedule = torch.zeros(2, 3, dtype=torch.int64), LogLinear()
    for time, want in (("alpha", 0.4), ("sigma", 0.916), ("t", 0.6006)):
        model = psidiff.wrap(network, Uniform(5), schedule, time=time)
        assert model.denoiser(z, 0.4).shape == (2, 3, 5)
        assert seen[-1][0].item() == pytest.approx(want, abs=1e-3)
    psidiff.wrap(network, Uniform(5), schedule, time=None).denoiser(z, 0.4)
    assert seen[-1] == ()
    labelled = psidiff.wrap(network, Uniform(5), schedule)
    labelled.denoiser(z, 0.4, torch.tensor([1, 2]))
    assert len(seen[-1]) == 2
    made = sample(
        labelled.denoiser, Uniform(5), plan(4, schedule, Cap(0.1)), (2, 3), generator()
    )
    assert made.tokens.shape == (2, 3)


def test_a_wrapped_module_moves_with_its_model_and_keeps_its_head():
    network = Transformer(11, 32, 1, 4, 16)
    model = psidiff.wrap(network, Uniform(11), LogLinear())
    steps = plan(20, LogLinear(), Cap(0.05))
    made = sample(model.denoiser, Uniform(11), steps, (4, 6), generator())
    whole = sample(lambda *a: model.denoiser(*a), Uniform(11), steps, (4, 6), generator())
    assert (made.tokens == whole.tokens).all() and not network.training
    model.denoiser.to(torch.bfloat16)
    assert network.vocab_embed.embedding.dtype == torch.bfloat16
    assert model.denoiser(made.tokens, 0.5).dtype == torch.float32


def test_what_cannot_be_loaded_is_said(tmp_path, omegaconf):
    with pytest.raises(ValueError, match="there is no model at"):
        psidiff.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"has no config.json"):
        official.load(tmp_path)
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(ValueError, match=r"text.ckpt"):
        official.load(tmp_path / "text.ckpt")
    for name, held in {
        "half.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "mine.py": b"import torch\n",
        "thing.json": b'{"a": 1}',
        "empty.ckpt": b"",
    }.items():
        (tmp_path / name).write_bytes(held)
        with pytest.raises(ValueError, match=f"{name} is not a checkpoint, or a damaged one$"):
            psidiff.load(tmp_path / name)
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"cut\.ckpt is damaged: "):
        psidiff.load(tmp_path / "cut.ckpt")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="no state_dict"):
        official.load(tmp_path / "other.ckpt")
    network = Transformer(11, 32, 2, 4, 16)
    wide = lightning(tmp_path / "w.ckpt", network, omegaconf, changed(model={"cond_dim": 17}))
    with pytest.raises(ValueError, match=r"does not fit: the network has \(17, 256\)"):
        official.load(wide)
    odd = lightning(tmp_path / "o.ckpt", network, omegaconf, changed(algo={"name": "sedd"}))
    with pytest.raises(ValueError, match="algorithm is 'sedd'"):
        official.load(odd)
    bare = changed()
    del bare["model"]["n_heads"]
    with pytest.raises(ValueError, match=r"b.ckpt does not say its n_heads"):
        official.load(lightning(tmp_path / "b.ckpt", network, omegaconf, bare))
    model = psidiff.wrap(lambda z, a: None, Uniform(5), LogLinear())
    with pytest.raises(ValueError, match="wrapped callable"):
        model.save(tmp_path / "x")
    with pytest.raises(ValueError, match="'years'"):
        psidiff.wrap(lambda z: z, Uniform(5), LogLinear(), time="years")
    folder = tmp_path / "future"
    folder.mkdir()
    (folder / "psidiff.json").write_text('{"format_version": 99}')
    with pytest.raises(ValueError, match="format_version 99"):
        psidiff.load(folder)
