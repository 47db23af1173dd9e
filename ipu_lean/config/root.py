"""The whole configuration: one frozen object that every room reads."""

from typing import Literal, Optional

from pydantic import Field

from ipu_lean.config.batch import BatchConfig
from ipu_lean.config.data import DataConfig
from ipu_lean.config.ipu import IpuConfig
from ipu_lean.config.logging import LoggingConfig
from ipu_lean.config.memory import MemoryConfig
from ipu_lean.config.model import ModelConfig
from ipu_lean.config.mup import MupConfig
from ipu_lean.config.optimizer import OptimizerConfig
from ipu_lean.config.schedule import ScheduleConfig
from ipu_lean.config.section import Section, section, setting
from ipu_lean.config.study import StudyConfig
from ipu_lean.config.sweep import SweepConfig
from ipu_lean.config.train import TrainConfig


class Config(Section):
    """What a run is. Built by `load` or `make_config`, which also apply the rules that join sections (checks.py)."""

    name: str = setting("run", "Names the run directory, runs/NAME-TIME.", pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = setting(0, "Seeds initialisation, dropout and the order of the data.", ge=0, lt=2**32)
    device: Literal["cpu", "gpu", "ipu", "ipu-emulated"] = setting(
        "cpu", "Where it runs. `ipu-emulated` is the IPU path on an emulator of PopTorch. Never changes what is computed."
    )
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16-pure", "fp16-ipu"] = setting(
        "fp32",
        "`fp32`; `bf16-mixed` and `fp16-mixed` keep fp32 weights and compute matrix products in 16 bits (autocast), fp16 with "
        "a loss scale. `bf16-pure` and `fp16-ipu` hold the weights in 16 bits as well.",
    )
    model: ModelConfig = section(ModelConfig, "What is computed.")
    mup: MupConfig = section(MupConfig, "How initialisation and learning rates follow width and depth.")
    memory: MemoryConfig = section(MemoryConfig, "How activations are saved.")
    batch: BatchConfig = section(BatchConfig, "The batch, in Graphcore's words.")
    data: DataConfig = section(DataConfig, "The text and its tokenizer.")
    optimizer: OptimizerConfig = section(OptimizerConfig, "The update rule.")
    schedule: ScheduleConfig = section(ScheduleConfig, "How the learning rate moves.")
    train: TrainConfig = section(TrainConfig, "How long, how often measured and saved.")
    ipu: IpuConfig = section(IpuConfig, "Placement on IPUs.")
    logging: LoggingConfig = section(LoggingConfig, "Where the numbers go.")
    sweep: Optional[SweepConfig] = Field(None, description="Which trials `ipu-lean sweep` runs; other commands do not read it.")
    study: Optional[StudyConfig] = Field(
        None, description="Which variants `ipu-lean study` compares; other commands do not read it."
    )
