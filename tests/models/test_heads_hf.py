"""Hugging Face's Reformers that find hidden tokens and tell classes: the same weights give the same numbers, in float64."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.models import TrainStep, build_model
from tests.models.common import awake
from tests.models.test_reformer_hf import (
    FFN,
    GRID,
    HEADS,
    SEED,
    SIZE,
    VOCAB,
    WIDTH,
    off,
    same,
    share_rotations,
    tokens_and_mask,
    transformers,
)

CLASSES = 3


def pair(head, kinds, hashes):
    """(our model, theirs), with our weights drawn at random and copied."""
    model = {
        "width": WIDTH, "depth": len(kinds), "heads": HEADS, "head_size": SIZE, "ffn_width": FFN, "vocab": VOCAB, "seq": 64,
        "positions": "axial", "axial": {"shape": list(GRID), "dims": [8, 16]}, "activation": "relu", "norm_eps": 1e-12,
        "tied": False, "attention_bias": False, "attention": list(kinds), "stack": {"output": "concat"}, "causal": False,
        "lsh": {"chunk": 8, "hashes": hashes}, "local": {"chunk": 16, "after": 0}, "head": head,
    }  # fmt: skip
    data = {"tokenizer": {"kind": "bpe", "path": "t"}}
    if head == "classifier":
        model["classes"], data["labelled"] = CLASSES, "docs-or-code"
    else:
        model["readout_bias"] = True
    config = make_config(model=model, mup={"parametrization": "standard"}, data=data)
    ours = awake(build_model(config, VOCAB)).double()
    kind = transformers.ReformerForMaskedLM if head == "masked-lm" else transformers.ReformerForSequenceClassification
    theirs = kind(
        transformers.ReformerConfig(
            attention_head_size=SIZE, attn_layers=list(kinds), axial_pos_embds=True, axial_pos_shape=GRID,
            axial_pos_embds_dim=[8, 16], feed_forward_size=FFN, hash_seed=SEED, hidden_act="relu", hidden_dropout_prob=0.0,
            hidden_size=WIDTH, is_decoder=False, local_attn_chunk_length=16, local_num_chunks_after=0,
            local_attention_probs_dropout_prob=0.0, lsh_attn_chunk_length=8, lsh_attention_probs_dropout_prob=0.0,
            max_position_embeddings=64, num_attention_heads=HEADS, num_hashes=hashes, vocab_size=VOCAB, use_cache=False,
            pad_token_id=0, eos_token_id=2, num_labels=CLASSES,
        )
    ).double().train()  # fmt: skip
    found = dict(ours.named_parameters())
    with torch.no_grad():
        for name, tensor in ours_in(theirs, kinds, lambda parameter: parameter).items():
            tensor.copy_(found.pop(name))
    assert not found
    share_rotations(ours)
    return ours, theirs


def ours_in(theirs, kinds, take):
    """{our name: what `take` gives of their parameter}."""
    named = {name: take(parameter) for name, parameter in theirs.named_parameters()}
    if "classifier.dense.weight" not in named:
        return same(named, kinds, True)
    trunk = {name[len("reformer.") :]: value for name, value in named.items() if name.startswith("reformer.")}
    found = same(trunk, kinds, False)
    for leaf in ("weight", "bias"):
        found[f"readout.dense.linear.{leaf}"] = named[f"classifier.dense.{leaf}"]
        found[f"readout.projection.{leaf}"] = named[f"classifier.out_proj.{leaf}"]
    return found


@pytest.mark.parametrize("engine", ["invert", "store"])
@pytest.mark.parametrize("kinds, hashes", [(("local", "lsh"), 1), (("lsh", "local", "lsh"), 2)])
@pytest.mark.parametrize("head, ragged", [("masked-lm", None), ("classifier", None), ("classifier", "right")])
def test_logits_loss_and_gradients(head, ragged, kinds, hashes, engine):
    ours, theirs = pair(head, kinds, hashes)
    ours.set_engine(engine)
    tokens, present = tokens_and_mask(ragged)
    generator = torch.Generator().manual_seed(8)
    if head == "classifier":
        labels = torch.tensor([2, 0, 1])
    else:
        labels = torch.where(torch.rand(tokens.shape, generator=generator) < 0.2, tokens, torch.tensor(-100))
    given = tokens if present is None else tokens.masked_fill(~present, -1)
    reference = theirs(tokens, attention_mask=None if present is None else present.long(), labels=labels)
    assert off(ours(given), reference.logits) < 1e-12
    loss, _ = TrainStep(ours)(given, labels)
    assert loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)
    loss.backward()
    reference.loss.backward()
    gradients = ours_in(theirs, kinds, lambda parameter: parameter.grad)
    for name, parameter in ours.named_parameters():
        assert gradients[name].norm() > 0, name
        assert off(parameter.grad, gradients[name]) < 1e-10, name


def test_a_decoder_is_no_masked_lm():
    """Theirs asserts; ours says which flag contradicts (tests/config/test_head_rules.py), and both modes can be had."""
    with pytest.raises(AssertionError):
        transformers.ReformerForMaskedLM(transformers.ReformerConfig(is_decoder=True))
    ours, _ = pair("masked-lm", ("local", "lsh"), 1)
    assert not ours.spec.causal and ours.readout.out_features == VOCAB
