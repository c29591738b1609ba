"""The HTTP server: OpenAI's API in front of the engine. `hasten.server.app.make_app` makes the ASGI app.

Nothing here is imported unless a server is wanted; its packages are the extra `serve`.
"""

from importlib.util import find_spec

from hasten.errors import ResourceError

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx")


def require_packages(names: tuple[str, ...] = PACKAGES) -> None:
    """Raises ResourceError naming what is missing of the extra `serve`, and how to install it."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ResourceError(f"the server needs {', '.join(missing)}: pip install 'hasten[serve]'")
