"""A server's tick: one step of many requests that share nothing, lazily and by CUDA graphs.

python benchmarks/serve_tick.py [--model books] [--device auto] [--requests 64] [--ticks 50]

Each request has steps, a rule, a length and filters of its own, and is half done. The same
states are moved on again and again, in turn by each way; medians, one JSON line a way. Without
a GPU the steps of fixed shapes are made as they are, unrecorded: that shows that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice

import torch

import psidiff
from psidiff.model import Model
from psidiff.request import build_request
from psidiff.sampling.cuda_graph import CudaGraphStepper
from psidiff.sampling.state import SampleState, advance
from psidiff.serve.samples import Sampling, shared_source

FILTERS = (
    {"top_p": 0.9},
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7},
    {"top_k": 50},
    {"min_p": 0.05, "top_p": 0.9},
)
PLANS = ((16, "ancestral"), (32, "cap:.01"), (64, "cap:.02"), (128, "rescale:.1"))
SHARES = (1.0, 0.5, 0.25)  # of the model's length


def states_of(model: Model, count: int, graphs: CudaGraphStepper | None) -> list[SampleState]:
    """One state of each request, in the middle of its plan."""
    source = shared_source(model) if graphs is None else graphs.source
    longest, states = model.config.length or 256, []
    kinds = zip(cycle(FILTERS), cycle(PLANS + PLANS[:1]), cycle((*SHARES, 0.75)), strict=False)
    for seed, (filters, (steps, kappa), share) in enumerate(islice(kinds, count)):
        length = max(int(share * longest), 1)
        request = build_request(model, 1, steps, kappa, length=length, seed=seed, **filters)
        states.append(Sampling(model, request, (), source, graphs).context.start(0, 1))
    for _ in range(8):  # the same for both ways
        states = [state for state, _ in advance(states)]
    return states


def tick(states: Sequence[SampleState]) -> float:
    """Milliseconds of a step of all."""
    on_gpu = states[0].z.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    advance(states)
    if on_gpu:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="books")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--ticks", type=int, default=50)
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--dtype", default="auto", help="of the network")
    parser.add_argument("--length", type=int, help="of the model, shorter than it is")
    options = parser.parse_args()
    model = psidiff.load(options.model, options.device, options.dtype)
    model.config.length = options.length or model.config.length
    source, on_gpu = shared_source(model), model.device.type == "cuda"
    assert source is not None
    longest = model.config.length or 1
    graphs = CudaGraphStepper(source, model.device, True, longest, replay=on_gpu)
    ways = {
        "lazy": states_of(model, options.requests, None),
        "graphs": states_of(model, options.requests, graphs),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(options.warm + options.ticks):
        for name, states in ways.items():
            took = tick(states)
            if i >= options.warm:
                found[name].append(took)
    for name, times in found.items():
        line = {
            "way": name,
            "milliseconds": round(statistics.median(times), 3),
            "least": round(min(times), 3),
            "most": round(max(times), 3),
            "requests": options.requests,
            "model": options.model,
            "dtype": str(next(model.network.parameters()).dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "recorded": name == "graphs" and on_gpu,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
