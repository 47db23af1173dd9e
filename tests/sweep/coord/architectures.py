"""The architectures on which the coordinate check is judged, small: residual and reversible GPTs, tied and untied, a Reformer
(local and hashed attention in turn, axial positions, both streams side by side), and an MLP."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn

from ipu_lean.config import Config, make_config
from ipu_lean.models import build_model
from ipu_lean.sweep.coord.rig import Rig, rig_of

WIDTHS, STEPS, BASE = (32, 64, 128), 8, 32
VOCAB, SEQ, ROWS, FEATURES, CLASSES = 64, 16, 8, 48, 10
Edit = Callable[[Config, int], Config]


@dataclass(frozen=True)
class Architecture:
    """A configuration and its batches; `rig` is its coordinate run, `edit` changes the configuration of every width."""

    name: str
    model: Dict[str, Any]

    @property
    def attends(self) -> bool:
        return self.name != "mlp"

    @property
    def tied(self) -> bool:
        return bool(self.model.get("tied"))

    def config(self, lr: float = 1e-2, seed: int = 0, mup: Optional[Dict[str, Any]] = None, **optimizer: Any) -> Config:
        """The checked configuration."""
        return make_config(
            seed=seed,
            model=self.model,
            mup={"base_width": BASE, **(mup or {})},
            optimizer={"lr": lr, **optimizer},
            data={"tokenizer": {"kind": "bpe", "path": "none"}} if self.attends else {"images": "digits"},
            train={"steps": 1000},
        )

    def rig(self, lr: float = 1e-2, seed: int = 0, edit: Optional[Edit] = None, axis: str = "width", **optimizer: Any) -> Rig:
        """Runs at any width, on random tokens or features that are the same for every width."""
        rig = rig_of(self.config(lr, seed, **optimizer), lambda number: self.batch(seed + number), VOCAB, axis)

        def build(size: int, number: int) -> nn.Module:
            config = rig.configs(size) if edit is None else edit(rig.configs(size), size)
            model = self.made(config.model_copy(update={"seed": config.seed + number}))
            model.rig_config = config  # where rig_of's optimizer looks
            return model

        return replace(rig, build=build)

    def made(self, config: Config) -> nn.Module:
        """The model of a configuration."""
        return build_model(config, VOCAB if self.attends else CLASSES)

    def batch(self, seed: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Random inputs and labels."""
        generator = torch.Generator().manual_seed(1000 + seed)
        if not self.attends:
            return torch.randn(64, FEATURES, generator=generator), torch.randint(0, CLASSES, (64,), generator=generator)
        drawn = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator, dtype=torch.int32)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def gpt(kind: str, tied: bool, **more: Any) -> Architecture:
    """Two layers of four heads whose size grows with the width."""
    model = {"width": 32, "depth": 2, "heads": 4, "seq": SEQ, "vocab": VOCAB, "tied": tied, "stack": {"kind": kind}, **more}
    return Architecture(f"{kind}{'-tied' if tied else ''}", model)


RESIDUAL, RESIDUAL_TIED = gpt("residual", False), gpt("residual", True)
REVERSIBLE, REVERSIBLE_TIED = gpt("reversible", False), gpt("reversible", True)
REFORMER = Architecture("reformer", {
    "width": 32, "depth": 2, "heads": 4, "seq": SEQ, "vocab": VOCAB, "tied": False, "attention": ["local", "lsh"],
    "local": {"chunk": 4}, "lsh": {"chunk": 4, "hashes": 2}, "positions": "axial", "stack": {"output": "concat"},
})  # fmt: skip
MLP = Architecture("mlp", {"kind": "mlp", "width": 32, "depth": 3, "features": FEATURES, "activation": "relu"})
THREE = (RESIDUAL, REVERSIBLE_TIED, MLP)
ALL = (RESIDUAL, REVERSIBLE, MLP, RESIDUAL_TIED, REVERSIBLE_TIED, REFORMER)
