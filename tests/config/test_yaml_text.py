"""The scalars of our YAML: numbers as people write them, and nothing that turns into something else unseen."""

import math

import pytest

from ipu_lean.config.yaml_text import parse, parse_value, to_text
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod


@pytest.mark.parametrize(
    "text, value",
    [
        ("6e-5", 6e-5),
        ("1e3", 1000.0),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("+7", 7),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("2024-01-31", "2024-01-31"),
        ("1__0", "1__0"),
        ("e5", "e5"),
        ("'6e-5'", "6e-5"),
        ("[0, 3, 6e-5]", [0, 3, 6e-5]),
    ],
)
def test_scalars(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_infinities_are_read_so_that_they_can_be_refused():
    assert parse_value("-.inf") == -math.inf
    assert math.isnan(parse_value(".nan"))


WORDS = ["6e-5", "1_0", "010", "true", "null", "", "~", "yes", "- a", "a: b", " x "]
WORDS += ["é\n\t#", "a\x85b", "\u2028", "\ufeff", "\x7f", "\r"]


@pytest.mark.parametrize("value", [*WORDS, 1e-20, 3, None, True])
def test_written_values_read_back_the_same(value):
    found = parse(to_text({"k": value}), "text")[0]["k"]
    assert found == value
    assert type(found) is type(value)


def test_marks_give_the_line_of_the_key():
    _, marks = parse("a: 1\n\nb:\n  c:\n    6e-5\n  d: [1,\n   2]\n", "file")
    assert marks[("b", "c")].line == 4
    assert marks[("b", "c")].raw == "6e-5"
    assert marks[("b", "d", "1")].line == 7
    assert marks[("b",)].source == "file"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", r"file:4: `b\.c`: this key stands twice, on line 3 and on line 4"),
        ("a: {b: 1, b: 2}", r"file:1: `a\.b`: this key stands twice"),
        ("a:\n\tb: 1\n", r"file:2: this is not valid YAML"),
        ("a: [1, 2\n", "this is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "this is not valid YAML"),
        ("- 1\n", "file:1: a configuration is a mapping"),
        ("a: !!python/name:os.system\n", "file:1: .*tag"),
        ("a: &x {b: *x}\n", "file:1: .*contains itself"),
        ("? [1, 2]\n: 3\n", "file:1: a key must be a word"),
        ("a: " + "[" * 4000, "nested too deeply"),
        ("a: \x07", "not valid YAML"),
    ],
)
def test_broken_text_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, "file")


def test_aliases_are_read():
    assert parse("a: &x {b: 1}\nc: *x\n", "file")[0] == {"a": {"b": 1}, "c": {"b": 1}}
