"""A file is the old one or the new one, and nothing else stays behind."""

from pathlib import Path

import pytest

from hasten.machine.files import replacing, write_atomically


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in ("ä\n", b"\xff\r\n"):
        write_atomically(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_after_an_error_the_old_file_stands_alone(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write(place: Path) -> None:
        place.write_text("half")
        raise error

    with pytest.raises(type(error)), replacing(path) as temporary:
        write(temporary)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_wrote_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "x"):
        pass
    assert not list(tmp_path.iterdir())
