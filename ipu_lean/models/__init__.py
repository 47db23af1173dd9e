"""Models, each reading like its paper's figure, and how the configuration becomes one."""

from __future__ import annotations

from ipu_lean.models.base import base_shapes_for
from ipu_lean.models.build import build_meta, build_model
from ipu_lean.models.classifier import Classifier
from ipu_lean.models.gpt import GPT, Block
from ipu_lean.models.mlp import MLP, MLPSpec
from ipu_lean.models.resolve import spec_of
from ipu_lean.models.spec import GPTSpec
from ipu_lean.models.step import TrainStep

__all__ = [
    "GPT", "MLP", "Block", "Classifier", "GPTSpec", "MLPSpec", "TrainStep", "base_shapes_for", "build_meta", "build_model",
    "spec_of",
]
