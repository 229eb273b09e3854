"""What transformers' common tests state of every model, stated of ours over its classes.

transformers does not install its tests, so these are our own assertions, by the names of the
common tests (ModelTesterMixin, ConfigTester). What of them does not apply, and why:

| common test | why not |
|---|---|
| inputs_embeds, inputs_embeds_matches_input_ids | the loss and the denoiser need token ids |
| tie_model_weights, tied_weights_keys | a tied model has one parameter, not two to tie |
| model_get_set_embeddings, "it is what was set" | the table is taken over, its name stays |
| resize_position_vector_embeddings | positions are rotary; learned ones are of fixed boards |
| feed_forward_chunking, problem_types, head_mask | there is no such option |
| custom_4d_attention_mask, sliding windows, caches | no place attends to the past only |
| flash, flex and paged attention | refused: text diffusion needs neither, see `hf_attention` |
| generation tests (GenerationMixin, beams) | `generate` denoises: tests/test_transformers.py |
| model parallelism, offload to disk, tensor parallel plans | need several devices |
| peft, bitsandbytes, GGUF | packages that are not installed here |
| ONNX, torchscript, fx | left by transformers itself |
| keep_in_fp32_modules | norms, rotations and the loss are float32 by themselves |
| encoder-decoder, composite and multimodal tests | one network, one config |
"""

import copy
import inspect
import json

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.11")

from psidiff.integrations.transformers import (  # noqa: E402
    PsidiffConfig,
    PsidiffForMaskedLM,
    PsidiffModel,
)

CLASSES = pytest.mark.parametrize("kind", [PsidiffModel, PsidiffForMaskedLM])
SIZES = {"hidden_size": 16, "num_blocks": 3, "num_heads": 2, "cond_dim": 8, "length": 12}


def config(**options):
    prior = {"name": "masked", "vocab_size": 11, "mask_id": 10}
    return PsidiffConfig(**{"vocab_size": 11, "prior": prior, **SIZES, **options})


def made(kind, eval=True, **options):
    """A model none of whose parameters is zero."""
    torch.manual_seed(1)
    model = kind(config(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model.eval() if eval else model.train()


def inputs(kind, batch=3, loss=False):
    ids = torch.randint(0, 11, (batch, 12))
    held = {"input_ids": ids, "timesteps": torch.rand(batch) + 0.2}
    held["attention_mask"] = (torch.arange(12) < 9).long().expand(batch, 12)
    if loss:
        held["labels"] = torch.randint(0, 10, (batch, 12))
    return held


def first(model, **given):
    return model(**given, return_dict=False)[0]


# --- configs


def test_config_common_properties():
    made = config()
    assert (made.hidden_size, made.num_attention_heads, made.num_hidden_layers) == (16, 2, 3)
    assert (made.vocab_size, made.max_position_embeddings) == (11, 12)
    made.num_hidden_layers = 5
    assert made.num_blocks == 5
    assert PsidiffConfig(num_hidden_layers=2, tie_word_embeddings=True).tied


def test_config_to_json_and_back(tmp_path):
    made = config(tied=True, num_classes=3)
    assert json.loads(made.to_json_string())["num_classes"] == 3
    made.to_json_file(tmp_path / "config.json")
    assert PsidiffConfig.from_json_file(tmp_path / "config.json").to_dict() == made.to_dict()
    made.save_pretrained(tmp_path)
    found = PsidiffConfig.from_pretrained(tmp_path).to_dict()
    assert found | {"_name_or_path": ""} == made.to_dict()
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is PsidiffConfig
    assert PsidiffConfig.from_dict(made.to_dict()).to_dict() == made.to_dict()


def test_config_can_be_init_without_params_and_with_num_labels():
    assert PsidiffConfig().vocab_size == 256
    assert len(config(num_labels=5).id2label) == 5
    assert copy.deepcopy(config()).to_dict() == config().to_dict()


def test_a_config_whose_prior_has_other_tokens_is_a_sentence():
    with pytest.raises(ValueError, match="vocab_size=9, but the config's prior is of 11"):
        PsidiffModel(config(vocab_size=9))


# --- save, load


@CLASSES
@pytest.mark.parametrize("tied", [False, True])
def test_save_load(kind, tied, tmp_path):
    model, given = made(kind, tied=tied), inputs(kind)
    model.save_pretrained(tmp_path)
    loaded, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(first(model, **given), first(loaded, **given))
    assert not any(
        info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    assert not loaded.training
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    auto = {PsidiffModel: "AutoModel", PsidiffForMaskedLM: "AutoModelForMaskedLM"}[kind]
    assert type(getattr(transformers, auto).from_pretrained(tmp_path)) is kind


@CLASSES
def test_torch_save_load_state_dict_and_deepcopy(kind, tmp_path):
    model, given = made(kind), inputs(kind)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = kind(config()).eval()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (other, copy.deepcopy(model)):
        assert torch.equal(first(model, **given), first(each, **given))


def test_from_pretrained_no_checkpoint():
    state = made(PsidiffForMaskedLM).state_dict()
    loaded = PsidiffForMaskedLM.from_pretrained(None, config=config(), state_dict=state)
    assert all(torch.equal(state[name], value) for name, value in loaded.state_dict().items())


def test_correct_missing_keys_and_init_of_all_missing_weights(tmp_path):
    model = made(PsidiffForMaskedLM)
    state = {n: v for n, v in model.state_dict().items() if "output_layer" not in n}
    missing = set(model.state_dict()) - set(state)
    model.save_pretrained(tmp_path, state_dict=state)
    loaded, info = PsidiffForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == missing
    assert all(v.isfinite().all() for v in loaded.state_dict().values())
    assert all(p.device.type == "cpu" for p in loaded.parameters())


def test_load_with_mismatched_shapes(tmp_path):
    made(PsidiffForMaskedLM).save_pretrained(tmp_path)
    other = {"vocab_size": 13, "prior": {"name": "uniform", "vocab_size": 13}}
    with pytest.raises(RuntimeError, match="mismatch"):
        PsidiffForMaskedLM.from_pretrained(tmp_path, **other)
    loaded = PsidiffForMaskedLM.from_pretrained(tmp_path, **other, ignore_mismatched_sizes=True)
    assert first(loaded, **inputs(PsidiffForMaskedLM)).shape == (3, 12, 13)


@CLASSES
def test_can_be_initialized_on_meta_and_loaded_by_a_device_map(kind, tmp_path):
    model, given = made(kind), inputs(kind)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = kind(config())
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    placed = kind.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(first(model, **given), first(placed, **given))


@CLASSES
def test_load_in_another_dtype(kind, tmp_path):
    made(kind).save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    out = first(loaded, **inputs(kind))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


# --- outputs


@CLASSES
def test_determinism_and_batching_equivalence(kind):
    model, given = made(kind), inputs(kind)
    out = first(model, **given)
    assert torch.equal(out, first(model, **given))
    for i in range(3):
        alone = first(model, **{name: value[i : i + 1] for name, value in given.items()})
        torch.testing.assert_close(alone, out[i : i + 1], rtol=1e-4, atol=1e-5)


@CLASSES
def test_forward_signature_and_main_input_name(kind):
    names = list(inspect.signature(kind.forward).parameters)
    assert names[1] == kind.main_input_name == "input_ids"
    assert {
        "attention_mask",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
    } <= set(names)


@CLASSES
def test_model_outputs_equivalence(kind):
    model, loss = made(kind, attn_implementation="eager"), kind is PsidiffForMaskedLM
    shown = {"output_hidden_states": True, "output_attentions": True}
    given = inputs(kind, loss=loss) | shown
    named, plain = model(**given), model(**given, return_dict=False)
    assert isinstance(plain, tuple) and len(plain) == len(named)
    for one, other in zip(named.to_tuple(), plain, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(torch.equal(a, b) for a, b in pairs)


@CLASSES
@pytest.mark.parametrize("by", ["argument", "config"])
def test_attention_and_hidden_states_output(kind, by):
    shown = {"output_hidden_states": True, "output_attentions": True}
    more = shown if by == "config" else {}
    model = made(kind, attn_implementation="eager", **more)
    out = model(**inputs(kind), **(shown if by == "argument" else {}))
    assert len(out.hidden_states) == 4 and out.hidden_states[0].shape == (3, 12, 16)
    assert len(out.attentions) == 3 and out.attentions[0].shape == (3, 2, 12, 12)
    silent = made(kind)(**inputs(kind))
    assert silent.hidden_states is None and silent.attentions is None


@CLASSES
def test_retain_grad_hidden_states_attentions(kind):
    model = made(kind, attn_implementation="eager")
    out = model(**inputs(kind), output_hidden_states=True, output_attentions=True)
    kept = (out.hidden_states[0], out.attentions[0])
    for each in kept:
        each.retain_grad()
    out[0].flatten()[0].backward()
    assert all(each.grad is not None for each in kept)


@CLASSES
def test_eager_matches_sdpa_inference(kind, tmp_path):
    made(kind).save_pretrained(tmp_path)
    outs = []
    for name in ("eager", "sdpa"):
        loaded = kind.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.config._attn_implementation == name
        outs.append(
            first(
                loaded,
                **inputs(kind)
                | {"input_ids": torch.arange(36).view(3, 12) % 11}
                | {"timesteps": torch.ones(3)},
            )
        )
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    assert kind(config()).config._attn_implementation == "sdpa"


# --- parameters


@CLASSES
def test_all_tensors_are_parameter_or_buffer_and_initialized(kind):
    model = kind(config())
    held = {id(t) for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            assert not isinstance(value, torch.Tensor) or id(value) in held
    assert all(t.isfinite().all() for t in (*model.parameters(), *model.buffers()))


@CLASSES
def test_training_gives_every_parameter_a_gradient(kind):
    model = made(kind, eval=False)
    given = inputs(kind, loss=kind is PsidiffForMaskedLM)
    first(model, **given).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    head = {"backbone.output_layer.linear.weight", "backbone.output_layer.linear.bias"}
    assert without == (set() if kind is PsidiffForMaskedLM else head)


@CLASSES
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_training_gradient_checkpointing(kind, use_reentrant):
    given = inputs(kind, loss=kind is PsidiffForMaskedLM)
    gradients = []
    for checkpointed in (False, True):
        model = made(kind, eval=False, dropout=0.0)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            assert model.is_gradient_checkpointing
        first(model, **given).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][name] is None)
        assert gradient is None or torch.allclose(gradient, gradients[1][name])
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@CLASSES
def test_model_get_set_embeddings(kind):
    model = made(kind)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    other = torch.nn.Embedding(11, 16)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings().weight is other.weight
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)


@CLASSES
@pytest.mark.parametrize("tied", [False, True])
def test_resize_tokens_embeddings(kind, tied, tmp_path):
    model, given = (
        made(kind, tied=tied, prior={"name": "uniform", "vocab_size": 11}),
        inputs(kind),
    )
    before = model.get_input_embeddings().weight.clone()
    assert model.resize_token_embeddings(None).weight.shape[0] == 11
    model.resize_token_embeddings(21)
    assert model.config.vocab_size == 21
    assert torch.equal(model.get_input_embeddings().weight[:11], before)
    assert first(model, **given).isfinite().all()
    model.resize_token_embeddings(7)
    assert torch.equal(model.get_input_embeddings().weight, before[:7])
    first(model, **given | {"input_ids": given["input_ids"].clamp(max=6)})
    model.resize_token_embeddings(13, pad_to_multiple_of=8, mean_resizing=False)
    assert model.get_input_embeddings().weight.shape[0] == 16
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert torch.equal(first(model, **given), first(loaded, **given))
