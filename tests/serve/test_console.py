"""The page in a real browser: headless Chromium in front of a running service.

Screenshots are kept in build/screenshots. Without a browser every test here is skipped, and says so.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.policy import ddtree, plain
from graft_dist.target import Target
from serve import service as service_module
from serve.active_policy import ActivePolicy
from serve.observer import StepReport, Submission
from serve.serve_args import ServeArgs
from serve.service import Service
from tests.serve.conftest import MODEL, RecitingDrafter, Reports, Running

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is NOT tested: playwright is not installed")
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)  # its own 5 s are too little on a busy machine
CHIP = ".chip[role=button]"
PHONE = {"width": 375, "height": 740}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page is NOT tested: there is no chromium on this machine")


class Gate:
    """Holds the decode thread after a number of steps, so that a test can look at an answer half written."""

    def __init__(self) -> None:
        self._steps_left: int | None = None
        self._is_open = threading.Event()
        self._is_open.set()

    def hold_after(self, num_steps: int) -> None:
        self._steps_left = num_steps

    def release(self) -> None:
        self._steps_left = None
        self._is_open.set()

    def added(self, submission: Submission) -> bool:
        return False

    def stepped(self, report: StepReport) -> None:
        if self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._is_open.clear()
            self._is_open.wait(120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as driver:
        # The sandbox needs privileges that containers do not give; the pages are our own.
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def running(reciting_target: Target, reciting_config: TargetConfig, gate: Gate) -> Iterator[Running]:
    """One service for the module, with a drafter that is often right."""
    drafter = RecitingDrafter(reciting_target, accuracy=0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_module, "load_decoder", lambda config: (reciting_target, drafter))
        args = ServeArgs(config="unused", model=MODEL, methods=("plain", "ddtree"), max_queue=0)
        reports = Reports()
        service = Service(args, reciting_config, observers=[gate], request_observers=[reports])
    running = Running(service, reports)
    methods = {"plain": plain(), "ddtree": ddtree(6, 4)}
    swap = service.decode.swap(ActivePolicy("ddtree", None, None, methods["ddtree"], methods))
    in_force = threading.Thread(target=asyncio.run, args=(swap,))  # the driver's event loop may run in this thread
    in_force.start()
    in_force.join(60)
    yield running
    gate.release()
    running.close()


@pytest.fixture
def open_page(browser: Browser, running: Running, gate: Gate) -> Iterator[Callable[..., Page]]:
    """Return a function that opens the page in a fresh context; whatever the browser complains about fails the test."""
    contexts, complaints = [], []

    def opened(url: str = running.url, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 820}} | options))
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(url)
        return page

    yield opened
    gate.release()
    for context in contexts:
        context.close()
    # A refused request is a complaint of the browser's own; tests look at what the page makes of it.
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


def ask(page: Page, text: str = "Recite!", *, max_tokens: int = 60) -> None:
    page.evaluate("count => document.getElementById('max-tokens').value = count", max_tokens)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_the_end(page: Page) -> None:
    expect(page.locator("#stop")).to_be_hidden(timeout=TIMEOUT_MS)


def wait_until_idle(page: Page, running: Running) -> None:
    while running.service.decode.num_sequences:  # ends with the next round, or the test with its timeout
        page.wait_for_timeout(20)


def text_of(page: Page, lane: int = 0) -> str:
    return page.locator(".answer").nth(lane).evaluate("answer => answer.textContent")


def answer_of(running: Running, text: str = "Recite!", max_tokens: int = 60) -> str:
    with running.client() as client:
        messages = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            temperature=0,
            max_tokens=max_tokens,  # type: ignore[arg-type]
        )
    return answer.choices[0].message.content or ""


def keep(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def overflow(page: Page) -> int:
    """Pixels that the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_an_answer_is_drawn_as_its_rounds(open_page: Callable[..., Page], running: Running) -> None:
    page = open_page()
    expect(page.locator("#model-label")).to_have_text(MODEL)
    keep(page, "welcome")
    ask(page)
    wait_for_the_end(page)
    assert text_of(page) == answer_of(running)
    lengths = page.locator(CHIP).evaluate_all("chips => chips.map(chip => chip.round.tokens.length)")
    assert sum(lengths) == 59 and max(lengths) > 1  # the first token belongs to no round
    assert page.locator(".bonus").count() > 0
    length, budget, speed = (page.locator(".meter b").nth(index).inner_text() for index in range(3))
    assert float(length) == pytest.approx(sum(lengths) / len(lengths), abs=0.01)
    assert float(budget) > 0 and float(speed) > 0
    expect(page.locator(".foot")).to_contain_text(f"60 tokens · {len(lengths)} rounds")
    # Screen readers hear the answer once, whole, when it is there.
    expect(page.get_by_role("status")).to_contain_text("End of the answer")


def test_hovering_shows_the_round_s_tree(open_page: Callable[..., Page]) -> None:
    page = open_page()
    ask(page)
    wait_for_the_end(page)
    panel, chip = page.locator("#panel"), page.locator(f"{CHIP}:has(.bonus)").first
    chip.hover()
    expect(panel).to_be_visible()
    seen = chip.evaluate("chip => ({budget: chip.round.budget, accepted: chip.round.tree.accepted.length})")
    assert panel.locator(".tree rect").count() == seen["budget"] + 2  # and the root, and the bonus token
    assert panel.locator("g.accepted").count() == seen["accepted"]
    assert panel.locator("g.bonus-node").count() == 1
    assert (
        panel.locator("g.rejected").count() + panel.locator("g.elsewhere").count() == seen["budget"] - seen["accepted"]
    )
    expect(panel).to_contain_text(f"{seen['budget']} node")
    keep(page, "tree")
    page.mouse.move(2, 2)
    expect(panel).to_be_hidden()


def test_everything_can_be_reached_with_the_keyboard(open_page: Callable[..., Page]) -> None:
    page = open_page()
    focus = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
    assert page.evaluate(focus) == "prompt"
    page.keyboard.press("Tab")
    assert page.evaluate(focus) == "race"
    page.keyboard.press("Space")
    expect(page.get_by_role("switch")).to_be_checked()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    assert page.evaluate(focus) == "send"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"  # the focus can be seen
    ask(page)
    wait_for_the_end(page)
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Tab")
    first, second = page.locator(CHIP).nth(0), page.locator(CHIP).nth(1)
    expect(first).to_be_focused()  # an answer is one stop; arrow keys move inside it
    panel = page.locator("#panel")
    expect(panel).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(second).to_be_focused()
    expect(page.locator("#panel-title")).to_have_text("Round 2")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(second).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#panel-tree")).to_be_focused()
    page.keyboard.press("Escape")
    expect(second).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate(focus) == "prompt"
    page.get_by_role("button", name="Settings").press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Settings")).to_be_hidden()


def test_a_race_runs_one_after_the_other(open_page: Callable[..., Page], running: Running, gate: Gate) -> None:
    page = open_page(color_scheme="dark")
    gate.hold_after(4)
    page.get_by_role("switch", name="Race plain decoding").click()
    ask(page)
    expect(page.locator(".lane").nth(0).locator(CHIP).first).to_be_visible()
    expect(page.locator(".lane").nth(1)).to_contain_text("waits")
    assert running.service.decode.num_sequences == 1
    gate.release()
    wait_for_the_end(page)
    assert text_of(page, 0) == text_of(page, 1) == answer_of(running)
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("Both wrote the same text.")
    expect(verdict).to_contain_text("One after the other")
    plain = page.locator(".lane").nth(1)
    assert plain.locator(".meter b").nth(0).inner_text() == "1.00"
    assert plain.locator(".meter b").nth(1).inner_text() == "0"
    assert plain.locator(CHIP).count() == 59 > page.locator(".lane").nth(0).locator(CHIP).count()
    page.get_by_role("button", name="Replay side by side").click()
    wait_for_the_end(page)
    assert text_of(page, 0) == text_of(page, 1) == answer_of(running)
    keep(page, "race-dark")
    page.set_viewport_size(PHONE)
    assert overflow(page) == 0
    keep(page, "race-phone")


def test_stopping_frees_the_slot(open_page: Callable[..., Page], running: Running, gate: Gate) -> None:
    page = open_page()
    gate.hold_after(4)
    ask(page, max_tokens=200)
    expect(page.locator(CHIP).first).to_be_visible()
    keep(page, "answering")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".foot")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    gate.release()
    expect(page.locator("#prompt")).to_be_focused()
    wait_until_idle(page, running)
    shown = text_of(page)
    assert answer_of(running, max_tokens=200).startswith(shown) and len(shown) > 0
    ask(page, "And on?", max_tokens=5)  # the conversation goes on from what was there
    wait_for_the_end(page)
    assert len(text_of(page, 1)) > 0


def test_a_new_chat_forgets_the_answer_that_was_under_way(open_page: Callable[..., Page], gate: Gate) -> None:
    page = open_page()
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    gate.hold_after(4)
    ask(page, "First", max_tokens=200)
    expect(page.locator(CHIP).first).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    gate.release()
    ask(page, "Second", max_tokens=5)
    wait_for_the_end(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Second"}]


def test_refusals_are_sentences(open_page: Callable[..., Page], running: Running, gate: Gate) -> None:
    page = open_page()
    problem = page.get_by_role("alert")
    ask(page, max_tokens=5000)
    expect(problem).to_contain_text("may have 256 tokens")
    expect(problem).to_contain_text(re.compile(r"^[A-Z].*\.Try again$"))
    gate.hold_after(1)
    page.context.set_offline(True)
    ask(page)
    expect(problem.nth(1)).to_contain_text("The server cannot be reached.")
    page.context.set_offline(False)
    with running.client() as client:
        full = client.completions.create(  # holds every slot there is
            model=MODEL, prompt="x", n=running.service.decode.limit, max_tokens=100, stream=True
        )
        ask(page)
        expect(problem.nth(2)).to_contain_text("server is busy")
        expect(problem.nth(2)).to_contain_text("It asks to wait 1\u00a0s.")
        keep(page, "problems")
        gate.release()
        full.close()
    wait_until_idle(page, running)  # else the server is still busy
    page.get_by_role("button", name="Try again").nth(0).click()  # with the answer's length in bounds now
    expect(problem).to_have_count(2)
    wait_for_the_end(page)
    assert text_of(page) == answer_of(running)


def test_a_key_is_asked_for_and_used(
    open_page: Callable[..., Page], serve_reciter: Callable[..., Running], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right-key\n", encoding="utf-8")
    locked = serve_reciter(api_keys_file=str(keys))
    try:
        page = open_page(locked.url)
        field = page.get_by_label("This server asks for an API key.")
        expect(field).to_be_focused()
        ask(page)
        expect(page.get_by_role("alert")).to_contain_text("This server asks for an API key.")
        field.fill("wrong-key")
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#key-form")).to_be_visible()
        field.fill("right-key")
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator(".foot")).to_contain_text("60 tokens")  # what had failed was asked again
        expect(page.locator("#race")).to_be_hidden()  # this server lets requests choose no method
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert "right-key" not in page.content()
    finally:
        locked.close()


def test_a_phone_has_room_for_it(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    assert overflow(page) == 0
    keep(page, "welcome-phone")
    ask(page)
    wait_for_the_end(page)
    assert overflow(page) == 0
    page.locator(CHIP).first.tap()
    panel = page.locator("#panel")
    expect(panel).to_be_visible()
    box = panel.bounding_box()
    assert box is not None and box["x"] == 0 and box["width"] == 375  # docked at the lower edge
    assert abs(box["y"] + box["height"] - PHONE["height"]) < 1
    keep(page, "tree-phone")
    page.get_by_role("button", name="Close").tap()
    expect(panel).to_be_hidden()
    assert (
        page.locator("#prompt").evaluate("box => parseFloat(getComputedStyle(box).fontSize)") >= 16
    )  # else phones zoom
