"""The search: nothing that `check` refuses, and nothing slower than what a plain enumeration finds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest

from ipu_lean.cli import main
from ipu_lean.config import Config, load_config, make_config
from ipu_lean.ipu.check import check
from ipu_lean.ipu.plan import make_plan
from ipu_lean.ipu.plan.auto import candidates, explain, placements, search
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.plan.published import transformer
from ipu_lean.ipu.plan.speed import samples_per_second, update_seconds

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[3]


def random_model(seed: int) -> Config:
    """A GPT of 20 to 900 million parameters."""
    draw = random.Random(seed)
    stack = draw.choice([{"kind": "residual"}, {"kind": "reversible"}, {"kind": "reversible", "order": "aaff"}])
    model = {"width": draw.choice([256, 512, 768, 1024, 1280]), "depth": draw.choice([6, 12, 24, 36]), "stack": stack,
             "seq": draw.choice([128, 512, 1024]), "vocab": draw.choice([4096, 50272]), "tied": draw.random() < 0.5}
    return make_config(
        device="ipu", precision="fp16-ipu", model=model, mup={"parametrization": "standard"},
        data={"tokenizer": {"kind": "bpe", "path": "x"}}, batch={"micro": 1, "accumulation": draw.choice([256, 512])},
    )


def coarse(config: Config, pod: int) -> Optional[float]:
    """Samples a second of the best of a coarser grid: equal layers, one micro-batch size, state off chip, checkpoints or not."""
    start, best = workload_of(as_ipu(config)[0]), None
    for ipus in (1, 2, 4, 8, 16, 32, 64):
        if ipus > pod or config.model.depth % ipus:
            continue
        layers = (config.model.depth // ipus,) * ipus
        if config.model.stack.order == "aaff" and layers[0] % 2:
            continue
        head = 0 if config.model.tied else ipus - 1
        for every in (True, False):
            replicas = pod // ipus
            accumulation = config.batch.global_batch // replicas
            plan = make_plan(replace(start, layers_per_ipu=layers, head_ipu=head, pipelined=ipus > 1, recomputed=True,
                                     every_layer=every or ipus == 1, state_offchip=True, proportions=(0.15,),
                                     logit_tokens=128, micro=1, replicas=replicas, accumulation=accumulation))
            if plan.verdict == "fits" and accumulation >= plan.needed:
                speed = samples_per_second(plan.workload)
                best = speed if best is None else max(best, speed)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_as_fast_as_a_coarser_enumeration(seed: int) -> None:
    config, pod = random_model(seed), random.Random(seed).choice([4, 16, 64])
    found, wanted = search(config, pod), coarse(config, pod)
    assert wanted is None or (found is not None and found.plan.verdict == "fits")
    if found is None:
        return
    assert wanted is None or found.speed >= wanted * (1 - 1e-9)
    workload = found.plan.workload
    assert workload.ipus * workload.replicas == pod and workload.global_batch == config.batch.global_batch
    assert found.plan.verdict in ("fits", "tight") and workload.accumulation >= found.plan.needed
    assert found.config.model == config.model and len(explain(found)) == 5


@pytest.mark.parametrize("seed", range(3))
def test_check_accepts_what_is_found(seed: int) -> None:
    found = search(random_model(100 + seed), 16)
    assert found is None or check(found.config).findings == []


def small(**changes: Any) -> Config:
    """12 layers of width 256 for any POD; `changes` by section."""
    sections = {"batch": {"micro": 1, "accumulation": 1024}, "ipu": {}, "model": {}, **changes}
    model = {"width": 256, "depth": 12, "seq": 128, "vocab": 4096, **sections.pop("model")}
    return make_config(device="ipu", precision="fp16-ipu", model=model, mup={"parametrization": "standard"},
                       data={"tokenizer": {"kind": "bpe", "path": "x"}}, **sections)


def test_a_pod_of_several_processes_is_checked_as_the_share_of_one() -> None:
    """PopTorch drives at most 64 IPUs from one process, and poprun starts more of them."""
    found = search(small(), 128)
    assert found is not None and found.plan.workload.ipus * found.plan.workload.replicas == 128
    result = check(found.config)
    assert result.findings == [] and result.found.ipus == 128
    assert any("start 2 with poprun" in note for note in result.found.notes)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_ranked_is_what_is_configured(tied: bool) -> None:
    """Also where the configuration had its embedding on another IPU than the first, as plans have it."""
    layers = [6, 6] if tied else [0, 12]
    start = small(model={"tied": tied}, ipu={"layers_per_ipu": layers, "embedding_ipu": 1 if tied else 0})
    found = search(start, 4)
    assert found is not None and found.plan.verdict == "fits"
    assert found.speed == samples_per_second(found.plan.workload)
    for workload in candidates(workload_of(as_ipu(start)[0]), 4, 1024):
        assert workload.head_ipu == (0 if tied else workload.ipus - 1)


def test_evaluation_fills_the_pipelines_that_are_searched() -> None:
    """With few device iterations in evaluation, pipelines stay short; as it likes, the search takes four stages here."""
    start = small(ipu={"eval_device_iterations": 2}, model={"width": 1024, "depth": 24, "tied": False})
    found = search(start, 4)
    assert found is not None and (found.plan.forward, found.plan.verdict) == (2, "tight")


def test_the_published_placement_is_found_again() -> None:
    found = search(load_config(ROOT / "configs" / "gpt2_small_pod16.yaml"), 16)
    assert found.plan.workload.layers_per_ipu == (0, 4, 4, 4) and found.plan.workload.replicas == 4


def test_an_update_takes_as_long_as_its_slowest_ipu() -> None:
    """Twice the layers on each IPU: twice the time; a bubble of (2F-2) steps."""
    start = workload_of(as_ipu(load_config(ROOT / "configs" / "gpt2_small_pod16.yaml"))[0])
    network = replace(transformer(64, 1, 8, 16, 1), vocab=0)
    one = replace(start, network=network, layers_per_ipu=(2, 2, 2, 2), head_ipu=3, accumulation=10)
    two = replace(one, network=replace(network, layers=network.layers * 2), layers_per_ipu=(4, 4, 4, 4))
    assert update_seconds(two) == pytest.approx(2 * update_seconds(one))
    assert update_seconds(replace(one, accumulation=26)) == pytest.approx(2 * update_seconds(one))


def test_placements_hold_every_layer_once() -> None:
    for depth, ipus in ((12, 4), (6, 2), (7, 8), (48, 16)):
        found = list(placements(transformer(64, 1, depth, 8, 10), ipus))
        assert found and len(set(found)) == len(found)
        assert all(sum(layers) == depth and len(layers) == ipus and min(layers[1:]) >= 1 for layers in found)


def test_the_command_keeps_a_configuration_that_plans_as_it_says(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "best"
    path = str(ROOT / "configs" / "lean_gpt_medium.yaml")
    assert main(["plan", path, "--auto", "--pod", "4", "--out", str(out), "--json"]) == 0
    *told, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert told[0] == "--auto found this plan for a POD4:" and told[-1] == "verdict: fits"  # the file's own plan does not fit
    assert json.loads((out / "summary.json").read_text()) == summary and (out / "plan.txt").read_text().splitlines() == told
    assert summary["verdict"] == "fits" and summary["metrics"]["auto"]["pod"] == 4
    assert main(["plan", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["metrics"]["ipus"] == summary["metrics"]["ipus"]
    assert load_config(str(out)).ipu.layers_per_ipu == summary["metrics"]["auto"]["keys"]["ipu.layers_per_ipu"]


def test_a_model_that_fits_nowhere(capsys: Any) -> None:
    """The file's own plan fits its own IPUs; nowhere may that be taken for the answer."""
    assert main(["plan", str(ROOT / "configs" / "gpt2_large_pod16.yaml"), "--auto", "--pod", "4", "--json"]) == 4
    out, error = capsys.readouterr()
    assert "no plan with a global batch of 512 rows fits a POD4" in error and "Try another --pod" in error
    *told, last = out.splitlines()
    assert told[0] == "--auto found no plan for a POD4." and told[-1] == "verdict on --auto for a POD4: no"
    verdicts = [line for line in told if "verdict" in line and line.endswith(": fits")]
    assert verdicts == ["verdict on the file as it stands, not on --auto: fits"]
    assert told[2].startswith("The file as it stands (16 IPUs")
    summary = json.loads(last)
    assert summary["verdict"] == "no" and summary["metrics"]["auto"]["found"] is False
    assert set(summary["metrics"]) == {"auto", "as_it_stands"} and summary["metrics"]["as_it_stands"]["verdict"] == "fits"


def test_a_pod_of_no_ipus_is_refused(capsys: Any) -> None:
    assert main(["plan", str(ROOT / "configs" / "gpt2_small_pod16.yaml"), "--auto", "--pod", "0"]) == 2
    assert "`--pod: 0`" in capsys.readouterr().err
