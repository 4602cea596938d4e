"""KubeRay's own schemas, made strict: what the operator would refuse, or silently drop, is an error.

They are the `openAPIV3Schema` of its custom resource definitions (ray.io/v1 of KubeRay after 1.7.0, Apache-2.0), in a
file beside the repository that is no part of it: {"ray.io/v1/RayCluster": schema, ...}, gzipped JSON.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "kuberay_crd_v1.json.gz"


def load() -> dict[str, Any]:
    """The schemas by `apiVersion/kind`; skips the test where the file is not there."""
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        if (folder / NAME).is_file():
            schemas = json.loads(gzip.decompress((folder / NAME).read_bytes()))
            return {kind: strict(schema) for kind, schema in schemas.items()}
    pytest.skip(f"{NAME} is not beside the repository: KubeRay's schemas are not checked")


def strict(schema: Any) -> Any:
    """The schema as the API server applies it, but refusing unknown keys instead of dropping them."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    properties = made.get("properties")
    if isinstance(properties, dict) and made.get("type") == "object":
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        # The server fills in defaults before it looks for what is required.
        required = [key for key in made.get("required", []) if "default" not in properties.get(key, {})]
        made["required"] = required
    return made


def errors(schemas: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource, a line each."""
    schema = schemas[f"{manifest['apiVersion']}/{manifest['kind']}"]
    schema = schema | {"properties": schema["properties"] | {"metadata": {"type": "object"}}}
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'/'.join(str(step) for step in error.absolute_path)}: {error.message[:200]}" for error in found]
