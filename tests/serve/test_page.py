"""The page as it is served: headers, caching, and that it fetches nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from serve.page import FOLDER, SECURITY_HEADERS, page_router

TYPES = {
    "/": "text/html; charset=utf-8",
    "/console/console.css": "text/css; charset=utf-8",
    "/console/console.js": "text/javascript; charset=utf-8",
    "/console/icon.svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


@pytest.mark.parametrize("path", TYPES)
def test_files_have_their_types_and_headers(client: TestClient, path: str) -> None:
    response = client.get(path)
    name = path.removeprefix("/console/") if path != "/" else "index.html"
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["Content-Type"] == TYPES[path]
    assert {key: response.headers[key] for key in SECURITY_HEADERS} == SECURITY_HEADERS
    head = client.head(path)
    assert head.status_code == 200 and head.content == b"" and head.headers["ETag"] == response.headers["ETag"]


def test_a_client_that_has_the_file_is_told_so(client: TestClient) -> None:
    first = client.get("/console/console.js")
    assert first.headers["Cache-Control"] == "no-cache"
    tag = first.headers["ETag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get("/console/console.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    assert client.get("/console/console.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/console/", "/console/missing.js", "/console/index.html", "/console/..%2Fpage.py"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_every_file_in_the_folder_is_part_of_the_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"index.html", "console.css", "console.js", "icon.svg"}


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    for path in FOLDER.iterdir():
        links = re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8"))
        assert [link for link in links if link != "http://www.w3.org/2000/svg"] == [], path.name  # a name, not a place


def test_links_are_relative_and_lead_somewhere() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    links = re.findall(r"(?:href|src)=\"([^\"#]+)\"", html)
    assert set(links) == {"console/icon.svg", "console/console.css", "console/console.js"}
    script = (FOLDER / "console.js").read_text(encoding="utf-8")
    assert set(re.findall(r"call\(\"([^\"]+)\"", script)) == {"v1/models", "v1/chat/completions"}


def test_the_script_names_only_what_the_page_has() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    script = (FOLDER / "console.js").read_text(encoding="utf-8")
    ids = re.findall(r"\bid=\"([\w-]+)\"", html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"\$\(\"([\w-]+)\"\)", script)) <= set(ids)
    assert " style=" not in html and "onclick" not in html  # the content security policy would drop them


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir()) < 80_000
