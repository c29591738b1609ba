import os
import warnings
from pathlib import Path

import pytest

from hasten.errors import HastenWarning, ResourceError
from hasten.machine import cache_folder, cache_places, cache_root, cache_sizes, caches
from hasten.machine.caches import find_cached


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


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test alone, and no earlier warning."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    caches._warn.cache_clear()
    caches._temporary_folder.cache_clear()
    return tmp_path / "tmp" / f"hasten-{os.getuid()}"


def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cache read-only, also for the super-user, who may write anywhere."""
    monkeypatch.setenv("HASTEN_CACHE", str(folder))
    access = os.access
    monkeypatch.setattr(
        "hasten.machine.caches.os.access", lambda path, mode: folder not in Path(path).parents and access(path, mode)
    )


def test_a_cache_that_cannot_be_made_is_a_temporary_folder(temporary, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    with pytest.warns(HastenWarning, match=r"file cannot be written \(Not a directory\).*is used.*; set HASTEN_CACHE"):
        assert cache_folder("native") == temporary / "native"
    with warnings.catch_warnings(action="error"):  # said once
        assert cache_folder("native") == temporary / "native"
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert cache_places("native") == (temporary / "native",)


def test_a_home_that_is_not_known_is_a_temporary_folder(temporary, monkeypatch) -> None:
    for name in ("HASTEN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_places("native") == ()
    with pytest.warns(HastenWarning, match="no home folder is known"):
        assert cache_folder("native") == temporary / "native"


def test_a_read_only_cache_is_read(temporary, tmp_path, monkeypatch, recwarn) -> None:
    own = tmp_path / "own"
    (own / "native").mkdir(parents=True)
    (own / "native" / "old").touch()
    read_only(own, monkeypatch)
    assert find_cached("native", "old") == own / "native" / "old"
    assert not recwarn.list
    assert not temporary.exists()
    with pytest.warns(HastenWarning, match="own cannot be written"):
        (cache_folder("native") / "new").touch()
    assert find_cached("native", "new") == temporary / "native" / "new"
    assert find_cached("native", "old") == own / "native" / "old"
    assert find_cached("native", "none") is None


def test_a_folder_that_others_can_write_to_is_not_used(temporary, tmp_path, monkeypatch) -> None:
    temporary.mkdir()
    temporary.chmod(0o777)
    read_only(tmp_path / "own", monkeypatch)
    with pytest.warns(HastenWarning):
        folder = cache_folder("native")
    assert folder.parent != temporary
    assert folder.parent.parent == temporary.parent
    assert temporary / "native" not in cache_places("native")


def test_without_any_folder_it_is_an_error(temporary, tmp_path, monkeypatch) -> None:
    read_only(tmp_path / "own", monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ResourceError, match=r"no temporary folder can be made.*set HASTEN_CACHE"):
        cache_folder("native")
