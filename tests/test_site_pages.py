"""Links of pages in the site: they lead to where mkdocs has the files that they lead to on GitHub."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "docs" / "site_pages.py"
spec = importlib.util.spec_from_file_location("site_pages", FILE)
site_pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_pages)


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("README.md", "docs/start.md#serve-it", "start.md#serve-it"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "examples", "files/examples/index.md"),
        ("README.md", "benchmarks/results/gpu.json", "files/benchmarks/results/gpu.json"),
        ("docs/architecture.md", "../CONTRIBUTING.md#style", "contributing.md#style"),
        ("docs/start.md", "models.md", "models.md"),
        ("docs/start.md", "#install", "#install"),
        ("docs/results/ladder.md", "../ladder.md", "../ladder.md"),
        ("docs/results/gpu.md", "../../benchmarks/results/gpu.json", "../files/benchmarks/results/gpu.json"),
        ("docs/results/gpu.md", "https://arxiv.org/abs/2205.14135", "https://arxiv.org/abs/2205.14135"),
    ],
)
def test_a_link_leads_to_the_place_in_the_site(page, link, moved):
    assert site_pages.relinked(page, f"See [that]({link}) and ![that]({link}).") == (
        f"See [that]({moved}) and ![that]({moved})."
    )


@pytest.mark.parametrize("code", ["`[a](examples)`", "    x = [a](examples)", "```python\n[a](examples)\n```"])
def test_code_is_left_as_it_is(code):
    text = f"Before.\n\n{code}\n\nAfter."
    assert site_pages.relinked("README.md", text) == text
    assert list(site_pages.linked("README.md", text)) == []


def test_files_outside_the_pages_are_found_and_a_folder_becomes_a_page():
    text = "[a](docs/start.md) [b](examples) [c](LICENSE) [d](no-such-file) [e](CONTRIBUTING.md)"
    assert list(site_pages.linked("README.md", text)) == ["examples", "LICENSE"]
    page = site_pages.folder_page("examples")
    assert page.startswith("# examples\n")
    scripts = list((FILE.parents[1] / "examples").glob("*.py"))
    assert page.count("\n## ") >= len(scripts)
    assert all(f"\n## {script.name}\n\n```python\n{script.read_text()}```\n" in page for script in scripts)
