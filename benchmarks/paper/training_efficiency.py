"""Table "training efficiency": samples a second and peak memory, each phase apart.

    python benchmarks/paper/training_efficiency.py [--out out/paper]
    python benchmarks/paper/training_efficiency.py --device cpu --tiny

138M parameters, L = 1024, K = 50,258, 32 sequences, one GPU: the dense curriculum, the sparse
one with k = 2, 3 and 5, and what comes after it. The trainer is that of `psidiff train`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drawing import keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_measure import TINY, Bench, Sizes
from gpu_training import OBJECTIVES, our_training

PHASES = {
    "dense curriculum": "dense",
    "sparse curriculum, k=2": "sparse",
    "sparse curriculum, k=3": "sparse-3",
    "sparse curriculum, k=5": "sparse-5",
    "after the curriculum": "exact",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out")
    options = parser.parse_args(arguments)
    sizes = TINY if options.tiny else Sizes()
    bench, numbers = Bench(options.device, sizes, sizes.batch), []
    for phase, name in PHASES.items():
        assert name in OBJECTIVES
        bench.forget()
        found = our_training(bench, name)
        numbers.append(
            {
                "phase": phase,
                "samples a second": found["samples_per_second"],
                "peak GiB": found.get("gib"),
                "batch": found["batch"],
                "parameters": found["parameters"],
            }
        )
    keep(None, numbers, options.out, "training_efficiency")


if __name__ == "__main__":
    main()
