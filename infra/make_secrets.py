"""Make the secrets of infra/compose.yaml: random ones, in infra/secrets/, which git and docker build ignore.

    python infra/make_secrets.py

What is there already stays as it is. The folder is closed to everybody else; the files in it can be read by any user,
because the services that they are mounted into run under user ids of their own.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "secrets"


def main(folder: Path = FOLDER) -> list[str]:
    """Write what is missing and return its names."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    key, password = secrets.token_hex(10), secrets.token_hex(32)
    identity = {"credentials": [{"accessKey": key, "secretKey": password}], "name": "mlflow"}
    identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
    made = write(
        folder, {name: secrets.token_hex(32) for name in ("postgres_password", "grafana_password", "ray_token")}
    )
    store = {
        "s3_identities.json": json.dumps({"identities": [identity]}, indent=2),
        "s3_credentials": f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {password}\n",
    }
    # The two sides of one key: both are new, or both stay.
    if not any((folder / name).exists() for name in store):
        made += write(folder, store)
    return made


def write(folder: Path, contents: dict[str, str]) -> list[str]:
    """Write the files that are not there, and return their names."""
    missing = [name for name in contents if not (folder / name).exists()]
    for name in missing:
        file = folder / name
        file.write_text(contents[name], encoding="utf-8")
        file.chmod(0o444)
    return missing


if __name__ == "__main__":
    names = main()
    print(f"made in {FOLDER}: {', '.join(names)}" if names else f"{FOLDER} has them all already")
    sys.exit(0)
