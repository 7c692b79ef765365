"""The detokeniser gives the tokenizer's own text, cut at the stop string, whatever the pieces are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octavo.engine.request import SamplingParams
from octavo.engine.text import Detokenizer

CORPUS = [
    "the cat sat on the mat",
    "hello héllo wörld",
    "日本語の文字 日本",
    "stop STOP stopping",
    "👩‍👩‍👧 🎉🎉",
]


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens cut some characters in the middle, with <s> and </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken("<s>", special=True), AddedToken("</s>", special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece's way: bytes are tokens 0 to 255, words begin with ▁ and the text's first space goes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁a": 257, "b": 258, "▁": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def pieces(
    ids: list[int],
    *stop: str,
    tokenizer: PreTrainedTokenizerFast = BYTE_LEVEL,
    skip_special_tokens: bool = True,
) -> tuple[list[str], Detokenizer]:
    """What each push, and last finish, returned."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop), skip_special_tokens)
    shown = []
    for token_id in ids:
        shown.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(shown)
    return [*shown, detokenizer.finish()], detokenizer


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The rule by characters: read on until the text ends with a stop string; drop the longest such."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def byte_ids(text: str) -> list[int]:
    """One token a byte."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [BYTE_LEVEL.convert_tokens_to_ids(letter) for letter in "".join(word for word, _ in letters)]


few_letters = st.text(alphabet="ab é日🎉", max_size=12)
words = st.lists(st.sampled_from([" the", " cat", "hello", "日本", "stop", " ", "é"]), max_size=6).map("".join)
some_text = st.one_of(st.text(max_size=30), few_letters, words)
parts_of_words = st.sampled_from(["h", "he", " the", "the c", "at", "ca", "ell", "hello", "日", "日本", "本s", "op"])
some_stops = st.lists(few_letters.filter(bool).map(lambda s: s[:3]) | parts_of_words, max_size=3).map(tuple)


@given(text=some_text, stop=some_stops, as_bytes=st.booleans())
def test_text_is_the_decode_of_all_tokens_up_to_the_first_stop(
    text: str, stop: tuple[str, ...], as_bytes: bool
) -> None:
    ids = byte_ids(text) if as_bytes else BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert BYTE_LEVEL.decode(ids) == text
    shown, detokenizer = pieces(ids, *stop)
    assert "".join(shown) == detokenizer.text == cut(text, stop)
    assert detokenizer.stopped == any(s in text for s in stop)


@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=30), skip=st.booleans())
def test_any_tokens_even_invalid_utf8_and_special_ones(ids: list[int], skip: bool) -> None:
    shown, _ = pieces(ids, skip_special_tokens=skip)
    assert "".join(shown) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(text=some_text, stop=some_stops)
def test_what_is_held_back_could_still_become_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    """Not more than needed: after each whole character, the text not shown begins a stop string."""
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=stop))
    for n, character in enumerate(text, start=1):
        for token_id in byte_ids(character):
            detokenizer.push(token_id)
        if detokenizer.stopped or character == "\ufffd":
            break
        held = text[:n].removeprefix(detokenizer.text)
        assert held == "" or any(s.startswith(held) for s in stop)


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    assert pieces(byte_ids("a日b"))[0] == ["a", "", "", "日", "b", ""]
    assert pieces(byte_ids("a日")[:3])[0] == ["a", "", "", "\ufffd"]


def test_stop_string_over_several_tokens_and_inside_one() -> None:
    shown, detokenizer = pieces(byte_ids("to stop now"), "stop")
    assert shown == ["t", "o", " ", "", "", "", "", "", "", "", "", ""]
    assert detokenizer.stopped
    assert detokenizer.text == "to "
    (the,) = BYTE_LEVEL.encode(" the", add_special_tokens=False)  # one token
    shown, detokenizer = pieces([the, the], "he")
    assert shown == [" t", "", ""]
    assert detokenizer.stopped


def test_a_false_start_of_a_stop_string_is_shown_when_it_is_known_to_be_one() -> None:
    assert pieces(byte_ids("sts!"), "stop")[0] == ["", "", "st", "s!", ""]
    assert pieces(byte_ids("sto"), "stop")[0] == ["", "", "", "sto"]


def test_the_stop_string_that_is_complete_first_counts() -> None:
    one_token = BYTE_LEVEL.encode(" the", add_special_tokens=False)
    assert len(one_token) == 1
    for ids in (byte_ids(" the"), one_token):
        assert pieces(ids, " the", "th")[1].text == " "
        assert pieces(ids, "h", " th", "th")[1].text == ""


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = [*byte_ids("a"), BYTE_LEVEL.eos_token_id]
    assert pieces(ids)[1].text == "a"
    assert pieces(ids, skip_special_tokens=False)[1].text == "a</s>"


def test_finishing_twice_adds_nothing() -> None:
    _, detokenizer = pieces(byte_ids("日")[:2])
    assert (detokenizer.finish(), detokenizer.text) == ("", "\ufffd")


@given(ids=st.permutations([257, 258, 259, *"é".encode()]))
def test_byte_fallback(ids: list[int]) -> None:
    shown, _ = pieces([257, *ids, 257], tokenizer=BYTE_FALLBACK)
    assert "".join(shown) == BYTE_FALLBACK.decode([257, *ids, 257])


def test_an_invalid_byte_after_shown_bytes_does_not_take_them_back_or_stop_the_text() -> None:
    ids = [257, *"é".encode(), 0xE2, 257, 258, *"é".encode()]
    shown, _ = pieces(ids, tokenizer=BYTE_FALLBACK)
    assert shown == ["a", "", "é", "", "\ufffd a", "b", "", "é", ""]


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(TypeError, match="Slow is a slow tokenizer"):
        Detokenizer(Slow(), SamplingParams())
