"""The chat of the page in a browser: streamed, stopped, retried, edited, kept; hostile text stays text."""

import pytest

from browser_case import until
from hasten.engine.request import RequestRefused
from hasten.server.app import make_app
from hasten.server.service import Service
from hasten.server.settings import ServerSettings
from server_case import app_of, serving, wait_until

pytestmark = pytest.mark.page

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b&gt;'
CODE = "def add(a, b):\n    return a + b\n"


def says(fake, text):
    fake.answer = fake.tokenizer.encode(text, add_special_tokens=False)


def prompt_of(fake):
    return fake.tokenizer.decode(fake.requests[-1].prompt, skip_special_tokens=False)


def test_an_answer_is_streamed(visit, served, fake, ask):
    fake.delay = 0.05
    says(fake, "one two three four five six seven eight nine ten")
    page = visit(served)
    ask(page, "count", wait=False)
    text = page.locator(".text")
    until(page, "document.querySelector('.text')?.textContent.startsWith('one')")
    assert text.inner_text() != "one two three four five six seven eight nine ten"
    assert page.get_by_role("log").get_attribute("aria-busy") == "true"
    until(page, "document.querySelector('.text').textContent.endsWith('ten')")
    page.get_by_text("tokens/s").first.wait_for()
    assert page.get_by_role("status").filter(has_text="The answer is complete.").count() == 1
    assert "<|user|>count" in prompt_of(fake)


def test_a_complete_answer_waits_for_no_frame(visit, served, fake, ask):
    says(fake, "one two three")
    page = visit(served)
    page.evaluate("window.requestAnimationFrame = () => 1")
    ask(page, "count")
    assert page.locator(".text").inner_text() == "one two three"


def test_an_answer_can_be_stopped_and_what_came_is_kept(visit, served, fake, ask):
    fake.delay, fake.endless = 0.02, True
    page = visit(served)
    ask(page, "go on", wait=False)
    until(page, "document.querySelector('.text')?.textContent.length > 20")
    page.get_by_role("button", name="Stop").click()
    wait_until(lambda: len(fake.aborted) == 1)
    page.locator(".note", has_text="Stopped.").wait_for()
    fake.endless = False
    ask(page, "again")
    assert "<|user|>go on\n<|assistant|>def add" in prompt_of(fake)


def test_an_answer_can_be_had_again(visit, served, fake, ask):
    page = visit(served)
    ask(page, "hello")
    page.get_by_role("button", name="Retry this answer").click()
    wait_until(lambda: len(fake.requests) == 2)
    page.get_by_role("button", name="Retry this answer").wait_for()
    assert fake.requests[0].prompt == fake.requests[1].prompt
    assert page.get_by_role("article").count() == 2


def test_a_message_can_be_edited_and_what_followed_is_dropped(visit, served, fake, ask):
    page = visit(served)
    ask(page, "first")
    ask(page, "second")
    page.get_by_role("button", name="Edit this message").first.click()
    field = page.get_by_role("textbox", name="Edited message")
    assert field.input_value() == "first"
    field.press("Escape")
    assert page.get_by_role("article").count() == 4
    page.get_by_role("button", name="Edit this message").first.click()
    field.fill("changed")
    page.get_by_role("button", name="Send the edited message").click()
    wait_until(lambda: len(fake.requests) == 3)
    page.get_by_role("button", name="Retry this answer").wait_for()
    assert page.get_by_role("article").count() == 2
    assert "changed" in prompt_of(fake)
    assert "first" not in prompt_of(fake)


def test_a_reload_keeps_the_conversation_and_the_settings(visit, served, fake, ask):
    says(fake, f"Look:\n\n```python\n{CODE}```\n\nand *that* is `it`.")
    page = visit(served)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Close").click()
    ask(page, "hello")
    before = page.locator(".text").inner_html()
    assert "<pre" in before and "<em>that</em>" in before and "<code>it</code>" in before  # noqa: PT018
    page.reload()
    page.get_by_role("article").nth(1).wait_for()
    until(page, "document.querySelector('.text').textContent.includes('return')")
    assert page.locator(".text").inner_html() == before
    ask(page, "more")
    assert fake.requests[-1].params.temperature == 0.5
    assert prompt_of(fake).startswith("<|system|>Be brief.\n<|user|>hello\n")
    page.get_by_role("button", name="New chat").click()
    page.reload()
    page.locator("#hint").wait_for()
    assert page.get_by_role("article").count() == 0


def test_a_reload_keeps_what_had_come_of_an_answer(visit, served, fake, ask):
    fake.delay, fake.endless = 0.02, True
    page = visit(served)
    ask(page, "go on", wait=False)
    until(page, "document.querySelector('.text')?.textContent.length > 20")
    page.reload()
    page.locator(".note", has_text="Interrupted.").wait_for()
    assert page.locator(".said").inner_text() == "go on"
    until(page, "document.querySelector('.text').textContent.startsWith('def add')")
    wait_until(lambda: len(fake.aborted) == 1)


def test_code_is_copied_as_it_was_written(visit, served, fake, ask):
    says(fake, f"```python\n{CODE}```")
    page = visit(served, permissions=["clipboard-read", "clipboard-write"])
    ask(page, "code")
    page.get_by_role("button", name="Copy code").click()
    page.get_by_text("Copied", exact=True).wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == CODE
    assert page.locator(".bar span").inner_text() == "python"


def test_reasoning_is_folded(visit, fake, ask):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
        "</think>\n\n{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fake.engine.tokenizer = fake.tokenizer.with_chat_template(template)
    says(fake, "<think>\nhidden thoughts\n</think>\n\nThe answer.")
    with serving(app_of(fake)) as (url, _):
        page = visit(url)
        ask(page, "why")
        page.get_by_text("The answer.").wait_for()
        thoughts = page.locator(".thoughts")
        assert not thoughts.is_visible()
        page.locator("summary", has_text="Reasoning").click()
        assert thoughts.is_visible()
        assert "hidden thoughts" in thoughts.inner_text()
        assert "hidden" not in page.locator(".text").inner_text()


def test_hostile_text_stays_text(visit, fake, ask):
    says(
        fake,
        f"{HOSTILE}\n\n# {HOSTILE}\n\n- {HOSTILE}\n- **{HOSTILE}**\n\n```{HOSTILE}\n{HOSTILE}\n```\n\n> `{HOSTILE}`",
    )
    with serving(make_app(Service(fake, model_name=HOSTILE, settings=ServerSettings()))) as (url, _):
        page = visit(url)
        ask(page, HOSTILE)
        until(page, "document.querySelectorAll('.text blockquote').length === 1")
        assert page.locator(".text").inner_text().count("<img src=x") == 7
        assert page.locator(".said").inner_text() == HOSTILE
        assert page.locator("#model option").inner_text() == HOSTILE
        fake.refusal = RequestRefused(HOSTILE)
        ask(page, "again")
        page.locator(".error", has_text="<img src=x").wait_for()
        page.reload()
        page.get_by_role("article").first.wait_for()
        page.wait_for_timeout(300)  # an image that fails to load would have run its handler by then
        assert page.evaluate("window.hacked") is None
        assert page.locator("img, #log script, #model script").count() == 0


def test_a_refusal_is_shown_and_left_out_of_what_follows(visit, served, fake, ask):
    fake.refusal = RequestRefused("not today")
    page = visit(served)
    ask(page, "refused")
    page.locator(".error", has_text="not today").wait_for()
    fake.refusal = None
    ask(page, "taken")
    assert prompt_of(fake) == "<|user|>taken\n<|assistant|>"


def test_a_key_is_asked_for_once(visit, fake, ask):
    with serving(app_of(fake, api_keys=("secret",))) as (url, _):
        page = visit(url)
        key = page.get_by_label("Key", exact=True)
        for given in ("wrong", "secret"):
            key.fill(given)
            page.get_by_role("button", name="Use this key").click()
            if given == "wrong":
                page.get_by_text("The server does not know this key.").wait_for()
        page.locator("#model option").wait_for(state="attached")
        ask(page, "hello")
        page.reload()
        page.locator("#model option").wait_for(state="attached")
        ask(page, "more")
        assert not page.get_by_role("dialog").is_visible()
        assert "secret" in page.evaluate("JSON.stringify(sessionStorage)")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_page_without_a_key_says_so_and_asks_no_more(visit, fake):
    with serving(app_of(fake, api_keys=("secret",))) as (url, _):
        page = visit(url)
        page.get_by_label("Key", exact=True).press("Escape")
        page.get_by_text("this server needs a key; reload").first.wait_for()
        page.wait_for_timeout(1500)  # in which a lost stream would be asked for again
        assert not page.get_by_role("dialog").is_visible()
