"""`convert`: a folder of Hugging Face's transformers becomes a run directory, and a run's checkpoint such a folder."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ipu_lean.config import Config, config_hash, derived, dump_config, load_config
from ipu_lean.config.yaml_text import to_text
from ipu_lean.data import Tokenizer, load_tokenizer
from ipu_lean.data.tokenizers import ByteTokenizer
from ipu_lean.errors import ConfigError
from ipu_lean.models import GPT, build_model
from ipu_lean.models.convert import Read, folder, mask_of, read_settings, read_weights, with_mask, written
from ipu_lean.models.convert.mask import name_for
from ipu_lean.mup import roles_to_json
from ipu_lean.train.banner import count_parameters, flat, versions
from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.files import disk_guard, write_atomic
from ipu_lean.train.progress import Reporter
from ipu_lean.train.reuse import open_run
from ipu_lean.train.runs import RunDirectory, make_summary
from ipu_lean.train.snapshot import Snapshot

Summary = Dict[str, Any]
SENTENCEPIECE = "spiece.model"
NOTED = "ipu_lean_tokenizer.json"
"""Where a folder that was written here says that its tokens are bytes, for which transformers has no file."""


def run_convert(
    source: str,
    overrides: Sequence[str] = (),
    *,
    to: Optional[str] = None,
    out: Optional[str] = None,
    checkpoint: str = "best",
    say: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Convert `source`, whichever of the two it is.

    Args:
        overrides: `key.path=value` for the configuration of the run directory that is made, such as `data.corpus=my.txt`.
        to: `hf` or `run`, to be sure of the direction; None: the other kind.
        out: the folder to be made; for a run directory `runs/NAME-TIME` unless given.
        checkpoint: of a run: `best`, `last` or a step.
        say: told what could not be carried over as it was.
    Raises:
        ConfigError: neither kind of folder, or what the other side has not, by name.
    """
    started = time.perf_counter()
    place = Path(source)
    found = "hf" if folder.is_folder(place) else "run" if (place / "config.yaml").is_file() else None
    if found is None:
        rule = "this is neither a run directory (config.yaml) nor a folder of transformers (config.json)"
        raise ConfigError(rule, key="SOURCE", value=source)
    if to not in (None, "hf", "run"):
        raise ConfigError("it is `hf` (a folder of transformers) or `run` (a run directory)", key="--to", value=to)
    if to == found:
        raise ConfigError("this is what the source is already", key="--to", value=to)
    if found == "hf":
        summary = _read(place, overrides, out, say)
    else:
        if overrides:
            key = overrides[0].partition("=")[0]
            raise ConfigError("a folder of transformers has no configuration of ours to change", key=key)
        summary = _write(source, out, checkpoint, say)
    return {**summary, "seconds": round(time.perf_counter() - started, 3)}


# --- from transformers ---


def _read(place: Path, overrides: Sequence[str], out: Optional[str], say: Callable[[str], None]) -> Summary:
    RunDirectory.check_free(out)
    read = read_settings(folder.read_settings(place))
    name = place.resolve().name or read.family
    sections: Dict[str, Any] = {"name": name, "model": read.section, "mup": {"parametrization": "standard"}}
    source, tokenizer = _tokenizer(place, overrides, read.section.get("vocab"))
    sections["data"] = {"tokenizer": {"kind": tokenizer.kind, **({"path": source} if tokenizer.kind != "bytes" else {})}}
    config = with_absolute_paths(_load(sections, overrides, place))
    config, model = _model(read, place, config, tokenizer)
    run = RunDirectory.create(out, name, dump_config(config))
    with run.in_one_go("tokenizer", "checkpoints"):
        # The run directory needs nothing else: its tokenizer lies in it.
        tokenizer.save(run.path / "tokenizer")
        if tokenizer.kind != "bytes":
            config = _with_tokenizer(config, str(run.path / "tokenizer"))
        write_atomic(run.config, dump_config(config))
        beginning = _beginning(config, model.spec.vocab, place)
        snapshot = Snapshot(model.state_dict(), {}, beginning, roles_to_json(model.roles), tokenizer.save)
        store = CheckpointStore(run.checkpoints, say)
        checkpoint = store.write(0, snapshot)
        store.mark_best(0)
    if config.model.head == "classifier" and tokenizer.end is not None:
        read.remarks.append("a text is read behind an end-of-text token here, which transformers' tokenizer does not put there")
    for remark in read.remarks:
        say(f"note: {remark}")
    summary = make_summary(
        "convert",
        device=config.device,
        config_hash=config_hash(config),
        metrics={"parameters": count_parameters(model), "remarks": read.remarks},
        artifacts={"run": str(run.path), "checkpoint": str(checkpoint), "source": str(place.absolute())},
    )
    run.write_summary(summary)
    shown = shlex.quote(str(run.path))
    read_from = "data.labelled" if config.model.head == "classifier" else "data.corpus"
    lines = [
        f"{count_parameters(model):,} parameters of {place} are now the run {run.path}",
        *([f"  ipu-lean generate {shown} --prompt TEXT"] if config.model.head == "causal-lm" else []),
        f"  ipu-lean eval {shown} --data FILE",
        f"  ipu-lean resume {shown} {read_from}=FILE train.steps=1000     (trains on from these weights)",
    ]
    return {**summary, "text": "\n".join(lines)}


def _model(read: Read, place: Path, config: Config, tokenizer: Tokenizer) -> Tuple[Config, GPT]:
    """The folder's model, and the configuration with as many rows as it has: one more where a mask had none."""
    vocab = config.model.vocab or tokenizer.vocab
    if tokenizer.vocab > vocab:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab} pieces and the model {vocab} rows: they do not belong together")
    model = build_model(config, vocab)
    weights = read_weights(read.family, model, folder.read_tensors(place))
    if derived.extra_rows(config.model):
        weights, remark = with_mask(weights, tokenizer.vocab, mask_of(place, tokenizer))
        read.remarks.extend([remark] if remark else [])
        rows = len(weights["embedding.token.weight"])
        if rows != vocab:
            config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": rows})})
            model = build_model(config, rows)
    model.load_state_dict(weights)
    return config, model


def _load(sections: Dict[str, Any], overrides: Sequence[str], place: Path) -> Config:
    """The configuration. What is wrong in `sections` is wrong in config.json, and nobody has seen the lines of their text."""
    text = to_text(sections)
    try:
        return load_config(text, overrides)
    except ConfigError as error:
        if error.file != "text":
            raise
        words = {"key": error.key, "value": error.value, "suggestion": error.suggestion}
        raise ConfigError(error.rule, file=str(place / folder.CONFIG), **words) from error


def _tokenizer(place: Path, overrides: Sequence[str], vocab: Optional[int]) -> Tuple[str, Tokenizer]:
    """The folder's own tokenizer and where it lies, or the one that an override names; `vocab`: rows of the folder's model."""
    named = [text.partition("=")[2] for text in overrides if text.startswith("data.tokenizer.path=")]
    if not named and "data.tokenizer.kind=bytes" in overrides:
        return str(place), ByteTokenizer()
    own = [place / name for name in (NOTED, SENTENCEPIECE) if (place / name).is_file()]
    path = Path(named[-1]) if named else own[0] if own else place
    try:
        return str(path), load_tokenizer(path)
    except ConfigError as error:
        if named:
            raise
        of_bytes = vocab in (ByteTokenizer.vocab, ByteTokenizer.vocab + 1)  # with a mask
        raise ConfigError(
            f"{place} holds no tokenizer that can be read ({error.rule})",
            key="SOURCE",
            suggestion=f"name one with data.tokenizer.path=FILE{', or give data.tokenizer.kind=bytes' if of_bytes else ''}",
        ) from error


def _with_tokenizer(config: Config, path: str) -> Config:
    tokenizer = config.data.tokenizer.model_copy(update={"path": path, "vocab": None})
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})


def _beginning(config: Config, vocab: int, place: Path) -> Dict[str, Any]:
    """trainer.json of weights that no step of ours has touched: a run that starts from it draws, reads and counts from zero."""
    return {
        "schema": 1,
        "step": 0,
        "tokens": 0,
        "best": None,
        "fresh": True,
        "vocab": vocab,
        "source": str(place.absolute()),
        "config_hash": config_hash(config),
        "config": flat(config),
        "versions": versions(),
    }


# --- to transformers ---


def _write(source: str, out: Optional[str], checkpoint: str, say: Callable[[str], None]) -> Summary:
    if out is None:
        raise ConfigError("say where the folder of transformers is to be made", key="--out")
    RunDirectory.check_free(out)
    used = open_run(source, checkpoint, Reporter("plain"), host=True)
    if used.config.model.kind != "gpt" or used.tokenizer is None:
        raise ConfigError("transformers has no such network", key="model.kind", value=used.config.model.kind)
    tensors = {name: tensor.cpu() for name, tensor in used.model.state_dict().items()}
    settings, theirs, changed = written(used.config, used.model.cpu(), tensors, used.tokenizer.end)
    target = Path(out).absolute()
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    with disk_guard(f"the folder {target} was not made"):
        try:
            temporary.mkdir(parents=True)
            folder.write(temporary, settings, theirs)
            remarks = _write_tokenizer(temporary, used.tokenizer, settings["model_type"], used.config.model.head == "masked-lm")
            if target.is_dir():
                target.rmdir()  # empty, as check_free has seen
            os.replace(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if used.config.model.head == "classifier" and used.tokenizer.end is not None:
        remarks.append(f"a text was read behind an end-of-text token here: put id {used.tokenizer.end} before those of a text")
    if changed:
        remarks.append(f"multipliers of muP are multiplied into {len(changed)} tensors, which are rounded by it")
    for remark in remarks:
        say(f"note: {remark}")
    summary = make_summary(
        "convert",
        device=used.config.device,
        config_hash=config_hash(used.config),
        steps=int(used.trainer["step"]),
        metrics={"parameters": count_parameters(used.model), "remarks": remarks, "folded": changed},
        artifacts={"run": str(used.run.path), "checkpoint": str(used.source), "folder": str(target)},
    )
    name = settings["architectures"][0]
    text = f"{used.source} is now {target}, which transformers loads: {name}.from_pretrained({str(target)!r})"
    return {**summary, "text": text}


def _write_tokenizer(place: Path, tokenizer: Tokenizer, family: str, masked: bool) -> List[str]:
    """The tokenizer's files as transformers wants them, with a mask if there is one; what it cannot do with them, in words."""
    model = tokenizer.model_file()
    if model is None:
        folder.write_json(place / NOTED, tokenizer.describe())
        mask = f", {tokenizer.vocab} is the mask" if masked else ""
        return [f"transformers has no tokenizer for bytes: token n is byte n, 256 ends a document{mask}"]
    kinds = {"reformer": "ReformerTokenizer", "gpt2": "GPT2Tokenizer"}
    name = SENTENCEPIECE if tokenizer.kind == "sentencepiece" else "tokenizer.json"
    (place / name).write_bytes(model[1])
    chosen = kinds[family] if (family == "reformer") == (tokenizer.kind == "sentencepiece") else "PreTrainedTokenizerFast"
    named = {"mask_token": name_for(tokenizer)} if masked else {}
    folder.write_json(place / "tokenizer_config.json", {"tokenizer_class": chosen, **named})
    if tokenizer.kind == "sentencepiece":
        return ["transformers' tokenizer puts a blank before every text; sentencepiece itself, with spiece.model, gives our ids"]
    return []

