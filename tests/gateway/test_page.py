"""The page in a headless Chromium, before real processes: it types, streams, stops, and fits."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fork_server import Child
from gateway_stack import BUNDLED, GatewayStack, gateway_stack
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Locator,
    Page,
    expect,
    sync_playwright,
)

from splitpoint.transport.access import Caller, Role
from splitpoint_cli.security.token import add_token

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
MILLISECONDS = 30_000.0
# No sandbox and no shared memory of its own: both are missing in most containers.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
WIDE, PHONE = (1280, 860), (360, 740)
# Longer than a chunk, so that a second turn finds it in the cache.
QUESTION = "Write a function that reads a file, and returns the words of each of its lines. " * 2

expect.set_options(timeout=MILLISECONDS)


@pytest.fixture(scope="module")
def stack() -> Iterator[GatewayStack]:
    with gateway_stack(model=BUNDLED) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(stack: GatewayStack) -> str:
    return stack.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@dataclass
class Visit:
    """A browser's visit: the page, and what it must not have."""

    page: Page
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def turn(self, number: int) -> Locator:
        return self.page.locator(".turn").nth(number)

    def ask(self, text: str) -> Locator:
        """Type and send; return the turn."""
        number = self.page.locator(".turn").count()
        self.page.locator("#prompt").fill(text)
        self.page.keyboard.press("Enter")
        return self.turn(number)

    def set(self, name: str, value: str) -> None:
        settings = self.page.locator("#settings")
        if settings.get_attribute("open") is None:
            settings.locator("summary").click()
        self.page.locator(f"#{name}").fill(value)


@contextmanager
def visiting(
    browser: Browser, url: str, size: tuple[int, int] = WIDE, **options: Any
) -> Iterator[Visit]:
    viewport: Any = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, **options)
    page = context.new_page()
    visit = Visit(page, context)
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("console", lambda said: visit.complaints.append(said.text))
    page.on("request", lambda request: visit.urls.append(request.url))
    page.goto(url)
    yield visit
    context.close()
    # Everything came from the gateway.
    assert {each.partition("/")[2] for each in visit.urls if not each.startswith(url)} == set()


@pytest.fixture
def visit(browser: Browser, gateway: str) -> Iterator[Visit]:
    with visiting(browser, gateway) as visit:
        expect(visit.page.locator("#state-text")).to_have_text("1 worker ready")
        yield visit
        # No error, and nothing that the policy of the page had to block.
        assert visit.complaints == []


def status(gateway: str) -> Any:
    with urllib.request.urlopen(f"{gateway}/splitpoint/status", timeout=10) as answer:
        return json.load(answer)


def cached_share(turn: Locator) -> int:
    text = turn.locator(".facts li").first.inner_text()
    found = re.match(r"(\d+)\s%", text)
    assert found is not None, text
    return int(found[1])


# -- chat and prompt ------------------------------------------------------------------------


def test_a_chat_streams_and_the_second_turn_finds_the_first_one(visit: Visit) -> None:
    visit.set("max_tokens", "300")
    turn = visit.ask(QUESTION)
    expect(turn).to_have_class(re.compile("running"))
    answer = turn.locator(".answer")
    expect(answer).not_to_be_empty()
    early = len(answer.inner_text())
    assert "running" in (turn.get_attribute("class") or "")
    expect(turn.locator(".plan")).to_be_visible()
    assert len(answer.inner_text()) > early
    expect(turn).not_to_have_class(re.compile("running"))
    expect(turn.locator(".facts")).to_contain_text("300 tokens, cut at max tokens")
    expect(turn.locator(".facts")).to_contain_text("tokens/s")
    expect(turn.locator(".reason")).to_contain_text("nothing is cached")
    expect(turn.locator(".reason-details")).to_contain_text("resident")
    visit.set("max_tokens", "8")
    second = visit.ask("And now the other way round.")
    expect(second.locator(".plan")).to_be_visible()
    assert cached_share(second) >= 85
    # Colours are never alone: each part of the strip is also told in words.
    parts = second.locator(".segments span").count()
    assert parts == second.locator(".parts li").count() >= 2
    expect(second.locator(".segments")).to_have_attribute(
        "aria-label", re.compile(r"Prompt of \d+ tokens: .*new")
    )
    expect(visit.page.locator("#announcer")).to_contain_text("of the prompt was cached")
    second.locator("summary").click()
    expect(second.locator(".table")).to_contain_text("predicted")


def test_a_prompt_goes_on_from_its_answer_and_shows_its_tokens(visit: Visit) -> None:
    visit.page.get_by_text("Prompt", exact=True).click()
    visit.set("max_tokens", "12")
    visit.page.locator("#show_tokens").check()
    prompt = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n"
    turn = visit.ask(prompt)
    expect(turn.locator(".plan")).to_be_visible()
    tokens = turn.locator(".token")
    assert 6 <= tokens.count() <= 12
    assert re.fullmatch(r"probability [01]\.\d{3}", tokens.first.get_attribute("title") or "")
    answer = turn.locator(".answer").evaluate("node => node.textContent")
    assert "".join(tokens.all_text_contents()) == answer
    turn.get_by_text("Go on from here").click()
    second = visit.turn(1)
    expect(second.locator(".plan")).to_be_visible()
    assert second.locator(".said").evaluate("node => node.textContent") == prompt + answer
    assert cached_share(second) >= 60


def test_what_is_typed_and_answered_is_text_and_never_markup(visit: Visit) -> None:
    visit.set("max_tokens", "4")
    hostile = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    turn = visit.ask(hostile)
    expect(turn.locator(".plan")).to_be_visible()
    assert turn.locator(".said").inner_text() == hostile
    assert turn.locator("img, b >> text=bold").count() == 0
    assert visit.page.title() == "Splitpoint"


@pytest.mark.parametrize("by", ["key", "button"])
def test_an_answer_can_be_stopped(visit: Visit, gateway: str, by: str) -> None:
    visit.set("max_tokens", "3500")
    turn = visit.ask("Write everything there is.")
    expect(turn.locator(".answer")).not_to_be_empty()
    button = visit.page.locator("#send-button")
    expect(button).to_have_text("Stop")
    if by == "key":
        visit.page.keyboard.press("Escape")
    else:
        button.click()
    expect(turn).to_contain_text("Stopped.")
    expect(button).to_have_text("Send")
    deadline = time.monotonic() + MILLISECONDS / 1000
    while status(gateway)["scheduler"]["running_count"]:
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.05)
    visit.set("max_tokens", "4")
    expect(visit.ask("Next.").locator(".plan")).to_be_visible()


def test_an_error_is_told_and_can_be_tried_again(browser: Browser, gateway: str) -> None:
    with visiting(browser, gateway) as visit:
        visit.set("max_tokens", "4")
        expect(visit.ask("First.").locator(".plan")).to_be_visible()
        visit.set("max_tokens", "100000")
        turn = visit.ask("Too much.")
        problem = turn.get_by_role("alert")
        expect(problem).to_contain_text("context")
        visit.set("max_tokens", "4")
        problem.get_by_text("Try again").click()
        expect(visit.turn(1).locator(".plan")).to_be_visible()
        assert visit.page.locator(".turn").count() == 2
        visit.page.get_by_text("Clear", exact=True).click()
        assert visit.page.locator(".turn").count() == 0
        expect(visit.page.locator("#welcome")).to_be_visible()
        # Chromium itself reports the status of the refused request.
        assert all("400" in complaint for complaint in visit.complaints)


def test_a_setting_that_cannot_be_is_shown_and_nothing_is_sent(visit: Visit) -> None:
    visit.set("top_p", "7")
    visit.page.locator("#settings summary").click()
    visit.page.locator("#prompt").fill("Hello.")
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#top_p")).to_be_visible()
    assert visit.page.locator(".turn").count() == 0
    assert visit.page.locator("#prompt").input_value() == "Hello."


# -- the live view --------------------------------------------------------------------------


def test_the_live_view_follows_the_worker(visit: Visit) -> None:
    worker = visit.page.locator(".worker")
    expect(worker).to_have_count(1)
    expect(worker).to_contain_text("Worker 0")
    expect(worker).to_contain_text(re.compile(r"link measured [\d.]+\s[MG]B/s"))
    answered = visit.page.locator("#live-answered")
    before = int(answered.inner_text())
    worker.evaluate("node => { node.isSame = true }")
    visit.set("max_tokens", "600")
    turn = visit.ask("Count to a thousand.")
    compute = worker.get_by_role("meter", name=re.compile("compute"))
    expect(compute).to_have_attribute("aria-valuenow", re.compile(r"[1-9]\d*"))
    expect(turn.locator(".plan")).to_be_visible()
    expect(answered).to_have_text(str(before + 1))
    # It is filled in place: what a reader points at or selects stays.
    assert worker.evaluate("node => node.isSame")


def test_a_lost_gateway_is_told_and_found_again(browser: Browser, stack: GatewayStack) -> None:
    def start(address: str) -> Child:
        scheduler = stack.scheduler_address
        options = ("--listen", address, "--scheduler", scheduler)
        return stack.fleet.server.start("gateway_service", *options)

    child = start("127.0.0.1:0")
    address = child.wait_ready()
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://{address}")
    expect(page.locator(".worker")).to_have_count(1)
    child.kill()
    expect(page.locator("#live-message")).to_contain_text("The gateway does not answer")
    start(address).wait_ready()
    expect(page.locator(".worker")).to_be_visible()
    expect(page.locator("#live-message")).to_be_hidden()
    expect(page.locator("#state-text")).to_have_text("1 worker ready")
    context.close()


# -- keys -----------------------------------------------------------------------------------


def test_keys_are_asked_for_kept_in_memory_and_have_roles(
    browser: Browser, stack: GatewayStack, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.toml"
    client = add_token(file, Caller("someone", Role.CLIENT, "team"))
    admin = add_token(file, Caller("root", Role.ADMIN))
    address = stack.start_gateway("--tokens", str(file))
    with visiting(browser, f"http://{address}") as visit:
        page = visit.page
        dialog, state = page.get_by_role("dialog"), page.locator("#state-text")
        button, model = page.locator("#key-button"), page.locator("#model")
        expect(dialog).to_be_visible()
        expect(dialog).to_contain_text("The gateway needs an API key. A key is a token")
        expect(page.locator("#live-message")).to_contain_text("needs an API key")

        def give(key: str) -> None:
            if not dialog.is_visible():
                page.locator("#key-button").click()
            page.locator("#key").fill(key)
            page.keyboard.press("Enter")
            expect(dialog).to_be_hidden()

        # Without a key the dialog can be left, and nothing is asked for again and again.
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(state).to_have_text("needs an API key")
        give("wrong")
        expect(state).to_have_text("the key is not known")
        expect(button).to_have_text("Unknown key")
        expect(model).to_have_text("no model")
        expect(page.locator("#live-message")).to_contain_text("this one is not known")
        visit.ask("Hello.")
        expect(dialog).to_contain_text("The gateway does not know this API key. A key is")
        assert "authorization" not in page.locator("body").inner_text().lower()
        page.locator(".problem").wait_for()
        page.keyboard.press("Escape")
        page.locator("#clear-button").click()
        give(client)
        expect(state).to_have_text("1 worker ready")
        expect(button).to_have_text("API key set")
        expect(model).to_have_value("stdlib-llama")
        expect(page.locator("#live-message")).to_contain_text("role admin")
        refusals = sum(url.endswith("/splitpoint/status") for url in visit.urls)
        visit.set("max_tokens", "4")
        expect(visit.ask("Hello.").locator(".plan")).to_be_visible()
        page.wait_for_timeout(1500)
        # A key that may not is not tried again.
        assert sum(url.endswith("/splitpoint/status") for url in visit.urls) == refusals
        give(admin)
        expect(page.locator(".worker")).to_have_count(1)
        kept = page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert (kept, visit.context.cookies()) == ("[{},{}]", [])
        assert client not in page.content()
        assert not any(key in url for key in (client, admin) for url in visit.urls)
        page.reload()
        expect(dialog).to_be_visible()


# -- keyboard, sizes, colours ---------------------------------------------------------------


def test_everything_works_from_the_keyboard(visit: Visit) -> None:
    page = visit.page

    def focused() -> str:
        return str(page.evaluate("() => document.activeElement.id || document.activeElement.name"))

    assert focused() == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#prompt").input_value() == "one\ntwo"
    page.keyboard.press("Tab")
    assert focused() == "mode"
    page.keyboard.press("ArrowRight")
    expect(page.locator("#composer")).to_have_class(re.compile("prompt"))
    page.keyboard.press("ArrowLeft")
    for name in ("clear-button", "send-button"):
        page.keyboard.press("Tab")
        assert focused() == name
    visit.set("max_tokens", "4")
    page.locator("#send-button").focus()
    page.keyboard.press("Enter")
    expect(visit.turn(0).locator(".plan")).to_be_visible()
    page.locator("#theme-button").focus()
    page.keyboard.press("/")
    assert focused() == "prompt"
    # The first stop of the page is seen once it has the focus, and leads past the bar.
    skip = page.locator(".skip")
    skip.focus()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    assert focused() == "prompt"
    expect(skip).not_to_be_in_viewport()


@pytest.mark.parametrize("size", [PHONE, (768, 1024), WIDE, (2200, 1100)], ids=str)
def test_nothing_is_cut_off_at_any_width(
    browser: Browser, gateway: str, size: tuple[int, int]
) -> None:
    is_narrow = size[0] <= 900
    with visiting(browser, gateway, size, has_touch=is_narrow) as visit:
        page = visit.page
        wide = "() => document.scrollingElement.scrollWidth - window.innerWidth"
        if is_narrow:
            page.locator("#panel-button").tap()
            expect(page.locator(".worker")).to_be_visible()
            expect(page.locator("main")).to_be_hidden()
            assert page.evaluate(wide) <= 0
        visit.set("max_tokens", "40")
        if is_narrow:
            page.locator("#panel-button").tap()
        turn = visit.ask("Tell me of " + "a_very_long_name_without_any_space" * 5)
        expect(turn.locator(".plan")).to_be_visible()
        turn.locator("summary").click()
        assert page.evaluate(wide) <= 0
        for part in (".said", ".answer", ".plan", "#composer", "#send-button"):
            box = page.locator(part).first.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size[0]
        assert visit.complaints == []


LUMINANCE = """selectors => selectors.map(selector => {
  const node = document.querySelector(selector);
  const canvas = document.createElement("canvas").getContext("2d");
  const shown = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  let ground = node;
  const isClear = (node) => getComputedStyle(node).backgroundColor === "rgba(0, 0, 0, 0)";
  while (isClear(ground)) ground = ground.parentElement;
  return [shown(getComputedStyle(ground).backgroundColor), shown(getComputedStyle(node).color)];
})"""


def contrast(first: list[int], second: list[int]) -> float:
    """WCAG's contrast of two sRGB colours."""

    def luminance(color: list[int]) -> float:
        shares = [channel / 255 for channel in color]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_in_both_themes(browser: Browser, gateway: str, theme: Any) -> None:
    with visiting(browser, gateway, color_scheme=theme) as visit:
        visit.set("max_tokens", "4")
        expect(visit.ask("Hello.").locator(".plan")).to_be_visible()
        texts = [".said", ".answer", ".reason", ".facts b", ".facts", "#hint", "#send-button"]
        texts += ["#key-button", "#state-text", ".worker h3", ".detail", ".curve-note", "summary"]
        pairs = visit.page.evaluate(LUMINANCE, texts)
        for name, (ground, text) in zip(texts, pairs, strict=True):
            assert contrast(ground, text) >= 4.5, (name, ground, text)
        before = pairs[0]
        visit.page.locator("#theme-button").click()
        (ground, text), *_ = visit.page.evaluate(LUMINANCE, texts[:1])
        assert contrast(ground, before[0]) > 5
        assert contrast(ground, text) >= 4.5
