"""AdamW on flat blocks, elementwise, in fp32 with one rounding a stored tensor; four ways to keep what rounding would lose.

With w, m, v, g widened to fp32 (fp64 for fp64 weights), decay = lr x weight_decay, bias corrections c1 = 1 - b1^t, c2 = 1 - b2^t:

    m = m + (1 - b1)(g - m)        v = b2 v + (1 - b2) g^2        d = -(lr / c1) m / (sqrt(v) / sqrt(c2) + eps)

    none        w = round(w (1 - decay) + d)
    stochastic  as none, rounded up or down by chance, so that the mean is kept
    split       the fp32 weight is held whole: bf16 nearest to it, and what is left of its bits (two tensors of 8: compilers
                vectorise those, and not int16)
    kahan       u = c + (d - decay w);  w' = round(w + u);  c = round(u + (w - w')): decay is inside the compensated step, or else
                rounding would swallow it whole (torchdistx and optimi multiply the 16-bit weight by 1 - decay, which is 1)

Stochastic rounding adds 16 random bits below the last bit that stays, then truncates. They come from an integer hash of seed,
step and position, which has no state to lose and costs little; the compiler's own generator is ten times slower. A bf16
compensation is first multiplied by a factor that walks about 1, within its last place, by the golden ratio from step to step:
without it equal increments would all be rounded to the same side, and a constant gradient's path be off by some percent.

The same function runs eagerly, in small blocks whose temporaries stay in cache, and compiled by torch.compile, in one pass. For
bf16 throughout, native/adamw.c is the same again.
"""
from __future__ import annotations

import types
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from ipu_lean import _compat

SUMMATIONS = ("kahan", "split", "stochastic", "none")
STATES_OF = {"kahan": ("compensation",), "split": ("lower", "lowest")}
"""The state tensors in which a way of summation keeps what the weight cannot hold."""
EPS_FLOOR = 2.0**-63
"""The root of the least normal float32. A gradient below it squares to zero; dividing by this, the step stays bounded."""
MIX = (0x7FEB352D, 0x846CA68B)  # "lowbias32" by Chris Wellons
HALF_UNIT = 0x8000  # half of a bf16's last place, in the bits of an fp32
GOLDEN = (5**0.5 - 1) / 2
_ONES = 0xFFFFFFFF
_HIGH = -65536  # the upper 16 bits of an int32
Rule = Callable[..., None]


def update(
    w: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    kept: Optional[torch.Tensor],
    lowest: Optional[torch.Tensor],
    s: torch.Tensor,
    index: Optional[torch.Tensor],
    key: Optional[torch.Tensor],
    summation: str,
    noisy_variance: bool,
    maximize: bool,
) -> None:
    """One update of a block, in place. All of w, g, m, v, kept, lowest are `[n]`.

    Args:
        kept: compensation (kahan), or bits 8 .. 15 of w's remainder + 2^15 (uint8; split), else None. lowest: bits 0 .. 7 of it.
        s: what `scalars` returns, in the type of the arithmetic. index: int32 `[n]`, 0, 1, …; key: int32 `[2]` from `noise_key`;
            None where nothing is rounded by chance. maximize: against the gradient's sign.
    """
    wide = s.dtype
    gw = -g.to(wide) if maximize else g.to(wide)
    mw = m.to(wide)
    mw = mw + (gw - mw) * s[0]
    vw = v.to(wide) * s[1] + (gw * s[2]) * gw
    d = (mw * s[5]) / (vw.sqrt() + s[3])  # numerator and denominator times sqrt(c2): one division less
    bits = None if index is None or key is None else random_bits(index, key)
    if summation == "kahan":
        assert kept is not None
        old = w.to(wide)
        u = kept.to(wide) + (d - old * s[4])
        new = old + u
        if w.dtype == torch.bfloat16 and wide == torch.float32:
            new = _to_bits(new, 16)
        elif w.dtype != wide:
            new = new.to(w.dtype).to(wide)
        left = u + (old - new)
        if kept.dtype == torch.bfloat16 and wide == torch.float32:
            left = left * s[7]
        kept.copy_(left.to(kept.dtype))
    elif summation == "split":
        assert kept is not None and lowest is not None
        left = ((kept.to(torch.int32) << 8) | lowest.to(torch.int32)) - HALF_UNIT
        old = (w.to(wide).view(torch.int32) + left).view(wide)
        whole = (old * s[6] + d).view(torch.int32)
        high = (whole + HALF_UNIT) & _HIGH  # nearest; of two equally near the one of larger size
        new = high.view(wide)
        left = whole - high + HALF_UNIT  # 0 .. 65535
        kept.copy_((left >> 8).to(torch.uint8))
        lowest.copy_((left & 0xFF).to(torch.uint8))
    else:
        new = w.to(wide) * s[6] + d
        if summation == "stochastic":
            assert bits is not None
            new = _by_chance(new, bits & 0xFFFF)
    w.copy_(new.to(w.dtype))
    m.copy_(mw.to(m.dtype))
    if noisy_variance:
        assert bits is not None
        vw = _by_chance(vw, (bits >> 16) & 0xFFFF)
    v.copy_(vw.to(v.dtype))


def _to_bits(x: torch.Tensor, cut: int) -> torch.Tensor:
    """float32 `x` rounded to its first 24 - `cut` bits (Veltkamp's splitting), as a float32; |x| < 2^(127 - cut).

    Compilers vectorise this, but not the reading of a float's bits; and they take `.to(bfloat16).to(float32)` for nothing.
    """
    t = x * float(2**cut + 1)
    return t - (t - x)


def _by_chance(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 `x` rounded up or down in size to a value that bf16 has, up with the probability of what is cut off. `bits`:
    random, 0 .. 65535.

    In integers: added as floats, they would take a number just above a power of two below it, where bf16 is twice as fine, and
    that would pull every such number down.
    """
    return ((x.view(torch.int32) + bits) & _HIGH).view(torch.float32)


def random_bits(index: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element: int32 `[n]`. Right shifts of an int32 copy its sign, hence the masks."""
    x = index + key[0]
    x = x ^ ((x >> 16) & 0xFFFF)
    x = (x * _signed(MIX[0])) ^ key[1]
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(MIX[1])
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(number: int) -> int:
    """The int32 with the lower 32 bits of `number`."""
    number &= _ONES
    return number - (1 << 32) if number >> 31 else number


def mix(number: int) -> int:
    """`random_bits`' permutation of 0 .. 2^32 - 1, without a key, on a plain number."""
    x = number & _ONES
    x ^= x >> 16
    x = (x * MIX[0]) & _ONES
    x ^= x >> 15
    x = (x * MIX[1]) & _ONES
    return x ^ (x >> 16)


def noise_key(seed: int, step: int, position: int) -> List[int]:
    """The key of a block that begins at `position`: two int32. What an element draws depends on its own position only."""
    one = mix(mix(seed) ^ (step & _ONES))
    return [_signed(one + position), _signed(mix(one + 0x9E3779B9))]


def scalars(lr: float, betas: Tuple[float, float], eps: float, weight_decay: float, step: float) -> List[float]:
    """[1 - b1, b2, 1 - b2, eps sqrt(c2), decay, -lr sqrt(c2) / c1, 1 - decay, the factor before the compensation is rounded] of
    update `step` (1 is the first), in double precision.
    """
    b1, b2 = betas
    root, decay = (1 - b2**step) ** 0.5, lr * weight_decay
    factor = 1 + 0.7 * 2**-7 * (step * GOLDEN % 1 - 0.5)
    return [1 - b1, b2, 1 - b2, eps * root, decay, -lr * root / (1 - b1**step), 1 - decay, factor]


def update_plain(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, setting: Mapping[str, Any], step: float
) -> None:
    """`update` where nothing is narrower than the arithmetic: torch.optim.AdamW's operations in its order, so its numbers."""
    (b1, b2), lr = setting["betas"], float(setting["lr"])
    g = -g if setting["maximize"] else g
    w.mul_(1 - lr * setting["weight_decay"])
    _compat.decay_towards(m, g, b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    denominator = (v.sqrt() / (1 - b2**step) ** 0.5).add_(max(setting["eps"], EPS_FLOOR))
    w.addcdiv_(m, denominator, value=-lr / (1 - b1**step))


_compiled: Dict[Tuple[Any, ...], Rule] = {}


def is_compiled(signature: Sequence[Any]) -> bool:
    """Whether `compiled` has been asked for this combination."""
    return tuple(signature) in _compiled


def compiled(signature: Sequence[Any]) -> Rule:
    """`update` compiled for one combination of types and options. Sizes and scalars may change without a new compilation.

    torch counts the versions of one code object and gives up beyond a few, so each combination has a code object of its own.
    """
    key = tuple(signature)
    if key not in _compiled:
        code = update.__code__.replace(co_name=f"update_{len(_compiled)}")
        own = types.FunctionType(code, update.__globals__, code.co_name)
        _compiled[key] = _compat.compile_elementwise(own)
    return _compiled[key]


def forget(signature: Sequence[Any]) -> None:
    """Compiling this combination failed."""
    _compiled.pop(tuple(signature), None)
