"""The map of the engine in a browser, of a tiny model that really generates."""

import time

import pytest

from browser_case import until
from hasten.engine.async_engine import AsyncEngine
from references import tiny_llama
from server_case import app_of, serving, wait_until
from serving_cases import make_engine

pytestmark = pytest.mark.page
MAP = "document.querySelector('#map')"


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def engine(model):
    """An engine that takes a few seconds for an answer, and does not end one before its most tokens."""
    engine = AsyncEngine(make_engine(model, blocks=400))
    engine.engine.eos_ids = frozenset()
    step = engine.engine.step
    engine.engine.step = lambda: (time.sleep(0.01), step())[1]
    return engine


@pytest.fixture
def url(engine):
    with serving(app_of(engine, max_length=512)) as (url, _):
        yield url


def settings(page, **fields):
    page.get_by_role("button", name="Settings").click()
    for name, value in fields.items():
        page.locator(f"#{name}").fill(str(value))
    page.get_by_role("button", name="Close").click()


def test_the_map_changes_while_the_model_writes(visit, url, ask):
    page = visit(url)
    page.get_by_text("Live", exact=True).wait_for()
    settings(page, max_tokens=150)
    empty = page.evaluate(f"{MAP}.toDataURL()")
    ask(page, "def add", wait=False)
    until(page, f"{MAP}.dataset.used > 8")
    assert page.evaluate(f"{MAP}.toDataURL()") != empty
    assert int(page.locator("#running").inner_text()) == 1
    assert page.locator("#sequences tr").count() == 1
    until(page, "parseFloat(document.querySelector('#rate-generation').textContent) > 0")
    until(page, f"{MAP}.dataset.used === '0' && {MAP}.dataset.cached > 8")
    assert "0 of 400 blocks in use" in page.locator("#map").get_attribute("aria-label")
    page.locator("#map").hover(position={"x": 4, "y": 4})
    page.locator("#map-block", has_text="Block 0: a cached prefix").wait_for()


def test_samples_share_the_blocks_of_their_prompt(visit, url, ask):
    page = visit(url)
    page.get_by_text("Live", exact=True).wait_for()
    settings(page, max_tokens=100, n=4)
    ask(page, "def add(a, b): return", wait=False)
    until(page, f"{MAP}.dataset.shared > 0")
    until(page, f"{MAP}.dataset.copied > 0")
    until(page, "document.querySelectorAll('#sequences tr').length === 4")
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator(".sample").count() == 4
    page.get_by_role("button", name="Choose: sample 3").click()
    assert page.get_by_role("button", name="Chosen: sample 3").get_attribute("aria-pressed") == "true"
    texts = page.evaluate("JSON.parse(sessionStorage['hasten-turns'])[1].samples.map((one) => one.text)")
    assert len(set(texts)) == 4
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "more", wait=False)
    assert sent.value.post_data_json["messages"][1]["content"] == texts[2]
    page.get_by_role("button", name="Stop").click()


def test_kernels_are_explained(visit, url):
    page = visit(url)
    entry = page.locator("#kernels details").first
    entry.wait_for()
    assert not entry.locator("li").first.is_visible()
    entry.locator("summary").click()
    assert entry.locator("li").first.inner_text().startswith("not ")
    assert "thread" in page.locator("#machine").inner_text()


def test_a_page_that_is_not_looked_at_watches_nothing(visit, url, engine):
    page = visit(url)
    page.get_by_text("Live", exact=True).wait_for()
    wait_until(lambda: engine.engine.on_copies is not None)
    page.get_by_role("button", name="Engine").click()
    wait_until(lambda: engine.engine.on_copies is None)
    page.get_by_role("button", name="Engine").click()
    wait_until(lambda: engine.engine.on_copies is not None)
    page.close()
    wait_until(lambda: engine.engine.on_copies is None)


def test_an_engine_without_a_map_says_so(visit, served):
    page = visit(served)
    page.get_by_text("Not available here").wait_for()
    assert not page.locator("#map").is_visible()


def test_a_stream_that_ended_is_followed_again(visit, url):
    page = visit(url)
    page.get_by_text("Live", exact=True).wait_for()
    page.context.set_offline(True)
    page.evaluate("watching.abort(), watching = null, watch()")
    page.get_by_text("Not connected").wait_for()
    page.context.set_offline(False)
    page.get_by_text("Live", exact=True).wait_for()
