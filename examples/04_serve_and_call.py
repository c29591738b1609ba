"""Start an OpenAI-compatible server, call it with OpenAI's client (or with the standard library), and stop it.

pip install 'hasten[serve]'
python examples/04_serve_and_call.py [MODEL]
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Name three colours."}]

with socket.socket() as free:  # a free port of this machine
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
command = [sys.executable, "-m", "hasten", "serve", MODEL, "--port", str(port), "--served-model-name", "mine"]
server = subprocess.Popen(command)


def wait_until_ready() -> None:
    """Poll /ready, which says 200 once the model is loaded."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    sys.exit("the server did not start")


try:
    wait_until_ready()
    try:
        from openai import OpenAI
    except ImportError:
        body = json.dumps({"model": "mine", "messages": MESSAGES, "max_tokens": 24}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            print(json.load(response)["choices"][0]["message"]["content"])
    else:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused")
        for chunk in client.chat.completions.create(model="mine", messages=MESSAGES, max_tokens=24, stream=True):
            print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
        print()
finally:
    server.send_signal(signal.SIGTERM)  # finishes the requests in flight, then exits
    server.wait()
