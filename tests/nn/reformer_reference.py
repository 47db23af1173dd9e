"""What the tests of local and LSH attention compare with: the definitions, one query at a time, and Hugging Face's modules."""

from __future__ import annotations

import sys

import pytest
import torch


def hugging_face(kind, *, width, heads, head_size, seq, chunk, before, after, causal, hashes=1, buckets=None, seed=3):
    """Their `LSHSelfAttention` or `LocalSelfAttention` in fp64, initialised at random; it has no output projection."""
    sys.modules.setdefault("torchvision", None)  # one that does not match torch breaks their import
    transformers = pytest.importorskip("transformers", reason="the reference is transformers' Reformer")
    from transformers.models.reformer import modeling_reformer as theirs

    transformers.logging.set_verbosity_error()
    common = {"chunk_length": chunk, "num_chunks_before": before, "num_chunks_after": after}
    config = transformers.ReformerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        attention_head_size=head_size,
        axial_pos_embds=False,
        is_decoder=causal,
        max_position_embeddings=seq,
        num_hashes=hashes,
        num_buckets=buckets,
        hash_seed=seed,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        lsh_attn_chunk_length=chunk,
        local_attn_chunk_length=chunk,
        **{f"{name}_{key}": value for name in ("lsh", "local") for key, value in list(common.items())[1:]},
    )
    torch.manual_seed(0)
    module = (theirs.LSHSelfAttention if kind == "lsh" else theirs.LocalSelfAttention)(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * width**-0.5)
    return module


def their_rotations(heads, head_size, hashes, columns, seed=3):
    """What `hugging_face` draws, `[heads, head_size, hashes, columns]`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.randn(heads, head_size, hashes, columns, dtype=torch.float64)


def multiplies(dtype):
    """Whether this torch has matrix products of that type on CPU; 2.0.1 has none of float16."""
    try:
        torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)
    except RuntimeError:
        return False
    return True


def softmax_with_logsum(scores):
    top = scores.max()
    weights = (scores - top).exp()
    return weights / weights.sum(), top + weights.sum().log()


def lsh_by_loops(qk, v, buckets, *, chunk, before, after, causal, present=None, score_mult=1.0):
    """LSH attention of one sequence and head, `[seq, d]` twice, from the buckets `[hashes, seq]`: lists of Python."""
    hashes, seq = buckets.shape
    keys = score_mult * qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() / qk.shape[1] ** 0.5
    places = []  # (round, position) in sorted order, the rounds one after the other
    for number in range(hashes):
        places += [(number, at) for at in sorted(range(seq), key=lambda at: (int(buckets[number, at]), at))]  # noqa: B023
    cut = [places[start : start + chunk] for start in range(0, len(places), chunk)]
    rounds = [[None] * seq for _ in range(hashes)]
    for number, queries in enumerate(cut):
        seen = [at for step in range(-before, after + 1) for _, at in cut[(number + step) % len(cut)]]
        for which, at in queries:
            scores = []
            for key in seen:
                hidden = (causal and key > at) or (present is not None and not present[key])
                score = qk[at] @ keys[key]
                scores.append(score * 0 - 1e5 if key == at else (score * 0 - 1e9 if hidden else score))
            rounds[which][at] = (*softmax_with_logsum(torch.stack(scores)), seen)
    out = []
    for at in range(seq):
        share = torch.stack([rounds[which][at][1] for which in range(hashes)]).softmax(0)
        parts = [weights @ v[seen] for weights, _, seen in (rounds[which][at] for which in range(hashes))]
        out.append((share[:, None] * torch.stack(parts)).sum(0))
    return torch.stack(out)


def local_by_loops(q, k, v, *, chunk, before, after, causal, present=None, scale=1.0):
    """Local attention of one sequence and head, `[seq, d]` three times."""
    seq = q.shape[0]
    if seq <= chunk:
        chunk, before, after = seq, 0, 0
    count, out = seq // chunk, []
    for at in range(seq):
        seen = []
        for step in range(-before, after + 1):
            start = (at // chunk + step) % count * chunk
            seen += range(start, start + chunk)
        kept = [key for key in seen if not (causal and key > at) and (present is None or present[key])]
        out.append((scale * (q[at] @ k[kept].t())).softmax(-1) @ v[kept] if kept else v[seen].mean(0))
    return torch.stack(out)
