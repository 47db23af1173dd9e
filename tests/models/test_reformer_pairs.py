"""A Reformer with every pair of features, and in 16 bits."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from ipu_lean._compat import TORCH
from tests.models.common import tokens_for
from tests.models.reformer_common import gradients, reformer, worst

pytestmark = pytest.mark.pod


# -- every pair of features --------------------------------------------------------------------------------------------------
AXES = {
    "attention": ["lsh", "local", ["local", "lsh"], ["full", "lsh"]],
    "positions": ["rotary", "learned", "sinusoidal", "axial", "none"],
    "coupling": ["additive", "momentum", "affine", "residual"],
    "shape": ["plain", "split", "aaff", "shared"],
    "size": ["own", "equal"],
    "gate": ["swiglu", "relu"],
    "norm": ["rmsnorm", "layernorm"],
}


def rows():
    """Few rows that hold every pair of values of two features."""
    names = list(AXES)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in range(len(AXES[a])) for y in range(len(AXES[b]))
    }
    found = []
    generator = torch.Generator().manual_seed(0)
    while missing:
        best, gain = None, -1
        for _ in range(30):
            row = {name: int(torch.randint(len(AXES[name]), (), generator=generator)) for name in names}
            pairs = {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
            if len(pairs & missing) > gain:
                best, gain = (row, pairs), len(pairs & missing)
        found.append({name: AXES[name][place] for name, place in best[0].items()})
        missing -= best[1]
    return found


def settings(row):
    """The model section of a row; what cannot go together gives way."""
    stack = {"kind": "residual"} if row["coupling"] == "residual" else {"coupling": row["coupling"]}
    changes = {"attention": row["attention"], "positions": row["positions"], "activation": row["gate"], "norm": row["norm"]}
    if row["coupling"] != "residual":
        split = row["shape"] == "split" and row["coupling"] == "additive"
        stack.update({"input": "split", "output": "concat"} if split else {})
        stack.update({"order": "aaff"} if row["shape"] == "aaff" else {})
    if row["shape"] == "shared":
        changes.update(num_hidden_groups=1, num_inner_groups=2)
    if row["size"] == "own":
        changes.update(heads=3, head_size=4)
    used = row["attention"] if isinstance(row["attention"], list) else [row["attention"]]
    changes.update(lsh={"chunk": 4, "hashes": 2} if "lsh" in used else {}, local={"chunk": 8} if "local" in used else {})
    return {**changes, "stack": stack, "readout_bias": True}


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(str(value) for value in row.values()))
def test_features_go_together(row):
    model = reformer(**settings(row)).train()
    tokens, labels = tokens_for(model, seq=19)
    present = torch.arange(19).expand(2, 19) < torch.tensor([[19], [11]])
    model.set_engine("store")
    loss, truth = gradients(model, tokens, labels, present=present)
    model.set_engine("checkpoint" if row["coupling"] == "residual" else "invert")
    again, found = gradients(model, tokens, labels, present=present)
    assert again == pytest.approx(loss, rel=1e-13) and worst(found, truth) < 1e-10
    model.set_attention("explicit")
    explicit, found = gradients(model, tokens, labels, present=present)
    assert explicit == pytest.approx(loss, rel=1e-12) and worst(found, truth) < 1e-9


# -- precisions --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    if dtype == torch.float16 and TORCH < (2, 6):
        pytest.skip("this torch has no fp16 autocast on CPU")
    model = reformer(torch.float32).train()
    tokens, labels = tokens_for(model)
    present = torch.ones(2, 32, dtype=torch.bool)
    present[0, 25:] = False
    found = {}
    for engine in ("invert", "store"):
        model.set_engine(engine)
        with torch.autocast("cpu", dtype=dtype):
            loss, found[engine] = gradients(model, tokens, labels, present=present)
        assert all(torch.isfinite(value).all() for value in found[engine].values())
    assert worst(found["invert"], found["store"]) < 4 * torch.finfo(dtype).eps  # rare flips of a rounding
    model.set_attention("explicit")
    with torch.autocast("cpu", dtype=dtype):
        explicit, _ = gradients(model, tokens, labels, present=present)
    assert explicit == pytest.approx(loss, rel=4 * torch.finfo(dtype).eps)
    if dtype == torch.bfloat16:
        half = copy.deepcopy(model).to(dtype)
        _, pure = gradients(half, tokens, labels, present=present)
        assert all(torch.isfinite(value).all() and value.dtype == dtype for value in pure.values())
