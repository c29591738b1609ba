"""A real browser in front of a real server: Debian's chromium, driven by Playwright."""

import os
import shutil
from contextlib import ExitStack

import pytest

from browser_case import until
from fake_engine import FakeEngine
from server_case import app_of, serving

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LOADING = "Failed to load resource: "
EXPECTED = (f"{LOADING}the server responded with a status of 4", f"{LOADING}net::ERR_INTERNET_DISCONNECTED")


@pytest.fixture(scope="session")
def browser():
    """A browser; a test that cannot have one fails."""
    program = os.environ.get("HASTEN_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.fail("there is no chromium: apt-get install chromium, or name one in HASTEN_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """A function that opens a page in a window of its own. Nothing may be an error in its console."""
    errors = []
    with ExitStack() as windows:

        def opened(url, **options):
            window = windows.enter_context(browser.new_context(**options))
            page = window.new_page()
            page.set_default_timeout(15_000)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.goto(url)
            return page

        yield opened
    assert [error for error in errors if not error.startswith(EXPECTED)] == []


@pytest.fixture
def fake():
    from references import tiny_llama

    return FakeEngine(tiny_llama().tokenizer)


@pytest.fixture
def served(fake):
    """The address of a server whose engine says what a test has it say."""
    with serving(app_of(fake)) as (url, _):
        yield url


@pytest.fixture
def ask():
    """A function that sends a message and waits for the whole answer, unless told not to."""

    def send(page, text, *, wait=True):
        page.get_by_role("textbox", name="Message").fill(text)
        page.get_by_role("button", name="Send").click()
        if wait:
            until(page, "document.querySelector('#log').getAttribute('aria-busy') === 'false'")

    return send
