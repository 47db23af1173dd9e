"""Plans of Reformers: parameters as the model has them, both estimates beside each other, a search that `check` agrees with."""

from __future__ import annotations

import random
from typing import Any, Dict

import pytest

from ipu_lean.config import Config, make_config
from ipu_lean.ipu.check import check
from ipu_lean.ipu.plan import make_plan
from ipu_lean.ipu.plan.auto import search
from ipu_lean.ipu.plan.memory import layer_bytes, stage_memory
from ipu_lean.ipu.plan.network import as_ipu, network_of, workload_of
from ipu_lean.ipu.plan.speed import update_seconds
from ipu_lean.ipu.traced import compare, traced_plan
from ipu_lean.models import build_meta
from tests.ipu.helpers import VOCAB, ipu_config

pytestmark = pytest.mark.pod
STANDARD = {"parametrization": "standard", "base_width": None}


def mixed(**changes: Any) -> Config:
    """Local and hashed layers in turn, two on each of two IPUs."""
    model = {"width": 64, "heads": 4, "seq": 256, "tied": False, "positions": "axial", "attention": ["local", "lsh"],
             "local": {"chunk": 32}, "lsh": {"chunk": 32}, "stack": {"output": "concat"}, **changes.pop("model", {})}  # fmt: skip
    return ipu_config(mup=STANDARD, model=model, **changes)


@pytest.mark.parametrize("seed", range(12))
def test_parameters_are_the_models(seed: int) -> None:
    draw = random.Random(seed)
    model: Dict[str, Any] = {
        "attention": draw.choice([["local", "lsh"], ["lsh", "full"], ["local", "local", "lsh", "full"]]),
        "positions": draw.choice(["axial", "learned", "rotary"]), "bias": draw.random() < 0.5,
        "attention_bias": draw.choice([None, True, False]), "heads": 4, "head_size": draw.choice([None, 8, 16, 32]),
        "tied": draw.random() < 0.3, "stack": {"output": draw.choice(["sum", "concat"])},
        "activation": draw.choice(["relu", "swiglu"]),
    }  # fmt: skip
    if model["stack"]["output"] == "concat":
        model["tied"] = False
    model["readout_bias"] = not model["tied"] and draw.random() < 0.5
    if "local" not in model["attention"]:
        model["local"] = {}
    config = mixed(model=model)
    built = build_meta(config, VOCAB)
    assert network_of(config).parameters == sum(parameter.numel() for parameter in built.parameters())


VARIANTS: Dict[str, Dict[str, Any]] = {
    "mixed": {},
    "two rounds, half": {"model": {"lsh": {"chunk": 32, "hashes": 2}}, "precision": "fp16-ipu",
                         "ipu": {"layers_per_ipu": [2, 2], "emulate_precision": True}},
    "padded, wide heads, checkpoints of stages": {"model": {"seq": 250, "head_size": 32},
                                                  "ipu": {"recompute_checkpoint_every_layer": False}},
    "surrogate": {"memory": {"ipu_backward": "surrogate"}, "ipu": {"layers_per_ipu": [4]}},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_both_estimates_agree(name: str) -> None:
    config = mixed(**VARIANTS[name])
    plan = make_plan(workload_of(config))
    for row in compare(plan, traced_plan(plan, config)):
        assert abs(row["difference"]) <= 0.15, row


@pytest.mark.parametrize("kind, activation, half", [
    ("full", "gelu", True), ("local", "relu", False), ("local", "geglu", True), ("lsh", "swiglu", False), ("lsh", "relu", True),
])  # fmt: skip
def test_a_walk_back_holds_one_branch_at_a_time(kind: str, activation: str, half: bool) -> None:
    """And no logits, which are gone when it begins; what it derives in float32 is so in 16 bits as well."""
    others = {other: {} for other in ("local", "lsh") if other != kind}
    precision = {"precision": "fp16-ipu"} if half else {}
    ipu = {"layers_per_ipu": [4], **({"emulate_precision": True} if half else {})}
    model = {"attention": kind, "activation": activation, **others}
    config = mixed(model=model, memory={"ipu_backward": "surrogate"}, ipu=ipu, **precision)
    plan = make_plan(workload_of(config))
    (row,) = compare(plan, traced_plan(plan, config))
    assert abs(row["difference"]) <= 0.07, row


def test_long_rows_cost_in_proportion() -> None:
    """Full attention's scores grow with the square of the length, chunks do not."""
    layers = {}
    for kind in ("full", "local", "lsh"):
        sections = {"local": {"chunk": 32} if kind == "local" else {}, "lsh": {"chunk": 32} if kind == "lsh" else {}}
        made = [mixed(model={"attention": kind, "seq": seq, **sections}) for seq in (1024, 4096)]
        layers[kind] = [layer_bytes(workload_of(config)) for config in made]
    assert layers["local"][1] == 4 * layers["local"][0] and layers["lsh"][1] == 4 * layers["lsh"][0]
    assert layers["full"][1] > 13 * layers["full"][0]
    assert layers["local"][1] < layers["lsh"][1] < layers["full"][1] / 10


def test_more_rounds_cost_more() -> None:
    one, four = (workload_of(mixed(model={"lsh": {"chunk": 32, "hashes": hashes}})) for hashes in (1, 4))
    assert layer_bytes(four, 0) == layer_bytes(one, 0)  # local
    assert 2.5 < layer_bytes(four, 1) / layer_bytes(one, 1) < 4
    assert update_seconds(four) > update_seconds(one)


def test_a_surrogate_keeps_the_order_of_tokens() -> None:
    """A 16-bit number for each token, head and round of the two hashed layers."""
    stash = {}
    for kind in ("local", "lsh"):
        sections = {"local": {"chunk": 32} if kind == "local" else {}, "lsh": {"chunk": 32, "hashes": 2} if kind == "lsh" else {}}
        config = mixed(model={"attention": kind, **sections}, **VARIANTS["surrogate"])
        (stage,) = stage_memory(workload_of(config))
        stash[kind] = stage.items["stash"]
    assert stash["lsh"] - stash["local"] == 4 * (2 * 256) * 4 * 2 * 2


@pytest.mark.parametrize("seq", [4096, 1000])
def test_check_accepts_what_the_search_finds(seq: int) -> None:
    config = make_config(
        device="ipu", precision="fp16-ipu", mup={"parametrization": "standard"}, batch={"micro": 1, "accumulation": 256},
        model={"width": 512, "depth": 6, "heads": 8, "seq": seq, "vocab": 4096, "tied": False, "attention": ["local", "lsh"],
               "positions": "axial", "stack": {"output": "concat"}},
        data={"tokenizer": {"kind": "bpe", "path": "x"}},
    )  # fmt: skip
    found = search(as_ipu(config)[0], 4)
    assert found is not None and found.plan.verdict in ("fits", "tight")
    assert check(found.config).findings == []
