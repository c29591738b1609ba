from pathlib import Path

import pytest

from hasten.errors import ResourceError
from hasten.machine import cache_folder, cache_root, cache_sizes


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HASTEN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "hasten"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "hasten"
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "own"))
    assert cache_folder("native") == tmp_path / "own" / "native"
    assert (tmp_path / "own" / "native").is_dir()


def test_sizes_count_nested_files_and_make_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "own"))
    assert cache_sizes() == {}
    assert not (tmp_path / "own").exists()
    folder = cache_folder("tokens") / "deep"
    folder.mkdir()
    (folder / "a").write_bytes(b"x" * 1000)
    (folder.parent / "b").write_bytes(b"x" * 24)
    cache_folder("native")
    assert cache_sizes() == {"native": 0, "tokens": 1024}


def test_a_cache_that_cannot_be_made_names_the_folder_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match=r"file/native cannot be made.*set HASTEN_CACHE"):
        cache_folder("native")


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setattr("hasten.machine.caches.os.access", lambda *_: False)  # the super-user may write anywhere
    with pytest.raises(ResourceError, match="not writable; set HASTEN_CACHE"):
        cache_folder("native")
