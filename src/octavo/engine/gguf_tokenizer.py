"""The tokenizer that a GGUF file's metadata describes, as a Transformers tokenizer's files.

Transformers has converters for this too. They are private, have moved between the versions that we support,
and split text like GPT-2 wherever they do not know how the model wants it split. Here an unknown split is
an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo.engine.errors import ModelError
from octavo.engine.gguf import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# takes tokenizer.json as it stands; the model's own class would build it anew, in many seconds
_CLASS = "PreTrainedTokenizerFast"
_SETTINGS = {
    "tokenizer_class", "model_max_length", "clean_up_tokenization_spaces", "padding_side", "chat_template",
    "bos_token", "eos_token", "unk_token", "pad_token",
}  # fmt: skip
# files that would have a say as well
_OTHER_FILES = {"chat_template.jinja", "special_tokens_map.json", "added_tokens.json"}

_CONTROL, _USER_DEFINED = 3, 4  # token types: matched whole; control tokens are special as well
_SPACE = "\u2581"  # SentencePiece's visible space
# tokens that end a turn and that chat models stop at, though some files name only the end of the text
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True)
class _Split:
    """How byte-level BPE cuts text before it merges. `pattern` None means GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token stays whole
    adds_bos: bool = False  # what llama.cpp assumes when the file does not say


_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Split(_CL100K.replace("DIGITS", "{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = _Split(_CL100K.replace("DIGITS", ""), nfc=True)
# by the name in `tokenizer.ggml.pre`
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Split(_TEKKEN, ignore_merges=True, adds_bos=True),
}


def write_tokenizer(file: GGUFFile, architecture: str, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template if there is one, into `folder`.

    `max_length` is the model's context in tokens. Raises ModelError if the file's tokenizer is of an
    unknown kind or incomplete.
    """
    vocab = _Vocabulary.of(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, vocab)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, vocab, architecture)
    else:
        raise ModelError(
            f"{file.path} has a tokenizer of the kind {kind!r}; 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE) are read. Use the model's Transformers folder instead"
        )
    for special, number in ((True, _CONTROL), (False, _USER_DEFINED)):
        # one that the model does not have would get a new id, past the end of the embedding
        known = [text for text in vocab.of_type(number) if tokenizer.token_to_id(text) is not None]
        added = [AddedToken(text, normalized=False, special=special) for text in known]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    prefix = vocab.named("bos") if _flag(file, "add_bos_token", adds_bos) else None
    suffix = vocab.named("eos") if _flag(file, "add_eos_token", False) else None
    tokenizer.post_processor = _template(vocab, prefix, suffix)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, object] = {
        "tokenizer_class": _CLASS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (text := vocab.named(key)) is not None:
            settings[f"{name}_token"] = text
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    assert settings.keys() <= _SETTINGS
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), "utf-8")


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer that `write_tokenizer` wrote into `folder`, or None if another program wrote it.

    It is the one that AutoTokenizer gives, in a third of the time: that one parses the vocabulary twice.
    """
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    written = {file.name for file in folder.iterdir()}
    if settings.get("tokenizer_class") != _CLASS or settings.keys() - _SETTINGS or _OTHER_FILES & written:
        return None
    from transformers import PreTrainedTokenizerFast

    del settings["tokenizer_class"]
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)


def stop_token_ids(file: GGUFFile) -> list[int]:
    """The ids of the tokens that end a text: the file's end of text and of turn, and the end of turn that
    its chat template writes. In that order, without repeats; empty if the file names none.
    """
    vocab = _Vocabulary.of(file)
    ids = [vocab.id_of(key) for key in ("eos", "eot")]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        control = set(vocab.of_type(_CONTROL))
        ids += [vocab.tokens.index(text) for text in _TURN_ENDS if text in template and text in control]
    return list(dict.fromkeys(number for number in ids if number is not None))


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens, their types, and the ids that the file names (`bos`, `eos`, ...)."""

    file: GGUFFile
    tokens: list[str]
    types: np.ndarray  # [num_tokens]

    @classmethod
    def of(cls, file: GGUFFile) -> _Vocabulary:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError(f"{file.path} has no vocabulary ('tokenizer.ggml.tokens'), so no tokenizer")
        types = file.metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
        if not isinstance(types, np.ndarray) or types.size != len(tokens):
            raise ModelError(f"{file.path} is corrupt: it does not have one token type for each token")
        return cls(file, tokens, types)

    def of_type(self, number: int) -> list[str]:
        return [self.tokens[index] for index in np.flatnonzero(self.types == number)]

    def id_of(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelError(
                f"{self.file.path}: 'tokenizer.ggml.{name}_token_id' is {value!r}, and the vocabulary has "
                f"{len(self.tokens)} tokens"
            )
        return value

    def named(self, name: str) -> str | None:
        index = self.id_of(name)
        return None if index is None else self.tokens[index]

    def index(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.tokens)}


def _byte_level(file: GGUFFile, vocab: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise ModelError(
            f"{file.path} splits text in the way {name!r} ('tokenizer.ggml.pre'); known are "
            f"{', '.join(sorted(_SPLITS))}. Use the model's Transformers folder instead"
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{file.path} has no merges ('tokenizer.ggml.merges'): its tokenizer is incomplete")
    model = models.BPE(vocab.index(), _pairs(file, merges), ignore_merges=split.ignore_merges)
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _sentencepiece(file: GGUFFile, vocab: _Vocabulary, architecture: str) -> tuple[Tokenizer, bool]:
    is_gemma = architecture.startswith("gemma")
    if is_gemma:  # runs of spaces are stored as spaces, and looked up after spaces became visible
        spelled = [text.replace(" ", _SPACE) if text.isspace() else text for text in vocab.tokens]
        vocab = _Vocabulary(file, spelled, vocab.types)
    index = vocab.index()
    merges = file.metadata.get("tokenizer.ggml.merges")
    if isinstance(merges, list):
        pairs = _pairs(file, merges)
    elif is_gemma:  # its scores do not follow the merges; the order of the vocabulary does
        pairs = _implied_merges(index, -np.arange(len(vocab.tokens)))
    else:
        scores = file.metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or scores.size != len(vocab.tokens):
            raise ModelError(f"{file.path} has neither merges nor one score for each token")
        pairs = _implied_merges(index, scores)
    model = models.BPE(index, pairs, unk_token=vocab.named("unknown"), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prefixed = _flag(file, "add_space_prefix", True)
        scheme = "first" if prefixed else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
        if prefixed:
            steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _pairs(file: GGUFFile, merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2:
            raise ModelError(f"{file.path}: the merge {merge!r} is not two tokens with a space between them")
    return pairs  # type: ignore[return-value]


def _implied_merges(index: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: all ways to cut a token into two tokens, best
    score first, and of one score the longest left part first. The order is the one that Transformers'
    converters give.
    """
    lefts, rights, numbers = [], [], []
    for text, number in index.items():
        for cut in range(1, len(text)):
            # the right part is cut out only if the left one is a token: this loop runs millions of times
            if (left := text[:cut]) in index and (right := text[cut:]) in index:
                lefts.append(left)
                rights.append(right)
                numbers.append(number)
    left_lengths, right_lengths = np.array([*map(len, lefts)], int), np.array([*map(len, rights)], int)
    order = np.lexsort((-right_lengths, -left_lengths, -scores[np.array(numbers, int)]))
    return [(lefts[i], rights[i]) for i in order.tolist()]


def _template(vocab: _Vocabulary, prefix: str | None, suffix: str | None) -> processors.PostProcessor:
    # written even when nothing is added: Transformers puts in one of its own where there is none
    index = vocab.index()
    around = [text for text in (prefix, suffix) if text is not None]
    single = " ".join(part for part in (prefix, "$A", suffix) if part is not None)
    pair = f"{single} " + " ".join(part for part in (prefix, "$B:1", suffix) if part is not None)
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(text, index[text]) for text in dict.fromkeys(around)]
    )


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"{file.path}: 'tokenizer.ggml.{name}' is {value!r}, and has to be true or false")
    return value
