"""The YAML schema, its loader and what follows from it. Plain data: nothing in this room loads torch."""

from ipu_lean.config import derived, layer_kinds
from ipu_lean.config.batch import BatchConfig
from ipu_lean.config.checks import check, require_device
from ipu_lean.config.data import DataConfig, TokenizerConfig
from ipu_lean.config.dump import config_hash, dump_config
from ipu_lean.config.ipu import IpuConfig
from ipu_lean.config.loader import Loaded, load, load_config, make_config
from ipu_lean.config.logging import LoggingConfig
from ipu_lean.config.memory import MemoryConfig
from ipu_lean.config.model import ModelConfig, StackConfig
from ipu_lean.config.model_rules import check_model
from ipu_lean.config.mup import MupConfig
from ipu_lean.config.optimizer import OptimizerConfig
from ipu_lean.config.root import Config
from ipu_lean.config.schedule import ScheduleConfig
from ipu_lean.config.study import StudyConfig
from ipu_lean.config.sweep import SweepConfig
from ipu_lean.config.train import LossScaleConfig, SampleConfig, TrainConfig

__all__ = [
    "BatchConfig",
    "Config",
    "DataConfig",
    "IpuConfig",
    "Loaded",
    "LoggingConfig",
    "LossScaleConfig",
    "MemoryConfig",
    "ModelConfig",
    "MupConfig",
    "OptimizerConfig",
    "SampleConfig",
    "ScheduleConfig",
    "StackConfig",
    "StudyConfig",
    "SweepConfig",
    "TokenizerConfig",
    "TrainConfig",
    "check",
    "check_model",
    "config_hash",
    "derived",
    "dump_config",
    "layer_kinds",
    "load",
    "load_config",
    "make_config",
    "require_device",
]
