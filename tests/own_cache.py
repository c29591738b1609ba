"""A cache folder for tests alone."""

from pathlib import Path

from hasten.machine import cache_folder


def make_cache(folder: Path) -> str:
    """An empty cache, but for the compiled kernels: they are known by their source, and compiling takes 20 seconds."""
    folder.mkdir(exist_ok=True)
    (folder / "kernels").symlink_to(cache_folder("kernels"), target_is_directory=True)
    return str(folder)
