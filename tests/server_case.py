"""A server in a thread, for tests: uvicorn on a free port of the loopback interface, in front of any engine."""

import threading
import time
from contextlib import contextmanager

from hasten.server.app import make_app
from hasten.server.server import Server, bind, url_of
from hasten.server.service import Service
from hasten.server.settings import ServerSettings

PROMPT = {"model": "tiny", "prompt": "def", "max_tokens": 3}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
TOOL_TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} answer with <tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def app_of(engine, *, max_length=None, **settings):
    if max_length is not None:
        engine.engine.max_length = max_length
    return make_app(Service(engine, model_name="tiny", settings=ServerSettings(**settings)))


@contextmanager
def serving(app):
    """(url, server) of the app while it is served."""
    sock = bind("127.0.0.1", 0)
    server = Server(app, app.state.service.settings)
    thread = threading.Thread(target=server.run_on, args=(sock,), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:
        time.sleep(0.005)
    assert server.started, "the server did not start"
    try:
        yield url_of(sock, "127.0.0.1"), server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def read_to_end(client):
    """What the server sends until it closes."""
    received = b""
    try:
        while data := client.recv(4096):
            received += data
    except ConnectionError:
        pass
    return received
