"""How the names of `tokenizer.ggml.pre` split a text into words, before byte-level BPE."""

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Split:
    """How a text is split into words: by patterns, one after the other, digit by digit, as GPT-2 does.

    ignore_merges: a word that is a token stays whole. bos: a text begins with BOS unless the metadata say otherwise.
    nfc: composed first, which llama.cpp leaves out.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    ignore_merges: bool = False
    bos: bool = False
    nfc: bool = False

    def apply(self, backend: tokenizers.Tokenizer) -> None:
        """Split and decode byte by byte, as the published tokenizer.json of such models says it."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps += [pre_tokenizers.Digits(individual_digits=True)] * self.digits
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
        backend.normalizer = normalizers.NFC() if self.nfc else None
        backend.decoder = decoders.ByteLevel()


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENGLISH = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _ENGLISH + r"\p{N}{1,3}" + _SPACES, _ENGLISH + r"\p{N}" + _SPACES
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _ENGLISH + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+{_SHORT}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*{_SHORT}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Letters that have two cases, as the tokenizer.json of DeepSeek LLM and V2 lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK2 = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_NOT_HAN = tuple(rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in _LETTERS)
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_SHORT}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_SHORT}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|"
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BY_SPLIT = {
    Split(gpt2=True): "gpt-2 phi-2 mpt olmo jais trillion exaone4 mellum gigachat",
    Split(digits=True, gpt2=True): "smollm starcoder refact command-r codeshell exaone",
    Split((_LLAMA3,), ignore_merges=True, bos=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
    Split((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Split((_LLAMA3,), ignore_merges=True): "glm4",
    Split((_QWEN2,), nfc=True): "qwen2 deepseek-r1-qwen megrez",
    Split((_QWEN2,)): "stablelm2 hunyuan",
    Split((_QWEN35,), nfc=True): "qwen35",
    Split((_SEED,)): "seed-coder",
    Split((_O200K,)): "gpt-4o llama4 minimax-m2 kanana2",
    Split(_DEEPSEEK3): "deepseek-v3 hunyuan-dense",
    Split(_DEEPSEEK2): "deepseek-llm",
    Split((_KIMI,)): "kimi-k2",
    Split(_YOUTU, ignore_merges=True): "youtu",
    Split((_TEKKEN,), ignore_merges=True, bos=True): "tekken",
    Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
}
SPLITS = {name: split for split, names in _BY_SPLIT.items() for name in names.split()}
