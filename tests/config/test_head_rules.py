"""What each head needs and what only one of them reads."""

from __future__ import annotations

import pytest

from ipu_lean.config import derived, make_config
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod
MUP = {"base_width": 64}
MASKED = {"head": "masked-lm", "causal": False}
CLASSIFIER = {"head": "classifier", "causal": False}
TEXTS = {"labelled": "docs-or-code"}


def make(model=None, **sections):
    return make_config(model=model or {}, mup=MUP, **sections)


def test_every_head_can_be_had():
    assert make().model.head == "causal-lm"
    assert make(MASKED).model.head == "masked-lm"
    assert make(CLASSIFIER, data=TEXTS).model.pooling == "first"
    assert make({"head": "classifier", "pooling": "mean"}, data=TEXTS).model.causal  # each token sees a part, the mean all


@pytest.mark.parametrize(
    "model, sections, key, words",
    [
        ({"head": "masked-lm"}, {}, "model.causal", "masked-lm` guesses hidden tokens from both sides"),
        ({"causal": False}, {}, "model.causal", "would see it"),
        ({"head": "classifier"}, {"data": TEXTS}, "model.causal", "would see no other"),
        (CLASSIFIER, {}, "data.labelled", "none are named"),
        (CLASSIFIER, {"data": {**TEXTS, "corpus": "kjv"}}, "data.corpus", "data.labelled"),
        (CLASSIFIER, {"data": {**TEXTS, "limit": 9}}, "data.limit", "data.labelled"),
        (CLASSIFIER, {"data": {**TEXTS, "mask_share": 0.3}}, "data.mask_share", "masked-lm"),
        ({}, {"data": TEXTS}, "data.labelled", "classifier"),
        (MASKED, {"data": {"label_key": "class"}}, "data.label_key", "classifier"),
        ({}, {"data": {"mask_share": 0.3}}, "data.mask_share", "masked-lm"),
        (MASKED, {"data": {"shift": True}}, "data.shift", "causal-lm"),
        (CLASSIFIER, {"data": {**TEXTS, "shift": True}}, "data.shift", "causal-lm"),
        ({"classes": 3}, {}, "model.classes", "classifier"),
        ({**MASKED, "pooling": "mean"}, {}, "model.pooling", "classifier"),
        (MASKED, {"train": {"sample": {"prompt": "In"}}}, "train.sample.prompt", "a masked-lm generates no text"),
        (CLASSIFIER, {"data": TEXTS, "train": {"sample": {"tokens": 9}}}, "train.sample.tokens", "a classifier generates no"),
        ({**CLASSIFIER, "tied": False, "readout_bias": True}, {"data": TEXTS}, "model.readout_bias", "if `bias` is true"),
        ({**MASKED, "vocab": 257}, {}, "model.vocab", "257 pieces and the mask a row of its own"),
        ({"kind": "mlp", "head": "masked-lm"}, {"data": {"images": "digits"}}, "model.head", "an mlp has no head"),
    ],
)
def test_what_contradicts_is_named(model, sections, key, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make(model, **sections)
    assert caught.value.key == key and (caught.value.suggestion or "mlp" in words)


def test_a_base_obeys_too():
    with pytest.raises(ConfigError) as caught:
        make_config(model=MASKED, mup={"base": {"width": 64, "head": "masked-lm"}})
    assert caught.value.key == "mup.base.causal"


def test_no_sample_may_be_said():
    assert make(MASKED, train={"sample": {"tokens": 0}}).train.sample.tokens == 0


def test_what_follows():
    masked, classifier = make(MASKED), make(CLASSIFIER, data=TEXTS)
    assert (derived.least_rows(make()), derived.least_rows(masked), derived.least_rows(classifier)) == (257, 258, 257)
    assert derived.tied(masked.model) and not derived.tied(classifier.model)
    assert (derived.labels_per_row(masked.model), derived.labels_per_row(classifier.model)) == (256, 1)
