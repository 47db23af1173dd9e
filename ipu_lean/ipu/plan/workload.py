"""What a plan is made of: the network's numbers, and how it is run. Plain data, whatever model they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from ipu_lean.ipu.plan.chunked import Chunked
from ipu_lean.ipu.plan.machine import MATMUL_PROPORTION


@dataclass(frozen=True)
class Network:
    """What is computed, in parameters and in numbers for one token.

    Attributes:
        layers: parameters that each layer adds, in execution order; a shared layer adds its own at the first visit.
        embedding, norm, head: parameters of these; a tied readout adds none.
        boundary: numbers that pass from one layer to the next (both streams of a reversible stack). entry: that enter the first
            layer, where both streams are still one; 0: as many.
        hidden: numbers that reach the readout.
        saved: numbers in the type of the activations that one layer needs again in its backward pass, apart from its scores.
        masks: bytes beside them (dropout masks), counted with or without dropout: without, gradients in flight take their place.
        heads: rows of attention scores; 0 without attention.
        seq: tokens in a row. vocab: numbers in a token's logits.
        block: layers between two checkpoints; 2 with order `aaff`.
        chunked: for each layer in execution order its local or hashed attention, None for a full one; () if all are full.
        working: numbers that move while gradients of a layer's feed-forward are taken; read for chunked layers only.
        moving: numbers that are alive on top of one layer's: a gate has gradients of two factors at once.
        inner: numbers of all heads together. fed, around: bytes that a step which walks a reversible stack backwards itself holds
            while it derives a feed-forward, and beside either branch and both streams.
        labels: labels in a row (1 for images, 0: as many as tokens). input_bytes: of one token (or image) as the host sends it.
    """

    layers: Tuple[int, ...]
    boundary: int
    saved: int
    masks: int = 0
    heads: int = 0
    seq: int = 1
    vocab: int = 1
    embedding: int = 0
    norm: int = 0
    head: int = 0
    hidden: int = 0
    block: int = 1
    entry: int = 0
    labels: int = 0
    input_bytes: int = 4
    chunked: Tuple[Optional[Chunked], ...] = ()
    working: int = 0
    moving: int = 0
    inner: int = 0
    fed: int = 0
    around: int = 0

    @property
    def parameters(self) -> int:
        """All of them, each once."""
        return sum(self.layers) + self.embedding + self.norm + self.head


@dataclass(frozen=True)
class Workload:
    """One run of a network on IPUs.

    Attributes:
        layers_per_ipu: of one replica. embedding_ipu, head_ipu: where these stand. positions_ipu: of a table of positions that
            stands apart from the embedding, as in Graphcore's GPT-2; a visit between embedding and layers.
        micro, accumulation, replicas, device_iterations: the batch.
        element, accumulator: bytes of a weight or activation, and of an accumulated gradient.
        moments: bytes of optimizer state for each parameter, by moment. state_offchip, state_sharded: where they are.
        every_layer: what enters each layer is kept, and layers are recomputed one at a time; else a stage at a time.
        recomputed: without it everything is kept (one IPU, or IPUs one after another, unless told otherwise).
        pipelined: False for one IPU and for `sharded`. surrogate: the step walks a reversible stack backwards itself.
        proportions: ipu.matmul_proportion for each IPU; the last one also holds for IPUs beyond the list.
        logit_tokens: tokens whose logits are alive at once (None: all). logit_bytes: of one logit, its softmax and its gradient.
        training: False for inference only.
    """

    name: str
    network: Network
    layers_per_ipu: Tuple[int, ...]
    head_ipu: int = 0
    embedding_ipu: int = 0
    positions_ipu: Optional[int] = None
    micro: int = 1
    accumulation: int = 1
    replicas: int = 1
    device_iterations: int = 1
    element: int = 2
    accumulator: int = 2
    moments: Tuple[int, ...] = (2, 4)
    state_offchip: bool = False
    state_sharded: bool = False
    every_layer: bool = True
    recomputed: bool = True
    pipelined: bool = True
    surrogate: bool = False
    proportions: Tuple[float, ...] = (MATMUL_PROPORTION,)
    logit_tokens: Optional[int] = None
    logit_bytes: int = 6
    training: bool = True

    @property
    def tokens(self) -> int:
        """Tokens (or images) of a micro-batch."""
        return self.micro * self.network.seq

    @property
    def labels(self) -> int:
        """Labels of a micro-batch."""
        return self.micro * (self.network.labels or self.network.seq)

    @property
    def global_batch(self) -> int:
        """Rows of one weight update."""
        return self.micro * self.accumulation * self.replicas

    @property
    def ipus(self) -> int:
        """IPUs of one replica: the highest number and one, gaps included (CompilerImpl.cpp:634)."""
        last = max((ipu for ipu, count in enumerate(self.layers_per_ipu) if count), default=0)
        return max(last, self.embedding_ipu, self.head_ipu, self.positions_ipu or 0) + 1

    def proportion(self, ipu: int) -> float:
        """Share of an IPU's memory that its matrix products may take."""
        return self.proportions[min(ipu, len(self.proportions) - 1)]
