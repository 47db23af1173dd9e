"""`prepare` for labelled texts: each set becomes a folder of the cache (tokens, spans.npy, labels.npy, tokenizer, manifest)."""
from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import numpy as np

from ipu_lean.data import folders, store
from ipu_lean.data.batches import check_rows
from ipu_lean.data.build import GROUP, Plan, Progress, groups
from ipu_lean.data.corpora import ITSELF
from ipu_lean.data.labelled.batches import TextSet
from ipu_lean.data.labelled.sources import LabelledSource, classes_of, labelled_classes, open_labelled
from ipu_lean.data.pieces import PIECE
from ipu_lean.data.prepare import tokenizer_plan, warn_if_smaller
from ipu_lean.data.sample import SAMPLE_BLOCKS
from ipu_lean.data.sources import file_sha256
from ipu_lean.data.tokenizers import Tokenizer, load_tokenizer, require_trainer, train_tokenizer
from ipu_lean.data.tokens import DTYPES, TokenFile, suffix_for
from ipu_lean.errors import ConfigError, IpuLeanError, RunError

if TYPE_CHECKING:
    from ipu_lean.config import Config

SPANS, LABELS = "spans.npy", "labels.npy"


@dataclass(frozen=True)
class PreparedTexts:
    """Labelled texts, ready for batches.

    Attributes:
        path: the folder of the training texts. manifest: its manifest; under `sets` each set's folder and bounds.
        tokenizer: the one that every set was encoded with.
        train, validation: the sets, the latter by name in the config's order.
    """

    path: Path
    manifest: Dict[str, Any]
    tokenizer: Tokenizer
    train: TextSet
    validation: Dict[str, TextSet]

    unit, what = "texts", "pieces in the vocabulary"

    @property
    def vocab(self) -> int:
        """Ids are 0 .. vocab - 1."""
        return self.tokenizer.vocab

    @property
    def classes(self) -> List[str]:
        """Their names, in the order of their numbers."""
        return list(self.manifest["classes"])


def expected_classes(config: Config) -> int:
    """Classes that a classifier tells apart: `model.classes`, or as many as `data.labelled` has (a file is read for it)."""
    data = config.data
    return config.model.classes or len(labelled_classes(data.labelled or "", data.text_key, data.label_key))


def prepare_labelled(config: Config, progress: Optional[Progress] = None, verify: bool = False) -> PreparedTexts:
    """The texts of `data.labelled` and of every validation set, from the cache where they are there already.

    They are taken in one fixed random order, so that a share held out from the end has all classes even where the file is sorted.

    Args:
        config: its `data` section. progress, verify: as `prepare` has them.

    Raises:
        ConfigError: texts that are missing, damaged, too few, or of classes that the training texts do not have.
        EnvironmentProblem: a package is missing, or the cache cannot be written. RunError: no room on the disk.
    """
    data, cache, report = config.data, store.cache_folder(config.data.cache), progress or (lambda stage, done, total: None)
    shares = {name: float(value) for name, value in data.validation.items() if not isinstance(value, str)}
    source = open_labelled(data.labelled or "", data.text_key, data.label_key)
    others = {
        name: open_labelled(value, data.text_key, data.label_key, f"data.validation.{name}")
        for name, value in data.validation.items()
        if isinstance(value, str) and value != ITSELF
    }
    plan = tokenizer_plan(data.tokenizer, sum(shares.values()))
    path, manifest = _build(cache, source, plan, report, verify)
    tokenizer = load_tokenizer(path / "tokenizer")
    warn_if_smaller(plan, tokenizer)
    counts = {name: round(share * manifest["texts"]) for name, share in shares.items()}
    start = manifest["texts"] - sum(counts.values())
    check_rows(start, "texts")
    sets: Dict[str, Dict[str, Any]] = {"train": {"folder": str(path), "start": 0, "stop": start}}
    for name in data.validation:
        if data.validation[name] == ITSELF:
            sets[name] = dict(sets["train"])
            continue
        if name in others:
            sets[name] = _other(cache, others[name], tokenizer, manifest["classes"], report, verify)
            continue
        if not counts[name]:
            rule = f"this share of {manifest['texts']:,} texts is none"
            raise ConfigError(rule, key=f"data.validation.{name}", value=data.validation[name])
        sets[name] = {"folder": str(path), "start": start, "stop": start + counts[name]}
        start += counts[name]
    return _open(path, {**manifest, "sets": sets}, tokenizer)


def prepare_other(config: Config, spec: str, train: PreparedTexts, key: str) -> TextSet:
    """All of another set, encoded and numbered as the training texts are. Raises as `prepare_labelled`, naming `key`."""
    source = open_labelled(spec, config.data.text_key, config.data.label_key, key)
    cache = store.cache_folder(config.data.cache)
    entry = _other(cache, source, train.tokenizer, train.classes, lambda stage, done, total: None, False)
    return _set(entry, train.manifest["classes"], train.tokenizer)


def reopen_labelled(path: Path, manifest: Dict[str, Any]) -> Optional[PreparedTexts]:
    """What a `PreparedTexts` with this path and manifest was, or None if a file is missing or has another length."""
    try:
        if any((path / name).stat().st_size != entry["bytes"] for name, entry in manifest["files"].items()):
            return None
        return _open(path, manifest, load_tokenizer(path / "tokenizer"))
    except (OSError, ValueError, IpuLeanError):
        return None


def labelled_fingerprint(manifest: Dict[str, Any]) -> Dict[str, Any]:
    """What a checkpoint's data position refers to: checksums, classes, and the bounds of each set in texts."""
    sets = {name: [entry["start"], entry["stop"], entry.get("sha256")] for name, entry in manifest["sets"].items()}
    return {"sha256": _sums(manifest), "sets": sets, "classes": list(manifest["classes"])}


def _sums(manifest: Dict[str, Any]) -> str:
    """One checksum over tokens, spans and labels."""
    names = (manifest["token_file"], SPANS, LABELS)
    return hashlib.sha256("".join(manifest["files"][name]["sha256"] for name in names).encode("ascii")).hexdigest()


def _open(path: Path, manifest: Dict[str, Any], tokenizer: Tokenizer) -> PreparedTexts:
    sets = {name: _set(entry, manifest["classes"], tokenizer) for name, entry in manifest["sets"].items()}
    train = sets.pop("train")
    return PreparedTexts(path, manifest, tokenizer, train, sets)


def _set(entry: Dict[str, Any], classes: List[str], tokenizer: Tokenizer) -> TextSet:
    """The set that an entry of `sets` stands for; its labels are numbered as the training texts' classes are."""
    folder = Path(entry["folder"])
    own = json.loads((folder / store.MANIFEST).read_text(encoding="utf-8"))
    file = TokenFile(folder / own["token_file"])
    numbers = np.array([classes.index(name) for name in own["classes"]], np.int32)
    labels = numbers[np.load(folder / LABELS)]
    return TextSet(file.flat(), np.load(folder / SPANS), labels, entry["start"], entry["stop"], tokenizer.end)


def _other(
    cache: Path, source: LabelledSource, tokenizer: Tokenizer, classes: List[str], report: Progress, verify: bool
) -> Dict[str, Any]:
    """The entry in `sets` of a set of its own."""
    folder, found = _build(cache, source, Plan(tokenizer.kind, tokenizer), report, verify, least=1)
    foreign = [name for name in found["classes"] if name not in classes]
    if foreign:
        raise ConfigError(
            f"these texts have the class {foreign[0]!r}, and those to train on are of {', '.join(map(repr, classes))}",
            key=source.key,
            value=source.spec,
        )
    return {"folder": str(folder), "start": 0, "stop": found["texts"], "sha256": _sums(found)}


# Making a folder.


def _build(
    cache: Path, source: LabelledSource, plan: Plan, report: Progress, verify: bool, least: int = 2
) -> Tuple[Path, Dict[str, Any]]:
    """The folder of a source and its manifest; `least` classes must be in it, whoever made it and for what."""
    mark = folders.mark_of("labelled", source.identity, plan.identity())

    def make(work: Path) -> Dict[str, Any]:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        return _make(work, source, plan, mark, report, least)

    path, manifest = folders.find_or_make(
        cache, source.name, f"labelled-{plan.kind}", mark, make, lambda: report("wait", 0, None), verify=verify
    )
    return path, {**manifest, "classes": classes_of(manifest["classes"], source, least)}


def _make(work: Path, source: LabelledSource, plan: Plan, mark: str, report: Progress, least: int) -> Dict[str, Any]:
    labels, characters = _count(source, report)
    classes = classes_of(labels, source, least)
    order = np.random.RandomState(0).permutation(len(labels))
    tokenizer = plan.ready or _train(source, plan, order, characters, report)
    tokenizer.save(work / "tokenizer")
    name = "tokens" + suffix_for(tokenizer.vocab)
    lengths, state = _write_tokens(work / name, source, tokenizer, characters, report)
    if len(lengths) != len(labels) or source.changed():
        raise RunError(f"{source.spec} changed while it was read. Prepare the labelled texts again when it is at rest.")
    spans = np.stack([np.cumsum(lengths) - lengths, lengths], 1).astype(np.int64)
    np.save(work / SPANS, spans[order])
    number = {label: place for place, label in enumerate(classes)}
    np.save(work / LABELS, np.array([number[label] for label in labels], np.int32)[order])
    known = {name: state["sha256"], **{array: file_sha256(work / array) for array in (SPANS, LABELS)}}
    manifest = {
        "schema": store.SCHEMA,
        "key": mark,
        "source": {"spec": source.spec, **source.identity},
        "tokenizer": tokenizer.describe(),
        "texts": len(labels),
        "classes": classes,
        "characters": characters,
        "tokens": state["tokens"],
        "token_file": name,
        "files": store.file_records(work, known),
    }
    store.write_whole(work / store.MANIFEST, json.dumps(manifest, indent=2) + "\n")
    store.sync_folder(work)
    return manifest


def _count(source: LabelledSource, report: Progress) -> Tuple[List[str], int]:
    """Labels in the source's order, and the characters of all texts."""
    labels: List[str] = []
    characters = 0
    for text, label in source.read():
        labels.append(label)
        characters += len(text)
        if len(labels) % 1000 == 0:
            report("read texts", characters, None)
    return labels, characters


def _train(source: LabelledSource, plan: Plan, order: np.ndarray, characters: int, report: Progress) -> Tokenizer:
    """A tokenizer of the texts that are not held out, of a random part of them where they are very long together."""
    require_trainer(plan.kind)
    count = len(order) - round(plan.held_out * len(order))
    most = SAMPLE_BLOCKS * PIECE
    chosen = set(order[: max(1, min(count, count * most // max(1, characters)))].tolist())
    texts = [text for place, (text, _) in enumerate(source.read()) if place in chosen]
    report("train tokenizer", 0, None)
    return train_tokenizer(plan.kind, texts, plan.vocab, plan.coverage)


def _write_tokens(
    path: Path, source: LabelledSource, tokenizer: Tokenizer, characters: int, report: Progress
) -> Tuple[np.ndarray, Dict[str, Any]]:
    """(tokens of each text, what the writer committed)."""
    lengths: List[int] = []
    writer, done = store.TokenWriter(path, DTYPES[path.suffix]), 0
    try:
        for group in groups((text for text, _ in source.read()), GROUP):
            for text, ids in zip(group, tokenizer.encode_texts(group)):
                writer.write(ids)
                lengths.append(len(ids))
                done += len(text)
            report("tokenize", done, characters)
        return np.array(lengths, np.int64), writer.commit()
    finally:
        writer.close()
