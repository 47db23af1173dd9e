"""`config show` and the JSON Schema."""

import json

import pytest

from ipu_lean.config import load, load_config
from ipu_lean.config.fields import leaves
from ipu_lean.config.schema import json_schema
from ipu_lean.config.show import as_yaml, rows

pytestmark = pytest.mark.pod
TEXT = "mup:\n  base_width: 64\nmodel:\n  width: 128\n  depth: 6\n"


def test_values_that_differ_are_marked_with_origin_and_default():
    text = as_yaml(load(TEXT, ["seed=3"]))
    assert "seed: 3                                   # override; default 0" in text
    assert "width: 128                              # text:4; default 256" in text
    assert "depth: 6                                # text:5; as the default" in text
    assert "  heads: null\n" in text


def test_shown_text_loads_back():
    changes = ["train.sample.prompt=a: b # c", "data.validation={a: 0.5, b: x}", "optimizer.lr=6e-5", "data.corpus='Null'"]
    loaded = load(TEXT, changes)
    assert load_config(as_yaml(loaded)) == loaded.config
    assert load_config(as_yaml(loaded, changed_only=True)) == loaded.config


def test_only_changes():
    text = as_yaml(load(TEXT), changed_only=True)
    assert [line.split(":")[0].strip() for line in text.splitlines()] == ["model", "width", "mup", "base_width"]


def test_rows_cover_the_schema_and_are_plain_data():
    found = json.loads(json.dumps(rows(load(TEXT))))
    assert [row["key"] for row in found] == [".".join(path) for path, _ in leaves()]
    width = next(row for row in found if row["key"] == "model.width")
    assert width == {"key": "model.width", "value": 128, "default": 256, "changed": True, "source": "text:4"}


def test_every_field_teaches():
    """Each key has a description of more than a few words, and the JSON Schema carries it."""
    for path, field in leaves():
        assert field.description and len(field.description.split()) >= 3, path


def test_schema_closes_sections_and_knows_extends():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["extends"]["type"] == "string"
    model = schema["$defs"]["ModelConfig"]
    assert model["additionalProperties"] is False
    assert model["properties"]["width"]["minimum"] == 1
    assert model["properties"]["norm"]["enum"] == ["layernorm", "rmsnorm"]
    assert {"type": "string"} in schema["$defs"]["MupConfig"]["properties"]["base"]["anyOf"]
    json.dumps(schema)
