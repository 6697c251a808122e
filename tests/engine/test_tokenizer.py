"""The tokenizer: exact bytes, incremental text equal to whole decoding, stop strings equal to cutting at once."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.engine.tokenizer import BYTE_ALPHABET, Detokenizer, StopStrings, Tokenizer

LETTERS = {byte: char for char, byte in BYTE_ALPHABET.items()}


def byte_level() -> Backend:
    """All 256 bytes, pieces that cut characters apart, added tokens with and without a space, one hole in the ids."""
    pieces = ["é".encode()[:1], "日本".encode()[1:5], b" the", b"ing", "😀".encode()[:3], b"\xff\xfe", b"\xed\xa0"]
    vocab = {LETTERS[byte]: byte for byte in range(256)}
    for piece in pieces:
        vocab.setdefault("".join(LETTERS[byte] for byte in piece), len(vocab))
    vocab["lo" + LETTERS[32]] = len(vocab) + 1
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    backend.add_tokens([AddedToken("a tool", normalized=False), AddedToken("Ġé", normalized=False)])
    return backend


def sentencepiece() -> Backend:
    """Llama-2 style: spaces as U+2581, byte fallback, the first space of a text stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581the", "\u2581cat", "s", "at", "日", "é", "\u2581\u2581", ".", "\u2581é"]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


BYTES, PIECES = Tokenizer(byte_level()), Tokenizer(sentencepiece())


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int], skip: bool) -> str:
    detokenizer, pieces, start = Detokenizer(tokenizer, prompt, skip), [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    return "".join(pieces) + detokenizer.flush()


SIZES = st.lists(st.integers(0, 4), max_size=40)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, BYTES.vocab_size + 2), max_size=40), SIZES, st.booleans())
def test_byte_level_stream_is_the_whole_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert streamed(BYTES, [1, 2, 3], ids, sizes, skip) == BYTES.decode(ids, skip)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.integers(128, 258), st.integers(256, BYTES.vocab_size)), max_size=40))
def test_byte_level_bytes_join_to_the_whole_decode(ids: list[int]) -> None:
    assert b"".join(map(BYTES.token_bytes, ids)).decode("utf-8", "replace") == BYTES.decode(ids, False)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=30))
def test_any_text_survives_byte_level_encoding_and_streaming(text: str) -> None:
    ids = BYTES.encode(text, False)
    assert streamed(BYTES, [], ids, [1] * len(ids), True) == text


def nfc() -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def without_spaces() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def stripping() -> Backend:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


COMPOSED = Tokenizer(nfc())


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=30), st.integers(0, 60), st.sampled_from(["", "e\u0301", "\u1112\u1161\u11ab", "<|end|>"]))
def test_what_is_surely_longer_is(text: str, tokens: int, again: str) -> None:
    for tokenizer in (BYTES, COMPOSED):
        if tokenizer.surely_more(text + again * 8, tokens):
            assert len(tokenizer.encode(text + again * 8, False)) > tokens


def test_a_text_is_surely_longer_only_where_no_part_of_it_may_be_left_out() -> None:
    for tokenizer in (BYTES, COMPOSED):
        assert tokenizer.surely_more("x" * 10_000, 100) and not tokenizer.surely_more("x" * 100, 100)
    for backend in (sentencepiece(), without_spaces(), stripping()):
        tokenizer = Tokenizer(backend)
        assert not tokenizer.surely_more(" " * 10_000 + "<mask>", 100)


def test_other_threads_run_while_a_text_is_encoded_or_decoded() -> None:
    text = "the 日本 ing" * 20_000
    ids = BYTES.encode(text, False)
    for work in (lambda: BYTES.encode(text, False), lambda: BYTES.decode(ids * 8, False)):
        thread, turns = threading.Thread(target=work), 0
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0)
        assert turns > 50


PIECE_IDS = st.one_of(st.integers(0, PIECES.vocab_size), st.integers(3 + 0x80, 3 + 0xF4), st.integers(259, 268))


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECE_IDS, max_size=12), st.lists(PIECE_IDS, max_size=40), SIZES, st.booleans())
def test_sentencepiece_stream_is_the_whole_decode_after_the_prompt(
    prompt: list[int], ids: list[int], sizes: list[int], skip: bool
) -> None:
    prompt = [*prompt, PIECES.encode("s", False)[-1]]  # ends in a whole piece
    whole, before = PIECES.decode(prompt + ids, skip), PIECES.decode(prompt, skip)
    assert before + streamed(PIECES, prompt, ids, sizes, skip) == whole


@settings(deadline=None, max_examples=200)
@given(st.lists(PIECE_IDS, max_size=40), SIZES, st.booleans())
def test_sentencepiece_stream_without_a_prompt_is_the_whole_decode(
    ids: list[int], sizes: list[int], skip: bool
) -> None:
    assert streamed(PIECES, [], ids, sizes, skip) == PIECES.decode(ids, skip)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_no_replacement_character_while_a_character_is_being_built(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é😀日", False)
    raw = [3 + b for b in "😀".encode()] if tokenizer is PIECES else list("😀".encode())
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push([token]) for token in raw + ids]
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:3] == ["", "", ""]


def test_an_unfinished_character_is_flushed_as_replacement() -> None:
    detokenizer = Detokenizer(BYTES, [])
    assert detokenizer.push(list("a😀".encode())[:3]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_an_endless_run_of_bad_bytes_is_released_now_and_then() -> None:
    detokenizer = Detokenizer(PIECES, [])
    held = [detokenizer.push([3 + 0xFF]) for _ in range(1000)]
    assert sum(map(len, held)) > 900
    assert len(detokenizer._decoder._ids) <= 200


def test_the_first_generated_word_keeps_its_space_after_a_prompt() -> None:
    the = [260]
    assert Detokenizer(PIECES, [1, *the]).push(the) == " the"
    assert Detokenizer(PIECES, [1]).push(the) == "the"


def test_exact_bytes_of_tokens() -> None:
    assert [BYTES.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert BYTES.token_bytes(BYTES.vocab_size) == BYTES.token_bytes(-1) == b""
    assert PIECES.token_bytes(3 + 0xE2) == b"\xe2"
    assert PIECES.token_bytes(260) == b" the"
    assert PIECES.token_text(3 + 0xE2) == "\ufffd"
    assert PIECES.token_text(2) == "</s>"


def test_load_reads_the_neighbours(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    end = {"content": "<|end|>", "special": True}
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"eos_token": end, "add_bos_token": True, "pad_token": None, "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|bos|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tokenizer = Tokenizer.load(tmp_path)
    end_id = tokenizer.encode("<|end|>", False)
    assert tokenizer.eos_ids == (7, 9, *end_id)
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    assert tokenizer.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).chat_template == "J"


def test_load_of_a_lone_tokenizer(tmp_path: Path) -> None:
    backend = sentencepiece()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((), None)
    assert len(tokenizer.encode("cat cat cat", True)) > 9
    assert tokenizer.encode("é", True)[0] == 1
    assert tokenizer.encode("é", False)[0] != 1
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")


def test_the_front_end_gets_no_torch() -> None:
    code = "import sys, paceline.engine.tokenizer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Reference: look at every end from the left, at the longest stop string first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end] if include else text[: end - len(stop)], True
    return text, False


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.text("ab", max_size=5), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.booleans(),
)
def test_stop_strings_cut_pieces_like_the_whole(pieces: list[str], stops: list[str], include: bool) -> None:
    scanner, released, stopped = StopStrings(stops, include), "", False
    for i, piece in enumerate(pieces):
        text, stopped = scanner.push(piece)
        released += text
        so_far = "".join(pieces[: i + 1])
        kept = len(so_far) - len(released)
        if not stopped:  # what is held back may still become a stop string, and nothing more is held
            assert all(any(stop.startswith(so_far[-kept:]) for stop in stops) for _ in range(min(kept, 1)))
            assert not any(stop.startswith(so_far[-n:]) for stop in stops for n in range(kept + 1, len(so_far) + 1))
    assert (released + scanner.flush(), stopped) == cut("".join(pieces), stops, include)


def test_stop_string_across_pieces_and_after_the_stop() -> None:
    scanner = StopStrings(["STOP", "TO"])
    assert scanner.push("abS") == ("ab", False)
    assert scanner.push("TO") == ("S", True)
    assert scanner.push("more") == ("", True)
    assert scanner.flush() == ""
    assert StopStrings(["bc", "abc"]).push("xabcd") == ("x", True)
    assert StopStrings(["abc"], include=True).push("xabcd") == ("xabc", True)
    assert StopStrings([]).push("text") == ("text", False)
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
