"""The README of a model on the Hub: what it is in YAML, then its card in Markdown."""

from __future__ import annotations

import re
from importlib.resources import files

from .model_config import ModelParts
from .process.prior import PRIORS

_TASKS = {"text": "text-generation", "image": "unconditional-image-generation"}
_NUMBER = re.compile(r"-?\d*\.?\d+")


def shipped_card(name: str | None) -> str | None:
    """The card of a model in the package: data, recipe, scores with protocol, limits."""
    if not name or not re.fullmatch(r"[\w-]+", name):
        return None
    path = files("psidiff").joinpath("pretrained", name, "card.md")
    return path.read_text(encoding="utf-8") if path.is_file() else None


def readme(
    model: ModelParts, repo_id: str, card: str | None = None, license: str | None = None
) -> str:
    """The README of a model: a header that the Hub reads, a card, and how to load it.

    Args:
        model: the model.
        repo_id: where it will be, owner/name.
        card: Markdown, whose table below "## Scores" becomes the metrics; None: that of the
            model of this name that ships, or else a few words.
        license: an id of the Hub, such as "mit"; None: no license is named.

    Returns:
        The text of a README.md.

    Example:
        >>> import psidiff
        >>> from psidiff.model_card import readme
        >>> model = psidiff.load("shakespeare", device="cpu")
        >>> print(readme(model, "me/bard", license="mit")[:39])
        ---
        library_name: psidiff
        license: mit
    """
    from huggingface_hub import EvalResult, ModelCardData

    title, codec = model.config.title, model.codec
    text = card or shipped_card(model.config.name) or _few_words(model)
    task, data = _TASKS.get(codec.kind if codec else "", "other"), model.config.recipe or title
    results = [
        EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=f"{data}, held out",
            metric_type="nll" if "NLL" in name or "nats" in name else "other",
            metric_name=name,
            metric_value=value,
        )
        for name, value in scores(text).items()
    ]
    header = ModelCardData(
        library_name="psidiff",
        license=license,
        pipeline_tag=None if task == "other" else task,
        tags=_tags(model),
        metrics=sorted({each.metric_type for each in results} - {"other"}) or None,
        model_name=title if results else None,
        eval_results=results or None,
    )
    return f"---\n{header.to_yaml()}\n---\n\n{text.strip()}\n{_USAGE.format(repo_id)}"


_USAGE = """
## Use

```python
import psidiff  # pip install psidiff

model = psidiff.load("{}")
print(model.sample(1))
```
"""


def scores(card: str) -> dict[str, float]:
    """Numbers of the tables below "## Scores": the column "value", by the names of the rows; in
    other tables the row "this model", by the names of the columns."""
    found: dict[str, str] = {}
    heads: list[str] = []
    for line in card.partition("## Scores")[2].partition("\n## ")[0].splitlines():
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in line.replace("`", "").strip("|").split("|")]
        if not heads:
            heads = cells
        elif heads[1:2] == ["value"] and cells[1:]:
            found[cells[0]] = cells[1]
        elif cells[0] == "this model":
            found |= dict(zip(heads[1:], cells[1:], strict=False))
    numbers = {name: _NUMBER.match(value) for name, value in found.items() if name}
    return {name: float(number[0]) for name, number in numbers.items() if number}


def _tags(model: ModelParts) -> list[str]:
    """What somebody may look for."""
    if model.prior is None:
        return ["psidiff", "autoregressive"]
    noise = str(PRIORS.to_dict(model.prior)["name"]).rpartition(":")[2]
    return ["psidiff", "discrete-diffusion", f"{noise}-noise"]


def _few_words(model: ModelParts) -> str:
    """A card of a model that has none."""
    kind = "An autoregressive" if model.prior is None else "A discrete diffusion"
    length = "" if model.length is None else f", sequences of {model.length:,} tokens"
    return (
        f"# {model.config.title}\n\n{kind} model, {model.num_parameters:,} parameters{length}."
    )
