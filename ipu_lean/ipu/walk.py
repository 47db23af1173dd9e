"""Forward and backward over a model with a reversible stack, both as ordinary operations on detached weights.

The stack runs forward, is walked backwards while its inputs are rebuilt by the coupling's inverse, and each branch's
vector-Jacobian product is evaluated on the way (reversible/module_vjp.py).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn

from ipu_lean.ipu.emulator import optable
from ipu_lean.ipu.placement import Row
from ipu_lean.ipu.walk_parts import Head, Leave, Products
from ipu_lean.models.reformer import pad
from ipu_lean.reversible.module_vjp import ModuleVJP, draw
from ipu_lean.reversible.routing import kwargs_for
from ipu_lean.reversible.vjp import Evaluation, Pullback, derive

Begin = Callable[[str, int], None]
State = Tuple[Tensor, Tensor, Tensor, Tensor]


class HalfStep(NamedTuple):
    """One branch of one visit to a block.

    Attributes:
        step: its number in the stack. place: that of its block in the model. first: no visit to this block came before.
    """

    branch: nn.Module
    step: int
    place: int
    first: bool


class Chosen(NamedTuple):
    """What is the same in both walks: dropouts' masks, discrete decisions (which tokens attend to which), keyword arguments."""

    masks: Sequence[Tensor]
    decisions: Sequence[Tensor]
    kwargs: Dict[str, Tensor]


def has_handler(node: fx.Node) -> bool:
    """Whether PopTorch lowers an operation and honours its arguments."""
    name = node.target._schema.name  # type: ignore[union-attr]
    accumulates = "index_put" in name and (node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False))
    return optable.has_handler(name) and not accumulates and node.kwargs.get("rounding_mode") is None


class Walk:
    """The forward and the backward walk over a model with a reversible stack (`embed`, `layers`, `norm`, `loss`).

    Args:
        model: at hand are its modules, whose tensors PopTorch replaces while it traces.
        scale: multiplies the loss before the walk back and is divided out at the end: fp16 gradients would vanish.
        rows: where each block stands. begin: starts a block `(name, ipu)`; None where there is one IPU.
        tracing: whether PopTorch is tracing right now.
    """

    def __init__(
        self, model: nn.Module, scale: float, rows: Sequence[Row], begin: Optional[Begin], tracing: Callable[[], bool]
    ) -> None:
        self.model, self.scale, self.begin, self.tracing = model, scale, begin, tracing
        self.rows = list(rows)
        self._cache: Dict[Any, Any] = {}
        self._pure: Dict[Any, Pullback] = {}
        self._vjps: Dict[int, ModuleVJP] = {}
        self.head, self.leave = Head(model), Leave(model.layers)

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_cache": {}, "_pure": {}, "_vjps": {}}  # graphs cannot be pickled; `prepare` makes them again

    # -- derivations -----------------------------------------------------------------------------------------------------
    def vjp(self, module: nn.Module) -> ModuleVJP:
        """The derivation of one part of the model."""
        if id(module) not in self._vjps:
            names = module.names() if isinstance(module, (Head, Leave)) else None
            self._vjps[id(module)] = ModuleVJP(module, has_handler, names, cache=self._cache)
        return self._vjps[id(module)]

    def pure(self, key: Any, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Pullback:
        """The derivation of a function of streams."""
        key = (key, tuple((tuple(t.shape), t.dtype) for t in inputs))
        if key not in self._pure:
            assert not self.tracing(), f"{key} was not derived before the trace"
            self._pure[key] = derive(lambda primals, _: (_as_tuple(function(*primals)), ()), inputs, (), has_handler)
        return self._pure[key]

    def evaluate(
        self,
        module: nn.Module,
        x: Tensor,
        masks: Sequence[Tensor] = (),
        pull: bool = True,
        kwargs: Optional[Dict[str, Tensor]] = None,
        decisions: Sequence[Tensor] = (),
    ) -> Evaluation:
        """Begin an evaluation of one part of the model."""
        vjp = self.vjp(module)
        assert vjp.ready((x,), kwargs) or not self.tracing(), f"{type(module).__name__} was not derived before the trace"
        return vjp.begin((x,), kwargs, masks, pull, decisions)

    def prepare(self, rows: int, seq: int) -> None:
        """Derive everything for micro-batches of `rows` sequences: inside a trace there is no room for it.

        Raises:
            Underivable: a part of the model has no backward pass in PopTorch's operations.
        """
        weight = next(self.model.parameters())
        x0 = torch.empty(rows, seq, self.model.spec.width, dtype=_stream_type(weight.dtype), device="meta")
        tokens = torch.empty(rows, seq, dtype=torch.int32, device="meta")
        present = self.model.arrived(tokens)[1]
        x0, given = self._padded(x0, present)
        a, b = self._enter(x0).outputs
        for branch, step, _, _ in self.half_steps():
            z = self._read(a, b, step).outputs[0]
            fx = self.vjp(branch).pullback((z.to(weight.dtype),), kwargs_for(branch, given)).outputs[0]
            a, b = self._forward(a, b, fx.to(a.dtype), step).outputs
        h = self.vjp(self.leave).pullback((a, b, x0)).outputs[0][:, :seq].to(weight.dtype)
        y = self.vjp(self.model.norm).pullback((h,)).outputs[0]
        labels = tokens[:, 0] if self.model.spec.head == "classifier" else tokens
        self.vjp(self.head).pullback((y,), _asked(labels, present))

    def _padded(self, x0: Tensor, present: Optional[Tensor]) -> Tuple[Tensor, Dict[str, Tensor]]:
        """The stack's input in a length that its layers can take, and what they are told about it."""
        x0, present = pad(x0, present, self.model.spec.padded_length(x0.shape[1]))
        return x0, {} if present is None else {"present": present}

    def half_steps(self) -> List[HalfStep]:
        """All of them, in execution order."""
        found, seen = [], set()
        for place, (block, step) in enumerate(self.model.layers.visited(), 1):  # the embedding is block 0
            found += [HalfStep(branch, step + i, place, id(block) not in seen) for i, branch in enumerate(block.branches)]
            seen.add(id(block))
        return found

    def _enter(self, x0: Tensor) -> Pullback:
        return self.pure("enter", self.model.layers.enter, (x0,))

    def _read(self, a: Tensor, b: Tensor, step: int) -> Pullback:
        coupling = self.model.layers.coupling
        return self.pure(("read", step), lambda a, b: coupling.read(a, b, step), (a, b))

    def _forward(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pullback:
        coupling = self.model.layers.coupling
        return self.pure(("forward", step), lambda a, b, fx: coupling.forward(a, b, fx, step), (a, b, fx))

    # -- the step --------------------------------------------------------------------------------------------------------
    def run(self, tokens: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Integers `[micro, seq]` and labels -> (the model's loss, its sums, the surrogate whose derivative is the loss's)."""
        model, coupling, products = self.model, self.model.layers.coupling, Products()
        tokens, present = model.arrived(tokens)
        e = model.embed(tokens)
        low, seq = e.dtype, e.shape[1]
        x0, given = self._padded(e.detach().to(_stream_type(low)), present)
        (a, b), chosen = model.layers.enter(x0), []
        for branch, step, place, _ in self.half_steps():
            self._stand(place)
            z = coupling.read(a, b, step).to(low)
            kwargs = kwargs_for(branch, given)
            masks = draw(self.vjp(branch).masks((z,), kwargs), z)
            branched = self.evaluate(branch, z, masks, False, kwargs)
            chosen.append(Chosen(masks, branched.decisions, kwargs))
            a, b = coupling.forward(a, b, branched.values[0].to(a.dtype), step)
        leave = self.vjp(self.leave).begin((a, b, x0))
        loss, sums, dh = self._top(_cut(leave.values[0], seq).to(low), _asked(labels, present), products)
        da, db, dx0, *gates = leave.pull(pad(dh.to(x0.dtype), None, x0.shape[1])[0])
        products.add(self.vjp(self.leave).parameters(), gates)
        da, db = _or_zeros(da, a), _or_zeros(db, b)
        for half in reversed(self.half_steps()):
            self._stand(half.place, back=True)
            known = model.layers.enter(x0) if half.step == 0 else None
            a, b, da, db = self._half_step_back(half, (a, b, da, db), chosen.pop(), products, known)
        de = _sum(self._enter(x0).gradients_at((x0,), (da, db))[0], dx0)
        self._stand(0, back=True)
        if de is not None:
            products.add((e,), (_cut(de, seq),))
        assert products.total is not None
        return loss.detach(), sums.detach(), products.total / self.scale

    def _top(self, h: Tensor, asked: Dict[str, Tensor], products: Products) -> Tuple[Tensor, Tensor, Tensor]:
        """Final norm, readout and loss, both ways: (loss, sums, gradient of the stack's result, times the scale)."""
        norm, head = self.vjp(self.model.norm), self.vjp(self.head)
        self._stand(len(self.rows) - 2)
        normed = self.evaluate(self.model.norm, h)
        self._stand(len(self.rows) - 1)
        lost = self.evaluate(self.head, normed.values[0], kwargs=asked)
        (loss,), (sums,) = lost.values, lost.extras
        dy, *gradients = lost.pull(torch.full_like(loss, self.scale))
        products.add(head.parameters(), gradients)
        self._stand(len(self.rows) - 2, back=True)
        dh, *gradients = normed.pull(_or_zeros(dy, normed.values[0]))
        products.add(norm.parameters(), gradients)
        return loss, sums, _or_zeros(dh, h)

    def _half_step_back(
        self, half: HalfStep, state: State, chosen: Chosen, products: Products, known: Optional[Tuple[Tensor, Tensor]]
    ) -> State:
        """Streams and their gradients after a half-step -> those before it.

        Args:
            known: the streams before it, where they need not be rebuilt: the stack's input is at hand, and errors add up in it.
        """
        a, b, da, db = state
        coupling, vjp, step = self.model.layers.coupling, self.vjp(half.branch), half.step
        z = coupling.read_back(a, b, step) if known is None else coupling.read(*known, step)
        low = next((weight.dtype for weight in vjp.parameters()), z.dtype)
        branched = self.evaluate(half.branch, z.to(low), chosen.masks, True, chosen.kwargs, chosen.decisions)
        fx = branched.values[0].to(a.dtype)
        a, b = coupling.inverse(a, b, fx, step) if known is None else known
        da, db, dfx = self._forward(a, b, fx, step).gradients_at((a, b, fx), (da, db))
        dz, *gradients = branched.pull(_or_zeros(dfx, fx).to(branched.values[0].dtype))
        products.add(vjp.parameters(), gradients, last=half.first)
        if dz is not None:
            more_a, more_b = self._read(a, b, step).gradients_at((a, b), (dz.to(a.dtype),))
            da, db = _sum(da, more_a), _sum(db, more_b)
        return a, b, _or_zeros(da, a), _or_zeros(db, b)

    def _stand(self, place: int, back: bool = False) -> None:
        """From here on, operations belong to the IPU of a block, in the stage of that direction."""
        if self.begin is not None:
            row = self.rows[place]
            self.begin(f"back{row.stage}" if back else f"stage{row.stage}", row.ipu)


def _as_tuple(value: Any) -> Tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _stream_type(dtype: torch.dtype) -> torch.dtype:
    """Streams are float32 where weights are fp16: rebuilding them in fp16 would lose about a percent in twelve layers."""
    return torch.float32 if dtype == torch.float16 else dtype


def _asked(labels: Tensor, present: Optional[Tensor]) -> Dict[str, Tensor]:
    """What the head is given beside the hidden states."""
    return {"labels": labels} if present is None else {"labels": labels, "present": present}


def _cut(x: Tensor, seq: int) -> Tensor:
    return x if x.shape[1] == seq else x[:, :seq]


def _or_zeros(gradient: Optional[Tensor], like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _sum(one: Optional[Tensor], other: Optional[Tensor]) -> Optional[Tensor]:
    if one is None or other is None:
        return other if one is None else one
    return one + other
