"""Local and hashed attention one token at a time, from what a cache keeps of the tokens before.

Both take any number of new tokens. The first ones, into an empty cache, are computed as a whole sequence is, padded to whole
chunks in here; later ones token by token. A token gets exactly what the whole layer would give the last token of the text so far,
at that text's length. With local attention that is what it gets in any longer text too (`before` of 2 and more: once the text has
more chunks than that; with `after` it is not, since neighbours are circular: a text's last chunks see its first). With hashed
attention it is not: which earlier tokens share its chunk, and how many buckets there are, changes as the text goes on, so that a
pass over the longer text would compute earlier tokens anew, whereas here they keep what they got.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention.cache import KVCache, Place
from ipu_lean.nn.attention.chunks import HIDDEN, OWN, unit_keys
from ipu_lean.nn.attention.hashing import bucket_factors, hash_buckets
from ipu_lean.nn.attention.sorting import bucket_order
from ipu_lean.nn.precision import as_matmul_input


def local_with_cache(attention: Any, x: torch.Tensor, present: Optional[torch.Tensor], cache: KVCache) -> torch.Tensor:
    """What a `LocalSelfAttention` gives for new tokens `[batch, new, width]`, before its output projection:
    `[batch, new, heads, head_size]`.
    """
    place, start = _begin(attention, x, present, cache)
    q, k, v = attention.projected(as_matmul_input(x), start)
    keys, values = place.append("keys", k, start), place.append("values", v, start)
    if start == 0 and x.shape[1] > 1:
        mixed = _whole(attention, cache, attention.chunk, q, k, v)
    else:
        mixed = torch.cat([_nearby(attention, cache, q[:, step], keys, values, start + step) for step in range(x.shape[1])], 1)
    if not attention.after:  # chunks ahead of the last one are the first ones
        first = max(0, (start + x.shape[1]) // attention.chunk - attention.before) * attention.chunk
        keys.give_up(first)
        values.give_up(first)
    return mixed


def lsh_with_cache(attention: Any, x: torch.Tensor, present: Optional[torch.Tensor], cache: KVCache) -> torch.Tensor:
    """What an `LSHSelfAttention` gives for new tokens `[batch, new, width]`, before its output projection:
    `[batch, new, heads, head_size]`.
    """
    place, start = _begin(attention, x, present, cache)
    qk, v = attention.projected(as_matmul_input(x), start)
    keys, values = place.append("keys", qk, start), place.append("values", v, start)
    if start == 0 and x.shape[1] > 1:
        return _whole(attention, cache, attention.full_below, qk, v)
    found = []
    for length in range(start + 1, start + x.shape[1] + 1):
        held = keys.read()[:, :length], values.read()[:, :length]
        padded = cache.padded(length, attention.chunk, attention.full_below)
        if padded <= attention.full_below:
            found.append(_all(attention, *held))
        else:
            found.append(_alike(attention, *held, _ordered(attention, place, held[0], padded), padded))
    return torch.cat(found, 1)


def _begin(attention: Any, x: torch.Tensor, present: Optional[torch.Tensor], cache: KVCache) -> Tuple[Place, int]:
    """The place of this attention in the cache, and the position of the first new token."""
    if present is not None or not attention.causal:
        raise ConfigError(
            "a cache continues sequences of one length from left to right: causal attention, and no `present`",
            suggestion="group sequences by length, or compute them whole",
        )
    return cache.take(x.shape[1]), cache.length


def _whole(attention: Any, cache: KVCache, most: int, *heads: torch.Tensor) -> torch.Tensor:
    """The layer's own way with a whole sequence, padded to a length that it takes."""
    length = heads[0].shape[1]
    padded = cache.padded(length, attention.chunk, most)
    if padded == length:
        return attention.attended(*heads)
    longer = [F.pad(one, (0, 0, 0, 0, 0, padded - length)) for one in heads]
    present = torch.arange(padded, device=heads[0].device).lt(length).expand(heads[0].shape[0], padded)
    return attention.attended(*longer, present)[:, :length]


def _nearby(attention: Any, cache: KVCache, query: torch.Tensor, keys: Any, values: Any, at: int) -> torch.Tensor:
    """Local attention of the token at position `at`, `[batch, 1, heads, head_size]`, to its own chunk and its neighbours."""
    chunk, length = attention.chunk, cache.padded(at + 1, attention.chunk, attention.chunk)
    shifts = range(attention.before, -attention.after - 1, -1) if length > chunk else (0,)
    numbers = [(at // chunk - shift) % max(1, length // chunk) for shift in shifts]
    spans = [(number * chunk, min(number * chunk + chunk, at + 1)) for number in numbers if number * chunk <= at]
    first = min(span[0] for span in spans)
    k, v = (torch.cat([rows.read(first)[:, a - first : b - first] for a, b in spans], 1) for rows in (keys, values))
    return _weighed(query * attention.scale, k, v)


def _all(attention: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of the last token to all, as the layer has it for sequences that are not hashed."""
    own = torch.zeros(keys.shape[1], dtype=torch.bool, device=keys.device)
    own[-1] = True
    return _weighed(keys[:, -1], unit_keys(keys, attention.score_mult), values, own=own)


def _weighed(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own: Optional[torch.Tensor] = None) -> torch.Tensor:
    """`[batch, heads, head_size]` among `[batch, keys, heads, head_size]` -> `[batch, 1, heads, head_size]`."""
    scores = _scores("bhd,bkhd->bhk", query, keys)
    if own is not None:
        scores = scores.masked_fill(own, OWN)
    return torch.einsum("bhk,bkhd->bhd", scores.softmax(-1).to(values.dtype), values).unsqueeze(1)


def _scores(rule: str, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Products in at least float32, as the whole layer forms them."""
    scores = torch.einsum(rule, query, keys)
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _alike(attention: Any, keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor, padded: int) -> torch.Tensor:
    """Attention of the last token to those in its chunk and the neighbouring ones, in each round of hashing.

    Args:
        order: positions sorted by bucket, `[batch, heads, hashes, length]`. The `padded - length` tokens that a whole sequence
            would end with come last in each round and are not seen.
    """
    batch, heads, hashes, length = order.shape
    chunk, last, device = attention.chunk, length - 1, order.device
    rank = (order == last).to(torch.uint8).argmax(-1)
    per_round = padded // chunk
    number = torch.arange(hashes, device=device) * per_round + rank // chunk  # of its chunk, the rounds laid end to end
    shifts = torch.arange(-attention.before, attention.after + 1, device=device)
    numbers = (number.unsqueeze(-1) + shifts) % (hashes * per_round)
    places = (numbers.unsqueeze(-1) * chunk + torch.arange(chunk, device=device)).flatten(-2)  # [batch, heads, hashes, seen]
    rounds, inside = places // padded, places % padded
    real = inside < length
    flat = rounds * length + inside.clamp(max=last)
    seen = torch.gather(order.reshape(batch, heads, -1), 2, flat.flatten(2)).view(flat.shape)
    rows = seen.flatten(2).unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
    k, v = (torch.gather(one.transpose(1, 2), 2, rows).view(*seen.shape, -1) for one in (keys, values))
    scores = _scores("bhd,bhnkd->bhnk", keys[:, -1], unit_keys(k, attention.score_mult))
    scores = scores.masked_fill(real.logical_not(), HIDDEN).masked_fill(real & (seen == last), OWN)
    total = torch.logsumexp(scores, -1, keepdim=True)
    found = torch.einsum("bhnk,bhnkd->bhnd", (scores - total).exp().to(v.dtype), v)
    if hashes > 1:
        found = found * total.softmax(2)
    return found.sum(2).to(v.dtype).unsqueeze(1)


def _ordered(attention: Any, place: Place, keys: torch.Tensor, padded: int) -> torch.Tensor:
    """All positions in the order of their buckets, `[batch, heads, hashes, length]`: the order that is kept, with the last token
    put in its place, or a new one where the number of buckets, the rotations or the length is another than then.
    """
    rotations, length = attention.rotations, keys.shape[1]
    factors = bucket_factors(padded, attention.chunk, attention.buckets, attention.seq)
    made_for = (factors, id(rotations), rotations._version, rotations.shape, keys.shape[0])
    kept = place.notes.get("order")
    if kept is None or kept[0] != made_for or kept[1].shape[-1] != length - 1:
        buckets, count = hash_buckets(keys, attention.hashing.like(keys), factors, None)
        order = bucket_order(buckets, count)[0]
    else:
        buckets, order = kept[1:]
        new = hash_buckets(keys[:, -1:], attention.hashing.like(keys), factors, None)[0]
        order = _inserted(order, (buckets <= new).sum(-1, keepdim=True))
        buckets = torch.cat([buckets, new], -1)
    place.notes["order"] = (made_for, buckets, order)
    return order


def _inserted(order: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """A permutation `[..., length]` with its next number put at place `rank` `[..., 1]`."""
    length = order.shape[-1]
    places = torch.arange(length + 1, device=order.device)
    moved = torch.gather(order, -1, (places - (places > rank).long()).clamp(max=length - 1))
    return torch.where(places == rank, length, moved)
