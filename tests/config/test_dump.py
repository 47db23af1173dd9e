"""The hash: equal for equal runs, blind to names and logging, different for everything else in the schema."""

import pytest

from ipu_lean.config import config_hash, load_config

pytestmark = pytest.mark.pod
BASE = "mup: {base_width: 64}\n"


def test_hash_is_of_the_values_not_of_the_text():
    assert config_hash(load_config("mup:\n  base_width: 64\nseed: 0\n")) == config_hash(load_config(BASE))
    assert len(config_hash(load_config(BASE))) == 12


def test_name_and_logging_do_not_count():
    plain = config_hash(load_config(BASE))
    assert config_hash(load_config(BASE, ["name=other", "logging.csv=false", "logging.wandb_project=p"])) == plain


@pytest.mark.parametrize(
    "change",
    ["seed=1", "model.width=128", "model.stack.order=aaff", "train.steps=999", "data.corpus=kjv", "optimizer.betas=[0.9, 0.9]"],
)
def test_everything_else_counts(change):
    assert config_hash(load_config(BASE, [change])) != config_hash(load_config(BASE))
