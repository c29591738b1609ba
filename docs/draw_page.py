"""Draws the page of a server that runs, light and dark, while it answers: docs/page.png and docs/page-dark.png.

    hasten serve smollm2-135m --port 8000 --max-length 1024 --max-sequences 16
    python docs/draw_page.py http://127.0.0.1:8000        # pip install 'hasten[page]', and Debian's chromium

The pictures are of the server's own page in a browser; nothing in them is drawn by hand.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server")
SIZE = {"width": 1280, "height": 800}
SETTINGS = {"n": "4", "max_tokens": "80", "temperature": "0.7", "seed": "2"}
LONG_ENOUGH = re.compile(r"[\s\S]{160}")
QUESTION = "Why does a language model keep the keys and values of earlier tokens?"


def draw(browser: Browser, url: str, scheme: str, file: Path) -> None:
    """Ask for four samples, and take the picture when their texts have some length."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(url)
    page.get_by_text("Live", exact=True).wait_for()
    page.get_by_role("button", name="Settings").click()
    for name, value in SETTINGS.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_role("button", name="Close").click()
    page.get_by_role("textbox", name="Message").fill(QUESTION)
    page.get_by_role("textbox", name="Message").press("Enter")
    page.locator(".sample:last-child .text", has_text=LONG_ENOUGH).wait_for()
    page.screenshot(path=file)
    page.close()
    picture = Image.open(file).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)


def main() -> None:
    program = os.environ.get("HASTEN_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        for scheme, name in (("light", "page.png"), ("dark", "page-dark.png")):
            draw(browser, sys.argv[1], scheme, Path(__file__).with_name(name))
        browser.close()


if __name__ == "__main__":
    main()
