"""Our transformer in transformers: files, logits, streams; foreign denoisers in ours."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from tiny_gemma import tiny_gemma
from toys import generator

import psidiff
from psidiff.data.tokenizers import Bytes, Characters, Subwords
from psidiff.model import Model, assemble
from psidiff.models import Transformer
from psidiff.process import LogLinear, Masked, Mixed, Uniform, Unigram, nelbo
from psidiff.sampling import Trace

transformers = pytest.importorskip(
    "transformers", "5.11", reason="text diffusion streams are in transformers 5.11 and later"
)

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    TextDiffusionStreamer,
)

from psidiff.integrations.trace_recorder import Recorder  # noqa: E402
from psidiff.integrations.transformers import (  # noqa: E402
    DataCollatorForDiffusion,
    PsidiffConfig,
    PsidiffForMaskedLM,
    PsidiffModel,
    tokenizer_of,
)

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def native():
    return psidiff.load("shakespeare", device="cpu")


@pytest.fixture(scope="module")
def model(native):
    return PsidiffForMaskedLM.from_native(native)


def tiny(prior, codec=None, **options):
    """A random transformer of ours; its last layers are not zero."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_blocks": 2, "num_heads": 2, "cond_dim": 8, "dropout": 0.0}
    options = {"vocab_size": prior.vocab_size, **sizes, **options}
    state = Transformer(**options).state_dict()
    state = {n: v if "inv_freq" in n else torch.randn_like(v) / 4 for n, v in state.items()}
    config = {"network": "transformer", "options": options, "predicts": "loo", "length": 12}
    return assemble(state, prior, LogLinear(), config, codec)


def tiny_hf(prior, codec=None, **options):
    return PsidiffForMaskedLM.from_native(tiny(prior, codec, **options))


def noisy(num_samples=2, length=32, vocab_size=65):
    return torch.randint(0, vocab_size, (num_samples, length))


@pytest.mark.parametrize("alpha", [1.0, 0.3, torch.rand(2, 32, 1)])
def test_logits_are_those_of_the_native_model(native, model, alpha):
    z = noisy()
    assert torch.equal(model(z, alpha=alpha).logits, native.network(z, alpha))
    log_x = native.denoiser(z, alpha)
    assert torch.equal(model.native().denoiser(z, alpha), log_x)


def test_timesteps_are_minus_log_alpha(model):
    z, alpha = noisy(), torch.tensor([0.2, 0.9])
    by_alpha = model(z, alpha=alpha[:, None, None]).logits
    torch.testing.assert_close(model(z, -alpha.log()).logits, by_alpha, rtol=0, atol=2e-5)
    each = -alpha.log()[:, None].expand(2, 32)
    torch.testing.assert_close(model(z, each).logits, by_alpha, rtol=0, atol=2e-5)


def test_a_round_trip_through_save_pretrained_is_bit_equal(native, model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors"} <= {f.name for f in tmp_path.iterdir()}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is PsidiffForMaskedLM
    assert type(AutoConfig.from_pretrained(tmp_path)) is PsidiffConfig
    state = native.network.state_dict()
    found = loaded.backbone.state_dict()
    assert state.keys() == found.keys()
    assert all(torch.equal(state[name], found[name]) for name in state)
    z = noisy()
    assert torch.equal(loaded(z, alpha=0.4).logits, native.network(z, 0.4))
    back = loaded.native()
    assert back.prior == native.prior and back.schedule == native.schedule
    assert back.codec == native.codec
    assert {**back.config, "options": None} == {**native.config, "options": None}
    ours = psidiff.load(tmp_path, device="cpu")  # which does not need transformers
    assert torch.equal(ours.denoiser(z, 0.4), native.denoiser(z, 0.4))
    assert (ours.prior, ours.codec) == (native.prior, native.codec)
    assert ours.config.kappa == native.config.kappa and not ours.config.framed


@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"num_classes": 3}, {"learned_positions": 12}]
)
def test_every_option_of_the_transformer_is_saved(options, tmp_path):
    made = tiny_hf(Masked(9, 8), **options)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    z, cond = noisy(2, 12, 9), torch.tensor([0, 2]) if "num_classes" in options else None
    assert torch.equal(*(each(z, alpha=0.5, cond=cond).logits for each in (made, loaded)))
    assert loaded.config.num_hidden_layers == 2 and loaded.config.max_position_embeddings == 12


def test_parameters_have_the_names_of_hub_models(model):
    names = set(model.state_dict())
    assert {
        "backbone.vocab_embed.embedding",
        "backbone.sigma_map.mlp.0.weight",
        "backbone.rotary_emb.inv_freq",
        "backbone.blocks.0.adaLN_modulation.bias",
        "backbone.output_layer.linear.weight",
    } <= names
    assert all(name.startswith("backbone.") for name in names)


def test_a_model_from_a_config_begins_as_ours_does(tmp_path):
    config = PsidiffConfig(vocab_size=9, hidden_size=16, num_blocks=2, num_heads=2, cond_dim=8)
    made = AutoModelForMaskedLM.from_config(config)
    assert (made(noisy(2, 8, 9), alpha=0.5).logits == 0).all()  # the last layer is zero
    embedding = made.backbone.vocab_embed.embedding
    assert embedding.abs().max() <= 1 / 16**0.5 and embedding.std() > 0.05
    state = {n: v for n, v in made.state_dict().items() if "blocks.1" not in n}
    made.save_pretrained(tmp_path, state_dict=state)
    loaded = PsidiffForMaskedLM.from_pretrained(tmp_path)  # what is missing is made anew
    block = loaded.backbone.blocks[1]
    assert block.attn_qkv.weight.std() > 0.05 and (block.adaLN_modulation.weight == 0).all()
    assert (block.norm1.weight == 1).all()


def test_push_to_hub_sends_the_saved_files(model, monkeypatch):
    sent = {}

    def create_repo(api, repo_id, **_):
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(api, repo_id, operations, **_):
        sent.update({each.path_in_repo: repo_id for each in operations})

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    card = "create_and_tag_model_card"  # looks for one on the Hub
    monkeypatch.setattr(transformers.utils.hub, card, lambda *_, **__: ModelCard("---\n---\n"))
    model.push_to_hub("someone/small")
    assert sent.keys() >= {"config.json", "model.safetensors"}
    assert set(sent.values()) == {"someone/small"}


def test_the_loss_is_the_integrand_of_the_nelbo(native, model):
    x, z, alpha = noisy(), noisy(), torch.tensor([0.3, 0.7])[:, None, None]
    labels = x.clone()
    labels[0, :5] = -100
    got = model(z, -alpha[:, 0, 0].log(), labels=labels)
    t = native.schedule.time(alpha)
    log_x = native.denoiser(z, alpha)
    nats = nelbo(native.prior, z, x, log_x, alpha, native.schedule.dalpha(t))
    torch.testing.assert_close(got.loss, nats[labels != -100].mean())
    assert model(z, alpha=0.5, labels=labels).loss.isfinite()


def test_a_masked_lm_without_time_needs_no_timesteps():
    native = tiny(Masked(9, 8), time_conditioning=False)
    made, z = PsidiffForMaskedLM.from_native(native), noisy(2, 12, 9)
    assert torch.equal(made(z).logits, native.network(z))
    padding = torch.ones_like(z)
    padding[:, 8:] = 0
    short = made(z, attention_mask=padding).logits[:, :8]
    torch.testing.assert_close(short, native.network(z[:, :8]))
    logits, hidden = made(z, output_hidden_states=True, return_dict=False)
    assert torch.equal(made.backbone.head(hidden[-1]), logits)


@pytest.mark.parametrize("prior", [Masked(9, 8), Uniform(9), Unigram([1.0] * 9)])
@pytest.mark.parametrize("time_conditioning", [True, False])
def test_a_loss_needs_a_level_whatever_the_network_needs(prior, time_conditioning):
    made = tiny_hf(prior, time_conditioning=time_conditioning)
    z = noisy(2, 12, 8)
    with pytest.raises(ValueError, match="a loss is that of a noise level: give timesteps"):
        made(z, labels=z)
    assert made(z, alpha=0.5, labels=(z + 1) % 8).loss >= 0


@pytest.mark.parametrize("prior", [Masked(9, 8), Uniform(9), Mixed(9, 8)])
def test_a_batch_without_labels_costs_nothing(prior):
    made = tiny_hf(prior).requires_grad_()
    z = noisy(2, 12, 9)
    loss = made(z, alpha=0.5, labels=torch.full_like(z, -100)).loss
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in made.parameters() if p.grad is not None)


def test_the_loss_is_a_sum_by_the_number_of_items():
    made = tiny_hf(Uniform(9))
    z, x = noisy(2, 12, 9), noisy(2, 12, 9)
    mean = made(z, alpha=0.5, labels=x).loss
    shared = made(z, alpha=0.5, labels=x, num_items_in_batch=torch.tensor(48)).loss
    torch.testing.assert_close(shared, mean / 2)


def test_timesteps_of_little_noise_lose_no_digits():
    """1 - alpha of sigma = 1e-6 has no digits left in float32."""
    native = tiny(Uniform(9))
    made, z, x = PsidiffForMaskedLM.from_native(native), noisy(2, 12, 9), noisy(2, 12, 9)
    sigma = torch.tensor([1e-6, 3e-4])
    alpha = sigma.double().neg().exp()[:, None, None]
    slope = native.schedule.dalpha(native.schedule.time(alpha))
    nats = nelbo(native.prior, z, x, native.denoiser(z, alpha), alpha, slope)
    torch.testing.assert_close(made(z, sigma, labels=x).loss, nats.mean(), rtol=1e-5, atol=0)


def test_the_states_of_all_layers_lead_to_the_logits(native, model):
    z = noisy()
    out = model(z, alpha=0.3, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], native.network.vocab_embed(z))
    assert torch.equal(model.backbone.head(out.hidden_states[-1]), out.logits)
    assert model(z, alpha=0.3).hidden_states is None


def test_automodel_gives_what_the_output_layer_reads(model, tmp_path):
    model.save_pretrained(tmp_path)
    base, z = AutoModel.from_pretrained(tmp_path), noisy()
    assert type(base) is PsidiffModel
    out = base(z, alpha=0.3, output_hidden_states=True)
    assert torch.equal(base.backbone.head(out.last_hidden_state), model(z, alpha=0.3).logits)
    assert len(out.hidden_states) == 4


def test_eager_attention_is_sdpa_and_shows_its_weights(native, tmp_path):
    PsidiffForMaskedLM.from_native(native).save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager")
    z, mask = noisy(), torch.ones(2, 32)
    mask[0, 20:] = 0
    out = loaded(z, alpha=0.3, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(
        out.logits, native.network(z, torch.tensor(0.3), mask=mask.bool()), rtol=1e-4, atol=1e-4
    )
    assert len(out.attentions) == 3 and out.attentions[0].shape == (2, 4, 32, 32)
    assert (out.attentions[1][0, :, :, 20:] == 0).all()
    torch.testing.assert_close(out.attentions[2].sum(-1), torch.ones(2, 4, 32))
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(loaded(z, alpha=0.3).logits, native.network(z, 0.3))
    with pytest.raises(ValueError, match="output_attentions needs attn_implementation=eager"):
        loaded(z, alpha=0.3, output_attentions=True)
    for name in ("flex_attention", "flash_attention_2", "paged|eager", "fast"):
        with pytest.raises((ValueError, ImportError)):
            loaded.set_attn_implementation(name)


def test_an_attention_function_of_ones_own_is_called(native):
    def halved(layer, q, k, v, mask, dropout, scaling, is_causal):
        called.append(q.shape)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
        return out.transpose(1, 2) / 2, None

    called = []
    transformers.AttentionInterface.register("halved", halved)
    loaded = PsidiffForMaskedLM(PsidiffConfig.of(native))
    loaded.load_state_dict({f"backbone.{n}": v for n, v in native.network.state_dict().items()})
    loaded.eval().set_attn_implementation("halved")
    logits = loaded(noisy(), alpha=0.3).logits
    assert called == [(2, 4, 32, 32)] * 3
    assert not torch.allclose(logits, native.network(noisy(), 0.3))


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_recomputes_blocks_and_gives_the_same_gradients(every):
    z, gradients, calls = noisy(2, 12, 9), [], []
    for checkpointed in (False, True):
        made = tiny_hf(Uniform(9)).train().requires_grad_()
        if checkpointed:
            made.gradient_checkpointing_enable(every_n_layers=every)
            assert made.is_gradient_checkpointing
        for i, block in enumerate(made.backbone.blocks):
            block.norm1.register_forward_hook(lambda *_, i=i: calls.append(i))
        made(z, alpha=0.5, labels=(z + 1) % 9).loss.backward()
        gradients.append([p.grad for p in made.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert calls == [0, 1, 0, 1, 1, 0] if every == 1 else calls == [0, 1, 0, 1, 0]
    made.gradient_checkpointing_disable()
    assert not made.is_gradient_checkpointing


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prior", [Masked(9, 8), Uniform(9)])
def test_more_tokens_leave_the_old_ones_as_they_are(prior, tied, tmp_path):
    made, z = tiny_hf(prior, tied=tied), noisy(2, 12, 8)
    before = made(z, alpha=0.5).logits
    table = made.resize_token_embeddings(12)
    assert table is made.get_input_embeddings() and table.weight.shape == (12, 16)
    after = made(z, alpha=0.5).logits
    torch.testing.assert_close(after[..., :9], before)
    assert (made.prior.vocab_size, made.config.vocab_size) == (12, 12)
    assert made.prior.mask_id == prior.mask_id
    made.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(z, alpha=0.5).logits, after)
    assert made.generate(max_length=6, max_denoising_steps=2).shape == (1, 6)
    assert made(z, alpha=0.5, labels=torch.full_like(z, 11)).loss.isfinite()
    assert made.resize_token_embeddings(pad_to_multiple_of=8).weight.shape[0] == 16


def test_embeddings_are_read_and_set_and_keep_their_names(model):
    native = tiny(Uniform(9))
    made = PsidiffForMaskedLM.from_native(native)
    table, output = made.get_input_embeddings(), made.get_output_embeddings()
    assert isinstance(table, torch.nn.Embedding) and isinstance(output, torch.nn.Linear)
    assert table.weight is native.network.vocab_embed.embedding
    names = set(made.state_dict())
    other = torch.nn.Embedding(9, 16)
    made.set_input_embeddings(other)
    assert (
        made.get_input_embeddings().weight is other.weight and set(made.state_dict()) == names
    )
    assert tiny_hf(Uniform(9), tied=True).get_output_embeddings() is None


@pytest.mark.filterwarnings("ignore")
def test_a_dynamic_int8_copy_runs(native, model):
    """torch's own quantization of linear layers, on a CPU."""
    z = noisy()
    for each in (model, native.denoiser):
        copy = torch.ao.quantization.quantize_dynamic(each, {torch.nn.Linear}, torch.qint8)
        (mine, its) = (m(z, alpha=0.3) for m in (each, copy))
        mine, its = (getattr(out, "logits", out).log_softmax(-1) for out in (mine, its))
        kl = (mine.exp() * (mine - its)).sum(-1).mean()
        assert not torch.equal(mine, its) and kl < 0.01
    assert copy(z, 0.3).isfinite().all()


class Listener:
    """Everything a streamer of transformers is told."""

    def __init__(self, takes_logits=False):
        self.told, self._takes_logits = [], takes_logits

    def put(self, value):
        self.told.append(("put", value))

    def put_draft(self, value=None, *, logits=None):
        self.told.append(("draft", value if logits is None else logits))

    def end(self):
        self.told.append(("end", None))


def test_generation_is_model_sample(native, model):
    given = torch.tensor(native.codec.encode("KING"))[None].long()
    made = model.generate(given, max_new_tokens=20, max_denoising_steps=8, seed=3, top_p=0.9)
    assert made.shape == (1, 24) and torch.equal(made[:, :4], given)
    same = native.sample(1, 8, seed=3, prompt="KING", length=24, top_p=0.9)
    assert torch.equal(made, same.tokens)
    torch.manual_seed(5)
    first, second = (model.generate(max_new_tokens=8, max_denoising_steps=2) for _ in range(2))
    assert not torch.equal(first, second)


def test_generate_takes_a_generation_config_and_what_stands_beside_it_first(native, model):
    config = GenerationConfig(
        max_new_tokens=20, do_sample=True, top_p=0.9, num_return_sequences=2, num_beams=1
    )
    prompt = torch.tensor(native.codec.encode("KING"))[None].long()
    made = model.generate(prompt, config, max_denoising_steps=4, seed=3)
    same = native.sample(2, 4, seed=3, prompt="KING", length=24, top_p=0.9)
    assert torch.equal(made, same.tokens)
    shorter = model.generate(prompt, config, max_new_tokens=5, max_denoising_steps=4)
    assert shorter.shape == (2, 9)


def test_max_length_counts_the_prompt_and_new_tokens_come_first(model):
    def lengths(**options):
        return model.generate(noisy(1, 4), max_denoising_steps=2, **options).shape[1]

    assert lengths(max_length=10) == 10
    assert lengths(max_length=10, max_new_tokens=3) == 7
    assert lengths(generation_config=GenerationConfig(max_length=9)) == 9


def test_without_sampling_the_most_probable_token_is_taken(native, model):
    made = model.generate(max_length=12, max_denoising_steps=4, seed=1, do_sample=False)
    same = native.sample(1, 4, seed=1, length=12, top_k=1)
    assert torch.equal(made, same.tokens)
    config = GenerationConfig(max_length=12, do_sample=False, temperature=0.5, top_k=50)
    made = model.generate(generation_config=config, max_denoising_steps=4, seed=1)
    assert torch.equal(made, same.tokens)


def test_a_streamer_hears_the_prompt_every_step_and_the_end(model):
    prompts, listener = noisy(3, 5), Listener()
    made = model.generate(
        prompts, max_new_tokens=7, max_denoising_steps=6, seed=0, streamer=listener
    )
    kinds = [kind for kind, _ in listener.told]
    assert kinds == ["put", *["draft"] * 7, "put", "end"]
    assert torch.equal(listener.told[0][1], prompts)
    assert all(value.shape == (3, 7) for kind, value in listener.told if kind == "draft")
    assert torch.equal(listener.told[-2][1], made[:, 5:])


def test_windows_are_put_when_they_are_done(model):
    """129 tokens and a model of 128: two windows, the second with half of the first."""
    listener = Listener()
    made = model.generate(
        noisy(1, 2), max_new_tokens=198, max_denoising_steps=2, seed=0, streamer=listener
    )
    put = [value for kind, value in listener.told if kind == "put"]
    assert [value.shape[1] for value in put] == [2, 126, 64, 8]
    assert torch.equal(torch.cat(put, 1), made)


def test_a_streamer_that_takes_logits_gets_them(model):
    listener = Listener(takes_logits=True)
    made = model.generate(
        noisy(1, 4), max_new_tokens=6, max_denoising_steps=3, seed=0, streamer=listener
    )
    logits = [value for kind, value in listener.told if kind == "draft"]
    assert all(each.shape == (1, 6, 65) for each in logits)
    level = torch.ones(1, 10, 1)
    expected = model.native().denoiser(made, level)[:, 4:]
    torch.testing.assert_close(logits[-1], expected)


def test_blanks_are_filled():
    made = tiny_hf(Masked(9, 8))
    ids = torch.tensor([[1, 8, 3, -1, 5]])
    listener = Listener()
    filled = made.generate(
        ids, max_new_tokens=0, max_denoising_steps=4, num_return_sequences=2, streamer=listener
    )
    assert filled.shape == (2, 5)
    assert torch.equal(filled[:, ::2], torch.tensor([[1, 3, 5]] * 2))
    assert (filled < 8).all() and (filled >= 0).all()
    assert listener.told[0][1].tolist() == [[1], [1]]


def test_their_streamer_prints_our_drafts(native, model, capsys):
    tokenizer = tokenizer_of(native)
    streamer = TextDiffusionStreamer(tokenizer, skip_prompt=True)
    prompt = tokenizer("ROMEO:", return_tensors="pt").input_ids
    made = model.generate(
        prompt, max_new_tokens=12, max_denoising_steps=3, seed=0, streamer=streamer
    )
    printed = capsys.readouterr().out
    text = native.codec.decode(made[0, 6:])
    assert printed.count("\033[33m") == 4  # a draft for each step, in yellow
    assert printed.rsplit("\033[J", 1)[1].rstrip("\n") == text.rstrip("\n")


def test_our_recorder_hears_our_generation(native, model):
    recorder = Recorder(num_steps=5, about={"codec": native.codec.describe()})
    made = model.generate(
        noisy(2, 4), max_new_tokens=8, max_denoising_steps=4, seed=0, streamer=recorder
    )
    trace = recorder.trace
    assert recorder.ended and trace.shape == (2, 12)
    assert torch.equal(trace.tokens[-1].long(), made)
    assert trace.about["given"] == [[1] * 4 + [0] * 8] * 2


def test_our_recorder_hears_diffusion_gemma(tmp_path):
    gemma, recorder = tiny_gemma(40, canvas_length=6), Recorder(num_steps=3)
    made = gemma.generate(
        torch.tensor([[5, 6, 7], [8, 9, 10]]),
        max_new_tokens=12,
        max_denoising_steps=3,
        streamer=recorder,
    ).sequences
    trace = recorder.trace
    assert recorder.ended and trace.shape == (2, 15)
    assert len(trace) == 2 * (3 + 1)  # drafts, and what each canvas ended as
    assert torch.equal(trace.tokens[-1].long(), made)
    assert (trace.tokens[0][:, 9:] == -1).all()  # the second canvas is not there yet
    trace.save(tmp_path / "gemma.npz")
    assert len(Trace.load(tmp_path / "gemma.npz")) == 8


@pytest.mark.parametrize(
    "codec",
    [
        Characters("\n abcxyz"),
        Characters.text8(),
        Bytes(),
        Subwords.train_bpe(["some text, and more text"] * 3, 270),
    ],
    ids=lambda codec: type(codec).__name__,
)
def test_a_tokenizer_has_the_ids_of_the_codec(codec, tmp_path):
    text = "bay\nzac x\n" if isinstance(codec, Characters) else "some\ntext é, "
    if getattr(codec, "fold", False):
        text = "some text"
    K = codec.vocab_size
    tokenizer_of(Model(None, Masked(K + 1, K), LogLinear(), codec)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(text).input_ids
    assert ids == codec.encode(text).tolist()
    assert loaded.decode(ids) == text
    assert loaded.mask_token_id == K and loaded.eos_token_id == codec.end_id


@pytest.mark.parametrize(
    ("codec", "pad", "unknown"),
    [
        (Bytes(), 256, None),
        (Subwords.train_bpe(["some text, and more text"] * 3, 270), 0, None),
        ("wordpiece", 0, 1),
    ],
)
def test_padding_and_the_unknown_have_tokens_where_the_codec_has_them(
    codec, pad, unknown, tmp_path
):
    if codec == "wordpiece":
        words = tmp_path / "vocab.txt"
        words.write_text(
            "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "text"])
        )
        codec = Subwords.wordpiece(words)
    tokenizer = tokenizer_of(Model(None, Uniform(codec.vocab_size), LogLinear(), codec))
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (pad, unknown)
    found = tokenizer(["some text", "some"], padding=True, return_tensors="pt")
    assert found.input_ids[1, -1] == pad and found.attention_mask[1, -1] == 0


def test_what_the_alphabet_has_no_token_for_is_a_sentence(native, tmp_path):
    tokenizer_of(native).save_pretrained(tmp_path)
    for tokenizer in (tokenizer_of(native), AutoTokenizer.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="a character that is not in the alphabet"):
            tokenizer("caf\u00e9")
        with pytest.raises(ValueError, match="has no padding token"):
            tokenizer(["KING", "I"], padding=True)


def test_subwords_stay_out_of_the_config():
    codec = Subwords.train_bpe(["some text, and more text"] * 3, 270)
    made = tiny_hf(Uniform(codec.vocab_size), codec)
    assert made.config.codec is None
    assert made.native().codec is None and made.native(codec).codec is codec


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: m(noisy()), "this model is told the noise level: give timesteps"),
        (lambda m: m(noisy(), torch.ones(2), alpha=0.5), "give timesteps or alpha, not both"),
        (lambda m: m.generate(noisy(1, 4), max_new_tokens=0), "there is nothing to generate"),
        (lambda m: m.generate(noisy(1, 4)[0]), r"input_ids must have shape \(B, L\)"),
        (lambda m: m.generate(max_new_tokens=-1), "max_new_tokens must be an integer"),
        (lambda m: m.generate(temprature=1.0), "did you mean temperature"),
        (
            lambda m: m.generate(noisy(1, 4), max_length=3),
            "max_length=3 is below the prompt's 4",
        ),
        (lambda m: m.generate(do_sample="no"), "do_sample must be true or false, got 'no'"),
        (
            lambda m: m.generate(do_sample=False, top_p=0.9),
            "most probable token: leave out top_p",
        ),
        (
            lambda m: m.generate(generation_config=GenerationConfig(num_beams=4)),
            "generation_config has num_beams=4, which text diffusion does not know",
        ),
        (
            lambda m: tiny_hf(Masked(9, 8)).resize_token_embeddings(8),
            "needs the tokens below 9",
        ),
        (
            lambda m: tiny_hf(Uniform(2), Characters("ab")).resize_token_embeddings(1),
            "needs the tokens below 2",
        ),
        (
            lambda m: tiny_hf(Unigram([1.0, 2.0])).resize_token_embeddings(3),
            "has numbers of its own for each token",
        ),
        (
            lambda m: m.set_input_embeddings(torch.nn.Embedding(65, 3)),
            "embeddings must be 128 wide, got 3",
        ),
        (
            lambda m: tiny_hf(Uniform(9), tied=True).set_output_embeddings(
                torch.nn.Linear(1, 1)
            ),
            "a tied model has no output layer",
        ),
        (lambda m: DataCollatorForDiffusion(m, given=2.0), r"given must be in \[0, 1\], got 2"),
        (
            lambda m: m.generate(noisy(), attention_mask=torch.zeros(2, 32)),
            "prompts must be of one length",
        ),
        (lambda m: PsidiffForMaskedLM(PsidiffConfig(causal=True)), "autoregressive"),
        (
            lambda m: PsidiffConfig.of(psidiff.wrap(lambda z: z, Uniform(5), LogLinear())),
            "only a diffusion transformer can be a masked LM",
        ),
        (
            lambda m: tokenizer_of(psidiff.load("digits", device="cpu")),
            "a tokenizer needs a model of text",
        ),
    ],
)
def test_a_mistake_is_one_sentence(model, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(model)


def test_a_hugging_face_masked_lm_fills_in_blanks(capsys):
    main = runpy.run_path(str(EXAMPLES / "foreign_masked_lm.py"))["main"]
    made = main(["the [MASK] of [MASK] .", "--samples", "3", "--steps", "4"])
    assert made.tokens.shape == (3, 5)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all("the" in line and "of" in line for line in words[:3])
    assert (made.tokens != 4).all()  # no mask is left
    assert made.nfe <= 5


def test_a_llada_style_model_answers_block_by_block(capsys):
    pytest.importorskip("diffusers", reason="the example ends in a pipeline of diffusers")
    example = runpy.run_path(str(EXAMPLES / "llada_style.py"))
    made = example["main"](["why?", "--length", "12", "--block", "4", "--steps", "3"])
    assert len(made) == 4
    for tokens in made.values():
        assert tokens.shape == (1, 12) and (tokens < 63).all()
    network = example["tiny"]()
    z = torch.randint(0, 63, (1, 6), generator=generator(0))
    other = z.clone()
    other[0, 5] = (z[0, 5] + 1) % 63
    assert not torch.equal(network(z).logits[0, 0], network(other).logits[0, 0])
    assert "LLaDA2Pipeline" in capsys.readouterr().out
