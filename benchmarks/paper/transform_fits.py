"""Figure "polynomial approximation and approximation error" of the transformation operator.

    python benchmarks/paper/transform_fits.py [--vocab-size 50257] [--out out/paper]

Polynomials of degree 9 and 5 in t and the sigmoid a s(bt + c) + d, by least squares, beside the
series of 150 terms, as in the paper, and the quadrature that this library uses; of the operator
and of its derivative, which scales the loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from drawing import COLOURS, keep, panels

from psidiff.duality import diffusion_transform

RANGE = (-3.5, -1.75)  # of gamma


def sigmoid(t: np.ndarray, a: float, b: float, c: float, d: float) -> np.ndarray:
    return a / (1 + np.exp(-(b * t + c))) + d


def fit_sigmoid(t: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Least squares by Levenberg and Marquardt's damped steps, from a falling curve."""
    found, damping = np.array([1.0, -8.0, 4.0, 0.0]), 1e-3
    error = np.square(sigmoid(t, *found) - alpha).sum()
    for _ in range(500):
        a, b, c, _d = found
        s = sigmoid(t, 1.0, b, c, 0.0)
        slope = s * (1 - s)
        J = np.stack((s, a * slope * t, a * slope, np.ones_like(t)), 1)
        H = J.T @ J
        step = np.linalg.solve(
            H + damping * np.diag(np.diag(H)), J.T @ (alpha - sigmoid(t, *found))
        )
        tried = np.square(sigmoid(t, *(found + step)) - alpha).sum()
        if tried < error:
            found, error, damping = found + step, tried, damping / 3
        else:
            damping *= 4
        if np.abs(step).max() < 1e-12 or damping > 1e12:
            break
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--points", type=int, default=20_001)
    options = parser.parse_args(arguments)
    low, high = RANGE
    t = np.linspace(0, 1, options.points)
    gamma = torch.as_tensor(low + t * (high - low))
    exact, slope = (each.numpy() for each in diffusion_transform(gamma, options.vocab_size))
    series = diffusion_transform(gamma, options.vocab_size, "series")[0].numpy()
    curves = {}
    for degree in (9, 5):
        fit = np.polynomial.Polynomial.fit(t, series, degree)
        curves[f"degree {degree}"] = fit(t), fit.deriv()(t) / (high - low)
    a, b, c, d = fit_sigmoid(t, series)
    s = sigmoid(t, 1.0, b, c, 0.0)
    curves["sigmoid"] = a * s + d, a * b * s * (1 - s) / (high - low)
    figure, axes = panels(2, 3, [*curves, *(f"error, {name}" for name in curves)])
    numbers = []
    for (name, (values, slopes)), above, below in zip(
        curves.items(), axes[:3], axes[3:], strict=True
    ):
        error = np.abs(values - series)
        above.plot(t, series, color=COLOURS[0], label="series")
        above.plot(t, values, color=COLOURS[1], ls="--", label=name)
        above.legend(frameon=False)
        below.semilogy(t, error + 1e-17, color=COLOURS[1])
        below.set_xlabel("t")
        numbers.append(
            {
                "fit": name,
                "vocab_size": options.vocab_size,
                "largest error": error.max(),
                "root mean square error": np.sqrt(np.square(error).mean()),
                "largest relative error of the derivative": np.abs(slopes / slope - 1).max(),
                "series from quadrature": np.abs(series - exact).max(),
            }
        )
    keep(figure, numbers, options.out, "transform_fits")


if __name__ == "__main__":
    main()
