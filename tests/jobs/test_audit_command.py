"""What `graft audit` leaves behind; what it finds is in `test_cli.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.generate import Answer
from jobs import audit_command, cli


def test_prompts_that_are_deleted_meanwhile_do_not_cost_the_report(
    tmp_path: Path, tiny_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, prompts, out = (tmp_path / name for name in ("tiny.yaml", "prompts.jsonl", "report.json"))
    config.write_text(json.dumps(tiny_config.model_dump(mode="json", exclude_none=True)))
    prompts.write_text(json.dumps({"id": "p0", "task": "chat", "turns": ["add two"]}) + "\n")
    sha256 = hashlib.sha256(prompts.read_bytes()).hexdigest()
    honest = audit_command.answer_all

    def answer_all(*arguments: Any) -> Iterator[Answer]:
        prompts.unlink(missing_ok=True)
        return honest(*arguments)

    monkeypatch.setattr(audit_command, "answer_all", answer_all)
    options = ["--methods", "plain", "--max-new-tokens", "4", "--out", str(out)]
    assert cli.run(["audit", "--config", str(config), "--prompts", str(prompts), *options]) == 0
    assert not prompts.exists()
    assert json.loads(out.read_text())["settings"]["prompt_file"] == {"name": "prompts.jsonl", "sha256": sha256}
