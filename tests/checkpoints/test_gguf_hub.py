"""GGUF models of several files, and of a hub: which file a name means, and what is downloaded (a hub on loopback)."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

import hasten
from gguf_files import retyped
from hasten.checkpoints.gguf.choose import models_of, parts_of, tagged
from hasten.checkpoints.gguf.header import read_gguf
from hasten.checkpoints.gguf.write import write_gguf
from hasten.checkpoints.hub import resolve_model
from hasten.cli.main import main
from hasten.cli.serve import Serve
from hasten.errors import CheckpointError, ResourceError
from hasten.server.settings import ServerSettings
from server_case import serving

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (hasten[gguf])")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def same(first, second):
    expected = dict(first.named_parameters())
    return all(torch.equal(tensor, expected[name]) for name, tensor in second.named_parameters())


@pytest.fixture
def split(tmp_path, tiny):
    """The tiny model in three parts, as llama.cpp's gguf-split makes them, and the whole file beside their folder."""
    write_gguf(tiny, tmp_path / "whole.gguf", "F16")
    folder = tmp_path / "parts"
    folder.mkdir()
    retyped(folder / "tiny.gguf", tmp_path / "whole.gguf", lambda *_: None, tensors_a_part=8)
    return sorted(folder.iterdir())


def test_any_part_of_a_split_model_is_the_whole_model(split, tiny, tmp_path):
    assert [path.name for path in split] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for source in (*split, split[0].parent):
        assert same(hasten.load(source, dtype="float32"), hasten.load(tmp_path / "whole.gguf", dtype="float32"))
    (split[0].parent / "mmproj-tiny-f16.gguf").write_bytes(b"")  # is skipped
    assert resolve_model(split[0].parent) == split[0]


def test_parts_that_do_not_belong_together_are_refused(split):
    split[1].rename(split[1].with_name("elsewhere.gguf"))
    with pytest.raises(CheckpointError, match=r"of 3 parts of a model; tiny-00002-of-00003.gguf is not beside it"):
        hasten.load(split[2])
    with pytest.raises(CheckpointError, match=r"call this one NAME-00002-of-00003.gguf"):
        hasten.load(split[1].with_name("elsewhere.gguf"))
    shutil.copy(split[0], split[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf says that it is part 0 .from 0. of 3, not part 1"):
        hasten.load(split[0])


NAMES = [
    "README.md",
    "mmproj-model-f16.gguf",
    "imatrix.gguf",
    "MTP-x-Q8_0.gguf",
    "x-IQ4_XS.gguf",
    "x-Q4_K_M.gguf",
    "x-Q8_0.gguf",
    "x-UD-Q4_K_XL.gguf",
    "BF16/x-BF16-00001-of-00002.gguf",
    "BF16/x-BF16-00002-of-00002.gguf",
]


def test_which_file_a_tag_means():
    models = models_of(NAMES)
    assert models == [
        "BF16/x-BF16-00001-of-00002.gguf",
        "x-IQ4_XS.gguf",
        "x-Q4_K_M.gguf",
        "x-Q8_0.gguf",
        "x-UD-Q4_K_XL.gguf",
    ]
    found = {tag: tagged(models, tag) for tag in (None, "latest", "q8_0", "bf16", "Q4_K_XL", "Q4_XS", "Q4", "Q4_K")}
    assert found == {
        None: "x-Q4_K_M.gguf",
        "latest": "x-Q4_K_M.gguf",
        "q8_0": "x-Q8_0.gguf",
        "bf16": "BF16/x-BF16-00001-of-00002.gguf",
        "Q4_K_XL": "x-UD-Q4_K_XL.gguf",
        "Q4_XS": None,
        "Q4": None,
        "Q4_K": None,
    }
    assert tagged(["a-Q5_0.gguf", "a-Q6_K.gguf"], None) == "a-Q5_0.gguf"
    assert parts_of(models[0]) == NAMES[-2:]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback: {owner/name: {file: bytes}}, and the paths that were asked for."""
    from huggingface_hub import constants

    repositories, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(send=False)

        def do_GET(self):
            self.answer(send=True)

        def answer(self, *, send):
            path = self.path.partition("?")[0]
            asked.append(path)
            if path.startswith("/api/models/"):
                name = "/".join(path.split("/")[3:5])
                files = repositories.get(name, {})
                answer: object = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                if "/tree/" in path:
                    answer = [{"type": "file", "path": f, "size": len(b), "oid": COMMIT} for f, b in files.items()]
                body = json.dumps(answer).encode()
                return self.reply(200 if name in repositories else 404, body, send, kind="application/json")
            if path.startswith("/api/"):
                return self.reply(404, b"", send)
            _, owner, name, _, _, file = path.split("/", 5)
            body = repositories.get(f"{owner}/{name}", {}).get(file)
            return self.reply(404 if body is None else 200, body or b"", send)

        def reply(self, status, body, send, kind="application/octet-stream"):
            self.send_response(status)
            headers = {"Content-Length": len(body), "Content-Type": kind, "ETag": f'"{hash(body):x}"'}
            for key, value in (headers | {"X-Repo-Commit": COMMIT}).items():
                self.send_header(key, str(value))
            self.end_headers()
            if send:
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield repositories, asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_with_a_tag_downloads_that_file_alone(hub, split, tiny, tmp_path, monkeypatch):
    repositories, asked = hub
    whole = (tmp_path / "whole.gguf").read_bytes()
    parts = {f"BF16/{path.name.replace('tiny', 'tiny-BF16')}": path.read_bytes() for path in split}
    repositories["owner/tiny-GGUF"] = {"tiny-Q8_0.gguf": whole, "tiny-Q2_K.gguf": b"", "mmproj.gguf": b""} | parts
    expected = hasten.load(tmp_path / "whole.gguf", dtype="float32")
    for name in ("owner/tiny-GGUF:q8_0", "hf.co/owner/tiny-GGUF:Q8_0", "owner/tiny-GGUF", "owner/tiny-GGUF:BF16"):
        assert same(hasten.load(name, dtype="float32"), expected)
    assert not any("Q2_K" in path or "mmproj" in path for path in asked)
    with pytest.raises(CheckpointError, match=r"no GGUF file that Q3_K names: it has .*tiny-Q2_K.gguf, tiny-Q8"):
        hasten.load("owner/tiny-GGUF:Q3_K")
    with pytest.raises(ResourceError, match="owner/missing is not a folder here, and the hub could not give it"):
        hasten.load("owner/missing:Q8_0")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(hasten.load("owner/tiny-GGUF:Q8_0", dtype="float32"), expected)
    with pytest.raises(CheckpointError, match="no GGUF file that Q2_K names: it has BF16/"):
        hasten.load("owner/tiny-GGUF:Q2_K")
    with pytest.raises(ResourceError, match="owner/other is not a folder here"):
        hasten.load("owner/other:Q8_0")
    assert read_gguf(resolve_model("owner/tiny-GGUF:BF16")).tensors


def test_a_hub_id_with_a_tag_is_planned_and_served(hub, tiny, tmp_path, capsys):
    write_gguf(tiny, tmp_path / "tiny-F16.gguf", "F16")
    name = "owner/tiny-GGUF:F16"
    hub[0]["owner/tiny-GGUF"] = {"tiny-F16.gguf": (tmp_path / "tiny-F16.gguf").read_bytes(), "tiny-Q2_K.gguf": b""}
    plans = []
    for model in (name, str(tmp_path / "tiny-F16.gguf")):
        main(["plan", model, "--device", "epyc", "--json", "-"])
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["parts"] == plans[1]["parts"]
    assert plans[0]["model"] == "tiny-GGUF:F16"
    command = Serve(model=name, draft="none", cache_gib=0.01)
    asked = {"model": name, "prompt": "def", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    with serving(command._app(command.load(), ServerSettings())) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["model"] == name
