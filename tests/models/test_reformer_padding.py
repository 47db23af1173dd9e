"""A Reformer with padding: it reaches no token, and no token sees a later one."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.errors import ConfigError
from tests.models.common import tokens_for
from tests.models.reformer_common import gradients, reformer, worst

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("kind", ["full", "local", "lsh", "mixed"])
def test_padding_never_reaches_a_token(kind):
    kinds = ["local", "lsh", "full", "lsh"] if kind == "mixed" else kind
    changes = {name: {} for name in ("local", "lsh") if kind not in (name, "mixed")}
    model = reformer(attention=kinds, **changes).train()
    tokens, labels = tokens_for(model, batch=4)
    present = torch.ones(4, 32, dtype=torch.bool)
    present[0, 20:] = present[1, :9] = present[2, 5:11] = present[3] = False
    labels = labels.masked_fill(~present, -100)
    other = tokens.masked_fill(~present, 3)
    loss, truth = gradients(model, tokens, labels, present=present)
    again, found = gradients(model, other, labels, present=present)
    assert again == pytest.approx(loss, rel=1e-13)
    token = "embedding.token.weight"
    for name, value in truth.items():
        assert torch.isfinite(value).all()
        rest = value if name != token else value[torch.unique(tokens[present])]
        same = found[name] if name != token else found[name][torch.unique(tokens[present])]
        assert (rest - same).norm() < 1e-12 * rest.norm(), name
    out = model.eval()(tokens)
    assert torch.isfinite(out).all()


def test_a_padded_sequence_trains_as_one_that_was_padded_by_hand():
    model = reformer().train()
    tokens, labels = tokens_for(model, seq=21)
    loss, truth = gradients(model, tokens, labels)
    present = torch.arange(24).expand(2, 24) < 21
    more = torch.cat([tokens, tokens[:, :3]], 1)
    again, found = gradients(model, more, torch.cat([labels, torch.full_like(labels[:, :3], -100)], 1), present=present)
    assert again == pytest.approx(loss, rel=1e-13) and worst(found, truth) < 1e-12


def test_present_is_a_bool_for_each_token():
    model = reformer()
    tokens, _ = tokens_for(model)
    for wrong in (torch.ones(2, 32), torch.ones(2, 31, dtype=torch.bool)):
        with pytest.raises(ConfigError, match="a bool for each"):
            model.hidden(tokens, present=wrong)
    with pytest.raises(ConfigError, match="queries by keys"):
        model.hidden(tokens, mask=torch.ones(1, 1, 32, 32, dtype=torch.bool))


# -- causality ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["full", "local", "one chunk"])
def test_no_token_sees_a_later_one(kind):
    changes = {"attention": kind, "local": {"chunk": 4} if kind == "local" else {}, "lsh": {}}
    if kind == "one chunk":
        changes.update(attention="lsh", lsh={"chunk": 4, "full_below": 32})
    model = reformer(**changes).eval()
    tokens, _ = tokens_for(model)
    before = model(tokens)
    for place in (1, 15, 31):
        other = tokens.clone()
        other[:, place:] = (other[:, place:] + 1) % 23
        after = model(other)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])
