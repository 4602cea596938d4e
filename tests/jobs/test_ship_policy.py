"""Shipping a policy: the folder, a card whose figures are checked, and who finds it afterwards."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.policy import GraftPolicy
from jobs.policy_option import read_learned
from jobs.serve_command import ServeRequest, _application
from jobs.ship_policy import main
from serve.policy_source import PolicySource
from serve.serve_args import PolicyPin
from tests.graft_dist.policies import make_policy, random_network

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {"mat": 2.348, "mismatch_rate": 0.1234, "mean_budget": 11.96, "tokens_per_s": 33.33, "speedup": 1.617}
CHOSEN, DDTREE = "tdes, marginal, state, price", "marginal, fixed 12"


def write_run(folder: Path, policy: GraftPolicy, chosen: str = CHOSEN) -> None:
    arms = [chosen, DDTREE, "plain", "caddtree", *(f"{scorer}, fixed 8" for scorer in ("tdes", "marginal"))]
    test = [
        {"arm": arm, "task": task, "num_rounds": 9, **{name: at + value for name, value in NUMBERS.items()}}
        for task in ("all", "code")
        for at, arm in enumerate(arms)
    ]
    compared = {"arm": chosen, "task": "all", "ratio": 1.0421, "low": 1.011, "high": 1.0768}
    report = {
        "policy": policy.fingerprint,
        "finished_at": "2026-01-01T10:30:00+00:00",
        "chosen": {"name": chosen, "what": "the learned edge scorer"},
        "ddtree": DDTREE,
        "test": test,
        "comparisons": [] if chosen == DDTREE else [{**compared, "baseline": rival} for rival in (DDTREE, "caddtree")],
        "fit": [{"step": 0, "loss": 0.0, "held_out_kl": 0.512}, {"step": 9, "loss": 0.4, "held_out_kl": 0.2504}],
        "calibration": {name: [{"name": "raw", "log_loss": 0.2, "error": 0.0123}] for name in ("tdes", "marginal")},
        "cost": {"best": "line", "fits": [{"name": "line", "error_ms": 1.234}]},
    }
    run = {
        "settings": {"width": 8, "seed": 0},
        "provenance": {
            "started_at": "2026-01-01T10:00:00+00:00",
            "command": ["jobs/train.py", "--store", "store"],
            "commit": "0123abc",
            "machine": {"cpu": "a box"},
        },
    }
    policy.save(folder / "policy")
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "run.json").write_text(json.dumps(run))


def arguments(folder: Path, to: Path) -> list[str]:
    (folder / "about.md").write_text("Made-up prompts.\n")
    places = {"--run": folder, "--to": to, "--rows": folder / "rows", "--about": folder / "about.md"}
    return [word for option, place in places.items() for word in (option, str(place))]


@pytest.mark.parametrize("chosen", [CHOSEN, DDTREE])
def test_the_card_shows_what_the_run_found_and_a_false_figure_is_named(tmp_path: Path, chosen: str) -> None:
    policy = make_policy(random_network(32, 4) if chosen == CHOSEN else None)
    write_run(tmp_path, policy, chosen)
    to = tmp_path / "policies" / policy.slug
    assert main(arguments(tmp_path, to)) == 0
    assert GraftPolicy.load(to).fingerprint == policy.fingerprint
    text = (to / "README.md").read_text()
    assert "30 minutes from start to end on a box" in text
    assert "Made-up prompts." in text and "python jobs/train.py --store store" in text
    report = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**report, "is_resumed": True}))
    assert main(arguments(tmp_path, to)) == 0
    assert "30 minutes from start to end, interruptions included, on a box" in (to / "README.md").read_text()
    (tmp_path / "report.json").write_text(json.dumps({**report, "finished_at": "2026-01-01T10:01:20+00:00"}))
    assert main(arguments(tmp_path, to)) == 0
    assert "\n1 minute from start to end on a box" in (to / "README.md").read_text()
    differences = runpy.run_path(str(ROOT / "bench" / "verify.py"))["document_differences"]
    assert differences(to / "README.md") == []
    figures = ["| plain code | 4.35 | 212.3 % |", "0.512 nats before, 0.250 after"]
    figures += ["1.042 times", "(1.011 to 1.077"] if chosen == CHOSEN else ["| budget 8 all | 7.35 | 6.35 |"]
    for figure in figures:
        assert figure in text
        changed = figure.translate(str.maketrans("125", "236"))
        (to / "false.md").write_text(text.replace(figure, changed))
        assert differences(to / "false.md"), figure


def test_what_is_not_for_shipping_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, make_policy(random_network(32, 4)))
    assert main(arguments(tmp_path, tmp_path / "other")) == 2
    assert "is looked for in a folder of that name" in capsys.readouterr().err
    make_policy(random_network(30_000, 4)).save(tmp_path / "policy")
    assert main(arguments(tmp_path, tmp_path / "tiny")) == 2
    assert "about another policy" in capsys.readouterr().err
    write_run(tmp_path, make_policy(random_network(30_000, 4)))
    assert main(arguments(tmp_path, tmp_path / "tiny")) == 2
    assert "at most 1,000,000 may ship" in capsys.readouterr().err and not (tmp_path / "tiny").exists()
    (tmp_path / "run.json").unlink()
    assert main(arguments(tmp_path, tmp_path / "tiny")) == 2
    assert "not the folder of a learning run that has ended" in capsys.readouterr().err


def test_every_command_finds_the_policy_that_ships(
    tmp_path: Path, tiny_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slug = tiny_config.slug
    policy = make_policy(random_network(32, 4), slug=slug)
    request: dict[str, Any] = dict.fromkeys(ServeRequest.__dataclass_fields__)
    request |= {"config": "tiny", "replicas": 1, "methods": ()}
    config = tiny_config.model_copy(update={"drafter": f"builtin:{slug}"})

    def pinned(given: str | None, settings: TargetConfig) -> Any:
        application = _application(ServeRequest(**{**request, "policy": given}), settings, None)
        return application["deployments"][0]["user_config"]["policy"]

    assert pinned(None, config) is None
    policy.save(tmp_path / "data" / "policies" / slug)
    monkeypatch.setattr("graft_dist.policy.resources.files", lambda package: tmp_path)
    found = read_learned(None, None, ["plain", "graft"], tiny_config)
    assert found.policy is not None and found.policy.fingerprint == policy.fingerprint
    assert read_learned(None, None, ["plain"], tiny_config).policy is None
    assert pinned(None, config) == {"folder": f"builtin:{slug}"}
    assert pinned("none", config) is None
    assert pinned(None, tiny_config) is None, "it was learned with another drafter"
    models: Any = [SimpleNamespace(fingerprint=letter * size) for letter, size in (("t", 64), ("d", 16))]
    source = PolicySource(tiny_config, *models, methods=(), max_budget=None)
    assert source.read(PolicyPin(folder=f"builtin:{slug}")).fingerprint == policy.fingerprint
