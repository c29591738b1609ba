"""The runner of pages itself: what it runs, what it accepts, and what it refuses."""

import os
import time

import pytest

from command_pages import PAGES, PageError, blocks, differences, shape, written

PAGE = """# A page

```python title="say.py"
import sys
print("one", sys.argv[1], "of 5 in 0.25 s")
```

```bash
python say.py 3
echo to standard error >&2
```

```text
one 4 of 17 in 1.5 s
to standard error
```
"""


def test_a_page_runs_in_order_and_numbers_may_differ(tmp_path):
    assert differences(PAGE, tmp_path) == []
    assert (tmp_path / "say.py").read_text() == blocks(PAGE)[0].text


def test_instruction_sets_and_the_widths_of_tables_may_differ():
    assert shape("int8 (native, avx2)\n│ a │ 10 │\n└───┘") == shape("int8 (native, amx)\n│ a   │  9.5 │\n└────────┘")
    assert shape("int8 (native, avx2)") != shape("int4 (native, avx2)")  # the digit belongs to a name


def test_other_words_are_a_difference(tmp_path):
    found = differences(PAGE.replace("one 4", "two 4"), tmp_path)
    assert "-two # of # in # s" in found
    assert "+one # of # in # s" in found


def test_a_line_too_few_is_a_difference(tmp_path):
    assert "+to standard error" in differences(PAGE.replace("\nto standard error\n```", "\n```"), tmp_path)


def test_the_words_of_an_example_may_differ_but_there_are_some(tmp_path):
    example = PAGE.replace("```text", '```text title="For example"').replace("one 4", "two 4")
    assert differences(example, tmp_path) == []
    assert differences(example.replace("python say.py 3\necho to standard error >&2", "true"), tmp_path) != []


def test_writing_puts_in_what_is_printed(tmp_path):
    page = written(PAGE, tmp_path)
    assert "```text\none 3 of 5 in 0.25 s\nto standard error\n```\n" in page
    assert page.partition("```text")[0] == PAGE.partition("```text")[0]
    assert written(page, tmp_path) == page


@pytest.mark.parametrize("failing", ["false\n", "false | cat\n", "python say.py\n", "hasten no-such-command\n"])
def test_a_command_that_fails_ends_the_page(tmp_path, failing):
    page = PAGE.replace("echo to", f"{failing}echo to")
    with pytest.raises(PageError, match="ends with status"):
        differences(page, tmp_path)


@pytest.mark.parametrize("first", ["```text\nprinted by nobody\n```\n", "```python\nprint(1)\n```\n"])
def test_a_block_without_a_role_is_refused(tmp_path, first):
    with pytest.raises(PageError, match="no command, file or output"):
        differences(first + PAGE, tmp_path)


def test_the_installation_is_not_run(tmp_path):
    assert differences('```bash title="Install"\nexit 1\n```\n' + PAGE, tmp_path) == []


SERVER = """
```python title="server.py"
import os, time
print("serving at http://127.0.0.1:9", flush=True)
open("pid", "w").write(str(os.getpid()))
time.sleep(600)
```

```bash title="Leave it running"
python server.py
```

```text
serving at http://127.0.0.1:8
```

```bash
cat pid > seen
```
"""


def test_what_is_left_running_runs_until_the_page_ends(tmp_path):
    assert differences(SERVER, tmp_path) == []
    pid = int((tmp_path / "seen").read_text())
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_ends_at_once_is_an_error(tmp_path):
    page = SERVER.replace('print("serving at http://127.0.0.1:9", flush=True)', "raise SystemExit('no port')")
    with pytest.raises(PageError, match="no port"):
        differences(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_has_a_role(page):
    """What tests/real/test_pages.py runs, checked in time: a command, a file, or the output of the commands above."""
    text = page.read_text()
    found = blocks(text)
    assert any(block.kind == "bash" for block in found)
    for file in (block for block in found if block.is_file):  # GitHub does not show titles
        assert f"`{file.title}`" in text[: file.span[0]], file.title
    for before, block in zip([None, *found], found, strict=False):
        shown = block.kind == "text" and before is not None and before.kind == "bash"
        assert block.kind == "bash" or block.is_file or shown, block
