"""What `kubectl kustomize` makes of the folders in infra/kuberay, for machines that have no kubectl.

Knows only what those folders use: resources, namespace, nameSuffix, images, and patches of the JSON kind. Anything else
in a kustomization is an error, so that nothing is silently left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KNOWN = {"apiVersion", "kind", "resources", "namespace", "nameSuffix", "images", "patches"}


def build(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization folder."""
    (settings,) = documents(folder / "kustomization.yaml")
    unknown = set(settings) - KNOWN
    if unknown:
        raise ValueError(f"{folder}: this renderer does not know {sorted(unknown)}")
    found: list[Manifest] = []
    for name in settings["resources"]:
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else documents(path)
    for patch in settings.get("patches", []):
        target = patch["target"]
        hit = [one for one in found if one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]]
        if len(hit) != 1:
            raise ValueError(f"{folder}: {len(hit)} resources are {target}")
        (operations,) = documents(folder / patch["path"])
        for operation in operations:
            apply(hit[0], operation)
    for manifest in found:
        if "namespace" in settings and manifest["kind"] != "Namespace":
            manifest["metadata"]["namespace"] = settings["namespace"]
        manifest["metadata"]["name"] += settings.get("nameSuffix", "")
        for container in containers(manifest):
            for image in settings.get("images", []):
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def documents(path: Path) -> list[Any]:
    """The documents of a YAML file, without shared parts: anchors are copied out."""
    with path.open(encoding="utf-8") as file:
        return [plain(document) for document in yaml.safe_load_all(file) if document is not None]


def plain(value: Any) -> Any:
    """A deep copy in which no two places share an object."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else copy.copy(value)


def apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch: add, replace or remove. Raises `KeyError` where the place does not exist."""
    *steps, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/")]
    place: Any = manifest
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    key: Any = int(last) if isinstance(place, list) else last
    if operation["op"] != "add":
        place[key]  # must be there
    if operation["op"] == "remove":
        del place[key]
    elif operation["op"] in ("add", "replace"):
        place[key] = operation["value"]
    else:
        raise ValueError(f"this renderer does not know the operation {operation['op']}")


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container of every pod template in a manifest, however deep."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("containers", "initContainers") and isinstance(item, list):
                yield from item
            yield from containers(item)
    elif isinstance(value, list):
        for item in value:
            yield from containers(item)


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod specification in a manifest, however deep."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for item in value.values():
            yield from pods(item)
    elif isinstance(value, list):
        for item in value:
            yield from pods(item)
