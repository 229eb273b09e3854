"""The released checkpoints: Lightning files of Duo, MDLM and AR, and hub-style folders."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .checksums import one_line, reading
from .data.codec import Codec, codec_from
from .data.images import Pixels
from .data.tokenizers import Subwords
from .files import load_tensors, read_json
from .limits import check_limit, limits, regular_file
from .models import Transformer
from .pickles import StandIn
from .process import Cosine, LogLinear, Masked, NoiseSchedule, Prior, Uniform
from .process.prior import PRIORS
from .process.schedule import SCHEDULES
from .torch_files import read_torch_file

_PREFIX = "backbone."
_MASKS = {"bert": 103, "text8": 4}  # elsewhere the mask is the last id
_OPENING = {"gpt2": 50256, "bert": 101}
_EMBEDDING = "vocab_embed.embedding"
_REFERENCE = 200  # characters
_INERT_PACKAGES = {  # whose names a .ckpt file may mention
    "collections",
    "dataloader",
    "lightning",
    "omegaconf",
    "pytorch_lightning",
    "tokenizers",
    "transformers",
    "typing",
}


class ReleasedModel(NamedTuple):
    """What files say of a model.

    config: as `Model.config`.
    averaged: its averaged parameters in their order, if these count.
    """

    state: dict[str, Tensor]
    prior: Prior | None
    schedule: NoiseSchedule
    config: dict[str, Any]
    codec: Codec | None
    averaged: list[Tensor] | None = None


def read_released(path: Path, ema: bool = True) -> ReleasedModel:
    """What a .ckpt file, or a folder with config.json and model.safetensors, says of a model.

    ema: the averaged weights of a .ckpt file, rather than the raw ones.
    """
    with reading(path):
        try:
            return _read_folder(path) if path.is_dir() else _read_lightning(path, ema)
        except KeyError as error:
            missing = one_line(str(error.args[0]))
            raise ValueError(f"{path} does not say its {missing}") from None


def read_checkpoint(path: str | Path) -> Any:
    """The contents of a .ckpt file on the CPU. Nothing that it names is imported or run."""
    path = regular_file(path)
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise ValueError(f"{path} is not a checkpoint, or a damaged one")
    return read_torch_file(path, allowed=_INERT_PACKAGES)


def _read_lightning(path: Path, ema: bool) -> ReleasedModel:
    checkpoint = read_checkpoint(path)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{path} holds no state_dict: it is not a Lightning checkpoint")
    hyper_parameters = plain(checkpoint.get("hyper_parameters"), path) or {}
    config = resolve(hyper_parameters.get("config") or {})
    state = _backbone(checkpoint["state_dict"])
    if not isinstance(config, dict):
        raise ValueError(f"{path} has no config that is a mapping")
    described = _describe_network(config, state)
    prior, schedule = _prior(config, described), _schedule(config)
    if prior is None:
        described["bos_id"] = _of_tokenizer(config, _OPENING)
    averaged = checkpoint["ema"]["shadow_params"] if ema and "ema" in checkpoint else None
    if averaged is not None and not all(isinstance(value, Tensor) for value in averaged):
        raise ValueError(f"{path} has an average that is no tensor")
    codec: Codec | None = _codec_beside(path.parent, described)
    described["framed"] = codec is not None
    if described["network"] == "unet":  # its tokens are the pixels as they are
        made = described["options"]
        codec = Pixels(made["channels"], made["image_size"], made["image_size"])
        described["length"] = codec.length
    return ReleasedModel(state, prior, schedule, described, codec, averaged and list(averaged))


def _read_folder(folder: Path) -> ReleasedModel:
    """config.json and model.safetensors, as duo, mdlm and udlm are on the Hub: averaged."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}")
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type", "")).lower()
    if kind not in ("duo", "mdlm", "udlm", "psidiff"):
        raise ValueError(
            f"model_type must be duo, mdlm or udlm, got {config.get('model_type')!r}"
        )
    state = _backbone(load_tensors(folder / "model.safetensors")[0])
    if kind == "psidiff":
        return _read_pretrained(folder, config, state)
    names = {"hidden_size": config["hidden_dim"], "length": config.get("model_length")}
    time = config.get("time_conditioning", kind != "mdlm")
    described = _transformer(state, config | names, time_conditioning=time)
    prior = _prior({"algo": {"name": kind}}, described)
    codec = _codec_beside(folder, described)
    described["framed"] = codec is not None
    return ReleasedModel(state, prior, _schedule(config), described, codec)


def _read_pretrained(
    folder: Path, config: dict[str, Any], state: dict[str, Tensor]
) -> ReleasedModel:
    """What `save_pretrained` of `integrations.transformers` wrote, without transformers."""
    options = {n: config[n] for n in signature(Transformer).parameters if n in config}
    described = config.get("card", {}) | _described("transformer", config, options)
    described["predicts"] = config.get("predicts", "loo")
    codec = codec_from(config["codec"]) if config.get("codec") else None
    codec = codec or _codec_beside(folder, described)
    prior, schedule = PRIORS.from_dict(config["prior"]), SCHEDULES.from_dict(config["schedule"])
    return ReleasedModel(state, prior, schedule, described, codec)


def _codec_beside(folder: Path, described: dict[str, Any]) -> Subwords | None:
    """The tokenizer whose files lie beside a transformer, if there are any.

    The released models know their rows as framed: bos, text, eos.
    """
    if described["network"] != "transformer":
        return None
    K, files = described["options"]["vocab_size"], {f.name for f in folder.iterdir()}
    codec = None
    if "tokenizer.json" in files:
        codec = Subwords.from_file(folder / "tokenizer.json")
    elif {"vocab.json", "merges.txt"} <= files or {"encoder.json", "vocab.bpe"} <= files:
        codec = Subwords.gpt2(folder, pad=K >= 50258)
    elif "vocab.txt" in files:
        codec = Subwords.wordpiece(folder / "vocab.txt")
    if codec is not None and codec.vocab_size > K:
        raise ValueError(
            f"the tokenizer beside the model has {codec.vocab_size} tokens, the model {K}"
        )
    return codec


def _described(network: str, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    length = config.get("length")
    return {"network": network, "options": options, "predicts": "loo", "length": length}


def _transformer(
    state: dict[str, Tensor], config: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """A released transformer: K stands in its embedding; it knows one level a sequence."""
    options |= {
        "vocab_size": len(state[_EMBEDDING]),
        "hidden_size": config["hidden_size"],
        "num_blocks": config["n_blocks"],
        "num_heads": config["n_heads"],
        "cond_dim": config["cond_dim"],
        "dropout": config.get("dropout", 0.1),
        "per_position_levels": False,
    }
    return _described("transformer", config, options)


def _describe_network(config: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Any]:
    model, algo = config.get("model", {}), config.get("algo", {})
    time = bool(algo.get("time_conditioning", "mdlm" not in str(algo.get("name"))))
    if _EMBEDDING in state:
        causal = bool(algo.get("causal_attention", False))
        return _transformer(state, model, causal=causal, time_conditioning=time)
    classes = state.get("cond_map.embedding_table.weight")
    options = {
        "vocab_size": 257 if "mdlm" in str(algo.get("name")) else 256,
        "image_size": round(int(model.get("size", 1024)) ** 0.5),
        "channels": model.get("input_channels", 3),
        "width": model["ch"],
        "width_mult": list(model["ch_mult"]),
        "num_res_blocks": model["num_res_blocks"],
        "attention_scales": [model.get("scale_count_to_put_attn", 1)],
        "dropout": model.get("dropout", 0.1),
        "skip_rescale": model.get("skip_rescale", True),
        "time_conditioning": bool(model.get("time_conditioning", time)),
        "time_scale": model.get("time_scale_factor", 1000),
        "time_embed_dim": model.get("time_embed_dim"),
        "num_classes": None if classes is None else len(classes) - 1,
    }
    return _described("unet", model, options)


def _prior(config: dict[str, Any], described: dict[str, Any]) -> Prior | None:
    algo, K = str(config.get("algo", {}).get("name", "")), described["options"]["vocab_size"]
    if algo == "ar":
        return None
    if algo == "mdlm":
        mask = _of_tokenizer(config, _MASKS)
        return Masked(K, K - 1 if mask is None else mask)
    if algo.startswith(("duo", "udlm", "distillation")):
        return Uniform(K)
    raise ValueError(
        f"the checkpoint's algorithm is {algo!r}; ar, mdlm, duo and udlm are known"
    )


def _of_tokenizer(config: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The id of the tokenizer whose name holds one of these words."""
    tokenizer = str(config.get("data", {}).get("tokenizer_name_or_path", ""))
    return next((number for word, number in ids.items() if word in tokenizer), None)


def _schedule(config: dict[str, Any]) -> NoiseSchedule:
    noise = config.get("noise") or {}
    noise = noise if isinstance(noise, dict) else {"type": noise}
    kind, eps = str(noise.get("type", "log-linear")).lower(), float(noise.get("eps", 1e-3))
    if kind.replace("-", "").replace("_", "") == "loglinear":
        return LogLinear(eps)
    if kind == "cosine":
        return Cosine(eps)
    raise ValueError(
        f"the checkpoint's noise schedule is {kind!r}; log-linear and cosine are known"
    )


def _backbone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The network's own entries, without their prefix."""
    found = {k[len(_PREFIX) :]: v for k, v in state.items() if k.startswith(_PREFIX)}
    if not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError("a parameter of the file is no tensor")
    if not found:
        raise ValueError(f"the file has no parameter that starts with {_PREFIX!r}")
    return found


def plain(value: Any, path: Any = "the config") -> Any:
    """An unpickled OmegaConf tree as dicts, lists and values, copied to the bounds of depth and
    nodes: a value that is used twice counts twice."""
    bounds, count = limits(), 0

    def copy(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > bounds.nodes:
            check_limit("nodes", count, path, f"has {count:,} values or more")
        if depth > bounds.depth:
            check_limit("depth", depth, path, f"nests {depth} levels deep or deeper")
        value = _content(value)
        if isinstance(value, dict):
            return {name: copy(inner, depth + 1) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [copy(inner, depth + 1) for inner in value]
        return value

    return copy(value, 0)


def _content(node: Any) -> Any:
    """What a node of OmegaConf holds; None where that is not to be found."""
    for _ in range(10):  # a node may hold another, though hardly ever does
        if not isinstance(node, StandIn):
            return node
        state = node.state if isinstance(node.state, dict) else {}
        kept = [state[key] for key in ("_content", "_val") if key in state]
        node = kept[0] if kept else node.items or None
    return None


def resolve(config: dict[str, Any]) -> dict[str, Any]:
    """Follow ${a.b} and ${.x} to plain values; what leads to a section or a list, and custom
    resolvers such as ${eval:...}, stay as they are."""

    def value(node: Any, parents: tuple[str, ...], depth: int) -> Any:
        if isinstance(node, dict):
            return {k: value(v, (*parents, k), depth) for k, v in node.items()}
        if isinstance(node, list):
            return [value(v, parents, depth) for v in node]
        short = isinstance(node, str) and len(node) <= _REFERENCE
        match = re.fullmatch(r"\$\{(\.*)([A-Za-z_][\w.]*)\}", node if short else "")
        if match is None or depth > 20:
            return node
        keys = tuple(match[2].split("."))
        if match[1]:  # one dot is the node's own level, each further one a level up
            keys = (*parents[: len(parents) - len(match[1])], *keys)
        target: Any = config
        for key in keys:
            if not isinstance(target, dict) or key not in target:
                return node
            target = target[key]
        if isinstance(target, (dict, list)):  # else a few lines become billions of values
            return node
        return value(target, keys, depth + 1)

    return value(config, (), 0)
