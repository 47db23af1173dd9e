"""GPT: a pre-norm decoder over tokens, with a residual or a reversible stack (Radford et al. 2019; Gomez et al. 2017)."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.models.block import make_blocks, make_layers
from ipu_lean.models.embed import Embed
from ipu_lean.models.heads import make_head
from ipu_lean.models.reformer import check_present, hashing, pad
from ipu_lean.models.spec import GPTSpec
from ipu_lean.mup import BaseShapes, Role
from ipu_lean.nn import (
    KVCache,
    Rotary,
    automatic_chunk,
    chunked_cross_entropy,
    make_norm,
)
from ipu_lean.reversible import ResidualStack, ReversibleStack, Segment


class Block(NamedTuple):
    """One stop of the forward pass, for whoever places the model on devices.

    Attributes:
        name: unique, also where a shared layer comes again.
        module: what is called there.
        kind: embed, layer, norm or head.
        ties: names of the blocks that hold a parameter of this one as well; they belong on one device.
        layers: layers (attention and feed-forward pairs) in it; 2 with order `aaff`.
    """

    name: str
    module: nn.Module
    kind: str
    ties: Tuple[str, ...] = ()
    layers: int = 0


class GPT(nn.Module):
    """tokens -> embed -> stack of layers -> norm -> readout.

    Attributes:
        spec: the numbers it was built from.
        roles, base_shapes: muP's view of each parameter, plain data (`build_model` fills them; no forward pass reads them).
        sum_names: what the sums returned by `loss` are.
    """

    sum_names = ("loss", "correct", "tokens")

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.roles: Dict[str, Role] = {}
        self.base_shapes: BaseShapes = {}
        self.embedding = Embed(spec)
        rotary = None
        if spec.positions == "rotary":
            rotary = Rotary(spec.padded_length(spec.seq), spec.head_size, spec.rotary_base)
        blocks = make_blocks(spec, make_layers(spec, rotary))
        parts = None if spec.segments is None else [Segment(*segment) for segment in spec.segments]
        memory: Dict[str, Any] = {"engine": spec.engine, "checkpoint_every": spec.checkpoint_every, "segments": parts}
        if spec.stack == "residual":
            self.layers: nn.Module = ResidualStack(blocks, **memory)
        else:
            ends = {"input": spec.stack_input, "output": spec.stack_output, "width": spec.stack_width}
            self.layers = ReversibleStack(blocks, **ends, **memory)
        self.norm = make_norm(spec.norm, spec.hidden_width, spec.norm_eps)
        self.readout = make_head(spec, self.embedding.token)
        self.loss_chunk, self.plain_loss = spec.loss_chunk, False

    def reset_parameters(self) -> None:
        """Initialise anew from torch's global generator, as building the model does. Base shapes and roles stay."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    # The forward pass, piece by piece.

    def arrived(self, tokens: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """(what is embedded, which of it is `present`) of integers `[batch, seq]` as the data has them; None: all of it."""
        return tokens, None

    def embed(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Integers `[batch, seq]` -> `[batch, seq, width]`; `start` is the position of the first."""
        return self.embedding(tokens, start)

    def stack(
        self,
        h: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        cache: Optional[KVCache] = None,
        present: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """`[batch, seq, width] -> [batch, seq, width]`: all layers. For mask, cache and present see `CausalSelfAttention`.

        Hashed and local attention take whole chunks, so a sequence is padded for them (`present` says so) and cut again; what is
        padded never reaches a token. With a cache they see to that themselves. With a concatenated or split stack the result has
        `spec.hidden_width` features, as has that of `hidden`.
        """
        check_present(present, h)
        if cache is not None:
            return self.layers(h, mask=mask, cache=cache, present=present)
        seq = h.shape[1]
        h, present = pad(h, present, self.spec.padded_length(seq))
        h = self.layers(h, mask=mask, present=present)
        return h if h.shape[1] == seq else h[:, :seq]

    def streams(
        self, h: torch.Tensor, mask: Optional[torch.Tensor] = None, present: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Both streams `[batch, seq, stack_width]` after the last layer of a reversible stack, from what `embed` gives, of a
        length that the layers can take as it is.
        """
        return self._reversible().run(*self._reversible().enter(h), mask=mask, present=present)

    def inverse(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        present: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """The embedded tokens `[batch, seq, width]` from both streams after the last layer: undoes `streams`, in eval mode.

        Raises:
            ConfigError: a residual stack cannot be undone.
        """
        stack = self._reversible()
        return stack.left_behind(*stack.inverse(a, b, mask=mask, present=present))

    def _reversible(self) -> ReversibleStack:
        if not isinstance(self.layers, ReversibleStack):
            raise ConfigError("only a reversible stack can be undone", key="model.stack.kind", value="residual")
        return self.layers

    def hidden(
        self,
        tokens: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        cache: Optional[KVCache] = None,
        present: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Integers `[batch, seq]` -> `[batch, seq, width]`, after the final norm. With a cache, `tokens` continue it.

        `present`, bool `[batch, seq]`, is False where there is only padding.
        """
        if cache is None:
            return self.norm(self.stack(self.embed(tokens), mask, present=present))
        cache.begin(tokens.shape[1])
        h = self.norm(self.stack(self.embed(tokens, cache.length), mask, cache, present))
        cache.finish()
        return h

    def pooled(self, h: torch.Tensor, present: Optional[torch.Tensor]) -> torch.Tensor:
        """What the head reads of the normed states `[batch, seq, width]`: all of them."""
        return h

    def logits(
        self,
        tokens: torch.Tensor,
        cache: Optional[KVCache] = None,
        mask: Optional[torch.Tensor] = None,
        last: bool = False,
        present: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Integers `[batch, seq]` -> `[batch, seq, vocab]`; with `last`, of the last token only, `[batch, 1, vocab]`."""
        h = self.hidden(tokens, mask, cache, present)
        return self.readout(h[:, -1:] if last else h)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Integers `[batch, seq]` -> logits `[batch, seq, vocab]`."""
        return self.logits(tokens)

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy, float32 sums `[3]` named by `sum_names`).

        Args:
            h: `[batch, seq, width]`, from `hidden`.
            labels: integers `[batch, seq]`, the token that follows each position; -100 is not counted.
        """
        columns = self.spec.classes or self.spec.vocab
        chunk = automatic_chunk(labels.numel(), columns) if self.loss_chunk is None else self.loss_chunk
        return chunked_cross_entropy(h, labels, self.readout, chunk, plain=self.plain_loss)

    def new_cache(self, batch: int, length: Optional[int] = None) -> KVCache:
        """A cache for `batch` sequences of at most `length` tokens (default: the context length)."""
        weight, spec = self.embedding.token.weight, self.spec
        length = spec.seq if length is None else length
        if not 1 <= length <= spec.seq:
            raise ConfigError(f"a cache holds between 1 and model.seq = {spec.seq} tokens", value=length)
        return KVCache(spec.depth, batch, spec.heads, length, spec.head_size, weight.dtype, weight.device, spec.padded_length)

    # What is chosen from outside and never changes the mathematics.

    def set_attention(self, implementation: str) -> None:
        """`explicit` (PopTorch can trace it), `fused` or `torch`, see `CausalSelfAttention`: the same numbers."""
        for module in self.modules():
            if hasattr(module, "set_implementation"):
                module.set_implementation(implementation)

    def redraw(self, step: int) -> None:
        """Draw the random directions of hashed attention for update `step`: a function of the seed, the layer and the step."""
        for attention in hashing(self):
            attention.redraw(step)

    def set_hashes(self, hashes: int) -> None:
        """Rounds of hashing, in every hashed attention. Raises ConfigError for less than one, or where nothing is hashed."""
        found = list(hashing(self))
        if not found:
            raise ConfigError("no layer of this model hashes", key="model.lsh.hashes", value=hashes)
        for attention in found:
            attention.set_hashes(hashes)

    def set_engine(self, engine: str) -> None:
        """How activations are saved: `store`, `invert` or `checkpoint`, see the stacks."""
        self.layers.engine = engine

    def set_loss(self, chunk: Optional[int] = None, plain: bool = False) -> None:
        """How the loss saves memory: tokens per chunk (None: automatic, 0: all), and whether in `plain` operations (PopTorch)."""
        if chunk is not None and chunk < 0:
            raise ConfigError("tokens per chunk; 0 for no chunks", key="memory.loss_chunk", value=chunk)
        self.loss_chunk, self.plain_loss = chunk, plain

    def blocks(self) -> List[Block]:
        """The stops of the forward pass in execution order. A shared layer comes at each visit, tied to the others."""
        executed = self.layers.executed()
        names: Dict[int, List[str]] = {}
        for place, module in enumerate(executed):
            names.setdefault(id(module), []).append(f"layer{place}")
        found = [Block("embed", self.embedding, "embed", ("head",) if self.spec.tied else ())]
        for place, module in enumerate(executed):
            same = tuple(name for name in names[id(module)] if name != f"layer{place}")
            found.append(Block(f"layer{place}", module, "layer", same, len(module.branches) // 2))
        found.append(Block("norm", self.norm, "norm"))
        found.append(Block("head", self.readout, "head", ("embed",) if self.spec.tied else ()))
        return found
