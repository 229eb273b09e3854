"""The kernels over logits in Triton's interpreter, beside their plain form.

TRITON_INTERPRET=1 python tests/kernels_interpreted.py    where triton is, no GPU needed

A program of its own: the hook that checks shapes under pytest wraps functions, which the
interpreter does not follow.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator

import torch

from psidiff.kernels import logit_rows, logit_step, mix_kernel
from psidiff.kernels.counter_rng import MULTIPLY, _mix
from psidiff.kernels.logit_rows import LogitBlock
from psidiff.sampling.dense_logits import row_filters
from psidiff.sampling.filters import chain

FILTERS = {
    "none": chain(),
    "keep": chain(0.7, top_p=0.9, static=True),
    "drop": chain(top_p=0.5, nucleus="drop", static=True),
}
KINDS = ("as they are", "changed", "ties", "flat")


def differences(width: int, dtype: torch.dtype, name: str, kind: str) -> Iterator[str]:
    g = torch.Generator().manual_seed(width)
    logits = {"flat": 0.0}.get(kind, 3.0) * torch.randn(2, 4, width, generator=g)
    logits = (logits.round() if kind == "ties" else logits).to(dtype)[:, 1:]
    z = torch.randint(width, (2, 3), generator=g)
    bits = torch.randint(-(2**63), 2**63 - 1, (6,), generator=g)
    shift = 4 * torch.randn(2, 3, generator=g)
    changed = (shift, width // 2) if kind == "changed" else (None, None)
    block, how = LogitBlock(logits, z, *changed), row_filters(FILTERS[name])
    got, want = (form(block, bits, how) for form in (logit_rows.by_kernel, logit_rows.plain))
    for field, one, other in zip(got._fields, got, want, strict=True):
        if not torch.allclose(one.float(), other.float(), rtol=1e-4, atol=1e-7):
            yield f"{field}: width {width}, {dtype}, {name}, {kind}"


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)
    wrong = list[str]()
    words = torch.arange(-700, 700).view(2, 700) * MULTIPLY[1]
    if not torch.equal(mix_kernel.mix_in_place(words.clone(), MULTIPLY), _mix(words.clone())):
        wrong.append("mix")
    for passes in (logit_step._PASSES, {2: 1, 4: 1}):  # with few, much is left to settle
        logit_step._PASSES = passes
        for case in itertools.product(
            (5, 300), (torch.float32, torch.bfloat16), FILTERS, KINDS
        ):
            wrong += differences(*case)
    print("\n".join(wrong) or "all equal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
