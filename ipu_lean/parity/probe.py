"""The forward pass with its intermediate results among its outputs, on any device."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
from torch import nn


class Probe(nn.Module):
    """inputs of a micro-batch -> what each watched module gave for the first row, `[1, ...]`, in execution order.

    Watched are the embedding, both branches of every layer, the final norm and the readout. Hooks take the results, which
    PopTorch traces like any other code. Only the first row leaves the device, since each output is a stream of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.names: List[str] = []
        self._seen: List[torch.Tensor] = []
        self._handles = [
            module.register_forward_hook(self._keep(name)) for name, module in watched(model).items()
        ]

    def _keep(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                visits = sum(seen == name or seen.startswith(name + " (visit ") for seen in self.names)
                self.names.append(name if not visits else f"{name} (visit {visits + 1})")
                self._seen.append(output[:1].float())

        return hook

    def forward(self, inputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Integers `[micro, seq]`, or images `[micro, features]`."""
        # Emptied, not replaced: PopTorch calls this on a shallow copy of the module, which shares the lists.
        self.names.clear()
        self._seen.clear()
        self.model.readout(self.model.hidden(inputs))
        seen = tuple(self._seen)
        self._seen.clear()
        return seen

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def watched(model: nn.Module) -> Dict[str, nn.Module]:
    """Modules by `path:Class`; a layer stands for its branches."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: Dict[str, nn.Module] = {}
    for block in model.blocks():
        for part in getattr(block.module, "branches", [block.module]):
            found[f"{paths[id(part)]}:{type(part).__name__}"] = part
    return found
