"""Two traces beside each other: how far apart each activation, gradient, loss and weight is, and where they part first."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Iterator, List, Mapping, Optional

import torch

from ipu_lean.parity.trace import Tensors, Trace, check_alike, relative_distance

# Share of the weights that may be left out before a comparison says nothing.
_UNJUDGED = 0.1
KINDS = ("activation", "gradient", "loss", "weight")


@dataclass(frozen=True)
class Tolerances:
    """Largest |u - v| / |u| (norms; u is the reference) that passes. `zero`: for tensors whose true gradient is zero, the norm of
    the gradient as a share of the whole model's.
    """

    activation: float
    gradient: float
    loss: float
    weight: float
    zero: float


# fp32: two correct programs differ by rounding, about 6e-8 for each of a few dozen operations in a row. 16 bits: one rounding is
# 5e-4 (fp16) or 4e-3 (bf16), and Adam turns the sign of a gradient that is all noise into a whole step.
TOLERANCES: Dict[str, Tolerances] = {
    "fp32": Tolerances(activation=1e-5, gradient=5e-5, loss=1e-6, weight=1e-5, zero=1e-6),
    "fp16-mixed": Tolerances(activation=1e-2, gradient=5e-2, loss=1e-2, weight=5e-2, zero=1e-2),
    "fp16-ipu": Tolerances(activation=1e-2, gradient=5e-2, loss=1e-2, weight=5e-2, zero=1e-2),
    "bf16-mixed": Tolerances(activation=5e-2, gradient=0.3, loss=2e-2, weight=0.2, zero=5e-2),
    "bf16-pure": Tolerances(activation=5e-2, gradient=0.3, loss=2e-2, weight=0.3, zero=5e-2),
}
# One rounding error, in fp32's.
_COARSENESS = {"fp32": 1.0, "fp16-mixed": 2.0**13, "fp16-ipu": 2.0**13, "bf16-mixed": 2.0**16, "bf16-pure": 2.0**16}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        kind: activation, gradient, loss or weight. step: weight updates made before it was seen. name: of the tensor.
        max_abs: max |u - v|. relative: |u - v| / |u| (norms, float64). cosine: of the angle between them. ratio: |v| / |u|.
        limit: of the relative distance.
        status: ok, differs; `zero`: the true gradient is zero and both are; `left out`: a weight that rounding alone moves as far
            (see `record`), so not judged; `muted`: the reference is zero, so its agreement proves nothing.
    """

    kind: str
    step: int
    name: str
    max_abs: float
    relative: float
    cosine: float
    ratio: float
    limit: float
    status: str


@dataclass(frozen=True)
class Comparison:
    """All rows, and what they amount to.

    Attributes:
        verdict: pass, fail, or inconclusive (nothing differs, but some reference gradients are zero without having to be, or more
            than a tenth of the weights is left out).
        first: the first row that differs: activations in forward order, gradients in backward order, then step by step.
        diagnosis: what that pattern usually means.
    """

    rows: List[Row]
    tolerances: Tolerances
    verdict: str
    first: Optional[Row]
    diagnosis: str

    def worst(self, kind: str) -> Optional[Row]:
        """The judged row of a kind that is farthest off."""
        rows = [row for row in self.rows if row.kind == kind and row.status in ("ok", "differs")]
        return max(rows, key=lambda row: _rank(row.relative), default=None)

    def named(self, status: str) -> List[str]:
        """Names with a status, each once."""
        return list(dict.fromkeys(row.name for row in self.rows if row.status == status))

    def as_dict(self) -> Dict[str, Any]:
        """Plain JSON; numbers that are not finite become text."""
        rows = [{key: _plain(value) for key, value in asdict(row).items()} for row in self.rows]
        first = None if self.first is None else {key: _plain(value) for key, value in asdict(self.first).items()}
        return {
            "verdict": self.verdict,
            "first": first,
            "diagnosis": self.diagnosis,
            "tolerances": asdict(self.tolerances),
            "rows": rows,
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def tolerances_for(reference: Trace, candidate: Trace, changes: Mapping[str, float] = {}) -> Tolerances:  # noqa: B006
    """The looser of the two precisions', with `changes` by name."""
    both = [TOLERANCES[str(trace.facts["precision"])] for trace in (reference, candidate)]
    looser = Tolerances(**{name: max(getattr(one, name) for one in both) for name in asdict(both[0])})
    return replace(looser, **changes)


def measure(kind: str, step: int, name: str, reference: torch.Tensor, candidate: torch.Tensor, limit: float) -> Row:
    """Distance of two tensors of one shape, in float64."""
    u, v = reference.detach().double().flatten(), candidate.detach().double().flatten()
    norm, other, relative = u.norm().item(), v.norm().item(), relative_distance(u, v)
    cosine = torch.dot(u, v).item() / (norm * other) if norm and other else float("nan")
    biggest = (u - v).abs().max().item() if u.numel() else 0.0
    status = "ok" if math.isfinite(relative) and relative <= limit else "differs"
    return Row(kind, step, name, biggest, relative, cosine, other / norm if norm else float("nan"), limit, status)


def compare(reference: Trace, candidate: Trace, changes: Mapping[str, float] = {}) -> Comparison:  # noqa: B006
    """Everything that both traces hold.

    Raises: ConfigError when they did not start from the same weights and batches.
    """
    updates = check_alike(reference, candidate)
    limits = tolerances_for(reference, candidate, changes)
    zero = set(reference.start.zero_gradients)
    rows = list(_tensors("activation", 0, reference.activations, candidate.activations, limits.activation))
    rows += _gradients(reference, candidate, limits, zero)
    rows += _losses(reference, candidate, updates, limits.loss)
    rows += _weights(reference, candidate, updates, limits.weight, zero)
    first = _first(rows)
    muted = [row.name for row in rows if row.status == "muted"]
    unjudged = _share_left_out(rows, reference)
    verdict = "fail" if first is not None else "inconclusive" if muted or unjudged > _UNJUDGED else "pass"
    return Comparison(rows, limits, verdict, first, diagnose(rows, first, muted, unjudged))


def _tensors(kind: str, step: int, reference: Tensors, candidate: Tensors, limit: float) -> Iterator[Row]:
    for name, tensor in reference.items():
        yield _pair(kind, step, name, tensor, candidate.get(name), limit)


def _pair(kind: str, step: int, name: str, reference: torch.Tensor, candidate: Optional[torch.Tensor], limit: float) -> Row:
    if candidate is None or candidate.shape != reference.shape:
        return Row(kind, step, name, math.inf, math.inf, float("nan"), float("nan"), limit, "differs")
    return measure(kind, step, name, reference, candidate, limit)


def _gradients(reference: Trace, candidate: Trace, limits: Tolerances, zero: Any) -> Iterator[Row]:
    """Tensors whose true gradient is zero hold rounding noise only: both must be small beside the whole gradient."""
    total = math.sqrt(sum(tensor.double().norm().item() ** 2 for tensor in reference.gradients.values()))
    for row in _tensors("gradient", 0, reference.gradients, candidate.gradients, limits.gradient):
        own = reference.gradients[row.name].double().norm().item()
        other = candidate.gradients.get(row.name)
        seen = math.inf if other is None else other.double().norm().item()
        if row.name in zero:
            small = max(own, seen) <= limits.zero * total
            yield replace(row, status="zero" if small else "differs")
        elif own == 0.0 and seen == 0.0:
            yield replace(row, status="muted")
        else:
            yield row


def _weights(reference: Trace, candidate: Trace, updates: int, limit: float, zero: Any) -> Iterator[Row]:
    """A weight that rounding alone moves beyond the limit on the reference's own device is left out, and so is one that no
    gradient moves; otherwise ten times what rounding does is allowed, since one sample of noise is no bound on the next. A
    coarser candidate rounds in proportion.
    """
    one, other = (_COARSENESS[str(trace.facts["precision"])] for trace in (reference, candidate))
    coarser = max(1.0, other / one)
    furthest: Dict[str, float] = {}
    for values in reference.spread.values():
        for name, value in values.items():
            furthest[name] = max(furthest.get(name, 0.0), value * coarser)
    for step in sorted(set(reference.weights) & set(candidate.weights)):
        if step > updates:
            continue
        for name, tensor in reference.weights[step].items():
            rounding = furthest.get(name, 0.0)
            row = _pair("weight", step, name, tensor, candidate.weights[step].get(name), max(limit, 10 * rounding))
            yield replace(row, status="left out") if name in zero or not rounding <= limit else row


def _share_left_out(rows: List[Row], reference: Trace) -> float:
    """Numbers in weights that were left out at some step, as a share of the model's."""
    names = {row.name for row in rows if row.status == "left out"}
    sizes = {name: tensor.numel() for name, tensor in reference.start.weights.items()}
    return sum(size for name, size in sizes.items() if name in names) / max(1, sum(sizes.values()))


def _losses(reference: Trace, candidate: Trace, updates: int, limit: float) -> Iterator[Row]:
    for update in range(updates):
        pair = [torch.tensor([trace.losses[update]], dtype=torch.float64) for trace in (reference, candidate)]
        yield measure("loss", update + 1, "loss", pair[0], pair[1], limit)


def _first(rows: List[Row]) -> Optional[Row]:
    """Forward order for activations, backward order for gradients, then by step, the loss before the weights it led to."""
    bad = [row for row in rows if row.status == "differs"]
    activations = [row for row in bad if row.kind == "activation"]
    gradients = [row for row in reversed(bad) if row.kind == "gradient"]
    later = sorted((row for row in bad if row.kind in ("loss", "weight")), key=lambda row: (row.step, row.kind))
    return next(iter([*activations, *gradients, *later]), None)


def diagnose(rows: List[Row], first: Optional[Row], muted: List[str], unjudged: float = 0.0) -> str:
    """What the pattern of differences usually means, in one sentence."""
    if first is None:
        if muted:
            return f"nothing differs, but the reference gradient of {', '.join(muted[:4])} is zero, so those prove nothing."
        if unjudged > _UNJUDGED:
            return f"nothing differs, but {unjudged:.0%} of the weights move as far by rounding alone, so they prove nothing."
        return "nothing differs."
    if first.kind == "activation":
        return f"the forward pass differs first at `{first.name}`: look at what that module computes."
    if first.kind == "gradient":
        return _diagnose_gradients([row for row in rows if row.kind == "gradient"], first)
    if first.kind == "loss":
        return (
            f"activations and gradients of the start agree, and the loss differs at update {first.step}: look at the batches and "
            "their mean, or at the update before (schedule, rate, decay, clipping)."
        )
    return (
        f"gradients of the start agree, and `{first.name}` differs after {first.step} updates: look at its optimizer group "
        "(rate, eps, decay), the schedule, or clipping."
    )


def _diagnose_gradients(rows: List[Row], first: Row) -> str:
    judged = [row for row in rows if row.status in ("ok", "differs")]
    bad = [row for row in judged if row.status == "differs"]
    names = ", ".join(f"`{row.name}`" for row in bad[:4])
    lost = [row for row in bad if row.ratio == 0.0]
    if lost:
        return f"the forward pass agrees; the gradient of {', '.join(f'`{row.name}`' for row in lost[:4])} never arrives."
    ratios = sorted(row.ratio for row in bad)
    if len(bad) == len(judged) > 1 and ratios[-1] - ratios[0] <= 1e-3 * ratios[-1] and min(row.cosine for row in bad) > 0.999:
        return (
            f"the forward pass agrees and every gradient is {ratios[0]:.6g} times the reference's: look at how many "
            "micro-batches are accumulated and how their mean is taken, or at a loss scale."
        )
    if len(bad) == len(judged):
        return (
            "the forward pass agrees for the first micro-batch and every gradient differs in direction: one side leaves out or "
            "repeats micro-batches (accumulation, order of the rows), or differentiates another loss."
        )
    return f"the forward pass agrees; {len(bad)} of {len(judged)} gradients differ, last in the forward pass {names}."
