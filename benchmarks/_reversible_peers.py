"""Other reversible stacks, run over the same branches: (branches in order, x [batch, seq, width]) -> x1 + x2 - x."""
from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence

import torch
from _common import LiveBytes, tensors_in
from torch import Tensor, nn
from train_step import revlib_function, torch_checkpoint

Run = Callable[[Tensor], Tensor]


def both_minus_input(pair: Tensor, x: Tensor) -> Tensor:
    """[batch, seq, 2 width] -> [batch, seq, width]."""
    a, b = pair.chunk(2, -1)
    return a + b - x


def memcnn_wrappers(branches: Sequence[nn.Module]) -> Run:
    """memcnn's InvertibleModuleWrapper around an AdditiveCoupling a layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import memcnn

    stack = nn.Sequential(
        *[
            memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(attention, feed_forward, split_dim=-1))
            for attention, feed_forward in zip(branches[::2], branches[1::2])
        ]
    )
    return lambda x: both_minus_input(stack(torch.cat((x, x), -1)), x)


class _Attention(nn.Module):
    """A branch with the signature of Hugging Face's attention."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, hidden_states: Tensor, **ignored: Any) -> Any:
        """As ReformerAttention, without buckets."""
        return SimpleNamespace(hidden_states=self.branch(hidden_states), attention_probs=None, buckets=None)


def reformer_layers(branches: Sequence[nn.Module]) -> Run:
    """Hugging Face's ReformerLayer and its reversible function, with our branches in the place of its own."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import ReformerLayer, _ReversibleFunction

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "attention_head_size": 8, "feed_forward_size": 8}
    config = ReformerConfig(attn_layers=["local"], **sizes)
    layers: List[nn.Module] = []
    for attention, feed_forward in zip(branches[::2], branches[1::2]):
        layer = ReformerLayer(config).train()
        layer.attention, layer.feed_forward = _Attention(attention), feed_forward
        layers.append(layer)

    def run(x: Tensor) -> Tensor:
        out = _ReversibleFunction.apply(torch.cat((x, x), -1), layers, None, None, [], [], None, False, None, False, False)
        return both_minus_input(out, x)

    return run


def revlib_momentum(branches: Sequence[nn.Module], kind: str, mode: str) -> Run:
    """revlib's momentum networks, beta 0.9: `pair`, the couplings of its README with a stream of velocity, and `momentum_net`.

    Both give the position x, up to a factor for `momentum_net`.
    """
    import revlib
    from revlib.utils import momentum_net

    beta, memory_mode = 0.9, getattr(revlib.MemoryModes, mode)
    if kind == "momentum_net":
        net = momentum_net(*branches, split_dim=-1, beta=beta, memory_mode=memory_mode)
        return lambda x: net(torch.cat((x, x), -1)).chunk(2, -1)[1] * beta ** len(branches)
    net = revlib.ReversibleSequential(
        *[module for branch in branches for module in (branch, nn.Identity())],
        split_dim=-1,
        coupling_forward=[lambda v, f: v * beta + f * (1 - beta), revlib.additive_coupling_forward],
        coupling_inverse=[lambda v, f: (v - f * (1 - beta)) / beta, revlib.additive_coupling_inverse],
        memory_mode=memory_mode,
    )
    return lambda x: net(torch.cat((torch.zeros_like(x), x), -1)).chunk(2, -1)[1]


def peers(branches: Sequence[nn.Module]) -> Dict[str, Run]:
    """All that are installed."""
    found: Dict[str, Run] = {
        "torch checkpoint per layer": lambda x: torch_checkpoint(2)(branches, x),
        "torch checkpoint per sublayer": lambda x: torch_checkpoint(1)(branches, x),
    }
    makers = {"revlib": revlib_function, "memcnn": memcnn_wrappers, "Hugging Face Reformer layers": reformer_layers}
    for name, make in makers.items():
        try:
            found[name] = make(branches)
        except ImportError as error:
            print(f"{name} left out: {error}")
    return found


class ResizedBytes(LiveBytes):
    """Live bytes where storages are emptied in place, as memcnn does with its layers' inputs: sizes are read anew each time."""

    def __init__(self, ignore: Any = ()) -> None:
        super().__init__(ignore)
        self._storages: Dict[int, Any] = {}

    def _forget(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self._known.discard(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known.add(key)
                self._storages[key] = weakref.ref(storage)
                weakref.finalize(storage, self._forget, key, 0)
        alive = [reference() for reference in list(self._storages.values())]
        self.now = sum(storage.nbytes() for storage in alive if storage is not None)
        self.peak = max(self.peak, self.now)
        return out
