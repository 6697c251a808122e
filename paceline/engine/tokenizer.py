"""Text to token ids and back. No torch here: the HTTP front end imports it.

Byte-level BPE (GPT-2, Llama 3, Qwen, our own models) decodes through a table of bytes and an incremental UTF-8
decoder; everything else (sentencepiece-style tokenizers) through a bounded window over `tokenizers`' own decode. Both
give, piece by piece, exactly the text that decoding everything at once gives.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.engine.config import named_eos

REPLACEMENT = "\ufffd"
MAX_HELD = 64  # tokens: a longer run of bytes that are no text is released as it is
CONTEXT = 8  # tokens of the prompt that a sentencepiece-style decoder sees before the first generated one
KEEPING = {"ByteLevel", "Digits", "Split, Isolated", "Split, MergedWithPrevious", "Split, MergedWithNext"}  # all text
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A tokenizer.json with what its neighbours say about special tokens and the chat template."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str | list[str]] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """special_tokens: {"bos_token": "<s>", ...} by role; eos_ids: more ends of sequence than the eos_token."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._added = {token: entry.content for token, entry in added.items()}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        named = self.special_tokens.get("eos_token")
        eos = backend.token_to_id(named) if isinstance(named, str) else None
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if eos is None else [eos])]))
        parts = json.loads(backend.to_str())
        kinds = _kinds(parts["decoder"])
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._spaced = "Metaspace" in kinds or "Replace" in kinds
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._longest = _longest(parts, vocabulary)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads a directory with tokenizer.json (FileNotFoundError without) and, where present, its neighbours."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {path}")
        config = _read_json(path / "tokenizer_config.json")
        eos = named_eos(_read_json(path / "generation_config.json"), _read_json(path / "config.json"))
        return cls(
            Backend.from_file(str(file)),
            special_tokens=_special_tokens(_read_json(path / "special_tokens_map.json") | config),
            eos_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
            chat_template=_chat_template(path, config),
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; with add_special_tokens also what the tokenizer's post-processor puts around (a BOS, say)."""
        # a batch, for that is what lets other threads run meanwhile (`decode` as well)
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def surely_more(self, text: str, tokens: int) -> bool:
        """Whether the text has more than this many tokens, by its length alone."""
        return 0 < self._longest * tokens < len(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token (a part of a character, perhaps); empty for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            return b""
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._make_bytes(token)
        return known

    def token_text(self, token: int) -> str:
        """The token's bytes as text, U+FFFD for what is no UTF-8 by itself."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_known(self, token: int) -> bool:
        """Whether there is a token with this id: a model's vocabulary may be padded, or have holes."""
        return 0 <= token < self.vocab_size and self._backend.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether the token stands for one raw byte, as in sentencepiece's byte fallback."""
        return self.byte_fallback and BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or "") is not None

    def _make_bytes(self, token: int) -> bytes:
        text = self._backend.id_to_token(token) or ""
        if self.byte_level:  # added tokens too: that is what the decoder does
            mapped = [BYTE_ALPHABET.get(char) for char in text]
            return text.encode() if None in mapped else bytes(mapped)  # type: ignore[arg-type]
        if token in self._added:
            return text.encode()
        byte = BYTE_TOKEN.fullmatch(text) if self.byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return (text.replace("\u2581", " ") if self._spaced else text).encode()


class Detokenizer:
    """Generated ids to text as they come: `push` returns the text that later ids can no longer change.

    All pushes and `flush` together equal decoding all generated ids at once, seen after the prompt's last tokens (so a
    sentencepiece-style first word keeps its space). An incomplete UTF-8 sequence waits for its rest; sentencepiece's
    byte tokens wait for the end of their run, since one bad byte turns the whole run into U+FFFD; neither for more
    than 64 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        make = _ByteDecoder if tokenizer.byte_level else _WindowDecoder
        self._decoder = make(tokenizer, prompt_ids, skipped)

    def push(self, ids: Sequence[int]) -> str:
        """The new text that is certain after these ids."""
        return self._decoder.push(ids)

    def flush(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""
        return self._decoder.flush()


class _ByteDecoder:
    """Byte-level BPE: text is the UTF-8 of the joined bytes, whatever came before."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        skipped, token_bytes = self._skipped, self._token_bytes
        return self._decode(b"".join([token_bytes(token) for token in ids if token not in skipped]))

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowDecoder:
    """Any decoder whose text grows at its end: decodes a short window whose first part has been released already.

    ids:   [ context, released | held ]     `_text` is the text of the released part
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        context = [token for token in prompt_ids[-4 * CONTEXT :] if self._shows(token)][-CONTEXT:]
        while context and tokenizer.is_byte(context[-1]):  # an unfinished run of the prompt is the prompt's
            context.pop()
        self._ids = context
        self._released = len(context)
        self._text = tokenizer.decode(context, False)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(token) for token in ids if self._shows(token)])

    def _shows(self, token: int) -> bool:
        return token not in self._skipped and self._tokenizer.is_known(token)

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        held = len(self._ids) - self._released
        if held <= MAX_HELD and self._tokenizer.is_byte(token):
            return ""
        text = self._tokenizer.decode(self._ids, False)
        if held <= MAX_HELD and text.endswith(REPLACEMENT):
            return ""
        return self._release(text)

    def flush(self) -> str:
        return self._release(self._tokenizer.decode(self._ids, False))

    def _release(self, text: str) -> str:
        """Releases all of `text` (the window's) and moves the window on, if what it then holds still has text."""
        new = text[len(self._text) :]
        rest = self._ids[self._released :]
        rest_text = self._tokenizer.decode(rest, False)
        if rest_text:
            self._ids, self._text = rest, rest_text
        else:
            self._text = text
        self._released = len(self._ids)
        return new


class StopStrings:
    """Cuts a text that comes in pieces at the first stop string, holding back what may be the beginning of one.

    The text is read character by character; the first character that completes a stop string ends it (of several
    completed by the same character the longest, which starts earliest). So the result does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """include: the text released ends after the stop string instead of before it."""
        if "" in stops:
            raise ValueError("stop: a stop string must not be empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._firsts = {stop[0] for stop in self._stops}
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._include = include
        self._held = ""
        self._stopped = False

    def push(self, text: str, ends: bool = True) -> tuple[str, bool]:
        """The text that can be released now, and whether a stop string has matched (then nothing follows).

        ends: whether one that is complete within `text` ends it; it may begin in earlier text.
        """
        if self._stopped:
            return "", True
        if not self._held and not any(first in text for first in self._firsts):
            return text, False
        for end, char in enumerate(text, 1):
            stop = self._read(char)
            if ends and stop is not None:
                self._stopped = True
                whole, self._held = self._held + text[:end], ""
                return (whole if self._include else whole[: -len(stop)]), True
        whole = self._held + text
        keep = len(whole) - max(self._matched)
        self._held = whole[keep:]
        return whole[:keep], False

    def flush(self) -> str:
        """What was held back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _read(self, char: str) -> str | None:
        """Moves every stop's automaton (Knuth, Morris, Pratt) by one character; the longest stop completed by it."""
        complete = None
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = self._borders[i][matched]
            matched += stop[matched] == char
            if matched == len(stop) and complete is None:
                complete = stop
            self._matched[i] = matched if matched < len(stop) else self._borders[i][matched]
        return complete


def _borders(stop: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    for n in range(1, len(stop)):
        border = borders[n]
        while border and stop[border] != stop[n]:
            border = borders[border]
        borders.append(border + (stop[border] == stop[n]))
    return borders


def _kinds(part: dict[str, Any] | None) -> list[str]:
    """The types in a decoder, a pre-tokenizer or a normalizer of a tokenizer.json."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        (parts,) = (value for value in part.values() if isinstance(value, list))
        return [kind for part in parts for kind in _kinds(part)]
    return [f"{part['type']}, {part['behavior']}" if "behavior" in part else part["type"]]


def _longest(parts: dict[str, Any], vocabulary: Iterable[str]) -> int:
    """Bytes of text that a token stands for at most; 0 where that is not known to be so, for text may be left out."""
    kept = BYTE_ALPHABET.keys() <= set(vocabulary) and set(_kinds(parts["pre_tokenizer"])) <= KEEPING
    strips = any(added["lstrip"] or added["rstrip"] for added in parts["added_tokens"])
    if strips or not kept or _kinds(parts["decoder"]) != ["ByteLevel"] or set(_kinds(parts["normalizer"])) - {"NFC"}:
        return 0
    joined = 4 if parts["normalizer"] else 1  # bytes that NFC makes one of at most
    return joined * max(len(text.encode()) for text in vocabulary)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str | list[str]]:
    """The entries of a config that name tokens: {"eos_token": "</s>", "additional_special_tokens": [...]}."""
    found: dict[str, str | list[str]] = {}
    for role, value in config.items():
        if role == "additional_special_tokens":
            found[role] = [content for content in map(_content, value or []) if content is not None]
        elif role.endswith("_token") and (content := _content(value)) is not None:
            found[role] = content
    return found


def _content(token: Any) -> str | None:
    """A token in a config is its text, or a dict with its "content"; flags such as add_bos_token are neither."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: a string, or a named list's "default" (else its first)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    return named.get("default", next(iter(named.values()), None))
