"""Forward and backward pass as one CUDA graph: a small network is otherwise slower to ask for
than to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_WARM_UP = 3  # calls before the graph is recorded: what is compiled on the way is compiled then


class CudaGraphStep:
    """`work(inputs) -> scalar`, whose gradients end in `parameters`, recorded once.

    inputs is any nest of tensors on one GPU and of constants. A call with other shapes, another
    nest or other constants is recorded anew, and the record before it is dropped.
    """

    def __init__(self, work: Callable[[Any], Tensor], parameters: list[nn.Parameter]) -> None:
        self.work, self.parameters = work, parameters
        self.stream = torch.cuda.Stream(parameters[0].device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.key: Any = None
        self.calls = 0

    def __call__(self, inputs: Any) -> Tensor:
        """The scalar; each parameter's gradient is that of this call alone."""
        leaves, nest = pytree.tree_flatten(inputs)
        kinds = [(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in leaves]
        if (nest, kinds) != self.key:
            self.key, self.calls, self.graph = (nest, kinds), 0, None
            self.leaves = [v.clone() if isinstance(v, Tensor) else v for v in leaves]
        for held, new in zip(self.leaves, leaves, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new, non_blocking=True)
        own = pytree.tree_unflatten(self.leaves, nest)
        self.calls += 1
        if self.calls <= _WARM_UP:  # with the tensors of the record: what is compiled for
            return self._warm_up(own)  # others might be compiled anew there
        graph = self.graph or self._record(own)
        graph.replay()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        return self.result.clone()

    def _warm_up(self, inputs: Any) -> Tensor:
        """Not yet recorded, but where the recording will be."""
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            result = self._pass(inputs)
        now.wait_stream(self.stream)
        return result

    def _record(self, inputs: Any) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self.graph, stream=self.stream, capture_error_mode="thread_local"
        ):  # another thread may pin the next batch meanwhile
            self.result = self._pass(inputs)
        self.grads = [p.grad for p in self.parameters]
        return self.graph

    def _pass(self, inputs: Any) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.work(inputs)
        loss.backward()
        return loss.detach()
