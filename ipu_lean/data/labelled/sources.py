"""The names that `data.labelled` can have."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from ipu_lean.data.corpora import ITSELF
from ipu_lean.data.files import nearby
from ipu_lean.data.labelled import files, installed
from ipu_lean.data.labelled.files import Pair
from ipu_lean.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class LabelledSource:
    """One set of labelled texts.

    Attributes:
        spec: as the user wrote it. name: a short word for folder names. key: the config key that named it.
        identity: plain data that changes when the texts do.
        read: gives (text, label) in an order that never changes; may be called again.
        refresh: computes `identity` anew, to notice a file that changed while it was read.
    """

    spec: str
    name: str
    key: str
    identity: Dict[str, Any]
    read: Callable[[], Iterator[Pair]]
    refresh: Optional[Callable[[], Dict[str, Any]]] = None

    def changed(self) -> bool:
        """True if the texts are no longer what they were when the source was opened."""
        try:
            return self.refresh is not None and self.refresh() != self.identity
        except OSError:
            return True


def open_labelled(
    spec: str, text_key: str = "text", label_key: str = "label", key: str = "data.labelled"
) -> LabelledSource:
    """Find labelled texts by name.

    Args:
        spec: `docs-or-code`, `testaments`, or a .jsonl, .csv or .tsv file (or .gz of one).
        text_key, label_key: the keys of a line, or columns, that hold text and label.
        key: the config key that named them, for messages.

    Raises:
        ConfigError: there is no such file, or it is none of these. EnvironmentProblem: the text is not installed.
    """
    if spec in installed.NAMES:
        return LabelledSource(spec, spec, key, installed.identity(spec), lambda: installed.read_pairs(spec))
    path = Path(spec).expanduser()
    if path.is_file() and files.suffix_of(path) in files.SUFFIXES:

        def identity() -> Dict[str, Any]:
            return files.identity(path, text_key, label_key)

        return LabelledSource(
            spec, path.stem, key, identity(), lambda: files.read_pairs(path, text_key, label_key, key), identity
        )
    raise _unknown(spec, path, key)


def labelled_classes(spec: str, text_key: str = "text", label_key: str = "label") -> List[str]:
    """Names of the classes, in the order of their numbers. A file is read for it. Raises as `open_labelled`."""
    if spec in installed.NAMES:
        return list(installed.NAMES[spec])
    source = open_labelled(spec, text_key, label_key)
    return classes_of((label for _, label in source.read()), source)


def classes_of(labels: Iterable[str], source: LabelledSource, least: int = 2) -> List[str]:
    """The different labels: numbers in their order, names in the alphabet's. ConfigError for fewer than `least`, or for none."""
    found = set(labels)
    if len(found) < max(1, least):
        rule = f"all texts are of the class {found.pop()!r}" if found else "there are no texts in it"
        raise ConfigError(f"{rule}, and two are the least to tell apart", key=source.key, value=source.spec)
    return sorted(found, key=_number_first)


def absolute_labelled(spec: Any) -> Any:
    """The same name with its path made absolute, if it is one; a held-out share and `train` (the training texts) stay."""
    if not isinstance(spec, str) or spec in (*installed.NAMES, ITSELF):
        return spec
    return str(Path(spec).expanduser().absolute())


def _number_first(label: str) -> Tuple[int, int, str]:
    digits = label[1:] if label[:1] == "-" else label
    return (0, int(label), label) if digits.isdecimal() else (1, 0, label)


def _unknown(spec: str, path: Path, key: str) -> ConfigError:
    if path.exists():
        return ConfigError(
            "labelled texts are in one .jsonl, .csv or .tsv file (or .gz of one)", key=key, value=spec
        )
    near = did_you_mean(spec, installed.NAMES, cutoff=0.65)
    hint = f"did you mean `{near}`?" if near else nearby(path)
    return ConfigError("there are no such labelled texts", key=key, value=spec, suggestion=hint)
