"""`prepare`: the corpora that a config names become token files, or are found prepared."""
from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional

from ipu_lean.config.derived import extra_rows, tokenizer_vocab
from ipu_lean.data import store
from ipu_lean.data.batches import check_vocab, check_windows
from ipu_lean.data.build import Plan, Progress, build_corpus
from ipu_lean.data.corpora import ITSELF, open_corpus
from ipu_lean.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from ipu_lean.data.tokens import TokenFile
from ipu_lean.errors import ConfigError

if TYPE_CHECKING:
    from ipu_lean.config import Config
    from ipu_lean.config.data import TokenizerConfig


@dataclass(frozen=True)
class Prepared:
    """Text as tokens, ready for batches.

    Attributes:
        path: the folder of the main corpus.
        manifest: the main corpus's manifest, and under `sets` each set's file and bounds in tokens.
        tokenizer: the one that every set was encoded with.
        train: the training tokens.
        validation: the validation sets by name, in the config's order.
    """

    path: Path
    manifest: Dict[str, Any]
    tokenizer: Tokenizer
    train: TokenFile
    validation: Dict[str, TokenFile]

    unit, what = "tokens", "pieces in the vocabulary"

    @property
    def vocab(self) -> int:
        """Ids are 0 .. vocab - 1."""
        return self.tokenizer.vocab


def prepare(config: Config, progress: Optional[Progress] = None, verify: bool = False) -> Prepared:
    """Tokens of the training corpus and of every validation set, from the cache where they are there already.

    The same text and tokenizer settings are prepared once. A call that was killed is continued by the next one; of several calls
    at the same time one works and the others wait.

    Args:
        config: its `data` section, and `model.seq` for the check that the text is long enough.
        progress: called as `progress(stage, done, total)`; see build.Progress.
        verify: compare the checksums of what is found, not only its sizes.

    Raises:
        ConfigError: a corpus or tokenizer that is missing, empty, unreadable or too short.
        EnvironmentProblem: an optional package is missing, the network is away, or the cache cannot be written.
        RunError: no room on the disk; the corpus changed while it was read.
    """
    data, cache, report = config.data, store.cache_folder(config.data.cache), progress or (lambda stage, done, total: None)
    shares = {name: float(value) for name, value in data.validation.items() if not isinstance(value, str)}
    source = open_corpus(data.corpus, text_key=data.text_key, limit=data.limit)
    others = {
        name: open_corpus(value, text_key=data.text_key, limit=data.limit, key=f"data.validation.{name}")
        for name, value in data.validation.items()
        if isinstance(value, str) and value != ITSELF
    }
    plan = tokenizer_plan(data.tokenizer, sum(shares.values()))
    if plan.ready is not None and config.model.vocab is not None:
        check_vocab(config.model.vocab, plan.ready.vocab, extra_rows(config.model))
    path, manifest = build_corpus(cache, source, plan, "data.corpus", report, verify)
    tokenizer = load_tokenizer(path / "tokenizer")
    warn_if_smaller(plan, tokenizer)
    sets = split_tokens(path / manifest["token_file"], manifest["tokens"], shares)
    check_windows(len(sets["train"]), config.model.seq)
    for name, other in others.items():
        folder, found = build_corpus(cache, other, Plan(tokenizer.kind, tokenizer), f"data.validation.{name}", report, verify)
        sets[name] = TokenFile(folder / found["token_file"])
    sets.update({name: sets["train"] for name, value in data.validation.items() if value == ITSELF})
    validation = {name: sets[name] for name in data.validation}
    for name, tokens in validation.items():
        if len(tokens) < 2:
            raise ConfigError(
                f"this validation set has {len(tokens)} tokens (the training corpus and what is held out from it have "
                f"{manifest['tokens']:,}), and two are the least on which a loss can be computed",
                key=f"data.validation.{name}",
                value=data.validation[name],
            )
    bounds = {name: {"file": str(part.path), "start": part.start, "stop": part.stop} for name, part in sets.items()}
    return Prepared(path, {**manifest, "sets": bounds}, tokenizer, sets["train"], validation)


def tokenizer_plan(tokenizer: TokenizerConfig, share: float) -> Plan:
    """The plan for a config's `data.tokenizer`; `share` of the corpus is hidden from training."""
    if tokenizer.path is not None:
        ready = load_tokenizer(tokenizer.path)
        if ready.kind != tokenizer.kind:
            raise ConfigError(
                f"{tokenizer.path} holds a tokenizer of the kind {ready.kind}",
                key="data.tokenizer.kind",
                value=tokenizer.kind,
                suggestion=f"set data.tokenizer.kind to {ready.kind}, or give another path",
            )
        return Plan(ready.kind, ready)
    if tokenizer.kind == "bytes":
        return Plan("bytes", ByteTokenizer())
    return Plan(tokenizer.kind, None, tokenizer_vocab(tokenizer), tokenizer.coverage, share)


def warn_if_smaller(plan: Plan, tokenizer: Tokenizer) -> None:
    """Says that training gave fewer pieces than were asked for, because the text has no more pairs of pieces to join."""
    if plan.ready is None and tokenizer.vocab < plan.vocab:
        warnings.warn(
            f"`data.tokenizer.vocab: {plan.vocab}`: the training text gives only {tokenizer.vocab} pieces of {plan.kind}, so the "
            f"tokenizer has {tokenizer.vocab}, and the model as many rows unless model.vocab says more. Set it to "
            f"{tokenizer.vocab} or less, or use a longer text.",
            stacklevel=2,
        )


def split_tokens(path: Path, tokens: int, shares: Dict[str, float]) -> Dict[str, TokenFile]:
    """`train` and the held-out sets, which lie one after the other at the end of the file, in the config's order.

    Args:
        shares: each between 0 and 1, together less than 1 (config/checks.py).
    """
    counts = {name: round(share * tokens) for name, share in shares.items()}
    start = tokens - sum(counts.values())
    if start < 0:  # of very few tokens, shares may be rounded up to more than all
        raise ConfigError(f"the shares held out of {tokens} tokens leave nothing to train on", key="data.validation")
    sets = {"train": TokenFile(path, 0, start)}
    for name, count in counts.items():
        sets[name] = TokenFile(path, start, start + count)
        start += count
    return sets
