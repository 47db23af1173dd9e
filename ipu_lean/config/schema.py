"""The JSON Schema of the configuration, so that editors complete keys and show what they mean."""

from __future__ import annotations

from typing import Any, Dict

from ipu_lean.config.root import Config


def json_schema() -> Dict[str, Any]:
    """Draft 2020-12: the schema of the files that people write (`extends`, and a path in `mup.base`, are part of those)."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "ipu_lean configuration"
    extends = {"type": "string", "description": "Path of another YAML; this one is laid over it. One level only."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    base = schema["$defs"]["MupConfig"]["properties"]["base"]
    base["anyOf"] = [{"type": "string"}] + base["anyOf"]
    return schema
