"""Lightning starts the processes and runs the loop; each of its steps is one opaque call of ours. The only module that imports
it.

Forward, backward and update happen inside the engine, so Lightning's own backward, optimizer step, wrapping, checkpoints,
loggers, bar and handling of signals are switched off. What is left is what it does well: launching (its own launcher, torchrun,
several hosts), process groups, and devices. Uses only API that Lightning 2.0 to 2.6 share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import warnings
from typing import Any, Callable, Dict, Iterator

import torch

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError, EnvironmentProblem, IpuLeanError, RunError
from ipu_lean.ipu.dist import instance_index
from ipu_lean.train.instances import world_of
from ipu_lean.train.loop import TrainLoop
from ipu_lean.train.world import World

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import pytorch_lightning as pl
        from pytorch_lightning.plugins.environments import LightningEnvironment
        from pytorch_lightning.strategies import DDPStrategy
    except ImportError as problem:
        raise EnvironmentProblem(
            f"training needs Lightning, which cannot be imported here ({problem}). Install it with "
            "`pip install 'pytorch-lightning>=2.0,<3'`."
        ) from problem


class LitTrainer(pl.LightningModule):
    """One `training_step` = one `TrainLoop.advance`.

    Args:
        open_loop: builds this process's loop once the process group stands; called in every process.
        finish: called with the loop, in every process, after the last step.
    """

    def __init__(self, open_loop: Callable[[World], TrainLoop], finish: Callable[[TrainLoop], None], config: Config) -> None:
        super().__init__()
        # Lightning wants an optimizer to count steps with; it gets one over a number that nobody reads.
        self.tick = torch.nn.Parameter(torch.zeros(1))
        self.__dict__.update(open_loop=open_loop, finish=finish, config=config, loop=None)

    def setup(self, stage: str) -> None:
        """Build the loop: the process group stands, nothing has been moved yet."""
        self.__dict__["loop"] = self.open_loop(world_of(self.config))

    def on_train_start(self) -> None:
        """Last thing before the first step: whatever Lightning drew or installed meanwhile is undone."""
        self.loop.begin()

    def train_dataloader(self) -> Any:
        """Ticks: batches are taken inside the step, where waiting for them is measured and their position is known exactly."""
        return _Ticks()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One engine call and whatever is due after it."""
        result = self.loop.advance()
        if self.loop.done:
            self.trainer.should_stop = True
        return self.tick.detach() * 0.0 + (0.0 if result is None else result.loss)

    def on_train_end(self) -> None:
        """The process group still stands: weights can be gathered for the sample."""
        self.finish(self.loop)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The counter of steps."""
        return torch.optim.SGD([self.tick], lr=0.0)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Done inside the engine."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, **kwargs: Any) -> None:
        """The closure is `training_step`; the update is done inside it."""
        optimizer_closure()

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Done inside the engine."""


class _Ticks:
    """An endless iterable without a length."""

    def __iter__(self) -> Iterator[int]:
        tick = 0
        while True:
            yield tick
            tick += 1


class LaunchOnly(DDPStrategy):
    """Lightning's DDP without its wrapping: the engine wraps the training step itself, with DDP or FSDP."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Straight to the module: Lightning 2.0 would go through the wrapper."""
        return self.lightning_module.training_step(*args, **kwargs)


# -- who am I, before there is a process group ---------------------------------------------------------------------------------
def under_torchrun() -> bool:
    """Whether torchrun (or another elastic launcher) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """This process's rank as its launcher says; 0 for a process that a person started."""
    return instance_index() or int(
        os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) if under_torchrun() else os.environ.get("LOCAL_RANK", "0")
    )


def planned_size(config: Config) -> int:
    """How many processes will train. ConfigError when torchrun and the configuration do not agree, or cannot share the
    replicas.
    """
    processes, strategy = config.train.processes, config.train.strategy
    size = processes
    if under_torchrun():
        size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if processes not in (1, local):
            raise ConfigError(
                f"torchrun started {local} processes on this host",
                key="train.processes",
                value=processes,
                suggestion="leave it out under torchrun",
            )
    if size > 1 and strategy == "single":
        raise ConfigError(
            f"`single` is one process, and {size} were started",
            key="train.strategy",
            value=strategy,
            suggestion="use `ddp` or `fsdp`",
        )
    World(size=size).check_replicas(config.batch.replicas)
    return size


def fit(module: LitTrainer, config: Config) -> None:
    """Run `module` to its end in as many processes as the configuration or torchrun asks for."""
    size = planned_size(config)
    options: Dict[str, Any] = {"devices": 1, "strategy": "auto", "plugins": [LightningEnvironment()]}
    if size > 1:
        options = {"devices": config.train.processes, "strategy": LaunchOnly()}
        if under_torchrun():
            local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            options.update(devices=local, num_nodes=size // local)
        else:
            options["plugins"] = [LightningEnvironment()]
    with quiet():
        trainer = pl.Trainer(
            accelerator="gpu" if config.device == "gpu" else "cpu",
            max_steps=-1,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **options,
        )
        try:
            trainer.fit(module)
        except BaseException as error:
            _stop_children(trainer)
            if size > 1 and _lost_peer(error):
                raise RunError(
                    "another process of this run ended, and training cannot go on without it. What it said stands above; the "
                    "checkpoints so far are whole, and `ipu-lean resume` goes on from the last one."
                ) from error
            raise
        finally:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                with contextlib.suppress(RuntimeError):
                    torch.distributed.destroy_process_group()


def _lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone (gloo and NCCL say so in words only)."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo")
    return isinstance(error, RuntimeError) and not isinstance(error, IpuLeanError) and any(sign in str(error) for sign in signs)


def _stop_children(trainer: Any) -> None:
    """This process failed: the ones that it started would wait for it for ever."""
    for child in getattr(trainer.strategy.launcher, "procs", None) or []:
        with contextlib.suppress(OSError):
            child.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's notices: what it says about accelerators, loggers, workers and tips describes machinery that is off."""
    names = ("pytorch_lightning", "lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        for pattern in (r"pytorch_lightning(\.|$)", r"lightning_fabric(\.|$)", r"lightning(\.|$)"):
            warnings.filterwarnings("ignore", module=pattern)
        warnings.filterwarnings("ignore", category=_possible_user_warning())
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _possible_user_warning() -> Any:
    try:
        from lightning_fabric.utilities.warnings import PossibleUserWarning
    except ImportError:
        return UserWarning
    return PossibleUserWarning
