"""`eval` and `generate`: a trained run directory put to use. Nothing here changes it, save for the note of an evaluation."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import nn

from ipu_lean.config import Config, config_hash, derived, load, load_config, require_device
from ipu_lean.config.layer_kinds import kinds, standing_draw
from ipu_lean.data import Tokenizer, load_tokenizer, prepare
from ipu_lean.data.images import prepare_other
from ipu_lean.data.labelled import prepare_other as prepare_other_texts
from ipu_lean.errors import CheckpointError, ConfigError, EnvironmentProblem, RunError
from ipu_lean.models import build_model
from ipu_lean.train import snapshot as snapshots
from ipu_lean.train.banner import flat
from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.engines import make_engine
from ipu_lean.train.evaluate import evaluate_set
from ipu_lean.train.files import write_json
from ipu_lean.train.finish import on_host, prompt_ids
from ipu_lean.train.generate import check_sampling, check_speaks, check_vocabulary, generate_ids
from ipu_lean.train.images import ImageTask, open_image_task
from ipu_lean.train.labelled import LabelledTask, open_labelled_task
from ipu_lean.train.precision import check_precision
from ipu_lean.train.progress import Reporter
from ipu_lean.train.resume import covers, differing
from ipu_lean.train.runs import RunDirectory, make_summary
from ipu_lean.train.tasks import Task, open_task, text_task
from ipu_lean.train.world import World

Summary = Dict[str, Any]

MEASURING = (
    "name",
    "logging.",
    "batch.",
    "memory.",
    "train.eval_batches",
    "train.threads",
    "model.attention",
    "model.lsh.hashes",
    "data.cache",
    "precision",
    "device",
    "ipu.",
)
"""Keys, and sections with a final dot, that `eval` may change: where and how it computes, never what."""


@dataclass
class Loaded:
    """A checkpoint, ready to use: `config` as far as this machine can honour it."""

    run: RunDirectory
    config: Config
    source: Path
    trainer: Dict[str, Any]
    model: nn.Module
    tokenizer: Optional[Tokenizer]
    world: World


COLUMNS = ("data.text_key", "data.label_key")
"""Keys that `eval` may change as well where they name columns of another corpus (`--data`)."""


def open_run(
    run_dir: str, which: str, report: Reporter, overrides: Sequence[str] = (), *, host: bool = False, other_data: bool = False
) -> Loaded:
    """Model and tokenizer of a run's checkpoint.

    Args:
        which: `best`, `last` or a step; without a best one, `best` means the last.
        overrides: applied to the run's config, of the keys in `MEASURING` only.
        host: on the CPU if the run's device is an IPU. other_data: `COLUMNS` may change as well.

    Raises:
        ConfigError: not a run directory, or an override that would measure another model. EnvironmentProblem: a device was asked
            for that is not here. CheckpointError: no such checkpoint, or one that does not fit model or tokenizer.
    """
    run = RunDirectory.open(run_dir)
    config = _measured(run, overrides, (*MEASURING, *COLUMNS) if other_data else MEASURING)
    if host:
        config = on_host(config)
    if not _here(config.device):
        report.warn(f"warning: the run was trained on {config.device}, which is not here; using the CPU in fp32.")
        config = config.model_copy(update={"device": "cpu", "precision": "fp32"})
    check_precision(config, training=False)
    store = CheckpointStore(run.checkpoints, report.warn)
    unmarked = which == "best" and not store.has_best()
    source = store.find("last" if unmarked else which)
    if unmarked:
        report.warn("warning: this run marked no best checkpoint; using the last one.")
    snapshot = snapshots.read(source, weights_only=True)
    vocab = int(snapshot.trainer["vocab"])
    tokenizer = None if config.data.images is not None else load_tokenizer(source / "tokenizer")
    if tokenizer is not None:
        check_vocabulary(vocab, tokenizer.vocab + derived.extra_rows(config.model))
    model = build_model(config, vocab)
    snapshots.load_into(model, snapshot.model, source)
    draw = standing_draw(config.model, int(snapshot.trainer["step"]), config.batch.device_iterations)
    if draw is not None:
        model.redraw(draw)  # as it hashed when it was saved
    world = World.current(config)
    return Loaded(run, config, source, snapshot.trainer, model.to(world.device), tokenizer, world)


def _measured(run: RunDirectory, overrides: Sequence[str], free: Sequence[str]) -> Config:
    """The run's config with the overrides of an evaluation."""
    trained, config = load_config(run.config), load(run.config, overrides).config
    for key in differing(flat(trained), flat(config)):
        if not covers(free, key):
            columns = "; with --data it may name a column of the other corpus" if key in COLUMNS else ""
            raise ConfigError(
                "this would measure another model or text than the run's",
                key=key,
                value=flat(config).get(key),
                suggestion=f"leave it out; eval may change {', '.join(name.rstrip('.') for name in free)}{columns}",
            )
    if kinds(config.model) != kinds(trained.model):
        raise ConfigError(
            f"this would measure another model: the layers of the run's are {', '.join(kinds(trained.model))}",
            key="model.attention",
            value=config.model.attention,
            suggestion="leave it out; eval may choose among `auto`, `fused` and `explicit` for a model of full attention",
        )
    if config.device != trained.device:
        require_device(config)
        check_precision(config, training=False)
    return config


def run_eval(
    run_dir: str,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str = "best",
    data: Optional[str] = None,
    report: Optional[Reporter] = None,
) -> Summary:
    """Loss, accuracy and perplexity of a checkpoint on the run's validation sets, or on another corpus.

    Args:
        overrides: `key.path=value` for the run's config, such as `train.eval_batches=10` or `batch.micro=1`.
        data: a corpus (as `data.corpus`) to evaluate on, encoded with the run's tokenizer.

    Returns:
        A summary; `metrics` maps each set to its figures. Also kept as eval.json in the run directory, where that can be written.
    """
    started = time.perf_counter()
    report = report or Reporter("plain")
    used = open_run(run_dir, checkpoint, report, overrides, other_data=data is not None)
    config = used.config
    task = _own_data(used) if data is None else _other_corpus(used, data)
    engine = make_engine(used.model, config, used.world, report.line, train=False)
    step = int(used.trainer["step"])
    metrics = {}
    for name in task.validation_names:
        metrics[name] = evaluate_set(engine, task, name, used.world, config.train.eval_batches)
        report.evaluation(step, config.train.steps, name, metrics[name])
    engine.close()
    place = used.run.path / "eval.json"
    summary = make_summary(
        "eval",
        device=config.device,
        config_hash=config_hash(config),
        steps=step,
        tokens=sum(one["tokens"] for one in metrics.values()),
        seconds=time.perf_counter() - started,
        metrics=metrics,
        artifacts={"run": str(used.run.path), "checkpoint": str(used.source), "eval": str(place)},
    )
    try:
        write_json(place, summary)
    except (EnvironmentProblem, RunError) as error:  # somebody else's run, or a full disk: the figures are there all the same
        report.warn(f"warning: eval.json was not kept: {error}")
        del summary["artifacts"]["eval"]
    return summary


def _here(device: str) -> bool:
    """Whether this machine has the device."""
    if device == "ipu":
        return importlib.util.find_spec("poptorch") is not None
    return device != "gpu" or torch.cuda.is_available()


def _own_data(used: Loaded) -> Task:
    task = open_task(used.config, record=used.run.data)
    if not task.validation_names:
        raise ConfigError("this run has no validation set", key="data.validation", suggestion="name a corpus with --data")
    return task


def _other_corpus(used: Loaded, source: str) -> Task:
    """All of another corpus, encoded as the run encodes, as the set `data`; or all of other images, scaled as the run's."""
    if used.config.data.images is not None:
        return _other_images(used, source)
    if used.config.data.labelled is not None:
        return _other_texts(used, source)
    tokenizer = used.config.data.tokenizer
    if tokenizer.kind != "bytes":
        tokenizer = tokenizer.model_copy(update={"path": str(used.source / "tokenizer"), "vocab": None})
    data = used.config.data.model_copy(update={"corpus": source, "validation": {}, "tokenizer": tokenizer})
    # An evaluation pads, so that a text shorter than the context will do: two tokens, one to see and one to predict.
    short = used.config.model.model_copy(update={"seq": 1})
    try:
        prepared = prepare(used.config.model_copy(update={"data": data, "model": short}))
    except ConfigError as error:
        if error.key is not None:
            error.key = "--data"
        raise
    return text_task(used.config, replace(prepared, validation={"data": prepared.train}), "--data")


def _other_images(used: Loaded, source: str) -> Task:
    own = open_image_task(used.config, record=used.run.data).prepared
    other = prepare_other(used.config, source, own, "--data")
    return ImageTask(used.config, replace(own, validation={"data": other}))


def _other_texts(used: Loaded, source: str) -> Task:
    trained = load_config(used.run.config).data  # whose columns may have other names
    columns = {"text_key": trained.text_key, "label_key": trained.label_key}
    config = used.config.model_copy(update={"data": used.config.data.model_copy(update=columns)})
    own = open_labelled_task(config, record=used.run.data).prepared
    other = prepare_other_texts(used.config, source, own, "--data")
    return LabelledTask(used.config, replace(own, validation={"data": other}))


def run_generate(
    run_dir: str,
    prompt: str = "",
    *,
    prompts: Optional[Sequence[str]] = None,
    samples: int = 1,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: Optional[int] = None,
    top_p: Optional[float] = None,
    seed: int = 0,
    checkpoint: str = "best",
    cache: bool = True,
    report: Optional[Reporter] = None,
) -> Summary:
    """Continue a prompt (or several, side by side) with a run's checkpoint.

    Args:
        prompt, prompts: one, or several instead; `-` reads it from standard input.
        samples: continuations of each prompt.
        cache: False recomputes the context for every token: slower, and the same text but for what docs/generate.md says.
        (For the others see `generate.generate_ids`.)

    Returns:
        A summary with `text` (prompt and continuation; several joined by lines of dashes) and `texts`.
    """
    started = time.perf_counter()
    report = report or Reporter("plain")
    check_sampling(temperature, top_k, top_p, tokens)
    if samples < 1:
        raise ConfigError("must be 1 or more", key="--samples", value=samples)
    used = open_run(run_dir, checkpoint, report, host=True)
    if used.tokenizer is None:
        raise ConfigError("this run classifies images, and generates no text", key="data.images", value=used.config.data.images)
    check_speaks(used.config)
    given = [_prompt(one) for one in (prompts if prompts is not None else [prompt])]
    asked = [one for one in given for _ in range(samples)]
    if not asked:
        raise CheckpointError("there is no prompt to continue.")
    counts: Dict[str, int] = {}
    found = generate_ids(
        used.model,
        [prompt_ids(used.tokenizer, one) for one in asked],
        tokens,
        seq=used.config.model.seq,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end=used.tokenizer.end,
        cache=cache,
        allowed=used.tokenizer.vocab,
        counts=counts,
    )
    texts: List[str] = [one + used.tokenizer.decode(ids) for one, ids in zip(asked, found)]
    count, seconds = sum(len(ids) for ids in found), time.perf_counter() - started
    summary = make_summary(
        "generate",
        device=used.config.device,
        config_hash=config_hash(used.config),
        steps=int(used.trainer["step"]),
        tokens=count,
        seconds=seconds,
        metrics={"tokens_per_s": round(count / seconds, 1), **counts},
        artifacts={"run": str(used.run.path), "checkpoint": str(used.source)},
    )
    return {**summary, "text": "\n---\n".join(texts), "texts": texts}


def _prompt(given: str) -> str:
    """The prompt as text; `-` is standard input. ConfigError for bytes that are not UTF-8."""
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode("utf-8")  # an argument that was no UTF-8 holds surrogates
    except UnicodeError as error:
        raise ConfigError("the prompt is not UTF-8 text", key="--prompt") from error
    return text
