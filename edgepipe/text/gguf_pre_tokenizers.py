"""How byte-level tokenizers of GGUF files split text before they merge, by the name that the file gives.

The patterns are those of the models' own ``tokenizer.json``. Which name means which of them follows llama.cpp, whose
converter writes the names (``src/llama-vocab.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"\s*[\r\n]+"


def _words(word: str = r"\p{L}+", number: str = r"\p{N}", signs: str = _SIGNS) -> str:
    """Return a pattern of the line that began with GPT-4: a word takes the sign before it, and lines end pieces."""
    return rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?{word}|{number}|{signs}|{_LINES}|{_SPACES}"


def _cased_words(ending: str, number: str, marks: str = r"\p{M}", signs: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    """Return a pattern of the line that began with GPT-4o: a word ends before a capital that follows small letters."""
    before = r"[^\r\n\p{L}\p{N}]?"
    high, low = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}{marks}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}{marks}]"
    words = rf"{before}{high}*{low}+{ending}|{before}{high}+{low}*{ending}"
    return rf"{words}|{number}|{signs}|{_LINES}|{_SPACES}"


_GPT4 = _words(number=r"\p{N}{1,3}")
_QWEN2 = _words()
_QWEN35 = _words(word=r"[\p{L}\p{M}]+", signs=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_ENDING = rf"(?i:{_ENDINGS})?"
_GPT4O = _cased_words(_ENDING, r"\p{N}{1,3}")
_TEKKEN = _cased_words("", r"\p{N}")
_KIMI = r"\p{Han}+|" + _cased_words(_ENDING, r"\p{N}{1,3}", marks=r"\p{M}&&[^\p{Han}]", signs=_SIGNS)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}",
)
_CASED = (  # letters of the planes that DeepSeek lists
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Splitting of text before merging: patterns applied one after another."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False  # a piece that is itself a token is not merged
    adds_bos: bool = False  # default if the file does not specify it


_DIGITS_GPT2 = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA_BPE = PreTokenizer(patterns=(_GPT4,), whole_words=True, adds_bos=True)
_OF_GPT4, _OF_GPT4O = PreTokenizer(patterns=(_GPT4,)), PreTokenizer(patterns=(_GPT4O,))
_COHERE = PreTokenizer(patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

PRE_TOKENIZERS = {
    "default": PreTokenizer(patterns=(_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(patterns=(_GPT2,)),
    "olmo": PreTokenizer(patterns=(_GPT2,), nfc=True),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,  # Granite 3
    "command-r": replace(_DIGITS_GPT2, nfc=True),
    "minerva-7b": _DIGITS_GPT2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,  # Nemotron 3
    "dbrx": _OF_GPT4,  # Phi-4, OLMo 2 and 3, Granite 4
    "smaug-bpe": _OF_GPT4,
    "glm4": _OF_GPT4,
    "chatglm-bpe": _OF_GPT4,
    "qwen2": PreTokenizer(patterns=(_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer(patterns=(_QWEN2,)),
    "megrez": PreTokenizer(patterns=(_QWEN2,)),
    "qwen35": PreTokenizer(patterns=(_QWEN35,), nfc=True),
    "gpt-4o": _OF_GPT4O,  # gpt-oss, Phi-4-mini
    "llama4": _OF_GPT4O,
    "minimax-m2": _OF_GPT4O,
    "tiny_aya": _COHERE,
    "cohere2moe": _COHERE,
    "tekken": PreTokenizer(patterns=(_TEKKEN,), whole_words=True, adds_bos=True),  # Mistral since Nemo
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer(patterns=_DEEPSEEK3),
    "kimi-k2": PreTokenizer(patterns=(_KIMI,)),
}
"""Keys are names in ``tokenizer.ggml.pre``."""
