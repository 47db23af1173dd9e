"""Hugging Face's Reformer with the same weights and rotations gives the same numbers and gradients, in float64."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.models import GPT, spec_of
from ipu_lean.models.reformer import hashing

sys.modules.setdefault("torchvision", None)  # a mismatched one would spoil the import of transformers
transformers = pytest.importorskip("transformers", reason="the reference is transformers' Reformer")
if not hasattr(transformers, "ReformerModelWithLMHead"):
    pytest.skip("this transformers has no Reformer", allow_module_level=True)

SEED = 11  # of the rotations, which transformers draws anew from it in every layer
VOCAB, WIDTH, HEADS, SIZE, FFN, GRID = 29, 24, 2, 8, 20, (8, 8)


def pair(kinds, *, hashes=1, buckets=None, chunk=8, local=8, before=1, after=0, seq=64, causal=True, head=True, axial=True):
    """(our model, theirs), with our weights drawn at random and copied, in float64."""
    model = {
        "width": WIDTH, "depth": len(kinds), "heads": HEADS, "head_size": SIZE, "ffn_width": FFN, "vocab": VOCAB, "seq": seq,
        "positions": "axial" if axial else "learned", "axial": {"shape": list(GRID), "dims": [8, 16]} if axial else {},
        "activation": "relu", "norm_eps": 1e-12,
        "tied": False, "attention_bias": False, "readout_bias": True, "attention": list(kinds), "stack": {"output": "concat"},
    }  # fmt: skip
    if "lsh" in kinds:
        model["lsh"] = {"chunk": chunk, "before": before, "after": after, "hashes": hashes, "buckets": buckets}
    if "local" in kinds:
        model["local"] = {"chunk": local, "before": before, "after": after}
    config = make_config(
        model=model, mup={"parametrization": "standard"}, data={"tokenizer": {"kind": "bpe", "path": "t"}}
    )
    ours = GPT(dataclasses.replace(spec_of(config), causal=causal)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            gain = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(gain + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    theirs = _theirs(kinds, hashes, buckets, chunk, local, before, after, seq, causal, head, axial)
    found = dict(ours.named_parameters())
    with torch.no_grad():
        for name, tensor in same(dict(theirs.named_parameters()), kinds, head).items():
            tensor.copy_(found[name])
    share_rotations(ours)
    return ours, theirs


def _theirs(kinds, hashes, buckets, chunk, local, before, after, seq, causal, head, axial):
    config = transformers.ReformerConfig(
        attention_head_size=SIZE, attn_layers=list(kinds), axial_pos_embds=axial, axial_pos_shape=GRID,
        axial_pos_embds_dim=[8, 16], feed_forward_size=FFN, hash_seed=SEED, hidden_act="relu", hidden_dropout_prob=0.0,
        hidden_size=WIDTH, is_decoder=causal,
        local_attn_chunk_length=local, local_num_chunks_before=before, local_num_chunks_after=after,
        local_attention_probs_dropout_prob=0.0, lsh_attn_chunk_length=chunk, lsh_num_chunks_before=before,
        lsh_num_chunks_after=after, lsh_attention_probs_dropout_prob=0.0, max_position_embeddings=seq, num_attention_heads=HEADS,
        num_buckets=buckets, num_hashes=hashes, vocab_size=VOCAB, use_cache=False, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    kind = transformers.ReformerModelWithLMHead if head else transformers.ReformerModel
    return kind(config).double().train()


def share_rotations(ours):
    """What transformers draws in each forward pass (as many columns as the buckets of this length need: here all of ours)."""
    for attention in hashing(ours):
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            attention.rotations.copy_(torch.randn(attention.rotations.shape, dtype=torch.float64))


def same(theirs, kinds, head):
    """{our name: their tensor}."""
    prefix = "reformer." if head else ""
    t = {name[len(prefix) :] if name.startswith(prefix) else name: tensor for name, tensor in theirs.items()}
    found = {
        "embedding.token.weight": t["embeddings.word_embeddings.weight"],
        "embedding.position.rows": t.get("embeddings.position_embeddings.weights.0"),
        "embedding.position.columns": t.get("embeddings.position_embeddings.weights.1"),
        "embedding.position.weight": t.get("embeddings.position_embeddings.embedding.weight"),
    }
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    for i, kind in enumerate(kinds):
        for part in ("query_key", "value") if kind == "lsh" else ("query", "key", "value"):
            name = f"layers.blocks.{i}.branches.0.attention.{part}.linear.weight"
            found[name] = t[f"encoder.layers.{i}.attention.self_attention.{part}.weight"]
        out = f"layers.blocks.{i}.branches.0.attention.out.linear.weight"
        found[out] = t[f"encoder.layers.{i}.attention.output.dense.weight"]
        for leaf in ("weight", "bias"):
            found[f"layers.blocks.{i}.branches.0.norm.{leaf}"] = t[f"encoder.layers.{i}.attention.layer_norm.{leaf}"]
            found[f"layers.blocks.{i}.branches.1.norm.{leaf}"] = t[f"encoder.layers.{i}.feed_forward.layer_norm.{leaf}"]
            for ours, other in (("up", "dense.dense"), ("down", "output.dense")):
                name = f"layers.blocks.{i}.branches.1.feed_forward.{ours}.linear.{leaf}"
                found[name] = t[f"encoder.layers.{i}.feed_forward.{other}.{leaf}"]
    for leaf in ("weight", "bias"):
        found[f"norm.{leaf}"] = t[f"encoder.layer_norm.{leaf}"]
        if head:
            found[f"readout.{leaf}"] = t[f"lm_head.decoder.{leaf}"]  # their second bias, lm_head.bias, is added to nothing
    return found


def tokens_and_mask(ragged, seq=64):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (3, seq), generator=generator)
    if ragged is None:
        return tokens, None
    present = torch.ones(3, seq, dtype=torch.bool)
    if ragged == "right":
        present[0, 50:] = False
        present[2, 33:] = False
    else:
        present[0, :17] = False
        present[1, :40] = False
    return tokens, present


def off(ours, theirs):
    return float(((ours - theirs).norm() / theirs.norm()).detach())


CASES = {
    "two": {"kinds": ("local", "lsh")},
    "four rounds, eight layers": {"kinds": ("local", "lsh") * 4, "hashes": 4},
    "two factors": {"kinds": ("lsh", "lsh", "local"), "buckets": [4, 6], "hashes": 2},
    "right": {"kinds": ("local", "lsh", "lsh", "local"), "ragged": "right", "hashes": 3},
    "left": {"kinds": ("lsh", "local"), "ragged": "left"},
    "other chunks": {"kinds": ("lsh", "local"), "chunk": 4, "local": 16, "before": 2},
    "learned positions": {"kinds": ("lsh", "local"), "axial": False},
    "one chunk": {"kinds": ("lsh", "local", "lsh"), "chunk": 64, "local": 64},
    "both ways": {"kinds": ("local", "lsh"), "causal": False, "head": False, "after": 1, "hashes": 2},
    "both ways, ragged": {"kinds": ("lsh", "local"), "causal": False, "head": False, "ragged": "right"},
}


@pytest.mark.parametrize("engine", ["invert", "store"])
@pytest.mark.parametrize("name", list(CASES))
def test_outputs_and_gradients(name, engine):
    case = dict(CASES[name])
    ragged = case.pop("ragged", None)
    ours, theirs = pair(**case)
    ours.set_engine(engine)
    tokens, present = tokens_and_mask(ragged)
    head = case.get("head", True)
    found = ours.logits(tokens, present=present) if head else ours.hidden(tokens, present=present)
    reference = theirs(tokens, attention_mask=None if present is None else present.long())[0]
    weights = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if present is not None:  # what stands at padding is nobody's business
        weights, found, reference = (t * present[..., None] for t in (weights, found, reference))
    assert off(found, reference) < 1e-12
    (found * weights).sum().backward()
    (reference * weights).sum().backward()
    gradients = same({key: p.grad for key, p in theirs.named_parameters()}, case["kinds"], head)
    for key, parameter in ours.named_parameters():
        if not head and key.startswith("readout."):
            continue
        truth = gradients[key]
        assert truth.norm() > 0, key
        assert off(parameter.grad, truth) < 1e-10, key


@pytest.mark.parametrize("seq", [8, 13, 50])
def test_sequences_that_fit_no_chunk_are_padded_as_theirs_are_in_evaluation(seq):
    """Theirs refuses such lengths in training; ours trains with them (test_reformer.py)."""
    ours, theirs = pair(("local", "lsh"), buckets=4, chunk=8, local=16)
    tokens, _ = tokens_and_mask(None, seq)
    with torch.no_grad():
        assert off(ours.eval().logits(tokens), theirs.eval()(tokens)[0]) < 1e-12
