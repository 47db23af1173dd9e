"""`memory`: bytes of activations and of copies of weights by formula, against what is alive in a forward and backward pass."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import pytest

from ipu_lean._compat import TORCH
from ipu_lean.config import derived, make_config
from ipu_lean.models import TrainStep, build_model
from ipu_lean.train.engines.torch_engine import TorchEngine
from ipu_lean.train.memory import worker
from ipu_lean.train.memory.activations import activation_bytes, copy_bytes

pytestmark = pytest.mark.skipif(TORCH < (2, 1), reason="storages cannot be followed")
RESIDUAL = {"kind": "residual"}
LABELLED = {"labelled": "docs-or-code"}
STORE = {"engine": "store"}
STANDARD = {"parametrization": "standard"}
PRECISIONS = ("fp32", "bf16-mixed", "bf16-pure")

FULL: Dict[str, Any] = {
    "invert": {},
    "store": {"memory": STORE},
    "residual": {"stack": RESIDUAL},
    "checkpoints": {"stack": RESIDUAL, "depth": 6, "memory": {"engine": "checkpoint", "checkpoint_every": 2}},
    "explicit": {"stack": RESIDUAL, "attention": "explicit"},
    "gated, untied": {"stack": RESIDUAL, "activation": "swiglu", "tied": False},
    "feed-forward in pieces": {"memory": {**STORE, "ffn_chunk": 64}},
    "heads in pieces": {"memory": {**STORE, "attention_heads_at_once": 2}},
    "loss in chunks": {"memory": {"loss_chunk": 32}},
    "rmsnorm, sandwich, dropout": {"norm": "rmsnorm", "sandwich": True, "dropout": 0.1, "stack": RESIDUAL},
    "mostly vocabulary": {"width": 256, "depth": 2, "seq": 16, "micro": 1},
    "shared layers": {"depth": 6, "num_hidden_groups": 2},
    "shared layers, stored": {"depth": 6, "num_hidden_groups": 2, "memory": STORE, "mup": STANDARD},
    "wide and short": {"width": 512, "heads": 8, "seq": 16, "micro": 1},
}
"""GPTs of 2,048 tokens' vocabulary; keys of `model:`, and other sections."""
REFORMERS: Dict[str, Any] = {
    "local": {"attention": "local"},
    "local, a chunk": {"attention": "local", "local": {"chunk": 128}, "stack": RESIDUAL},
    "hashed": {"attention": "lsh"},
    "hashed, stored": {"attention": "lsh", "stack": RESIDUAL},
    "hashed four times": {"attention": "lsh", "lsh": {"chunk": 16, "hashes": 4}},
    "hashed four times, stored": {"attention": "lsh", "lsh": {"chunk": 16, "hashes": 4}, "memory": STORE},
    "hashed, all pairs": {"attention": "lsh", "lsh": {"chunk": 16, "full_below": 128}, "stack": RESIDUAL},
    "both": {"attention": ["local", "lsh"], "positions": "axial"},
    "both, stored": {"attention": ["local", "lsh"], "positions": "axial", "memory": STORE},
    "both, checkpoints": {"attention": ["local", "lsh"], "stack": RESIDUAL, "memory": {"engine": "checkpoint"}},
    "both, padded": {"attention": ["local", "lsh"], "seq": 120, "stack": RESIDUAL},
    "both, a layer stored": {"attention": ["local", "lsh"], "memory": {"keep_last": 1}},
    "few features inside": {"attention": ["local", "lsh"], "head_size": 16, "stack": RESIDUAL, "mup": STANDARD},
}
HEADS: Dict[str, Any] = {
    "classifier": {"head": "classifier", "causal": False, "stack": RESIDUAL},
    "classifier, causal": {"head": "classifier", "pooling": "mean"},
    "classifier, both": {"head": "classifier", "causal": False, "attention": ["local", "lsh"]},
    "masked-lm": {"head": "masked-lm", "causal": False, "stack": RESIDUAL},
    "masked-lm, both": {"head": "masked-lm", "causal": False, "attention": ["local", "lsh"], "memory": STORE},
}


CHUNKED = {"loss_chunk": 64}
PIECES = {"attention_heads_at_once": 1, "ffn_chunk": 32}
AFFINE = {"coupling": "affine"}
SPLIT = {"input": "split"}
STACKS: Dict[str, Any] = {
    "affine": {"stack": AFFINE},
    "affine, stored": {"stack": AFFINE, "memory": STORE},
    "affine, checkpoints": {"stack": AFFINE, "memory": {"engine": "checkpoint"}},
    "affine, hashed": {"stack": AFFINE, "attention": "lsh", "memory": STORE},
    "affine, feed-forward in pieces": {"stack": AFFINE, "memory": {**STORE, "ffn_chunk": 64}},
    "affine, heads in pieces": {"stack": AFFINE, "memory": {**STORE, "attention_heads_at_once": 2}},
    "affine, sandwich": {"stack": AFFINE, "norm": "rmsnorm", "sandwich": True},
    "affine, dropout": {"stack": AFFINE, "dropout": 0.1, "memory": STORE},
    "split": {"stack": SPLIT},
    "split, stored": {"stack": SPLIT, "memory": STORE},
    "split, checkpoints": {"stack": SPLIT, "memory": {"engine": "checkpoint"}},
    "split, both": {"stack": SPLIT, "depth": 2, "attention": ["local", "lsh"]},
    "split, in pieces": {"stack": SPLIT, "memory": PIECES},
    "split, sandwich": {"stack": SPLIT, "norm": "rmsnorm", "sandwich": True},
    "halves side by side": {"stack": {"output": "concat"}, "tied": False},
    "mean of both": {"stack": {"output": "mean"}},
    "momentum": {"stack": {"coupling": "momentum"}},
    "means": {"stack": {"coupling": "mean"}},
    "checkpoints": {"memory": {"engine": "checkpoint"}},
    "in pieces": {"memory": PIECES},
    "feed-forward in pieces": {"memory": {"ffn_chunk": 64}},
    "relu, stored": {"activation": "relu", "memory": STORE},
    "relu, inverted": {"activation": "relu"},
    "relu, residual": {"activation": "relu", "stack": RESIDUAL, "dropout": 0.1},
    "reglu, stored": {"activation": "reglu", "memory": STORE},
    "relu, in pieces": {"activation": "relu", "memory": PIECES},
    "reglu, in pieces": {"activation": "reglu", "memory": PIECES},
}
"""Of 258 tokens' vocabulary, three layers: little beside what the stack itself keeps."""
CHUNKS: Dict[str, Any] = {
    "tied": {"memory": {"loss_chunk": 32}},
    "untied": {"tied": False, "memory": {"loss_chunk": 32}},
    "stored": {"memory": {**STORE, **CHUNKED}},
    "one layer": {"stack": RESIDUAL, "depth": 1, "memory": CHUNKED},
}


def chosen(settings: Dict[str, Any]) -> List[Tuple[str, str]]:
    """Every setting in fp32 and under autocast, and every third one, which are of several engines, in bf16."""
    pairs = [(name, precision) for name in settings for precision in PRECISIONS[:2]]
    return pairs + [(name, "bf16-pure") for name in list(settings)[1::3]]


def config_of(precision: str, settings: Dict[str, Any]) -> Any:
    model: Dict[str, Any] = {"width": 128, "depth": 3, "heads": 2, "seq": 64, "vocab": 2048}
    small = "head" in settings or settings.get("attention", "explicit") != "explicit"
    if small:
        model.update(depth=2, seq=128, vocab=258)
        model.update({kind: {"chunk": 16} for kind in ("local", "lsh") if kind in settings.get("attention", ())})
    sections: Dict[str, Any] = {"precision": precision, "mup": {"base_width": 64}, "batch": {"micro": 2 if small else 4}}
    for key, value in settings.items():
        if key in ("memory", "mup"):
            sections[key] = value
        elif key == "micro":
            sections["batch"] = {"micro": value}
        else:
            model[key] = value
    if model.get("head") == "classifier":
        sections["data"] = LABELLED
    return make_config(model=model, **sections)


def near(config: Any, within: Optional[float] = None) -> bool:
    """Whether the formulas are near what is alive. Under autocast activations and copies are not most at the same moment."""
    vocab = config.model.vocab
    engine = TorchEngine(TrainStep(build_model(config, vocab)), None, None, config)
    found = worker._activations(engine, worker.batch_of(config, vocab))
    assert copy_bytes(config, vocab) == pytest.approx(found["copies"], rel=0.02, abs=1000)
    if within is None or config.precision == "bf16-mixed":
        within = 0.1 if config.precision == "bf16-mixed" else 0.09
    return bool(activation_bytes(config, vocab) / found["activations"] == pytest.approx(1, abs=within))


@pytest.mark.parametrize("setting, precision", chosen(FULL))
def test_full_attention(setting: str, precision: str) -> None:
    assert near(config_of(precision, FULL[setting]))


@pytest.mark.parametrize("setting, precision", chosen(REFORMERS))
def test_local_and_hashed_attention(setting: str, precision: str) -> None:
    assert near(config_of(precision, REFORMERS[setting]))


@pytest.mark.parametrize(
    "setting, precision", [(name, "fp32") for name in STACKS] + [(name, "bf16-mixed") for name in list(STACKS)[::4]]
    + [(name, "bf16-pure") for name in list(STACKS)[1::4]],
)  # fmt: skip
def test_stacks(setting: str, precision: str) -> None:
    assert near(config_of(precision, {"depth": 3, "vocab": 258, "seq": 128, "micro": 2, **STACKS[setting]}), 0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("setting", list(CHUNKS))
def test_loss_in_chunks(setting: str, precision: str) -> None:
    """One chunk's logits, and the readout's gradient of one chunk beside the sum of all."""
    assert near(config_of(precision, CHUNKS[setting]), 0.02)


@pytest.mark.parametrize("setting, precision", chosen(HEADS))
def test_heads(setting: str, precision: str) -> None:
    assert near(config_of(precision, HEADS[setting]))


@pytest.mark.parametrize("setting", ["local", "hashed, stored", "hashed four times, stored", "hashed, all pairs", "both, padded"])
def test_what_is_written_out_where_there_are_no_blocks(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(derived, "attention", lambda config: "explicit")
    assert near(config_of("fp32", REFORMERS[setting]))


def test_short_sequences_hash_nothing_and_keep_no_order() -> None:
    """A layer's order is two integers of 64 bits a token, head and round, and one of 16 where layers are run again."""
    def kept(hashes: int, **settings: Any) -> int:
        lsh = {"chunk": 16, "hashes": hashes, "full_below": settings.pop("full_below", 16)}
        return activation_bytes(config_of("fp32", {**REFORMERS["hashed"], "lsh": lsh, "depth": 64, **settings}), 258)

    tokens = 2 * 128 * 2 * 64  # in all layers and heads
    assert kept(2) - kept(1) == pytest.approx(tokens * 2, rel=0.1)
    assert kept(3, memory=STORE) - kept(2, memory=STORE) == pytest.approx(tokens * (16 + 4), rel=0.1)
    assert kept(3, full_below=128) == kept(1, full_below=128)


MLPS: Dict[str, Any] = {
    "as cifar_mlp": {"width": 64, "depth": 2, "features": 64, "micro": 64},
    "few rows, many features": {"width": 256, "depth": 3, "features": 3072, "micro": 128},
    "gelu": {"width": 512, "depth": 4, "features": 100, "micro": 16, "activation": "gelu"},
    "dropout": {"width": 32, "depth": 6, "features": 64, "micro": 512, "activation": "silu", "dropout": 0.1},
    "relu and dropout, standard": {"width": 128, "depth": 3, "features": 20, "micro": 256, "dropout": 0.2, "mup": STANDARD},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("setting", list(MLPS))
def test_mlp(setting: str, precision: str) -> None:
    """Of images everything is followed step by step, so the formula is exact but for biases and single numbers."""
    model = {"kind": "mlp", "activation": "relu", **MLPS[setting]}
    micro, mup = model.pop("micro"), model.pop("mup", {"base_width": 8})
    config = make_config(model=model, mup=mup, batch={"micro": micro}, precision=precision, data={"images": "digits"})
    engine = TorchEngine(TrainStep(build_model(config, 10)), None, None, config)
    engine.wrapped.train()
    found = worker._activations(engine, worker.batch_of(config, 10))
    assert copy_bytes(config, 10) == pytest.approx(found["copies"], rel=0.02, abs=500)
    assert activation_bytes(config, 10) == pytest.approx(found["activations"], rel=0.015)
