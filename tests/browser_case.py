"""Waiting for a page in a browser whose Content Security Policy forbids Playwright's own `wait_for_function`."""

import json

from server_case import wait_until


def until(page, expression):
    """Wait until a JavaScript expression holds in the page."""
    try:
        wait_until(lambda: page.evaluate(f"Boolean({expression})"), 15)
    except AssertionError:
        raise AssertionError(f"never so: {expression}; the page: {json.dumps(page.inner_text('body'))}") from None
