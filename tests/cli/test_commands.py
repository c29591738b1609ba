"""The commands as a user runs them: what they print, where, and with which exit status."""

import io
import json
import re
import signal
import subprocess
import sys
import tomllib
import warnings
from functools import partial
from pathlib import Path

import pytest

import hasten
from hasten.cli.main import COMMANDS, main
from hasten.engine.params import SamplingParams
from hasten.engine.speculation import Speculator
from hasten.errors import ConfigError, HastenWarning


def run(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "hasten", *map(str, arguments)], capture_output=True, text=True, timeout=120, **settings
    )


def test_help_is_quick_and_needs_no_torch():
    probe = (
        "import sys; from hasten.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_the_version_is_the_projects_and_the_changelogs(capsys):
    root = Path(__file__).parents[2]
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    main(["--version"])
    assert capsys.readouterr().out == f"hasten {version}\n"
    changes = (root / "CHANGELOG.md").read_text()
    sections = [section for section in changes.split("\n## ")[1:] if not section.startswith("Unreleased\n")]
    assert sections[0].startswith(f"{version} ")
    assert max(len(part.splitlines()) for part in changes.split("\n## ")) <= 60  # a screen


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_that_needs_no_torch(name):
    probe = (
        f"import sys; from hasten.cli.main import main\n"
        f"try: main([{name!r}, '--help'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_generate_json_is_all_there_is_on_standard_output(tiny_folder, capfd):
    main(
        [
            "generate",
            str(tiny_folder),
            "--prompt",
            "def add",
            "--max-new-tokens",
            "5",
            "--temperature",
            "0",
            "--json",
            "-",
            "--ignore-eos",
        ]
    )
    out, _ = capfd.readouterr()
    result = json.loads(out)
    assert set(result) == {
        "text",
        "tokens",
        "finish_reason",
        "prompt_tokens",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "time_to_first_token_seconds",
        "speculation",
    }
    assert len(result["tokens"]) == 5
    assert result["finish_reason"] == "length"
    assert result["decode_tokens_per_second"] > 0


def test_generate_streams_text_and_reports_speed_apart(tiny_folder, capfd):
    main(["generate", str(tiny_folder), "--prompt", "def add", "--max-new-tokens", "5", "--seed", "1"])
    out, err = capfd.readouterr()
    assert out.startswith("def add")
    assert "prompt tokens" in err


def test_one_token_has_no_decoding_speed(tiny_folder, capfd):
    main(["generate", str(tiny_folder), "--prompt", "def add", "--max-new-tokens", "1", "--ignore-eos"])
    _, err = capfd.readouterr()
    assert "1 new, first after" in err


@pytest.mark.filterwarnings("default::hasten.errors.HastenWarning")
def test_warnings_of_a_load_that_fails_are_shown(tiny_folder, capfd, monkeypatch):
    def read_model(self, device):
        warnings.warn("the file is older than its index", HastenWarning, stacklevel=2)
        raise ConfigError("no room for it")

    monkeypatch.setattr("hasten.cli.options.LoadOptions.read_model", read_model)
    with pytest.raises(SystemExit):
        main(["generate", str(tiny_folder), "--prompt", "x"])
    _, err = capfd.readouterr()
    assert "the file is older than its index" in err
    assert "error: no room for it" in err


def test_generate_several_prompts_and_ids(tiny_folder, tmp_path, capfd):
    file = tmp_path / "out.json"
    main(["generate", str(tiny_folder), "--prompt", "def", "for", "--max-new-tokens", "3", "--json", str(file)])
    assert [o["prompt_tokens"] for o in json.loads(file.read_text())["outputs"]] == [1, 1]
    main(["generate", str(tiny_folder), "--prompt-ids", "1", "2", "--max-new-tokens", "3", "--json", "-"])


def test_generate_answers_in_the_chat_template(tiny_folder, tmp_path, capfd):
    import hasten

    model = hasten.load(tiny_folder)
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "def add"}])
    (expected,) = hasten.generate(model, prompt, hasten.SamplingParams(temperature=0, max_new_tokens=5))
    arguments = ["generate", str(tiny_folder), "--prompt", "def add", "--max-new-tokens", "5", "--temperature", "0"]
    main([*arguments, "--chat"])
    assert capfd.readouterr().out == expected.text + "\n"
    folder = tmp_path / "thinking"
    hasten.save(model, folder)
    (folder / "chat_template.jinja").write_text("{{ think }}{{ messages[0].content }}")
    arguments[1] = str(folder)
    main([*arguments, "--chat", "--chat-template-kwargs", '{"think": false}', "--json", "-"])
    assert json.loads(capfd.readouterr().out)["prompt_tokens"] == len(model.tokenizer.encode("Falsedef add"))


@pytest.mark.parametrize(
    "options",
    [[], ["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--no-fuse"], ["--quantize", "int8"]]
    + [["--dtype", "bfloat16", "--quantize", scheme] for scheme in ("int8", "int4")],
)
def test_eval_json(tiny_folder, tmp_path, capfd, options):
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 5)
    main(["eval", str(tiny_folder), "--text", str(text), "--context", "32", "--json", "-", *options])
    result = json.loads(capfd.readouterr().out)
    assert set(result) == {"perplexity", "bits_per_byte", "tokens", "dtype", "path", "seconds"}
    assert result["perplexity"] == pytest.approx(458, rel=0.2)  # random weights; what the unfused float32 model says


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "not a command"),
        (["generate", "no/such/folder", "--prompt", "x"], "no/such/folder"),
        (["generate", "FOLDER"], "--prompt"),
        (["generate", "FOLDER", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "FOLDER", "--prompt", "x", "--device", "cuda:9"], "cuda"),
        (["generate", "FOLDER", "--prompt", "x", "--threads", "0"], "threads"),
        (["generate", "FOLDER", "--prompt", "x", "--threads", "1000000"], "threads"),
        (["generate", "FOLDER", "--prompt", "x", "--json", "/tmp"], "/tmp is a folder"),
        (["generate", "FOLDER", "--prompt", "x", "--draft", "no/such/draft"], "no/such/draft"),
        (["generate", "FOLDER", "--prompt", "x", "--draft", "self:99-layers"], "take from 1 to"),
        (["generate", "FOLDER", "--prompt", "x", "--draft", ""], "draft is empty"),
        (["generate", "FOLDER", "--prompt", "x", "--draft", "suffix", "--speculate", "0"], "speculate"),
        (["generate", "FOLDER", "--prompt", "x", "--draft", "suffix", "--speculate", "65"], "speculate"),
        (
            ["generate", "FOLDER", "--prompt", "x", "--draft", "suffix", "--accept", "distribution"],
            "with --draft suffix",
        ),
        (
            ["generate", "FOLDER", "--prompt", "x", "--draft", "SUFFIX", "--accept", "distribution"],
            "with --draft suffix",
        ),
        (["generate", "FOLDER", "--prompt", "x", "--quantize", "int4", "--draft", "self:int4"], "in int4 itself"),
        (["generate", "FOLDER", "--prompt", "x", "--quantize", "int4", "--draft", "SELF:INT4"], "in int4 itself"),
        (
            ["generate", "FOLDER", "--prompt", "x", "--chat-template-kwargs", "{}"],
            "--chat-template-kwargs has no effect without --chat",
        ),
        (["generate", "FOLDER", "--prompt", "x", "--chat", "--chat-template-kwargs", "[]"], "takes a JSON object"),
        (["generate", "FOLDER", "--prompt-ids", "1", "--chat"], "--chat has no effect with --prompt-ids 1"),
        (["chat", "FOLDER", "--chat-template-kwargs", '{"tools": []}'], "'tools' cannot be given"),
        (["eval", "FOLDER", "--text", "stdlib", "--json", "/no/such/folder/x.json"], "no folder"),
        (["eval", "FOLDER", "--text", "stdlib", "--json", "FOLDER/model.safetensors"], "is a part of a model"),
        (["eval", "FOLDER", "--text", "stdlib", "--json", "FOLDER/config.json"], "is a part of a model"),
        (["eval", "FOLDER", "--text", "/no/such/file"], "/no/such/file"),
        (["chat", "FOLDER", "--template", "/no/such/file"], "/no/such/file"),
        (["train", "demo", "--max-restarts", "2"], "--max-restarts has no effect with --processes 0"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments, words, tiny_folder, capfd):
    with pytest.raises(SystemExit) as exit_:
        main([a.replace("FOLDER", str(tiny_folder)) for a in arguments])
    assert exit_.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_chat_reads_lines_and_answers(tiny_folder):
    done = run(
        "chat",
        tiny_folder,
        "--threads",
        "1",
        "--max-new-tokens",
        "4",
        "--seed",
        "0",
        "--verbose",
        input="hello\n/clear\nagain\n/exit\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("from the cache") == 2
    assert len(done.stdout.splitlines()) >= 2


def test_a_full_standard_output_is_one_line_and_exit_2(tiny_folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hasten", "generate", str(tiny_folder), "--prompt", "a", "--max-new-tokens", "3"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert "no space" in done.stderr
    assert "Traceback" not in done.stderr


def test_export_writes_a_folder_that_transformers_loads(tiny_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    main(["export", str(tiny_folder), str(tmp_path / "out"), "--dtype", "bfloat16"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(model.dtype) == "torch.bfloat16"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("def add")


def test_export_writes_a_gguf_file_that_is_read_again(tiny_folder, tmp_path, capfd):
    pytest.importorskip("gguf")
    main(["export", str(tiny_folder), str(tmp_path / "tiny.gguf"), "--gguf", "F16", "--json", "-"])
    told = json.loads(capfd.readouterr().out)
    assert told["bytes"] == (tmp_path / "tiny.gguf").stat().st_size
    main(["generate", str(tmp_path / "tiny.gguf"), "--prompt", "def add", "--max-new-tokens", "3", "--json", "-"])
    assert len(json.loads(capfd.readouterr().out)["tokens"]) <= 3
    with pytest.raises(SystemExit):
        main(["export", str(tiny_folder), str(tmp_path / "folder"), "--gguf", "F16"])
    assert "ends in .gguf" in capfd.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_chat(tiny_folder):
    options = ["--max-new-tokens", "450", "--ignore-eos", "--threads", "1", "--verbose"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "hasten", "chat", str(tiny_folder), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )
    try:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(1), "the answer has begun"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"again\n/exit\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert b"[stopped]" in out
    assert err.count(b"from the cache") == 2, "the second turn was answered"
    assert b"Traceback" not in err


def test_eval_without_overlap(tiny_folder, tmp_path, capfd):
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 20)
    command = ["eval", str(tiny_folder), "--text", str(text), "--context", "32", "--json", "-"]
    main(command)
    overlapping = json.loads(capfd.readouterr().out)
    main([*command, "--no-overlap"])
    apart = json.loads(capfd.readouterr().out)
    assert apart["tokens"] == overlapping["tokens"]
    assert apart["perplexity"] != overlapping["perplexity"]
    with pytest.raises(SystemExit):
        main([*command, "--no-overlap", "--stride", "8"])
    assert "--stride has no effect with --no-overlap" in capfd.readouterr().err


def test_generate_with_drafts_says_the_same(tiny_folder, capfd, monkeypatch):
    monkeypatch.setattr("hasten.engine.speculation.build.Speculator", partial(Speculator, always=True))
    arguments = ["generate", str(tiny_folder), "--prompt", "def add", "--max-new-tokens", "24", "--seed", "3"]
    found = []
    for draft in (
        ["--draft", "none"],
        [],
        ["--draft", str(tiny_folder), "--speculate", "4"],
        ["--draft", "self:int4"],
    ):
        main([*arguments, *draft, "--ignore-eos", "--json", "-"])
        told = capfd.readouterr()
        found.append(json.loads(told.out))
        assert ("the draft in int4 takes" in told.err) == (draft[-1:] == ["self:int4"])
    text = found[0]["text"]
    assert {result["text"] for result in found} == {text}
    assert "speculation" not in found[0]
    main([*arguments, "--draft", str(tiny_folder), "--ignore-eos", "--stop", text[9:11], "--json", "-"])
    ended = json.loads(capfd.readouterr().out)
    assert (ended["finish_reason"], ended["text"]) == ("stop", text[: text.index(text[9:11])])
    for result in found[1:]:
        told = result["speculation"]
        assert told["speedup"] > 0
        assert told["tokens"] == 24
        assert told["accepted_tokens"] == sum(told["accepted_by_position"]) <= told["draft_tokens"]
    assert found[2]["speculation"]["accepted_tokens"] > 10, "the model draws for itself"
    assert found[3]["speculation"]["draft_tokens"] > 0
    for accept in ("exact", "distribution"):
        main([*arguments, "--draft", str(tiny_folder), "--accept", accept, "--temperature", "0.8", "--ignore-eos"])
        assert " proposed tokens were taken (" in capfd.readouterr().err


def test_drafts_that_were_not_worth_it_are_counted(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(Speculator, "_paying", lambda self, drafts, *_: [draft.first(0) for draft in drafts])
    arguments = ["generate", str(tiny_folder), "--prompt", "def", "--temperature", "0", "--max-new-tokens", "40"]
    for draft, count in (("self:1-layers", 1), ("auto", 0)):
        main([*arguments, "--ignore-eos", "--draft", draft])
        said = re.findall(
            r"\[drafts were made before (\d+) of 40 steps; none was worth checking\]", capsys.readouterr().err
        )
        assert len(said) == count
        assert all(0 < int(tries) < 40 for tries in said)


def test_chat_with_drafts_says_the_same(tiny_folder, monkeypatch, capsys):
    found, told = [], []
    monkeypatch.setattr("hasten.engine.speculation.build.Speculator", partial(Speculator, always=True))
    ways = (["none"], ["auto"], [str(tiny_folder), "--speculate", "4"], ["self:1-layers"])
    for draft in (["--draft", *way] for way in ways):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\nfor name in names\n"))
        main(["chat", str(tiny_folder), "--max-new-tokens", "12", "--seed", "3", "--verbose", *draft])
        captured = capsys.readouterr()
        found.append(captured.out)
        told.append("so far [" in captured.err)
    assert len(set(found)) == 1
    assert len(found[0]) > 10
    assert (told[0], told[2:]) == (False, [True, True]), "what drafts gave; suffix may find nothing"


@pytest.mark.parametrize("draft", ["suffix", "self:1-layers"])
def test_stream_and_llm_take_drafts(tiny_folder, draft, monkeypatch):
    monkeypatch.setattr("hasten.engine.speculation.build.Speculator", partial(Speculator, always=True))
    options = {"max_new_tokens": 16, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    model = hasten.load(tiny_folder)
    plain = "".join(hasten.stream(model, "def add", **options))
    assert "".join(hasten.stream(model, "def add", draft=draft, speculate=4, **options)) == plain
    llm = hasten.LLM(tiny_folder, device="cpu", draft=draft, speculate=4, cache_bytes=1 << 20)
    (answer,) = llm.generate(["def add"], SamplingParams(**options))
    assert answer.text == plain
    assert (llm.engine.stats().draft_tokens > 0) == (draft != "suffix"), "suffix may find nothing"
    with pytest.raises(ConfigError, match="dtype and device are for a model that is loaded here"):
        hasten.LLM(model, device="cpu")


def test_an_empty_standard_input_is_no_prompt(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit):
        main(["generate", str(tiny_folder), "--prompt", "-"])
    assert "standard input is empty" in capsys.readouterr().err
    main(["generate", str(tiny_folder), "--prompt", "", "--max-new-tokens", "2"])
