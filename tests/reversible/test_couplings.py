"""Each coupling by its formula, and back again."""
from __future__ import annotations

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.reversible import COUPLINGS, make_coupling

pytestmark = pytest.mark.pod
VARIANTS = [
    ("additive", {}),
    ("momentum", {"beta": 0.8}),
    ("modified-momentum", {"beta": 0.8}),
    ("mean", {}),
    ("mean", {"index": "global"}),
    ("affine", {}),
]


def sample(coupling, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 3, 4, generator=generator, dtype=dtype) for _ in range(2))
    return a, b, torch.randn(2, 3, 4 * coupling.widening, generator=generator, dtype=dtype)


def test_by_hand():
    """a = 2, b = 10, f = 5, at half-step 4, from the formulas in the papers."""
    a, b, fx = torch.tensor([2.0]), torch.tensor([10.0]), torch.tensor([5.0])

    def after(name, **options):
        return tuple(round(t.item(), 5) for t in make_coupling(name, **options).forward(a, b, fx, 4))

    assert after("additive") == (10.0, 7.0)
    assert after("mean") == (10.0, (3 * 2 + 5) / 4), "this stream holds its input and two outputs"
    assert after("mean", index="global") == (10.0, round((5 * 2 + 5) / 6, 5))
    assert after("momentum", beta=0.5) == (2 + 7.5, 0.5 * 10 + 0.5 * 5)
    assert after("modified-momentum", beta=0.5) == (7.0, 10 + 0.5 * 2**5 * 7)
    affine = make_coupling("affine").forward(a, b, torch.tensor([0.5, 5.0]), 4)
    assert affine[0] is b and affine[1].item() == pytest.approx(2 / (1 + torch.exp(torch.tensor(-2.5)).item()) + 5)


def test_what_each_branch_reads():
    a, b = torch.tensor([2.0]), torch.tensor([10.0])
    read = {name: make_coupling(name).read(a, b, 3).item() for name in COUPLINGS}
    assert read == {
        "additive": 10.0,
        "mean": 10.0,
        "affine": 10.0,
        "momentum": 2.0,
        "modified-momentum": pytest.approx(10 * 0.9**3),
    }


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("step", [0, 1, 7])
def test_inverse(name, options, step):
    coupling = make_coupling(name, **options)
    a, b, fx = sample(coupling)
    after = coupling.forward(a, b, fx, step)
    assert torch.allclose(coupling.read(a, b, step), coupling.read_back(*after, step), rtol=1e-13, atol=1e-13)
    back = coupling.inverse(*after, fx, step)
    assert torch.allclose(back[0], a, rtol=1e-12, atol=1e-12) and torch.allclose(back[1], b, rtol=1e-12, atol=1e-12)
    assert max((after[0] - a).abs().max(), (after[1] - b).abs().max()) > 0.1


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_linear_couplings_save_no_tensor(name, options):
    """The engine relies on it: what they would save, no frame would rebuild."""
    coupling, saved = make_coupling(name, **options), []
    streams = [t.requires_grad_() for t in sample(coupling)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        coupling.read(*streams[:2], 3)
        coupling.forward(*streams, 3)
    assert bool(saved) == (not coupling.linear)


def test_inverse_of_additive_is_off_by_one_rounding_of_the_sum():
    torch.manual_seed(0)
    coupling = make_coupling("additive")
    a, b, fx = torch.randn(10000), torch.randn(10000), torch.randn(10000)
    after = coupling.forward(a, b, fx, 0)
    off = (coupling.inverse(*after, fx, 0)[0] - a).abs()
    assert 0 < off.max() <= torch.finfo(torch.float32).eps * (after[1].abs() + fx.abs()).max()


def test_names_and_options():
    assert set(COUPLINGS) == {"additive", "momentum", "modified-momentum", "mean", "affine"}
    assert all(make_coupling(name).name == name for name in COUPLINGS)
    with pytest.raises(ConfigError, match="model.stack.coupling.*Did you mean `additive`"):
        make_coupling("aditive")
    with pytest.raises(ConfigError, match="model.stack.beta.*additive coupling has no beta"):
        make_coupling("additive", beta=0.9)
    with pytest.raises(ConfigError, match="model.stack.index"):
        make_coupling("momentum", index="global")
    with pytest.raises(ConfigError, match="model.stack.index"):
        make_coupling("mean", index="half")
    for beta in (0.0, 1.0, -0.5, 1.5):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            make_coupling("momentum", beta=beta)
