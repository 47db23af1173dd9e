"""`compile`: PopTorch's compilation by itself, so that a long one is done and cached before a run, or without IPUs at hand."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict

from ipu_lean.config import Config, Loaded, config_hash, require_device
from ipu_lean.config.checks import check
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.data import blank_batch, expected_vocab
from ipu_lean.errors import ConfigError
from ipu_lean.models import build_model
from ipu_lean.optim import build_schedule
from ipu_lean.train.runs import make_summary

OFFLINE = "ipu2"


def run_compile(loaded: Loaded, offline: bool = False, say: Callable[[str], None] = lambda text: None) -> Dict[str, Any]:
    """Compile the training step and return the summary.

    Args:
        offline: for a generation of IPU (`ipu.offline_target`, or Mk2) that this machine need not have.

    Raises:
        ConfigError: the device is no IPU, or the configuration cannot run on one.
        EnvironmentProblem: no PopTorch. RunError: PopTorch refuses the step, or memory runs out.
    """
    config = loaded.config
    if config.device not in IPU_DEVICES:
        raise ConfigError(
            "only IPU programs are compiled beforehand", key="device", value=config.device, suggestion="add `device=ipu`"
        )
    if offline and config.ipu.offline_target is None:
        config = config.model_copy(update={"ipu": config.ipu.model_copy(update={"offline_target": OFFLINE})})
    check(config)
    require_device(config)
    started = time.perf_counter()
    engine = _compiled(config, say)
    seconds = time.perf_counter() - started
    ipus = engine.placement.ipus * config.batch.replicas
    lines = [engine.placement.table, "", f"compiled for {ipus} IPU{'' if ipus == 1 else 's'} in {seconds:.1f} s"]
    cache = config.ipu.executable_cache
    if config.device == "ipu-emulated":
        lines.append("the emulator keeps no program: this shows only that the step would compile")
    else:
        lines.append(f"kept in {cache}" if cache else "not kept: set ipu.executable_cache to use it in a run")
    metrics = {"ipus": ipus, "stages": engine.placement.stages, "compile_seconds": seconds, "target": config.ipu.offline_target}
    engine.close()
    summary = make_summary(
        "compile",
        device=config.device,
        config_hash=config_hash(config),
        seconds=seconds,
        metrics=metrics,
        artifacts={"executable_cache": cache} if cache else {},
    )
    return {**summary, "table": "\n".join(lines)}


def _compiled(config: Config, say: Callable[[str], None]) -> Any:
    """The engine, with its training program compiled for one call's batch."""
    from ipu_lean.train.engines.poptorch_engine import PopTorchEngine

    vocab, tokenizer = expected_vocab(config), config.data.tokenizer
    if config.model.vocab is None and tokenizer.path is None and tokenizer.kind != "bytes" and config.data.images is None:
        say(f"the program is for a vocabulary of {vocab:,}; a text too short to give that needs another one: set model.vocab")
    model = build_model(config, vocab)
    engine = PopTorchEngine(model, config, build_schedule(config), say=say)
    rows = config.batch.global_batch * config.batch.device_iterations
    try:
        engine.compile(blank_batch(config, rows))
    except BaseException:
        engine.close()
        raise
    return engine
