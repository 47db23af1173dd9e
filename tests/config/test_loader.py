"""A file, what it extends, and overrides become one Config, and every value knows where it came from."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_lean.config import Config, dump_config, load, load_config, make_config
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod
BASE = "mup: {base_width: 64}\n"


def test_file_wins_over_extended_and_override_over_both(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 1\nmodel:\n  width: 128\n  depth: 4\nmup: {base_width: 64}\n")
    run = tmp_path / "run.yaml"
    run.write_text("extends: base.yaml\nmodel:\n  width: 192\n")
    loaded = load(run, ["model.depth=3", "optimizer.lr=6e-5"])
    assert (loaded.config.model.width, loaded.config.model.depth, loaded.config.seed) == (192, 3, 1)
    assert loaded.config.optimizer.lr == 0.00006
    origin = loaded.provenance
    assert origin["model.width"] == f"{run}:3"
    assert origin["seed"] == f"extends {tmp_path / 'base.yaml'}:1"
    assert origin["model.depth"] == origin["optimizer.lr"] == "override"
    assert origin["train.steps"] == "default"


def test_extends_goes_one_level_only(tmp_path):
    (tmp_path / "a.yaml").write_text(BASE)
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (tmp_path / "c.yaml").write_text("\nextends: b.yaml\n")
    assert load_config(tmp_path / "b.yaml").mup.base_width == 64
    with pytest.raises(ConfigError, match="one level"):
        load(tmp_path / "c.yaml")


def test_extends_replaces_mappings_whole_and_sections_key_by_key(tmp_path):
    (tmp_path / "a.yaml").write_text(BASE + "data:\n  shuffle: false\n  validation: {one: 0.1}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\ndata: {validation: {two: 0.2}}\n")
    config = load_config(tmp_path / "b.yaml")
    assert config.data.validation == {"two": 0.2}
    assert config.data.shuffle is False


def test_missing_files_are_named_with_their_neighbours(tmp_path):
    (tmp_path / "quick.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match=r"quik\.yaml: there is no such file.*quick\.yaml"):
        load(tmp_path / "quik.yaml")
    (tmp_path / "b.yaml").write_text("seed: 1\nextends: gone.yaml\n")
    with pytest.raises(ConfigError, match=r"b\.yaml:2: `extends: 'gone.yaml'`.*no such file"):
        load(tmp_path / "b.yaml")


def test_a_run_directory_stands_for_its_config(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(make_config(seed=5, mup={"base_width": 64})))
    assert load_config(tmp_path).seed == 5


def test_dump_loads_back_to_an_equal_config():
    awkward = make_config(
        name="010",
        optimizer={"lr": 6e-5, "eps": 1e-20, "betas": [0.5, 0.25]},
        mup={"base": {"width": 32}, "init_scale": 1e22},
        train={"clip": None, "sample": {"prompt": "true: no\n\t# 1_000 'é\u2028"}},
        data={"validation": {"a": 0.1, "b": "6e-5", "c": "null"}, "corpus": "~/1e3"},
    )
    assert load_config(dump_config(awkward)) == awkward
    assert load_config(dump_config(make_config(mup={"base_width": 64}))) == load_config(BASE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompt=st.text(st.characters(blacklist_categories=("Cs",))),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    source=st.text(st.characters(blacklist_categories=("Cs",)), min_size=1),
    clip=st.none() | st.floats(min_value=1e-9, max_value=1e9),
)
def test_any_values_survive_a_dump(prompt, lr, source, clip):
    config = make_config(
        mup={"base_width": 64},
        optimizer={"lr": lr},
        train={"clip": clip, "sample": {"prompt": prompt}},
        data={"corpus": source, "validation": {"a": source}},
    )
    assert load_config(dump_config(config)) == config


def test_text_keys_keep_their_spelling():
    loaded = load(BASE + "name: 2024_01\ndata: {corpus: 010}\n", ["train.sample.prompt=To be: or, not"])
    assert loaded.config.name == "2024_01"
    assert loaded.config.data.corpus == "010"
    assert loaded.config.train.sample.prompt == "To be: or, not"
    assert load_config(BASE, ["train.sample.prompt=1e3"]).train.sample.prompt == "1e3"
    assert load_config(BASE, ["train.sample.prompt='0'"]).train.sample.prompt == "0"
    assert load_config(BASE, ["train.sample.prompt="]).train.sample.prompt == ""


def test_overrides_reach_lists_nulls_and_names_of_ones_own():
    overrides = ["ipu.layers_per_ipu=[2, 4]", "train.clip=null", "data.validation.crime=crime.txt", "train.threads=1_0"]
    loaded = load(BASE, overrides)
    assert loaded.config.ipu.layers_per_ipu == [2, 4]
    assert loaded.config.train.clip is None
    assert loaded.config.data.validation == {"crime": "crime.txt"}
    assert loaded.config.train.threads == 10
    assert loaded.provenance["data.validation"] == "override"


def test_later_override_wins():
    assert load_config(BASE, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("override", ["seed", "=3", "model.=3", ".seed=1", "model..width=3"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(ConfigError, match="key.path=value|no such key"):
        load(BASE, [override])


def test_override_into_what_is_no_section_names_the_line():
    with pytest.raises(ConfigError, match="text:2: `model: 3`: this is a section"):
        load(BASE + "model: 3\n", ["model.depth=4"])


def test_an_empty_section_is_all_defaults():
    assert load_config(BASE + "train:\noptimizer:\n").train == Config().train


def test_the_base_model_is_taken_from_its_file(tmp_path):
    (tmp_path / "small.yaml").write_text("model: {width: 32, depth: 2}\noptimizer: {lr: 1e-2}\n")
    (tmp_path / "big.yaml").write_text("model: {width: 256, depth: 2}\nmup: {base: small.yaml}\n")
    config = load_config(tmp_path / "big.yaml")
    assert config.mup.base.width == 32
    assert config.optimizer.lr == Config().optimizer.lr
    assert load_config(dump_config(config)) == config
    assert load_config(tmp_path / "big.yaml", ["mup.base.heads=2"]).mup.base.heads == 2


def test_a_mistake_in_the_base_file_names_that_file(tmp_path):
    (tmp_path / "small.yaml").write_text("seed: 1\nmodel:\n  widht: 32\n")
    (tmp_path / "big.yaml").write_text("mup: {base: small.yaml}\n")
    with pytest.raises(ConfigError, match=r"small\.yaml:3: `mup\.base\.widht`.*mup\.base\.width"):
        load(tmp_path / "big.yaml")
    (tmp_path / "big.yaml").write_text("\nmup: {base: gone.yaml}\n")
    with pytest.raises(ConfigError, match=r"big\.yaml:2: `mup\.base: 'gone\.yaml'`.*no such file"):
        load(tmp_path / "big.yaml")


def test_configs_cannot_be_changed():
    config = make_config(mup={"base_width": 64})
    with pytest.raises(ValueError, match="frozen"):
        config.model.width = 3
