"""API keys of an environment variable, keys that cannot be had, and that no key is ever logged."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from graft_dist.errors import ConfigError
from serve.api_keys import ApiKeys
from serve.errors import ApiError
from tests.serve.conftest import MODEL, Running

VARIABLE = "GRAFT_TEST_KEYS"


def test_keys_of_an_environment_variable_have_commas_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a, b,,")
    keys = ApiKeys.load(None, VARIABLE)
    keys.check("Bearer a")
    keys.check("bearer b")
    for wrong in ("Bearer c", "Bearer a, b", "Bearer ", "Basic b", "b", "", None):
        with pytest.raises(ApiError) as caught:
            keys.check(wrong)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_keys_that_cannot_be_had_are_a_mistake_in_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never a server that lets everybody in."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"there is no API key in {VARIABLE}"):
        ApiKeys.load(None, VARIABLE)
    monkeypatch.setenv(VARIABLE, " , ")
    with pytest.raises(ConfigError, match=f"there is no API key in {VARIABLE}"):
        ApiKeys.load(None, VARIABLE)
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="keys cannot be read"):
        ApiKeys.load(str(file), None)
    for content in (b"", b"\n# only a comment\n  # and another\n"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="there is no API key in "):
            ApiKeys.load(str(file), None)
    file.write_text("plain\nschl\u00fcssel\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"API key 2 in .* has letters that HTTP headers do not carry"):
        ApiKeys.load(str(file), None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="keys cannot be read"):
        ApiKeys.load(str(file), None)


def test_the_log_has_no_keys_neither_right_nor_wrong(
    serve_reciter: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "first-secret, second-secret")
    logger = logging.getLogger("ray.serve")
    # On the logger itself: Ray Serve, once set up in a process, lets nothing through to the root.
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "ray.serve"):
            running = serve_reciter(api_keys_variable=VARIABLE)
            try:
                assert [ask(running, key) for key in ("second-secret", "third-secret")] == [200, 401]
            finally:
                running.close()
    finally:
        logger.removeHandler(caplog.handler)
    assert '"outcome": "unauthorized"' in caplog.text and '"outcome": "ok"' in caplog.text
    assert "secret" not in caplog.text and "Bearer" not in caplog.text


def ask(running: Running, key: str) -> int:
    """The status of a request with that key; by urllib, which logs nothing of its own."""
    body = json.dumps({"model": MODEL, "prompt": "recite", "max_tokens": 3}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{running.url}/v1/completions", body, headers), timeout=60
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
