"""One corpus and one tokenizer become one folder: a token file, the tokenizer, a manifest.

The folder is made under a hidden name and renamed when whole, so whatever bears the final name is complete. While it is made,
`progress.json` names a point up to which the token file is durable; a call after a kill goes on from there. One process makes it,
others wait for it.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from ipu_lean.data import folders, store
from ipu_lean.data.pieces import Piece, cut_pieces
from ipu_lean.data.sample import sample_texts
from ipu_lean.data.sources import Source, corpus_error
from ipu_lean.data.tokenizers import Tokenizer, load_tokenizer, require_trainer, train_tokenizer
from ipu_lean.data.tokens import DTYPES, suffix_for
from ipu_lean.errors import ConfigError, RunError

Progress = Callable[[str, int, Optional[int]], None]
"""progress(stage, done, total), with the stages `wait` (another process makes this), `sample`, `train tokenizer`, `skip` (what an
interrupted call has encoded) and `tokenize`; done and total count bytes of the corpus, total is None if unknown."""

PROGRESS = "progress.json"
GROUP = 16
"""Pieces encoded in one call of a tokenizer, which may spread them over processors."""
COMMIT_TOKENS = 1 << 24
"""Tokens between two points from which a killed call goes on."""

log = logging.getLogger("ipu_lean")


class Plan(NamedTuple):
    """How the tokenizer of a corpus comes about: `ready`, or trained on the corpus by kind, vocab and coverage."""

    kind: str
    ready: Optional[Tokenizer] = None
    vocab: int = 0
    coverage: float = 1.0
    held_out: float = 0.0
    """Share at the end of the corpus that training does not look at."""

    def identity(self) -> Dict[str, Any]:
        """Plain data that changes when the ids would."""
        if self.ready is not None:
            return self.ready.describe()
        return {"trained": self.kind, "vocab": self.vocab, "coverage": self.coverage, "held_out": self.held_out}


def build_corpus(
    cache: Path, source: Source, plan: Plan, key: str, progress: Progress, verify: bool = False
) -> Tuple[Path, Dict[str, Any]]:
    """The folder with the tokens of a corpus and its manifest: found if it is there and whole, made otherwise.

    Args:
        key: the config key that named the corpus.
        verify: compare checksums too, not only sizes.
    """
    mark = folders.mark_of(source.identity, source.limit, plan.identity())

    def make(work: Path) -> Dict[str, Any]:
        return _Build(work, source, plan, mark, key, progress).run()

    path, manifest = folders.find_or_make(
        cache, source.name, plan.kind, mark, make, lambda: progress("wait", 0, None), verify=verify
    )
    with contextlib.suppress(OSError):
        (path / PROGRESS).unlink()
    return path, manifest


class _Build:
    """The making of one folder, up to its manifest."""

    def __init__(self, work: Path, source: Source, plan: Plan, mark: str, key: str, progress: Progress) -> None:
        self.work, self.source, self.plan, self.mark, self.key, self.progress = work, source, plan, mark, key, progress

    def run(self) -> Dict[str, Any]:
        self.work.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer()
        name = "tokens" + suffix_for(tokenizer.vocab)
        state = self.write_tokens(tokenizer, self.work / name)
        if self.source.changed():
            shutil.rmtree(self.work)
            raise RunError(f"The corpus {self.source.spec} changed while it was read. Prepare it again when it is at rest.")
        if not state["documents"]:
            shutil.rmtree(self.work)
            raise corpus_error("the corpus is empty", self.source, self.key)
        manifest = {
            "schema": store.SCHEMA,
            "key": self.mark,
            "source": {"spec": self.source.spec, "limit": self.source.limit, **self.source.identity},
            "tokenizer": tokenizer.describe(),
            "documents": state["documents"],
            "characters": state["characters"],
            "tokens": state["tokens"],
            "token_file": name,
            "files": store.file_records(self.work, {name: state["sha256"]}),
        }
        store.write_whole(self.work / store.MANIFEST, json.dumps(manifest, indent=2) + "\n")
        store.sync_folder(self.work)
        return manifest

    def pieces(self) -> Iterator[Piece]:
        return cut_pieces(self.source.fragments())

    def tokenizer(self) -> Tokenizer:
        """The one that an interrupted call has left, or a new one."""
        folder = self.work / "tokenizer"
        if folder.is_dir():
            try:
                return load_tokenizer(folder)
            except ConfigError as error:  # a power cut may leave names without content; then the tokens cannot be trusted either
                log.warning("%s; the corpus is prepared from its beginning.", error)
                shutil.rmtree(self.work)
                self.work.mkdir()
        tokenizer = self.plan.ready or self.train()
        beside = self.work / "tokenizer.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        tokenizer.save(beside)
        os.rename(beside, folder)
        return tokenizer

    def train(self) -> Tokenizer:
        require_trainer(self.plan.kind)
        pieces = cut_pieces(self.source.fragments(sampling=True))
        texts = sample_texts(
            pieces, self.plan.held_out, read=lambda: self.progress("sample", self.source.consumed, self.source.size)
        )
        if not texts:
            shutil.rmtree(self.work)
            raise corpus_error("the corpus is empty", self.source, self.key)
        self.progress("train tokenizer", 0, None)
        return train_tokenizer(self.plan.kind, texts, self.plan.vocab, self.plan.coverage)

    def write_tokens(self, tokenizer: Tokenizer, path: Path) -> Dict[str, Any]:
        """Encode the corpus into `path`, from the last commit on; the final counts and checksum."""
        writer, state = self.open_writer(path)
        pieces = self.pieces()
        for _ in groups(itertools.islice(pieces, state["pieces"]), GROUP):
            self.progress("skip", self.source.consumed, self.source.size)
        end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype=np.int64)
        committed = writer.tokens
        try:
            for group in groups(pieces, GROUP):
                for piece, ids in zip(group, tokenizer.encode_pieces(group)):
                    writer.write(ids)
                    if piece.last:
                        writer.write(end)
                    state["documents"] += piece.last
                    state["characters"] += len(piece.text)
                state["pieces"] += len(group)
                if writer.tokens - committed >= COMMIT_TOKENS:
                    committed = writer.tokens
                    self.commit(writer, state)
                self.progress("tokenize", self.source.consumed, self.source.size)
            return self.commit(writer, state)
        finally:
            writer.close()

    def open_writer(self, path: Path) -> Tuple[store.TokenWriter, Dict[str, Any]]:
        """A writer at the last commit if there is one that holds, else at the beginning."""
        state = store.read_json(self.work / PROGRESS)
        if state is not None and path.is_file():
            try:
                return store.TokenWriter(path, DTYPES[path.suffix], state), state
            except ValueError as error:
                log.warning("%s; the corpus is encoded from its beginning.", error)
        return store.TokenWriter(path, DTYPES[path.suffix]), {"pieces": 0, "documents": 0, "characters": 0}

    def commit(self, writer: store.TokenWriter, state: Dict[str, Any]) -> Dict[str, Any]:
        state.update(writer.commit())
        store.write_whole(self.work / PROGRESS, json.dumps(state))
        return state


def groups(pieces: Iterator[Piece], size: int) -> Iterator[List[Piece]]:
    """Lists of up to `size` pieces."""
    while True:
        group = list(itertools.islice(pieces, size))
        if not group:
            return
        yield group
