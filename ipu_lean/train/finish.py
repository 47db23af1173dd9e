"""After the last step: the loss curve, a sample of text, and the figures of the summary."""

from __future__ import annotations

from typing import Any, Dict, List

from ipu_lean.config import Config
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.data import Tokenizer
from ipu_lean.errors import IpuLeanError
from ipu_lean.models import build_model
from ipu_lean.train.generate import generate_ids
from ipu_lean.train.loggers import read_metrics
from ipu_lean.train.loop import TrainLoop
from ipu_lean.train.plots import plot_losses


def finish(loop: TrainLoop) -> Dict[str, Any]:
    """{"metrics", "artifacts"} of the summary. Collective: every process calls it, the first one writes."""
    session, config = loop.session, loop.config
    # A sharded or compiled model does not generate; a copy on the host does.
    apart = session.world.size > 1 or session.engine.holds_weights or config.train.compile != "none"
    speaks = session.task.tokenizer is not None and config.model.head == "causal-lm"
    speaks = speaks and config.train.sample.tokens > 0 and not loop.interrupted
    weights = session.engine.sync_to_host() if apart and speaks else None
    if not session.world.first:
        return {}
    session.report.end()
    session.log.close()
    run = session.run
    records = read_metrics(run.metrics)
    artifacts = {"run": str(run.path), "config": str(run.config), "metrics": str(run.metrics)}
    if config.logging.csv:
        artifacts["csv"] = str(run.csv)
    try:
        if plot_losses(records, run.plot, f"{config.name}: loss"):
            artifacts["plot"] = str(run.plot)
    except ImportError as error:
        session.report.warn(f"warning: no loss.png, matplotlib cannot be imported ({error}).")
    if speaks:
        text = sample_text(loop, weights)
        run.sample.write_text(text + "\n", encoding="utf-8")
        artifacts["sample"] = str(run.sample)
        session.report.line(f"sample:\n{text}")
    for name in ("last", "best"):
        try:
            artifacts["checkpoint" if name == "last" else name] = str(session.store.find(name))
        except IpuLeanError:
            continue
    if not loop.interrupted:
        session.report.line(f"saved in {run.path}")
    return {"metrics": figures(loop, records), "artifacts": artifacts}


def sample_text(loop: TrainLoop, weights: Any) -> str:
    """The prompt of `train.sample` and its continuation by the weights as they are now."""
    session, config = loop.session, loop.config
    model = session.model
    if weights is not None:
        model = build_model(on_host(config), session.vocab)
        model.load_state_dict(weights)
    sample, tokenizer = config.train.sample, session.task.tokenizer
    ids = generate_ids(
        model,
        [prompt_ids(tokenizer, sample.prompt)],
        sample.tokens,
        seq=config.model.seq,
        temperature=sample.temperature,
        seed=config.seed,
        end=tokenizer.end,
        allowed=tokenizer.vocab,
    )
    return sample.prompt + tokenizer.decode(ids[0])


def on_host(config: Config) -> Config:
    """The configuration for generating on the CPU what an IPU has trained; others as they are."""
    if config.device not in IPU_DEVICES:
        return config
    return config.model_copy(update={"device": "cpu", "precision": "fp32"})


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> List[int]:
    """Tokens of a prompt; an empty one starts like a document, after an end-of-text token (or a line break where there is
    none).
    """
    ids = list(tokenizer.encode(prompt))
    if ids:
        return ids
    return [tokenizer.end] if tokenizer.end is not None else list(tokenizer.encode("\n"))


def figures(loop: TrainLoop, records: List[Dict[str, Any]]) -> Dict[str, Any]:
    """The summary's metrics. `eval` is the last evaluation of each set; speed is this process's, without its first step."""
    from ipu_lean.train.banner import count_parameters

    train = [record["loss"] for record in records if record["split"] == "train"]
    last: Dict[str, Any] = {}
    for record in records:
        if record["split"] != "train":
            last[record["split"]] = {key: record[key] for key in ("step", "loss", "accuracy", "perplexity", "tokens")}
    return {
        "loss": train[-1] if train else None,
        "first_loss": train[0] if train else None,
        "eval": last,
        "best": loop.best,
        "tokens_per_s": loop.speed.tokens_per_s,
        "data_wait": loop.speed.data_wait,
        "parameters": count_parameters(loop.session.model),
    }
