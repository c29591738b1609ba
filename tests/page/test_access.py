"""The page by keyboard, for screen readers, on a small screen, in light and dark."""

import pytest

from browser_case import until

pytestmark = pytest.mark.page

LONG = "a" * 300
STOPS = {"log", "model", "new", "open-settings", "toggle-engine", "message", "send"}
WIDTH = "document.scrollingElement.scrollWidth"
CONTRAST = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (parts(color)[3] !== 0) return color;
    }
  };
  const found = {};
  for (const node of document.querySelectorAll("button, h1, h2, dt, dd, p, td, th, li, summary, span, select, label")) {
    if (!node.textContent.trim() || !node.checkVisibility() || node.disabled) continue;
    const [a, b] = [getComputedStyle(node).color, behind(node)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found[node.id || node.className || node.textContent.slice(0, 20)] = ratio;
  }
  return found;
}"""


def tab_stops(page, count):
    """The controls that Tab reaches, with the outline that shows where the focus is."""
    found = {}
    for _ in range(count):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.id || document.activeElement.getAttribute('aria-label'),"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        found[name] = outline
    return found


def test_everything_is_done_by_keyboard(visit, served, fake):
    page = visit(served)
    page.locator("#model option").wait_for(state="attached")
    stops = tab_stops(page, 20)
    assert stops.keys() >= STOPS
    assert "none" not in {stops[name] for name in STOPS}
    page.reload()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the message
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    fake.endless, fake.delay = True, 0.02
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.text')?.textContent.length > 5")
    page.keyboard.press("Escape")
    page.locator(".note", has_text="Stopped.").wait_for()
    assert "line one\nline two" in fake.tokenizer.decode(fake.requests[-1].prompt, skip_special_tokens=False)
    assert {"Retry this answer", "Copy this answer", "Edit this message"} <= tab_stops(page, 25).keys()
    page.locator("#open-settings").focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog", name="Settings").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()
    assert page.evaluate("document.activeElement.id") == "open-settings"


def test_screen_readers_find_regions_names_and_what_changes(visit, served, ask):
    page = visit(served)
    ask(page, "hello")
    for role, name in (
        *(("main", "Chat"), ("complementary", "Engine"), ("navigation", "Page"), ("log", "Conversation")),
        *(("textbox", "Message"), ("combobox", "Model"), ("button", "Engine"), ("heading", "KV cache")),
        *(("article", "You"), ("article", "Model")),
    ):
        assert page.get_by_role(role, name=name, exact=True).count() == 1, (role, name)
    assert page.get_by_role("log").get_attribute("aria-live") == "polite"
    assert page.locator("html").get_attribute("lang") == "en"
    page.get_by_role("button", name="Settings").click()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')].filter((node) =>"
        " !(node.getAttribute('aria-label') || node.textContent.trim() && node.matches('button') ||"
        " node.labels?.length)).map((node) => node.outerHTML)"
    )
    assert unnamed == []
    other = page.evaluate(
        "[...document.querySelectorAll('button[aria-label]')].filter((node) =>"
        " !node.getAttribute('aria-label').startsWith(node.textContent)).map((node) => node.outerHTML)"
    )
    assert other == []  # who speaks to the page says what is written on a button


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(visit, served, ask, scheme):
    page = visit(served, color_scheme=scheme)
    ask(page, "hello")
    page.get_by_text("Not available here").wait_for()
    found = page.evaluate(CONTRAST)
    assert len(found) > 15
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 600) == (scheme == "light")
    page.get_by_role("button", name="Settings").click()
    page.locator("#theme").select_option("dark" if scheme == "light" else "light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background


def test_a_screen_of_320_pixels_never_scrolls_sideways(visit, served, fake, ask):
    fake.answer = fake.tokenizer.encode(f"{LONG}\n\n```\n{LONG}\n```\n\n- {LONG}", add_special_tokens=False)
    page = visit(served, viewport={"width": 320, "height": 640})
    ask(page, LONG)
    until(page, "document.querySelectorAll('.text li').length === 1")
    assert page.evaluate(WIDTH) == 320
    assert page.get_by_role("textbox", name="Message").is_visible()
    assert not page.locator("#engine").is_visible()
    page.get_by_role("button", name="Engine").click()
    assert page.locator("#engine").is_visible()
    assert page.evaluate(WIDTH) == 320
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(WIDTH) == 320
    box = page.locator("#settings").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 320
    outside = page.evaluate(
        "[...document.querySelectorAll('#settings *')].filter((n) => n.getBoundingClientRect().right > 320).length"
    )
    assert outside == 0
