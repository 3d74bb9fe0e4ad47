"""A GGUF file's tokenizer as Hugging Face files: ``tokenizer.json`` and ``tokenizer_config.json``.

Owns the two kinds of vocabulary that GGUF files of our architectures carry:

- ``gpt2``: byte-level BPE with a merge list. How text is cut before merging is only named
  (``tokenizer.ggml.pre``), so each known name has its rule here.
- ``llama``: SentencePiece-style pieces with scores and byte fallback. The merge order is the order of
  the scores, so the merge list is rebuilt from them.

Tokenisation matches llama.cpp's on the same file (recorded in ``tests/runtime/models/reference``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbook.bus.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {**_BYTE_LEVEL, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# GGUF name of the rule -> (pre-tokenizer, whole words in the vocabulary skip merging)
_PRE_TOKENIZERS: dict[str, tuple[dict[str, Any], bool]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGITS, False)),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt"), (_BYTE_LEVEL, False)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        (_sequence(_split(_LLAMA3), _BYTES_ONLY), True),
    ),
}

# Texts that end a turn under one of the common chat formats, as llama.cpp recognises them.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
)


class GgufVocabulary:
    """The tokenizer fields of a GGUF file, read once and checked.

    Attributes:
        tokens: piece of each id.
        types: token type of each id (``NORMAL`` ... ``BYTE``).
        eos_ids: every id that ends a generation, the file's own end-of-sequence first.
        add_bos: whether the model expects the begin-of-sequence token before a text.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        try:
            self.model: str = fields["tokenizer.ggml.model"]
            self.tokens: list[str] = fields["tokenizer.ggml.tokens"]
        except KeyError as exc:
            raise ModelError(f"the GGUF file has no {exc.args[0]!r}: it carries no tokenizer") from exc
        if self.model not in ("gpt2", "llama"):
            raise ModelError(f"GGUF tokenizer {self.model!r} is not supported; known: 'gpt2', 'llama'")
        self.types: list[int] = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(self.tokens)
        self.scores: list[float] = fields.get("tokenizer.ggml.scores") or []
        self.merges: list[str] = fields.get("tokenizer.ggml.merges") or []
        self.pre: str = fields.get("tokenizer.ggml.pre", "default")
        self.chat_template: str | None = fields.get("tokenizer.chat_template")
        self.add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", self.model == "llama"))
        self.add_eos = bool(fields.get("tokenizer.ggml.add_eos_token", False))
        self.add_space_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", self.model == "llama"))
        self.bos_id: int | None = fields.get("tokenizer.ggml.bos_token_id")
        self.eos_id: int | None = fields.get("tokenizer.ggml.eos_token_id")
        self.unknown_id: int | None = fields.get("tokenizer.ggml.unknown_token_id")
        self.pad_id: int | None = fields.get("tokenizer.ggml.padding_token_id")
        self.eos_ids = self._end_ids(fields)

    def _end_ids(self, fields: dict[str, Any]) -> list[int]:
        named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ids = [i for i in named if i is not None]
        texts = set(_END_OF_TURN)
        ids += [
            i
            for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == CONTROL and text in texts
        ]
        return list(dict.fromkeys(ids))

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def write(self, folder: Path, context_length: int) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
        build = _byte_level if self.model == "gpt2" else _sentencepiece
        tokenizer = build(self)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "bos_token": self.text(self.bos_id),
            "eos_token": self.text(self.eos_id),
            "unk_token": self.text(self.unknown_id),
            "pad_token": self.text(self.pad_id),
        }
        if self.chat_template:
            config["chat_template"] = self.chat_template
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8"
        )


def _skeleton(vocabulary: GgufVocabulary) -> dict[str, Any]:
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _affixes(vocabulary),
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(vocabulary.tokens)},
            "merges": [],
        },
    }


def _affixes(vocabulary: GgufVocabulary) -> dict[str, Any] | None:
    """The tokens put around a text: BOS before, EOS after, where the file asks for them."""
    bos = vocabulary.bos_id if vocabulary.add_bos else None
    eos = vocabulary.eos_id if vocabulary.add_eos else None
    used = [i for i in (bos, eos) if i is not None]
    if not used:
        return None
    text = vocabulary.text

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if bos is not None:
            parts.insert(0, {"SpecialToken": {"id": text(bos), "type_id": type_id}})
        if eos is not None:
            parts.append({"SpecialToken": {"id": text(eos), "type_id": type_id}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {text(i): {"id": text(i), "ids": [i], "tokens": [text(i)]} for i in used},
    }


def _byte_level(vocabulary: GgufVocabulary) -> dict[str, Any]:
    if vocabulary.pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"GGUF pre-tokenizer {vocabulary.pre!r} is not supported; "
            f"known: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    if not vocabulary.merges:
        raise ModelError("the GGUF file has a 'gpt2' tokenizer without tokenizer.ggml.merges")
    pre_tokenizer, whole_words = _PRE_TOKENIZERS[vocabulary.pre]
    tokenizer = _skeleton(vocabulary)
    tokenizer["pre_tokenizer"] = pre_tokenizer
    tokenizer["decoder"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer["model"] |= {"merges": vocabulary.merges, "ignore_merges": whole_words}
    return tokenizer


def _sentencepiece(vocabulary: GgufVocabulary) -> dict[str, Any]:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise ModelError("the GGUF file has a 'llama' tokenizer without tokenizer.ggml.scores")
    tokenizer = _skeleton(vocabulary)
    replace: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.add_space_prefix:
        prepend = {"type": "Prepend", "prepend": "▁"}
        replace = {"type": "Sequence", "normalizers": [prepend, replace]}
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    tokenizer["normalizer"] = replace
    tokenizer["decoder"] = {"type": "Sequence", "decoders": back}
    tokenizer["model"] |= {
        "unk_token": vocabulary.text(vocabulary.unknown_id),
        "fuse_unk": True,
        "byte_fallback": True,
        "merges": _merges_by_score(vocabulary),
    }
    return tokenizer


def _merges_by_score(vocabulary: GgufVocabulary) -> list[list[str]]:
    """Every way to make a piece of two others, best-scored piece first, as SentencePiece merges."""
    usable = {
        text: score
        for text, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        if kind == NORMAL
    }
    ranked: list[tuple[float, int, str, str]] = []
    for text, score in usable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in usable and right in usable:
                ranked.append((-score, cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [[left, right] for _, _, left, right in ranked]
