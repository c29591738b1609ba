"""Which GGUF files are models, and which one is meant: by names alone, in a folder or in a repository of the hub."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

# Files beside a model: projectors of images, calibration data, heads that draft.
_BESIDE = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_PREFERRED = ("Q4_K_M", "Q8_0")  # where no tag is given; llama.cpp's order


def parts_of(name: str) -> list[str]:
    """The files of a model split as `NAME-00001-of-00003.gguf`, of which `name` is any; else only itself."""
    found = _PART.search(name)
    if found is None:
        return [name]
    count = int(found[2])
    return [f"{name[: found.start()]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def models_of(names: Iterable[str]) -> list[str]:
    """The models among files, sorted; of a split one its first part."""
    files = sorted(name for name in names if name.endswith(".gguf"))
    models = [name for name in files if not any(word in PurePosixPath(name).name.lower() for word in _BESIDE)]
    return [name for name in models if parts_of(name)[0] == name]


def tagged(models: Iterable[str], tag: str | None) -> str | None:
    """The model that a tag such as Q4_K_M means; no tag, or "latest": Q4_K_M, else Q8_0, else the first one."""
    found = list(models)
    if tag is not None and tag.lower() != "latest":
        return _first(found, tag)
    return next((name for kind in _PREFERRED if (name := _first(found, kind))), found[0] if found else None)


def _first(models: list[str], tag: str) -> str | None:
    # "IQ4_XS-" must not be found by "Q4_XS", nor "UD-Q4_K_XL" before "Q4_K_XL"
    pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}[.-]", re.IGNORECASE)
    return min((name for name in models if pattern.search(name)), key=lambda name: (len(name), name), default=None)
