"""A Config as YAML that loads back to an equal one, and as a short hash."""

from __future__ import annotations

import hashlib
import json

from ipu_lean.config.root import Config
from ipu_lean.config.yaml_text import to_text

_UNHASHED = ("name", "logging", "sweep", "study")  # they never change what is computed


def dump_config(config: Config) -> str:
    """Every key with its value, in the order of the schema."""
    return to_text(config.model_dump(mode="json"))


def config_hash(config: Config) -> str:
    """12 hex digits over everything but the name, the logging, the sweep and the study section."""
    values = {key: value for key, value in config.model_dump(mode="json").items() if key not in _UNHASHED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
