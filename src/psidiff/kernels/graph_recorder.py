"""Work on tensors of a GPU as CUDA graphs: a small network is otherwise slower to ask for than
to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class _Recording:
    """One kind of inputs: what the graph reads, and what it writes."""

    inputs: tuple[Any, ...]
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None


class GraphRecorder:
    """`work(*inputs)`, recorded for each kind of inputs, and replayed from then on.

    inputs is any nest of tensors on one GPU and of constants; other shapes, another nest or
    other constants are another kind. The next call may overwrite what the last one gave.

    warm_up  calls before the graph is recorded: what is compiled on the way is compiled then
    most     kinds that are kept, those that were used last
    """

    def __init__(
        self, work: Callable[..., Any], device: torch.device, warm_up: int = 3, most: int = 1
    ) -> None:
        self.work, self.warm_up, self.most = work, warm_up, most
        self.stream = torch.cuda.Stream(device)
        self.kinds: dict[Any, _Recording] = {}  # the latest is the last

    def __call__(self, *inputs: Any) -> Any:
        """What the work gives."""
        leaves, nest = pytree.tree_flatten(inputs)
        kind = (nest, *((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in leaves))
        held = self.kinds.pop(kind, None)
        if held is None:
            while len(self.kinds) >= self.most:
                del self.kinds[next(iter(self.kinds))]
            held = _Recording(pytree.tree_map_only(Tensor, torch.clone, inputs))
        self.kinds[kind] = held
        for own, new in zip(pytree.tree_leaves(held.inputs), leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new, non_blocking=True)
        held.calls += 1
        with torch.cuda.device(self.stream.device):
            if held.calls <= self.warm_up:  # with the tensors of the record: what is compiled
                return self._warm_up(held.inputs)  # for others might be compiled anew there
            if held.graph is None:
                held.graph, held.result = self._record(held.inputs)
            held.graph.replay()
        return held.result

    def _warm_up(self, inputs: tuple[Any, ...]) -> Any:
        """Not yet recorded, but where the recording will be."""
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            result = self.work(*inputs)
        now.wait_stream(self.stream)
        return result

    def _record(self, inputs: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Graphs share memory: one runs at a time."""
        graphs = [each.graph for each in self.kinds.values() if each.graph is not None]
        pool = graphs[0].pool() if graphs else None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool, stream=self.stream, capture_error_mode="thread_local"
        ):  # another thread may pin the next batch meanwhile
            result = self.work(*inputs)
        return graph, result
