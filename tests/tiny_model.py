"""A tiny random model of ours, for tests and for benchmarks/soak.py: it needs neither transformers nor pytest."""

from hasten.data import train_bpe
from hasten.model.families import read_config
from hasten.model.initialize import initialize

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_llama(**changes):
    """A tiny random Llama of ours, with a byte-level tokenizer trained on a few lines and a chat template."""
    text = "def add(a, b):\n    return a + b\n\nfor name in names:\n    print(f'{name}: é ü 漢字 🙂')\n" * 20
    tokenizer = train_bpe([text], vocab_size=300)
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
    } | changes
    model = initialize(read_config(values), seed=0)
    model.tokenizer = tokenizer.with_chat_template(TEMPLATE)
    return model.eval()
