"""Forward and backward pass as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..kernels.graph_recorder import GraphRecorder


class CudaGraphStep:
    """`work(inputs) -> scalar`, whose gradients end in `parameters`, recorded once.

    A call with inputs of another kind is recorded anew, and the record before it is dropped.
    """

    def __init__(self, work: Callable[[Any], Tensor], parameters: list[nn.Parameter]) -> None:
        self.work, self.parameters = work, parameters
        self.recorder = GraphRecorder(self._pass, parameters[0].device)

    def __call__(self, inputs: Any) -> Tensor:
        """The scalar; each parameter's gradient is that of this call alone."""
        loss, grads = self.recorder(inputs)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        return loss.clone()

    def _pass(self, inputs: Any) -> tuple[Tensor, list[Tensor | None]]:
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.work(inputs)
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in self.parameters]
