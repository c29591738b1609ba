"""Structure that import-linter does not check: no cycles, no two classes of one name, pages, their names and length."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hasten"


def test_no_modules_import_each_other():
    graph = grimp.build_graph("hasten", exclude_type_checking_imports=True)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imported).prepare()  # CycleError names the circle


def test_no_two_public_classes_have_one_name():
    homes = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_what_the_contributing_page_names_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    names = {name for name in re.findall(r"`([A-Za-z]\w+)(?:\([^`]*\))?`", page) if re.search(r"_|[a-z][A-Z]", name)}
    assert len(names) > 10
    folders = (SOURCE, ROOT / "tests")
    written = "\n".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    assert names - set(re.findall(r"\w+", written)) == set()


def test_the_stops_of_the_architecture_page_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    stops = re.findall(r"`([\w/]+\.(?:py|cpp|h)):([\w.]+)`", page)
    assert len(stops) > 30

    def made(file, name):  # a class or function of Python, a function of C++
        return re.search(rf"(def|class) {name}\b|^[^/\n]*\b{name}\(", (SOURCE / file).read_text(), re.MULTILINE)

    assert [f"{file}:{name}" for file, name in stops if not all(made(file, part) for part in name.split("."))] == []


def test_guides_are_short():
    """docs/*.md are guides but for these; what was measured is in docs/results/, depth in docs/in-depth/."""
    others = {"architecture", "reference", "start"}
    words = {page.stem: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert {name: count for name, count in words.items() if count > 1200 and name not in others} == {}


def test_pictures_of_the_pages_are_small_and_made_by_a_script():
    scripts = "\n".join(script.read_text() for script in (ROOT / "docs").glob("draw_*.py"))
    pictures = {picture.name: picture.stat().st_size for picture in (ROOT / "docs").glob("*.png")}
    assert {name for name, size in pictures.items() if size > 150_000 or f'"{name}"' not in scripts} == set()


def test_tutorials_say_how_long_they_take():
    pages = [ROOT / "docs" / "start.md", *(ROOT / "docs" / "tutorials").glob("*.md")]
    said = {page.stem: re.search(r"\bminutes\b", page.read_text().partition("\n## ")[0]) for page in pages}
    assert [name for name, found in said.items() if not found] == []
