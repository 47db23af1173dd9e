"""MuAdam, MuAdamW, MuSGD: the stock package's numbers where it is right, its traps not repeated."""
from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import attach_infshapes, base_shapes_from_width, compute_roles
from ipu_lean.optim import MuAdam, MuAdamW, MuSGD
from tests.mup.toy import Toy

pod = pytest.mark.pod
BASE = base_shapes_from_width(Toy, 16)


def toy(width=64, ffn=None, attach=True):
    torch.manual_seed(0)
    model = Toy(width, ffn=ffn)
    model.roles = compute_roles(model, BASE)
    return attach_infshapes(model, BASE) if attach else model


def table(model, optimizer):
    """{name: (lr, weight_decay)}; fails on a parameter that is in no group or in two."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert id(parameter) not in found
            found[id(parameter)] = (group["lr"], group["weight_decay"])
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("width, ffn", [(64, None), (64, 96), (8, None), (16, None)])
@pytest.mark.parametrize("name, options", [
    ("MuAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("MuAdam", {"lr": 0.01}),
    ("MuAdam", {"lr": 0.01, "weight_decay": 0.1, "impl": torch.optim.RMSprop}),
    ("MuAdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("MuSGD", {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}),
])  # fmt: skip
def test_same_groups_as_mup(width, ffn, name, options):
    """lr and decay of every parameter, and whatever else a group has, by roles, by our infshapes and by the stock package."""
    mup = pytest.importorskip("mup", reason="the stock package is not installed")
    model = toy(width, ffn)
    ours = {"MuAdam": MuAdam, "MuAdamW": MuAdamW, "MuSGD": MuSGD}[name]
    theirs = getattr(mup, name)(model.parameters(), **options)
    for optimizer in (ours(model, **options), ours(model.parameters(), **options)):
        got, want = table(model, optimizer), table(model, theirs)
        for parameter in want:
            assert got[parameter] == pytest.approx(want[parameter], rel=1e-12), parameter
        scaled = ("params", "lr", "weight_decay", "eps")
        other = {key: value for key, value in theirs.param_groups[0].items() if key not in scaled}
        assert all(group[key] == other[key] for group in optimizer.param_groups for key in other)


def test_parameters_prepared_by_mup_are_taken():
    mup = pytest.importorskip("mup", reason="the stock package is not installed")
    model = mup.set_base_shapes(Toy(64), Toy(16), delta=Toy(32), rescale_params=False, do_assert=False)
    assert table(model, MuAdam(model.parameters(), lr=0.01)) == table(model, mup.MuAdam(model.parameters(), lr=0.01))


@pod
def test_every_form_of_parameters_gives_the_same_groups():
    model = toy()
    want = table(model, MuAdam(model, lr=0.01, weight_decay=0.1))
    roles = model.roles
    for params, given in (
        (model.parameters(), None),
        (list(model.parameters()), None),
        (model.named_parameters(), roles),
        (list(model.named_parameters()), None),
        ([{"params": model.named_parameters()}], roles),
        ([{"params": list(model.parameters())[:3]}, {"params": []}, {"params": list(model.parameters())[3:]}], None),
        (list(model.named_parameters(remove_duplicate=False)) * 2, roles),
    ):
        assert table(model, MuAdam(params, lr=0.01, weight_decay=0.1, roles=given)) == want


@pod
def test_at_the_base_it_is_the_plain_optimizer():
    for ours, plain, options in (
        (MuAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (MuSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        one, two = toy(16), toy(16)
        pair = [(one, ours(one, **options)), (two, plain(two.parameters(), **options))]
        for _ in range(3):
            for model, optimizer in pair:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(torch.arange(10)), torch.arange(10) % 5).backward()
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


@pod
def test_groups_given_by_the_user():
    """Each keeps its own lr, decay, betas and unknown keys; the user's dicts and lists stay as they were."""
    model = toy()
    inside = [parameter for name, parameter in model.named_parameters() if name.startswith("blocks")]
    outside = [parameter for name, parameter in model.named_parameters() if not name.startswith("blocks")]
    given = [{"params": inside, "lr": 0.5, "betas": (0.1, 0.2), "colour": "red"}, {"params": outside, "weight_decay": 0.3}]
    before = [dict(group, params=list(group["params"])) for group in given]
    optimizer = MuAdam(given, lr=0.01, weight_decay=0.1)
    assert [set(group) for group in given] == [set(group) for group in before]
    assert all(len(a["params"]) == len(b["params"]) for a, b in zip(given, before))
    got = table(model, optimizer)
    assert got["blocks.0.up.weight"] == (0.125, 0.4) and got["blocks.0.up.bias"] == (0.5, 0.1)
    assert got["embedding.weight"] == (0.01, 0.3)
    for group in optimizer.param_groups:
        assert (group["betas"] == (0.1, 0.2) and group["colour"] == "red") == (group["initial_lr"] in (0.5, 0.125))


@pod
def test_adamw_keeps_its_own_decay():
    """0.01 in torch; mup makes it 0."""
    model = toy()
    got = table(model, MuAdamW(model, lr=0.01))
    assert got["blocks.0.up.weight"] == (0.0025, pytest.approx(0.04)) and got["norm.weight"] == (0.01, 0.01)
    assert table(model, MuAdamW(model, lr=0.01, decay_vectors=False))["norm.weight"] == (0.01, 0.0)
    assert table(model, MuAdam(model, lr=0.01))["blocks.0.up.weight"] == (0.0025, 0.0)


@pod
def test_decoupled_decay_is_left_alone():
    model = toy()
    for build in (MuAdam, MuAdamW, MuSGD):
        assert {decay for _, decay in table(model, build(model, lr=0.01, weight_decay=0.1, decoupled_wd=True)).values()} == {0.1}


class Recorder(torch.optim.Adam):
    """Keeps what its constructor was given, as PopTorch's optimizers do to tell variable settings from constant ones."""

    def __init__(self, params, lr=None, betas=None, eps=None, weight_decay=None, loss_scaling=None):
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.variable = {key for key, value in given.items() if value is not None}
        super().__init__(params, **{key: value for key, value in given.items() if value is not None})
        self.loss_scaling = loss_scaling


@pod
def test_another_implementation():
    """lr always reaches the constructor; partials and defaults hidden behind None work; only plain values are in the groups."""
    model = toy()
    impl = functools.partial(Recorder, loss_scaling=512.0)
    optimizer = MuAdam(model.named_parameters(), impl=impl, roles=model.roles)
    assert optimizer.variable == {"lr"} and optimizer.loss_scaling == 512.0 and optimizer.defaults["lr"] == 1e-3
    assert "eps" in MuAdam(model, impl=impl, lr=0.1, eps=1e-6).variable
    hidden = next(group for group in optimizer.param_groups if group["kind"] == "hidden")
    assert (hidden["lr"], hidden["eps"], hidden["weight_decay"]) == (1e-3 / 4, 1e-8 / 4, 0.0)
    for group in optimizer.param_groups:
        assert all(isinstance(value, (int, float, str, tuple, type(None))) for key, value in group.items() if key != "params")


@pod
def test_refusals():
    model = toy()
    with pytest.raises(ConfigError, match="lr is a tensor"):
        MuAdam(model, lr=torch.tensor(0.01))
    with pytest.raises(ConfigError, match="lr is a tensor"):
        MuAdam([{"params": model.parameters(), "lr": torch.tensor(0.01)}], lr=0.01)
    for nothing in ([], iter(()), nn.Identity(), [{"params": []}]):
        with pytest.raises(ConfigError, match="no parameters"):
            MuAdam(nothing, lr=0.01)
    with pytest.raises(ConfigError, match="not one tensor"):
        MuAdam(model.head.weight, lr=0.01)
    with pytest.raises(ConfigError, match="came without names"):
        MuAdam(model.parameters(), roles=model.roles, lr=0.01)
    with pytest.raises(ConfigError, match="`head.bias` is in more than one"):
        MuAdam([{"params": model.named_parameters()}, {"params": [("head.bias", model.head.bias)]}], lr=0.01)
    with pytest.raises(ConfigError, match="of the sgd family"):
        MuAdam(model, impl=torch.optim.SGD, lr=0.01)
    with pytest.raises(ConfigError, match="of the adam family"):
        MuSGD(model, impl=functools.partial(torch.optim.AdamW, betas=(0.1, 0.2)), lr=0.01)
    with pytest.raises(ConfigError, match="cannot be built with"):
        MuAdam(model, lr=0.01, colour="red")


@pod
def test_a_parameter_without_role_or_infshape_is_named():
    model = toy(attach=False)
    with pytest.raises(ConfigError, match=r"`#0` of shape \(3, 64\) has neither"):
        MuAdam(model.parameters(), lr=0.01)
    with pytest.raises(ConfigError, match="`position`"):
        MuAdam(model.named_parameters(), lr=0.01)
    copied = copy.deepcopy(toy())
    with pytest.raises(ConfigError, match="deepcopy"):
        MuAdam(copied.parameters(), lr=0.01)
    del model.roles["norm.weight"]
    with pytest.raises(ConfigError, match="`norm.weight`"):
        MuAdam(model, lr=0.01)


@pod
def test_options_of_torch_that_touch_groups():
    model = toy()
    for options in ({"foreach": True}, {"maximize": True}, {"amsgrad": True}):
        optimizer = MuAdamW(model, lr=0.01, **options)
        model(torch.arange(10)).sum().backward()
        optimizer.step()
        assert all(group[key] == value for group in optimizer.param_groups for key, value in options.items())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5 * group["initial_lr"] for group in optimizer.param_groups]
    assert scheduler.base_lrs == [group["initial_lr"] for group in optimizer.param_groups]


def change_after_two_steps(width, eps, ours):
    """{name: mean |W_2 - W_0|} after two steps of Adam, on the same data at every width."""
    model = toy(width, attach=False)
    for name, parameter in model.named_parameters():
        if model.roles[name].kind == "hidden":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = MuAdam(model, lr=0.01, eps=eps)
    if not ours:
        for group in optimizer.param_groups:
            group["eps"] = eps
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.arange(10)), torch.arange(10) ** 2 % 5).backward()
        optimizer.step()
    return {name: (parameter.detach() - before[name]).abs().mean().item() for name, parameter in model.named_parameters()}


def slopes(eps, ours):
    small, large = change_after_two_steps(64, eps, ours), change_after_two_steps(1024, eps, ours)
    return {name: (torch.tensor(large[name] / small[name]).log2() / 4).item() for name in small}


@pod
@pytest.mark.parametrize("eps", [1e-12, 1e-4])
def test_updates_scale_as_mup_says_whatever_eps(eps):
    """Log-log slope of an update over width: -1 for hidden matrices, 0 for others (Tensor Programs V); a fixed eps breaks it."""
    roles = toy(64).roles
    for name, slope in slopes(eps, ours=True).items():
        assert slope == pytest.approx(-1.0 if roles[name].kind == "hidden" else 0.0, abs=0.1), name
    assert slopes(1e-4, ours=False)["blocks.0.up.weight"] < -1.3
