"""Rebuild a tokenizer from GGUF metadata as a ``tokenizers`` object, to save as ``tokenizer.json``.

The supported architectures use three kinds: byte-level BPE (``gpt2``) with one of several pre-tokenizers;
SentencePiece (``llama``), which llama.cpp always merges by score, so it becomes BPE with byte fallback; and Gemma 4's
(``gemma4``), SentencePiece's text with merges of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.plain_words import plain
from edgepipe.safe_text import one_line
from edgepipe.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from edgepipe.text.token_marks import TOOL_MARKS, TURN_MARKS

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

logger = logging.getLogger(__name__)

_MARK = re.compile(r"<\|[^\s|<>]{1,60}\|>")
"""Text of marks such as ``<|im_start|>``. Vocabularies learnt from text hold no such token."""
_UNDEFINED, _NORMAL, _CONTROL, _USER_DEFINED = 0, 1, 3, 4  # types of tokens
_NAMED = ("bos", "eos", "eot", "eom")  # the metadata names their ids
_MAX_MERGED_CHARS = 256  # longest SentencePiece token, of which every split is tried; trained tokens have up to 16


def rebuild_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Rebuild the tokenizer of GGUF metadata. Raises ModelInvalid for an unusable kind or part."""
    fields = Fields(metadata, what="the GGUF metadata")
    kind = fields.text("tokenizer.ggml.model")
    tokens = _tokens(fields)
    if kind == "gpt2":
        built, adds_bos = _byte_level(fields, tokens)
    elif kind == "llama":
        built, adds_bos = _sentence_piece(fields, tokens), True
    elif kind == "gemma4":
        built, adds_bos = _spaced(fields, tokens, list(_merges(fields)), prefix=False), False
    else:
        raise _unknown_kind(kind)
    _add_special(built, fields, tokens)
    _add_ends(built, fields, tokens, adds_bos)
    return built


def check_tokenizer_kind(metadata: Mapping[str, object]) -> None:
    """Check that ``rebuild_tokenizer`` knows the tokenizer's kind, if there is a tokenizer. Raises ModelInvalid."""
    fields = Fields(metadata, what="the GGUF metadata")
    if not fields.has("tokenizer.ggml.tokens"):
        return
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        _pre_tokenizer(fields)
    elif kind not in ("llama", "gemma4"):
        raise _unknown_kind(kind)


def special_tokens(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token``, ... as text, for chat templates. Raises ModelInvalid."""
    fields = Fields(metadata, what="the GGUF metadata")
    tokens = _tokens(fields)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.raw(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[found] for name, found in ids.items() if isinstance(found, int) and 0 <= found < len(tokens)}


def _tokens(fields: Fields) -> list[str]:
    tokens = fields.items("tokenizer.ggml.tokens")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise fields.fail("tokenizer.ggml.tokens", f"a list of strings is needed, it has {len(tokens)} items")
    return [str(token) for token in tokens]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _unknown_kind(kind: str) -> ModelInvalid:
    return ModelInvalid(
        f"the tokenizer '{kind[:40]}' of the GGUF file is not supported", fact="supported: gpt2, llama, gemma4"
    )


def _pre_tokenizer(fields: Fields) -> PreTokenizer:
    name = fields.text("tokenizer.ggml.pre", default="default")
    if name not in PRE_TOKENIZERS:
        raise ModelInvalid(
            f"the pre-tokenizer '{name[:40]}' of the GGUF file is not supported",
            fact=f"it says how text becomes tokens; {len(PRE_TOKENIZERS)} others are supported",
            next_step="pull the model's safetensors, which include a tokenizer.json",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(fields: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(fields)
    merges = list(_merges(fields))
    built = Tokenizer(_guarded(lambda: models.BPE(_vocabulary(tokens), merges, ignore_merges=pre.whole_words)))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    built.decoder = decoders.ByteLevel()
    if pre.nfc:
        built.normalizer = normalizers.NFC()
    return built, pre.adds_bos


def _merges(fields: Fields) -> Iterable[tuple[str, str]]:
    for merge in fields.items("tokenizer.ggml.merges"):
        left, space, right = str(merge).partition(" ")
        if not space or not left or not right or " " in right:
            raise fields.fail("tokenizer.ggml.merges", f"{str(merge)[:40]!r} is not a pair")
        yield left, right


def _sentence_piece(fields: Fields, tokens: list[str]) -> Tokenizer:
    scores = fields.numbers("tokenizer.ggml.scores", low=-1e30, high=1e30, length=len(tokens))
    merges = _merges_by_score(_vocabulary(tokens), scores)
    return _spaced(fields, tokens, merges, prefix=fields.flag("tokenizer.ggml.add_space_prefix", default=True))


def _spaced(fields: Fields, tokens: list[str], merges: list[tuple[str, str]], *, prefix: bool) -> Tokenizer:
    """Build BPE with byte fallback over text whose spaces are ``▁``; ``prefix``: and which begins with one."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = fields.token_ids("tokenizer.ggml.unknown_token_id", vocab_size=len(tokens)) or (0,)
    vocabulary = _vocabulary(tokens)
    model = _guarded(
        lambda: models.BPE(vocabulary, merges, unk_token=tokens[unknown[0]], fuse_unk=True, byte_fallback=True)
    )
    built = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return built


def _merges_by_score(vocabulary: dict[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return every way to form a token from two others, best score first: SentencePiece's merge order."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        if len(token) > _MAX_MERGED_CHARS:
            raise ModelInvalid(
                "the GGUF file's tokenizer cannot be used",
                fact=f"token {index} has {len(token)} characters, at most {_MAX_MERGED_CHARS} are merged",
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special(built: Tokenizer, fields: Fields, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    kinds = fields.items("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise fields.fail("tokenizer.ggml.token_type", f"it has {len(kinds)} items for {len(tokens)} tokens")
    corrected = [_kind(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    for name in _NAMED:
        for index in fields.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size=len(tokens)):
            corrected[index] = _CONTROL
    triples = zip(tokens, corrected, kinds, strict=True)
    _warn_of([token for token, kind, stored in triples if kind != stored and token])
    pairs = [(token, kind) for token, kind in zip(tokens, corrected, strict=True) if token]
    control = [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == _CONTROL]
    user = [AddedToken(token, special=False, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    built.add_special_tokens(control)  # pyright: ignore[reportUnknownMemberType]: the stub leaves the item open
    built.add_tokens(user)  # pyright: ignore[reportUnknownMemberType]: as above


def _kind(token: str, stored: object) -> object:
    """Return a token's type. The text of marks wins over the stored type, which some converters leave out.

    llama.cpp (``llama-vocab.cpp``) overrides the type of tokens that end an answer in the same way.
    """
    if token in TURN_MARKS:
        return _CONTROL
    if token in TOOL_MARKS and stored != _CONTROL:
        return _USER_DEFINED
    return _CONTROL if stored in (_UNDEFINED, _NORMAL) and _MARK.fullmatch(token) else stored


def _warn_of(corrected: list[str]) -> None:
    if corrected:
        names = one_line(", ".join(corrected[:4])) + (", ..." if len(corrected) > 4 else "")
        logger.warning("the GGUF file types %d marks as text (%s): they are read as marks", len(corrected), names)


def _add_ends(built: Tokenizer, fields: Fields, tokens: list[str], adds_bos: bool) -> None:
    """Set the tokens that ``encode(add_special=True)`` puts around a text."""
    from tokenizers import processors

    around: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        ids = fields.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size=len(tokens))
        if ids and fields.flag(f"tokenizer.ggml.add_{name}_token", default=default):
            around[name] = (tokens[ids[0]], ids[0])
    if around:
        parts = [
            *([around["bos"][0]] if "bos" in around else []),
            "$A",
            *([around["eos"][0]] if "eos" in around else []),
        ]
        built.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(around.values()))


def _guarded(build: Callable[[], models.BPE]) -> models.BPE:
    """Build the model and translate the library's bare exceptions, such as for merges with unknown tokens."""
    try:
        return build()
    except Exception as exc:
        raise ModelInvalid("the GGUF file's tokenizer cannot be used", fact=plain(exc)) from exc
