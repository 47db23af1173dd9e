"""The run's own note of its tokens (data.json), so that a run goes on with exactly the tokens it began with, wherever the
source text went.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Optional

from ipu_lean.config import Config, derived
from ipu_lean.data import Prepared, TokenFile, check_vocab, check_windows, load_tokenizer, prepare
from ipu_lean.errors import IpuLeanError, RunError
from ipu_lean.train.files import read_json, write_json

Progress = Callable[[str, int, int], None]


def fingerprint(prepared: Prepared) -> Dict[str, Any]:
    """What a checkpoint's data position refers to: the checksum of the training corpus's token file, and the bounds of each
    set in tokens.
    """
    manifest = prepared.manifest
    bounds = {name: [part["start"], part["stop"]] for name, part in manifest["sets"].items()}
    return {"sha256": manifest["files"][manifest["token_file"]]["sha256"], "bounds": bounds}


def obtain(config: Config, record: Optional[Path], progress: Optional[Progress] = None) -> Prepared:
    """The tokens that `record` (a run's data.json) notes, if they are still there; else prepared anew.

    Raises:
        RunError: prepared anew, the text is not the recorded one.
        ConfigError: the text gives fewer windows than one global batch has rows, or the model too few embeddings.
    """
    noted = read_json(record) if record is not None else None
    prepared = _reopen(noted) if noted else None
    if prepared is None:
        prepared = prepare(config, progress)
        if noted and noted["fingerprint"] != fingerprint(prepared):
            raise RunError(
                f"the training text has changed since this run began, and its prepared tokens are gone from {noted['path']}: "
                "the run cannot go on where it stood. Put the old text back, or start a new run."
            )
    check_windows(len(prepared.train), config.model.seq, config.batch.global_batch)
    if config.model.vocab is not None:
        check_vocab(config.model.vocab, prepared.vocab, derived.extra_rows(config.model))
    return prepared


def note(prepared: Prepared, record: Path) -> None:
    """Write data.json."""
    manifest = prepared.manifest
    write_json(record, {"path": str(prepared.path.absolute()), "fingerprint": fingerprint(prepared), "manifest": manifest})


def _reopen(noted: Dict[str, Any]) -> Optional[Prepared]:
    """The recorded tokens, or None if a file is missing or has another length."""
    path, manifest = Path(noted["path"]), noted["manifest"]
    try:
        if any((path / name).stat().st_size != entry["bytes"] for name, entry in manifest["files"].items()):
            return None
        sets = {name: TokenFile(part["file"], part["start"], part["stop"]) for name, part in manifest["sets"].items()}
        tokenizer = load_tokenizer(path / "tokenizer")
    except (OSError, IpuLeanError):
        return None
    train = sets.pop("train")
    return Prepared(path, manifest, tokenizer, train, sets)
