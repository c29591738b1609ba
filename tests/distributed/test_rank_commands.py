"""`--tensor-parallel` at the command line, and what is refused."""

import json
import subprocess
import sys

import pytest

import hasten
from hasten.checkpoints.load import load
from hasten.cli.main import main
from hasten.engine.engine import Engine
from hasten.engine.following import END
from hasten.errors import ConfigError
from hasten.ops.collective import RankGroup
from tiny_model import tiny_llama

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hasten"]
HASTEN = [sys.executable, "-m", "hasten"]


@pytest.mark.parametrize(("program", "degree"), [(HASTEN, ["--tensor-parallel", "2"]), (TORCHRUN, [])])
def test_a_command_runs_in_ranks_and_the_first_one_speaks(program, degree, tmp_path, tiny_folder):
    out = tmp_path / "out.json"
    settings = ["--temperature", "0.8", "--seed", "5", "--max-new-tokens", "12", "--ignore-eos"]
    command = [*program, "generate", str(tiny_folder), "--prompt", "-", *settings, *degree, "--json", str(out)]
    done = subprocess.run(command, input="def add", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = hasten.generate(
        hasten.load(tiny_folder), "def add", temperature=0.8, seed=5, max_new_tokens=12, ignore_eos=True
    )
    assert json.loads(out.read_text())["tokens"] == alone[0].tokens
    assert done.stdout == f"def add{alone[0].text}\n"
    assert done.stderr.count("prompt tokens at") == 1


@pytest.mark.slow  # commands of several processes
def test_eval_in_two_ranks_finds_what_one_process_finds(tmp_path, tiny_folder):
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 8)
    command = [sys.executable, "-m", "hasten", "eval", str(tiny_folder), "--text", str(tmp_path / "text.txt")]
    found = []
    for ranks in ("1", "2"):
        out = tmp_path / f"{ranks}.json"
        options = ["--tensor-parallel", ranks, "--dtype", "float32", "--json", str(out)]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text()))
    assert found[0]["tokens"] == found[1]["tokens"] > 50
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tensor-parallel", "0"], "--tensor-parallel is 0"),
        (["--tensor-parallel", "999999"], "take at most 4"),  # before any is started
        (["--tensor-parallel", "2"], "torchrun has started 3 processes"),
    ],
)
def test_a_degree_that_does_not_fit_its_processes(options, told, tiny_folder, monkeypatch, capsys):
    if told.startswith("torchrun"):
        for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(tiny_folder), "--prompt", "x", *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_what_runs_in_one_process_is_refused_under_torchrun(tiny_folder, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for command in (["export", str(tiny_folder), "out"], ["doctor"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert "torchrun has started 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["generate", "--prompt", "x", "--pin"], "--pin is for one process"),
        (["generate", "--prompt", "x", "--adapter", "nowhere"], "nowhere is no folder with an adapter"),
        (["serve", "--adapter", "a=nowhere"], "nowhere is no folder with an adapter"),
        (["serve", "--port", "99999"], "--port 99999"),
        (["serve", "--port", "99999", "--devices", "auto"], "--port 99999"),
    ],
)
def test_what_ranks_cannot_take_is_refused_before_any_is_started(options, told, tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr("hasten.distributed.launch.start", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("hasten.machine.threads.pin_threads", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main([options[0], str(tiny_folder), "--tensor-parallel", "2", *options[1:]])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_more_ranks_than_heads_are_refused_before_a_weight_is_read(tiny_folder):
    with pytest.raises(ConfigError, match=r"--tensor-parallel is 5; .* take at most 4$"):
        load(tiny_folder, group=RankGroup(0, 5))


def test_a_share_is_not_saved(tiny_folder, tmp_path):
    share = load(tiny_folder, group=RankGroup(0, 2))
    with pytest.raises(ConfigError, match="this rank holds a share"):
        hasten.save(share, tmp_path / "share")


@pytest.mark.slow  # two processes compile
@pytest.mark.parametrize("options", [["--compile"], ["--draft", "self:int4"]])
def test_compiled_shares_and_drafts_of_the_whole_model_change_no_token(options, tiny_folder, tmp_path):
    out = tmp_path / "out.json"
    settings = ["--temperature", "0", "--max-new-tokens", "8", "--ignore-eos", "--dtype", "float32"]
    command = [*HASTEN, "generate", str(tiny_folder), "--prompt", "def add", *settings, *options]
    done = subprocess.run([*command, "--tensor-parallel", "2", "--json", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = hasten.load(tiny_folder, dtype="float32")
    alone = hasten.generate(model, "def add", temperature=0, max_new_tokens=8, ignore_eos=True)
    assert json.loads(out.read_text())["tokens"] == alone[0].tokens


@pytest.mark.slow  # commands of several processes
def test_a_chat_in_two_ranks_says_what_one_process_says(tiny_folder):
    lines = "hello\nfor name in names, \u00fc\n/clear\nand again\n"
    settings = ["--temperature", "0", "--max-new-tokens", "10", "--ignore-eos", "--dtype", "float32"]
    said = []
    for degree in ("1", "2"):
        command = [*HASTEN, "chat", str(tiny_folder), *settings, "--tensor-parallel", degree]
        done = subprocess.run(command, input=lines, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].count("\n") >= 3
    assert said[0] == said[1]


def test_a_model_in_memory_is_not_shared():
    with pytest.raises(ConfigError, match="from a folder or a file"):
        load(tiny_llama(), group=RankGroup(0, 2))


class Alone(RankGroup):
    """A group of one, in which the first rank's numbers are 5."""

    def sum(self, x):
        return x

    def gather(self, x, sizes):
        return x

    def of_first(self, numbers=()):
        return [5] * len(numbers)


def test_without_a_seed_all_ranks_draw_with_the_first_ones(tiny_folder):
    model, settings = load(tiny_folder, dtype="float32", group=Alone(0, 1)), {"temperature": 1.0, "max_new_tokens": 8}
    drawn = hasten.generate(model, ["def add", "def"], **settings)
    assert drawn == hasten.generate(model, ["def add", "def"], seed=5, **settings)


def test_a_server_closes_where_another_rank_has_died(tiny_folder):
    class Dead(Alone):
        def of_first(self, numbers=()):
            if numbers == [END]:
                raise RuntimeError("peer 1 has ended")
            return super().of_first(numbers)

    hasten.LLM(load(tiny_folder, dtype="float32", group=Dead(0, 1)), cache_bytes=1 << 20).close()


def test_ctrl_c_shows_what_there_is_and_ends_with_its_status(tiny_folder, monkeypatch, capsys):
    steps = iter([False, True])

    def advance(self, advance=Engine.advance):
        if next(steps):
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Engine, "advance", advance)
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(tiny_folder), "--prompt", "def", "--ignore-eos"])
    assert ended.value.code == 130
    said = capsys.readouterr()
    assert said.out.startswith("def")
    assert "1 new, first after" in said.err
