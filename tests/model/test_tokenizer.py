"""Tokenizer folders and chat templates give what transformers' AutoTokenizer gives; bad ones one clear error."""

import itertools
import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hasten.errors import CheckpointError, ConfigError, DataError
from hasten.model.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

LINES = ["the cat sat on the mat, didn't it?", "naïve café — 東京 🙂", "  def f(x):\n\treturn x + 12345\n\n"]
TEXTS = [*LINES, "", " ", "a<|end|>b", "<s>hi</s>there</s> x", "the\x00cat\r\n", "e\u0301 ﬁ \u00a0 x"]


def byte_level(*, special: list[str] | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = special or ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, initial_alphabet=alphabet)
    backend.train_from_iterator(LINES * 4, trainer)
    return backend


def llama_like() -> tokenizers.Tokenizer:
    """As Llama 2's own tokenizer.json: prepending normalizer, byte fallback, BOS by the post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *"acdehinostfx", "▁t", "▁c", "he", "▁the", "at", "▁cat", "é"]
    merges = [("▁", "t"), ("▁", "c"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁c", "at")]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *words])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer | None, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def assert_as_transformers(folder: Path) -> Tokenizer:
    ours, theirs = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.bos_id == theirs.bos_token_id
    assert (ours.eos_ids[:1] or (None,))[0] == theirs.eos_token_id
    assert ours.pad_id == theirs.pad_token_id
    return ours


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (byte_level, FAST),
        (byte_level, FAST | {"eos_token": "<|end|>", "bos_token": "<|begin|>", "add_bos_token": True}),
        (byte_level, FAST | {"eos_token": "<|end|>", "pad_token": "<|new_pad|>"}),  # a token the vocabulary lacks
        (byte_level, FAST | {"additional_special_tokens": ["the", "<|x|>"], "split_special_tokens": False}),
        (byte_level, FAST | {"added_tokens_decoder": {"340": {"content": "cat sat", "lstrip": True}}}),
        (llama_like, FAST | LLAMA),
        (llama_like, LLAMA | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}),
        (llama_like, LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "add_eos_token": True}),
        (llama_like, LLAMA | {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    ],
)
def test_a_folder_encodes_as_transformers_does(tmp_path: Path, make: object, config: dict) -> None:
    assert_as_transformers(write(tmp_path, make(), tokenizer_config=config))  # type: ignore[operator]


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_model_type_decides_about_llamas_spaces_as_in_transformers(tmp_path: Path, model_type: str) -> None:
    config = LLAMA | {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    write(tmp_path, llama_like(), tokenizer_config=config, config={"model_type": model_type})
    ours = assert_as_transformers(tmp_path)
    after_special = ours.encode("</s>the", add_special_tokens=False)
    assert (ours.backend.token_to_id("▁the") in after_special) == (model_type == "mistral")


def test_tokens_from_special_tokens_map_and_added_tokens(tmp_path: Path) -> None:
    write(
        tmp_path,
        byte_level(),
        tokenizer_config=FAST,
        special_tokens_map={"eos_token": {"content": "<|end|>", "lstrip": False}, "pad_token": "<|end|>"},
    )
    ours = assert_as_transformers(tmp_path)
    assert ours.pad_id == ours.eos_ids[0]


def test_truncation_and_padding_saved_in_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert_as_transformers(write(tmp_path, backend, tokenizer_config=FAST | {"pad_token": "<|end|>"}))


def gpt2_folder(folder: Path, **config: object) -> Path:
    backend = byte_level(special=["<|endoftext|>"])
    content = json.loads(backend.to_str())
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return write(folder, None, vocab=content["model"]["vocab"], config={"model_type": "gpt2"}, tokenizer_config=config)


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_prefix_space": True}])
def test_gpt2_layout(tmp_path: Path, config: dict) -> None:
    ours = assert_as_transformers(gpt2_folder(tmp_path, **config))
    ours.save(tmp_path / "copy")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == [
        "merges.txt",
        "tokenizer_config.json",
        "vocab.json",
    ]


def test_end_ids_of_every_file_are_put_together(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"eos_token": "<|end|>"})
    assert load(tmp_path).eos_ids == (1,)
    write(tmp_path, None, generation_config={"eos_token_id": [3, 1]}, config={"eos_token_id": 2, "bos_token_id": 0})
    assert load(tmp_path).eos_ids == (1, 3)
    assert load(tmp_path).bos_id == 0
    write(tmp_path, None, generation_config={}, tokenizer_config=FAST)
    assert load(tmp_path).eos_ids == (2,)
    write(tmp_path, None, config={"text_config": {"eos_token_id": [2, 3]}})
    assert load(tmp_path).eos_ids == (2, 3)
    write(tmp_path, None, config={})
    assert load(tmp_path).eos_ids == ()


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_byte_level_text_survives(text: str) -> None:
    assert TRAINED.decode(TRAINED.encode(text)) == text


TRAINED = Tokenizer.from_tokenizers(byte_level(), bos_token="<|begin|>", eos_token="<|end|>")


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen3", "gemma2", "phi3"])
def test_a_trained_tokenizer_saved_is_the_same_in_transformers(tmp_path: Path, model_type: str) -> None:
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    trained = Tokenizer.from_tokenizers(
        byte_level(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=template
    )
    trained.save(tmp_path / "deep" / "folder")
    folder = write(tmp_path / "deep" / "folder", None, config={"model_type": model_type})
    again = assert_as_transformers(folder)
    assert again.digest == trained.digest
    assert again.chat_template == template
    assert len(list(folder.iterdir())) == 3  # no temporary file is left


def test_a_folders_files_are_copied_unchanged(tmp_path: Path) -> None:
    source = write(tmp_path / "a", byte_level(), tokenizer_config=FAST | {"odd": [1]}, config={}, special_tokens_map={})
    (source / "chat_template.jinja").write_bytes(b"{{ messages[0].content }}\r\n")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }}")
    tokenizer = load(source)
    tokenizer.save(tmp_path / "b")
    copied = [p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file()]
    assert len(copied) == 5
    assert all((source / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in copied)
    tokenizer.save(source)  # onto itself
    tokenizer.with_chat_template("new").save(tmp_path / "b")
    assert load(tmp_path / "b").chat_template == "new"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b").chat_template["default"] == "new"
    (source / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be copied"):
        tokenizer.save(tmp_path / "c")


def test_digest_follows_what_decides_the_ids() -> None:
    assert TRAINED.digest == Tokenizer.from_tokenizers(byte_level(), bos_token="<|begin|>", eos_token="<|end|>").digest
    assert TRAINED.digest == TRAINED.with_chat_template("x").digest
    assert TRAINED.digest != Tokenizer.from_tokenizers(byte_level(), eos_token="<|end|>").digest
    other = byte_level()
    other.add_tokens(["cat sat"])
    assert TRAINED.digest != Tokenizer.from_tokenizers(other, bos_token="<|begin|>", eos_token="<|end|>").digest


def test_it_can_be_sent_to_a_worker_process() -> None:
    tokenizer = TRAINED.with_chat_template("{{ messages[0].content }}")
    tokenizer.render_chat([{"role": "user", "content": "x"}])
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(LINES[0]) == tokenizer.encode(LINES[0])
    assert copy.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_what_cannot_be_tokenized() -> None:
    with pytest.raises(DataError, match="character 1"):
        TRAINED.encode("a\ud800")
    with pytest.raises(DataError, match="found bytes"):
        TRAINED.encode_batch(["a", b"b"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="eos_token '<nope>'"):
        Tokenizer.from_tokenizers(byte_level(), eos_token="<nope>")
    assert TRAINED.decode([10**6, 4]) == TRAINED.decode([4])  # an id of the embedding's padding


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write(tmp_path, None, config={"eos_token_id": 1}, tokenizer_config=FAST)) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_foreign_format_says_how_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a\x0e")
    with pytest.raises(CheckpointError, match=r"AutoTokenizer\.from_pretrained\(.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_vocab_and_merges_of_another_class_are_not_guessed(tmp_path: Path) -> None:
    gpt2_folder(tmp_path, tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(CheckpointError, match="how Qwen2Tokenizer splits words"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="how qwen2 splits words"):
        Tokenizer.from_folder(write(tmp_path, None, config={"model_type": "qwen2"}, tokenizer_config={}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"version": "1.0", "model": {"type": "Magic"}}',
        b'{"model": ' + b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"version":"1.0","added_tokens":[],"model":{"type":"Unigram","unk_id":7,"vocab":[["a",0.0]]}}',
    ],
)
def test_a_malformed_tokenizer_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", []),
        ("tokenizer_config", {"eos_token": 5}),
        ("tokenizer_config", {"chat_template": 5}),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"1": {}}}),
        ("tokenizer_config", {"added_tokens_decoder": [1]}),
        ("generation_config", {"eos_token_id": "2"}),
        ("generation_config", {"eos_token_id": [True]}),
        ("config", {"bos_token_id": -1}),
        ("added_tokens", {"a": "b"}),
    ],
)
def test_a_malformed_side_file_is_named(tmp_path: Path, name: str, content: object) -> None:
    write(tmp_path, byte_level(), **{name: content})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointError, match="too large"):
        Tokenizer.from_folder(tmp_path)


# -- chat templates ---------------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}
{% endfor %}""",
    "llama-3": """{{- bos_token }}{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
{%- set ns.turns = ns.turns + 1 %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- if ns.turns >= 50 %}{%- break %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}{%- for message in rest %}
{%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("conversation roles must alternate user and assistant roles") }}{%- endif %}
{%- if message["role"] == "user" %}
{%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message.tool_calls is defined %}{{- message.tool_calls | map(attribute="name") | list | tojson(indent=1) }}
{%- else %}{{- " " + message["content"] + eos_token }}{%- endif %}{%- endfor %}""",
}

SYSTEM, USER, ANSWER = (
    {"role": role, "content": content}
    for role, content in (("system", "Be <b>brief</b> & kind. "), ("user", " hi \n"), ("assistant", "héllo 🙂"))
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock", "arguments": {"zone": "é<"}}]}
THOUGHT = {"role": "assistant", "content": "so", "thinking": "hm"}
TOOL = {"type": "function", "function": {"name": "clock", "description": "time & <zone>", "parameters": {}}}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER], [USER, USER], [USER, CALL, USER]]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_render_as_transformers_does(tmp_path: Path, name: str) -> None:
    config = FAST | {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATES[name]}
    write(tmp_path, byte_level(), tokenizer_config=config)
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = 0
    for chat, prompt, tools in itertools.product([*CHATS, [USER, THOUGHT]], (True, False), (None, [TOOL])):
        options = {"add_generation_prompt": prompt, "tools": tools}
        try:
            expected = theirs.apply_chat_template(chat, tokenize=False, **options)
        except Exception:
            with pytest.raises(ConfigError, match="chat template"):
                ours.render_chat(chat, **options)
            continue
        rendered += 1
        assert ours.render_chat(chat, **options) == expected
        assert ours.encode_chat(chat, **options) == theirs.apply_chat_template(chat, return_dict=False, **options)
    assert rendered >= 12


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = TRAINED.with_chat_template(TEMPLATES["mistral"])
    with pytest.raises(ConfigError, match="refuses these messages: conversation roles must alternate"):
        tokenizer.render_chat([USER, USER])


def test_without_a_template_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"hasten generate.*template file"):
        TRAINED.render_chat([USER])


def test_named_templates_and_the_file_that_wins(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"chat_template": both})
    tokenizer = load(tmp_path)
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "clock"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load(tmp_path).render_chat([USER], tools=[TOOL]) == "from the file"
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, None, tokenizer_config=FAST | {"chat_template": both[1:]})
    with pytest.raises(ConfigError, match="named tool_use"):
        load(tmp_path).render_chat([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "sandbox"),
        ("{{ dict.mro() }}", "Undefined|sandbox|no attribute"),
        ("{% set ns = namespace(__class__=1) %}", "sandbox"),
        ("{{ messages.append(1) }}", "sandbox"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "1,000,000 loop steps"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1,000,000 loop steps"),
        ("{{ 'a' * 1000000000000 }}", "repeating"),
        ("{{ [1] * 1000000000000 }}", "repeating"),
        ("{{ 10 ** 10000000000 }}", "power"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for m in messages %}", "line 1"),
        ("{% include 'other' %}", "failed with TypeError"),
    ],
)
def test_a_hostile_template_gives_one_error(template: str, message: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        TRAINED.with_chat_template(template).render_chat([USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hi", "found str"),
        (USER, "found dict"),
        (["hi"], r"messages\[0\]"),
        ([{1: 2}], "keys must be strings"),
        ([USER, {"role": "user", "content": object()}], r"messages\[1\]\['content'\] is a object"),
        ([{"role": "user"}], "needs something these messages do not have"),
    ],
)
def test_bad_messages_are_named(messages: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TRAINED.with_chat_template(TEMPLATES["chatml"]).render_chat(messages)  # type: ignore[arg-type]


def test_strftime_now() -> None:
    text = TRAINED.with_chat_template("{{ strftime_now('%Y') }}").render_chat([USER])
    assert len(text) == 4
    assert text.isdigit()
