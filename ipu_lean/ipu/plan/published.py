"""Training runs that Graphcore published (graphcore/examples and optimum-graphcore at SDK 3.4), and some that nobody did.

The evidence behind the formulas and their limits. Figures are of the fullest IPU, in MB (1e6 bytes) and in percent of 897 MiB,
and were computed apart from this package; `benchmarks/plan.py` and the tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from ipu_lean.ipu.plan.workload import Network, Workload

GPT2, BERT = 50272, 30522  # rows of the vocabularies, rounded up


@dataclass(frozen=True)
class Figures:
    """What the table says: F, 2F-1, weights with their accumulators and state, stash, live, their sum, percent before and after
    temporaries; verdict: what has to come out, None for `fits` or `tight`.
    """

    forward: int
    needed: int
    weights: float
    stash: float
    live: float
    total: float
    before: float
    after: float
    verdict: Optional[str] = None


def transformer(width: int, heads: int, depth: int, seq: int, vocab: int, logits: int = 0, labels: int = 0) -> Network:
    """Layers of 12 d^2 + 13 d parameters; `logits` numbers come out for a label (0: the vocabulary's)."""
    layer = 12 * width * width + 13 * width
    return Network(layers=(layer,) * depth, boundary=width, hidden=width, saved=16 * width, masks=2 * width, heads=heads, seq=seq,
                   vocab=logits or vocab, embedding=vocab * width, labels=labels)


def _gpt2(name: str, width: int, heads: int, depth: int, seq: int, layers: Tuple[int, ...], share: float,
          **more: Any) -> Workload:
    """Positions stand on IPU 1, the tied readout on IPU 0; the loss is taken in slices of 128 tokens."""
    settings: Dict[str, Any] = {"positions_ipu": 1, "logit_tokens": 128, "state_offchip": True, **more}
    return Workload(name, transformer(width, heads, depth, seq, GPT2), layers, proportions=(share,), **settings)


def _bert(name: str, width: int, heads: int, depth: int, seq: int, micro: int, layers: Tuple[int, ...], *shares: float,
          masked: int = 0, **more: Any) -> Workload:
    """`masked` tokens of a row are predicted by the tied readout on IPU 0; without them, the readout finds answers where the last
    layer is.
    """
    network = transformer(width, heads, depth, seq, BERT, 0 if masked else 2, masked)
    head = 0 if masked else len(layers) - 1
    settings: Dict[str, Any] = {"state_offchip": True, **more}
    return Workload(name, network, layers, head_ipu=head, micro=micro, proportions=shares, **settings)


def _vit(name: str, micro: int, moments: Tuple[int, ...]) -> Workload:
    network = transformer(768, 12, 12, 197, 1, 1000, 1)
    return Workload(name, network, (3, 3, 3, 3), head_ipu=3, micro=micro, replicas=4, accumulation=128, moments=moments,
                    state_sharded=True, proportions=(0.3,))


_SQUAD8 = (0.08, 0.25, 0.32, 0.32, 0.36, 0.38, 0.4, 0.32)
_BASE, _LARGE = (768, 12, 12), (1024, 16, 24)
_ON_CHIP: Dict[str, Any] = {"state_offchip": False, "state_sharded": True}

PUBLISHED: Tuple[Tuple[Workload, Figures], ...] = (
    (_gpt2("GPT2-S 1024", *_BASE, 1024, (0, 4, 4, 4), 0.15, accumulation=2048, replicas=4),
     Figures(5, 9, 113, 55, 90, 258, 27, 42)),
    (_gpt2("GPT2-M 1024", *_LARGE, 1024, (0, 3, 3, 3, 3, 4, 4, 4), 0.15, accumulation=4096, replicas=2),
     Figures(9, 17, 151, 126, 120, 397, 42, 57)),
    (_gpt2("GPT2-L 512", 1280, 20, 36, 512, (1, *[5] * 7), 0.15, accumulation=4096, replicas=2),
     Figures(11, 21, 394, 118, 48, 560, 60, 75)),
    (_gpt2("GPT2-L 1024", 1280, 20, 36, 1024, (0, *[2] * 8, *[3] * 6, 2), 0.2, accumulation=8192),
     Figures(17, 33, 157, 244, 149, 551, 59, 79)),
    (_gpt2("GPT2-XL inference", 1600, 25, 48, 1024, (1, 6, 6, *[7] * 5), 0.2, training=False, replicas=2),
     Figures(11, 1, 430, 0, 0, 430, 46, 66)),
    (_bert("BERT-base 128", *_BASE, 128, 32, (0, 4, 4, 4), 0.25, masked=20, accumulation=512, replicas=4),
     Figures(5, 9, 113, 220, 138, 472, 50, 75)),
    (_bert("BERT-base 512", *_BASE, 512, 8, (0, 4, 4, 4), 0.25, masked=76, accumulation=512, replicas=4),
     Figures(5, 9, 113, 220, 233, 566, 60, 85)),
    (_bert("BERT-large 128", *_LARGE, 128, 8, (3, 7, 7, 7), 0.25, masked=20, accumulation=2048, replicas=4),
     Figures(5, 9, 353, 117, 46, 516, 55, 80)),
    (_bert("BERT-large 512", *_LARGE, 512, 2, (3, 7, 7, 7), 0.15, masked=76, accumulation=2048, replicas=4),
     Figures(5, 9, 353, 117, 78, 548, 58, 73)),
    (_bert("SQuAD-base 384", *_BASE, 384, 1, (0, 4, 4, 4), 0.25, accumulation=8, replicas=4, **_ON_CHIP),
     Figures(4, 7, 156, 15, 19, 190, 20, 45)),
    (_bert("SQuAD-large 384 on 8", *_LARGE, 384, 4, (2, 3, 3, 3, 3, 3, 3, 4), *_SQUAD8, accumulation=32, replicas=2, **_ON_CHIP),
     Figures(8, 15, 395, 142, 101, 637, 68, 76)),
    (_bert("SQuAD-large 384 on 4", *_LARGE, 384, 2, (3, 7, 7, 7), 0.25, accumulation=64, replicas=4),
     Figures(4, 7, 353, 63, 50, 466, 50, 75)),
    (_vit("ViT-B/16 fine-tuning", 17, (2,)), Figures(4, 7, 96, 144, 127, 367, 39, 69)),
    (_vit("ViT-B/16 pretraining", 8, (4, 4)), Figures(4, 7, 128, 68, 60, 255, 27, 57)),
)

UNPUBLISHED: Tuple[Tuple[Workload, Figures], ...] = (
    (_gpt2("GPT2-M 1024 on 4", *_LARGE, 1024, (0, 8, 8, 8), 0.15, accumulation=4096),
     Figures(5, 9, 403, 132, 120, 655, 70, 85, "tight")),
    (_gpt2("GPT2-L 1024 on 8", 1280, 20, 36, 1024, (1, *[5] * 7), 0.15, accumulation=8192),
     Figures(11, 21, 394, 236, 149, 779, 83, 98, "no")),
    (_gpt2("GPT2-XL training on 16", 1600, 25, 48, 1024, (0, *[3] * 12, *[4] * 3), 0.15, accumulation=8192),
     Figures(17, 33, 369, 406, 187, 962, 102, 117, "no")),
    (_gpt2("GPT2-XL training on 8", 1600, 25, 48, 1024, (0, 6, *[7] * 6), 0.15, accumulation=8192),
     Figures(9, 17, 861, 341, 187, 1388, 148, 163, "no")),
)
