"""The HTTP server: OpenAI's API in front of the engine. `hasten.server.app.make_app` builds the ASGI app.

Imported only when a server is started; the packages it needs are the extra `serve`.
"""

from importlib.util import find_spec

from hasten.errors import ResourceError

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx")


def require_packages(names: tuple[str, ...] = PACKAGES) -> None:
    """Raise ResourceError if packages of the extra `serve` are missing, naming them and how to install them."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ResourceError(f"the server needs {', '.join(missing)}: pip install 'hasten[serve]'")
