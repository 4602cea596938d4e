"""`graft serve` ends on Ctrl-C when running requests have finished, and on a second one without them."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.serve_command import ServeRequest, run_serve
from serve import applications


@pytest.mark.parametrize("is_patient", [True, False])
def test_ctrl_c_waits_for_requests_unless_it_comes_again(
    is_patient: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a cluster's dashboard that does nothing but remember."""
    told: list[str] = []
    looks = iter(range(100))

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def remaining(*arguments: Any) -> list[Any]:
        """The application goes after three looks, or never."""
        look = next(looks)
        if look == 1 and not is_patient:
            signal.raise_signal(signal.SIGINT)
        return [] if is_patient and look == 3 else [SimpleNamespace(name="smollm2-135m")]

    monkeypatch.setattr("jobs.serve_command.time.sleep", lambda seconds: None)
    monkeypatch.setattr(applications, "deploy", lambda *arguments, **options: told.append("deploy"))
    monkeypatch.setattr(applications, "wait_until_running", interrupted)
    monkeypatch.setattr(applications, "remove", lambda *arguments: told.append("remove"))
    monkeypatch.setattr(applications, "list_applications", remaining)
    before = signal.getsignal(signal.SIGINT)
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, "http://head:8265", None)
    assert run_serve(request) == 130
    assert told == ["deploy", "remove"] and signal.getsignal(signal.SIGINT) is before
    assert ("nobody waits for them" in capsys.readouterr().err) is not is_patient
