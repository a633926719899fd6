"""Text to token ids and back: SentencePiece, tiktoken and `tokenizer.json` behind one small interface.

`load_tokenizer` finds out which of the three a checkpoint has, and the rest of the project sees a `Tokenizer` only. Whatever
the kind, a vocabulary comes down to one table: the bytes that each id writes. Decoding, streaming and the comparison of two
vocabularies use nothing else, so they are the same for all three, and a stream's text is what decoding gives by construction.
"""

from __future__ import annotations

import base64
import codecs
import functools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import sentencepiece
import tiktoken
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import UserError
from files import read_json

FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken")

# Control tokens that end a turn. One counts as such only when the checkpoint's chat template writes it: the id that the
# checkpoint names as eos is then often another one (Llama 3's <|end_of_text|>, ChatML's <|endoftext|>).
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>")

# Names under which vocabularies keep places free for later. A later version may give such a place a name.
PLACEHOLDER = re.compile(r"reserved|unused|placeholder", re.IGNORECASE)

# Llama 3's original files have the ranks only: the split and the names of the 256 control tokens (3.1's) are in its code.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONGEST_RUN = 25_000  # characters of white space, or of none, beyond which Llama 3's own code cuts a text before it splits it
LLAMA3_CONTROL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)  # fmt: skip

# tokenizer_config.json's keys for tokens with a part to play
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")

# Put around a control token's name where it stands in a message: two characters that Unicode keeps out of all text.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
NO_FENCES = {ord(OPEN): None, ord(CLOSE): None}
FENCED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


@dataclass(frozen=True)
class Vocabulary:
    """What one kind of tokenizer file comes down to.

    `encode(text, special)` gives ids without bos; `special` says whether the names of control tokens are read as such.
    `pieces[i]` is what id i writes, None where an id is in no use. `special` holds the control tokens, name -> id, and
    `added` every id outside the learned vocabulary. `strips_space`: the first piece's leading space isn't in the text.
    `bos`, `ends` and `adds_bos` are what the file itself says; `tokenizer_config.json` may say otherwise.
    """

    encode: Callable[[str, bool], list[int]]
    pieces: list[bytes | None]
    special: dict[str, int]
    added: frozenset[int]
    strips_space: bool
    bos: str | None = None
    ends: tuple[str, ...] = ()
    adds_bos: bool = False


class Tokenizer:
    """A checkpoint's tokenizer; made by `load_tokenizer`.

    Attributes: `n_tokens`, ids in use lie below it (the model's vocabulary may be padded beyond); `bos_id` or None;
    `eos_ids`, every id that ends a text or a turn; `hidden_ids`, those, bos and padding, which write nothing. Other control
    tokens write their names, so that the marks around a tool call are in the text.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.vocabulary = vocabulary
        self.pieces = vocabulary.pieces
        self.special_ids = frozenset(vocabulary.special.values())
        self.n_tokens = len(self.pieces)
        eos = vocabulary.ends[0] if vocabulary.ends else None
        names = {"bos_token": vocabulary.bos, "eos_token": eos, "unk_token": None, "pad_token": None} | settings
        self._names = {key: names[key] for key in NAMED if names[key] is not None}
        self.bos_id = vocabulary.special.get(self._names.get("bos_token", ""))
        said = settings.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (vocabulary.adds_bos if said is None else bool(said))
        self.chat_template: str | None = settings.get("chat_template")
        self.eos_ids = _eos_ids(folder, vocabulary, settings)
        silent = {self._names.get(key) for key in ("bos_token", "eos_token", "pad_token")}
        self.hidden_ids = self.eos_ids | {i for name, i in vocabulary.special.items() if name in silent}
        self._control = _any_of(vocabulary.special)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`, without bos. With `special`, names of control tokens such as <|im_end|> become those tokens."""
        # Bytes on a command line that aren't UTF-8 arrive as lone surrogates, which no tokenizer takes: "?".
        return self.vocabulary.encode(text.encode("utf-8", "replace").decode("utf-8"), special)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: control tokens written in it are read, and bos goes in front where the checkpoint says so."""
        ids = self.encode(text, special=True)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self.chat_template is not None

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that the chat template makes of `messages`; see `encode_chat`."""
        if self.chat_template is None:
            raise UserError(f"{self.folder} has no chat template; give the prompt as raw text (`raw`)")
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return _environment().from_string(self.chat_template).render(values | self._names)
        except Exception as error:  # a template's own code fails in any way that Python does
            raise UserError(f"{self.folder}: the chat template fails on these messages: {error}") from error

    def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, `[{"role": "user", "content": "…"}, …]`, as the checkpoint's chat template renders it.

        Only the template writes control tokens: the name of one inside a message stays plain text. Raises `UserError`
        without a template, or where the template refuses the messages.
        """
        rendered = self.render_chat([self._fence(message) for message in messages], add_generation_prompt)
        ids: list[int] = []
        for n, part in enumerate(FENCED.split(rendered)):  # every other part is a name that stood in a message
            part = part.translate(NO_FENCES)  # a template may have cut a fenced name in two
            ids += self.encode(part, special=n % 2 == 0) if part else []
        return ids

    def _fence(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(rf"{OPEN}\g<0>{CLOSE}", value.translate(NO_FENCES))
        if isinstance(value, list):
            return [self._fence(item) for item in value]
        if isinstance(value, dict):
            return {key: self._fence(item) for key, item in value.items()}
        return value

    def encode_question(self, text: str, raw: bool = False) -> list[int]:
        """Ids of a single question: through the chat template where there is one, unless it is to be taken raw."""
        if raw or not self.has_chat_template:
            return self.encode_prompt(text)
        return self.encode_chat([{"role": "user", "content": text}])

    def end_of_answer(self, raw: bool = False) -> list[int]:
        """The stop token [1] with which an answer ends: in a conversation the one the template writes there, else eos.

        Empty where the checkpoint names none.
        """
        named = [self.vocabulary.special[name] for name in [self._names.get("eos_token")] if name in self.vocabulary.special]
        if raw or not self.has_chat_template:
            return named
        question = {"role": "user", "content": "a"}
        asked = self.encode_chat([question])
        whole = self.encode_chat([question, {"role": "assistant", "content": "b"}], add_generation_prompt=False)
        return [i for i in whole[len(asked) :] if i in self.eos_ids][:1] or named

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, without `hidden_ids`, bytes that aren't UTF-8 as U+FFFD."""
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def stream(self) -> StreamDecoder:
        """A decoder that takes ids as they come."""
        return StreamDecoder(self)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What an id writes, which is also its identity in a comparison; a control token's name; None for an unused id."""
        return self.pieces[token_id] if 0 <= token_id < self.n_tokens else None

    def token_text(self, token_id: int) -> str:
        """An id's text for display, on one line: line ends and other unprintable characters are escaped."""
        piece = self.token_bytes(token_id)
        if piece is None:
            return f"<unused {token_id}>"
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in piece)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class StreamDecoder:
    """Text of ids as they come, never a part of a character; each id costs the same however long the text is.

    All that `push` and `flush` return, put together, is what `Tokenizer.decode` gives for all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.vocabulary.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids and return the text that has become whole."""
        pieces, hidden = self._tokenizer.pieces, self._tokenizer.hidden_ids
        data = b"".join(pieces[i] or b"" for i in ids if i < len(pieces) and i not in hidden)
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End the text: return what stands for a character cut short (U+FFFD), else nothing."""
        return self._utf8.decode(b"", final=True)


class Output:
    """The text of one generation as it grows, trimmed at the first stop token, stop text or the length cap.

    Ids, text, counters and what was streamed agree: the text is cut exactly where a stop text begins, and the ids are the
    fewest whose decoding begins with that text; a stop token is in neither. ``emit`` gets each piece of text, and who
    accepted it, as soon as it can no longer be part of a stop text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        stop_texts: Sequence[str] = (),
        emit: Callable[[str, str], None] = lambda piece, who: None,
    ) -> None:
        self.max_new_tokens, self.stop_texts, self.emit = max_new_tokens, [s for s in stop_texts if s], emit
        self.stop_ids, self.decoder = tokenizer.eos_ids, tokenizer.stream()
        self.tokens: list[int] = []
        self.accepted_by: list[str] = []
        self.ends: list[int] = []  # length of the text after each token
        self.text = ""
        self.streamed = 0  # characters emitted
        self.finish_reason = ""
        self.stopped_by: int | None = None  # the stop token, which is in neither ids nor text

    def add(self, tokens: Sequence[int], accepted_by: Sequence[str]) -> bool:
        """Append what a round committed. Returns whether the text has ended."""
        for token, who in zip(tokens, accepted_by):
            if token in self.stop_ids:
                self.stopped_by = token
                return self._finish("stop")
            self.tokens.append(token)
            self.accepted_by.append(who)
            self.ends.append(len(self.text))
            if self._append(self.decoder.push([token])):
                return self._finish("stop", cut=True)
            if len(self.tokens) == self.max_new_tokens:
                return self._finish("length")
        held = (n for stop in self.stop_texts for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        self._stream(len(self.text) - max(held, default=0))
        return False

    def _append(self, piece: str) -> bool:
        """Add the last token's text; cut text and tokens at the first stop text. Returns whether there was one."""
        before = len(self.text)
        self.text += piece
        if self.ends:
            self.ends[-1] = len(self.text)
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.stop_texts]
        found = [at for at in found if at >= 0]
        if not found:
            return False
        self.text = self.text[: min(found)]
        keep = next(i for i, end in enumerate([0, *self.ends]) if end >= len(self.text))
        del self.tokens[keep:], self.accepted_by[keep:], self.ends[keep:]
        return True

    def _finish(self, reason: str, cut: bool = False) -> bool:
        if not cut and self._append(self.decoder.flush()):
            reason = "stop"
        self.finish_reason = reason
        self._stream(len(self.text))
        return True

    def _stream(self, upto: int) -> None:
        """Emit the text up to a character, in pieces of one token."""
        first = bisect_right(self.ends, self.streamed)
        for end, who in zip(self.ends[first:], self.accepted_by[first:]):
            piece = self.text[self.streamed : min(end, upto)]
            if piece:
                self.emit(piece, who)
                self.streamed += len(piece)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a checkpoint folder: `tokenizer.json`, else `tokenizer.model` (SentencePiece or tiktoken by its
    content), else `*.tiktoken`.

    Raises `UserError` when there is none of these, or when one can't be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        return _load(folder)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # a value of another form than the field's files have
        raise UserError(f"{folder}: the tokenizer's files can't be understood: {error}") from None


def _load(folder: Path) -> Tokenizer:
    settings = _settings(folder)
    found = [path for pattern in FILES for path in sorted(folder.glob(pattern))]
    if not found:
        raise UserError(f"{folder}: no tokenizer; looked for {', '.join(FILES)}")
    with found[0].open("rb") as file:
        is_ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", file.read(1000))
    if found[0].suffix == ".json":
        vocabulary = _from_tokenizer_json(found[0], settings)
    elif is_ranks or found[0].suffix == ".tiktoken":
        vocabulary = _from_tiktoken(found[0], settings)
    else:
        vocabulary = _from_sentencepiece(found[0], settings)
    return Tokenizer(folder, vocabulary, settings)


def _from_tokenizer_json(path: Path, settings: dict[str, Any]) -> Vocabulary:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise UserError(f"{path}: not a tokenizer file that the tokenizers library reads ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = [settings[key] for key in NAMED if settings.get(key) is not None]
    tokenizer.add_special_tokens([name for name in names if tokenizer.token_to_id(name) is not None])

    # The decoder's state is its part of the file; the whole file is too big to be parsed twice.
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        to_bytes, strips_space = _byte_level_bytes, False
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes, strips_space = _sentencepiece_bytes, any(_strips_space(step) for step in steps)
    else:
        raise UserError(f"{path}: its decoder is {', '.join(sorted(kinds))}; supported are ByteLevel, ByteFallback and Metaspace")

    vocab = tokenizer.get_vocab()
    added = tokenizer.get_added_tokens_decoder()
    pieces: list[bytes | None] = [None] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        pieces[i] = token.encode() if i in added else to_bytes(token)

    def encode(text: str, special: bool) -> list[int]:
        tokenizer.encode_special_tokens = not special
        return tokenizer.encode(text, add_special_tokens=False).ids

    # What the post-processor puts in front of any text is bos.
    bare, whole = encode("a", False), tokenizer.encode("a").ids
    adds_bos = len(whole) > len(bare) > 0 and whole[0] != bare[0]
    return Vocabulary(
        encode, pieces, {token.content: i for i, token in added.items() if token.special}, frozenset(added), strips_space,
        bos=tokenizer.id_to_token(whole[0]) if adds_bos else None, adds_bos=adds_bos,
    )  # fmt: skip


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    return step["type"] == "Strip" and step["start"] > 0


@functools.cache
def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet of visible characters for bytes: code point -> byte.

    Visible Latin-1 characters stand for themselves and the other bytes, in order, for 256, 257, …; in place of the Latin-1
    characters that stand for nothing there is one that no byte has.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | dict.fromkeys(hidden, 0xFFFF) | {256 + n: byte for n, byte in enumerate(hidden)}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_byte_alphabet()).encode("latin-1")
    except UnicodeEncodeError:  # not in the alphabet: the decoder leaves such a token as it is
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _from_sentencepiece(path: Path, settings: dict[str, Any]) -> Vocabulary:
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load(str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: neither a SentencePiece model nor tiktoken ranks, or cut short") from error
    has_prefix = model.encode("x", out_type=str)[0].startswith("▁")
    # Llama 2 puts its dummy space in front of every stretch between control tokens; "legacy": false means the first alone.
    # The library always puts one, so then a stretch is read behind a character that no piece holds, whose ids are cut off.
    guard = "" if settings.get("legacy", True) else OPEN
    guard_length = len(model.encode(guard))

    pieces: list[bytes | None] = [_sentencepiece_bytes(model.id_to_piece(i)) for i in range(model.vocab_size())]
    special = {model.id_to_piece(i): i for i in range(len(pieces)) if model.is_control(i) or model.is_unknown(i)}
    added, added_special = _added_tokens(settings)
    special |= added_special
    ids = special | added
    _place(pieces, ids)
    matched = {False: _any_of(added), True: _any_of(ids)}

    def encode(text: str, special: bool) -> list[int]:
        out: list[int] = []
        for n, part in enumerate(matched[special].split(text)):
            if n % 2:
                out.append(ids[part])
            elif part:
                out += model.encode(guard + part)[guard_length:] if n else model.encode(part)
        return out

    return Vocabulary(
        encode, pieces, special, frozenset(ids.values()), has_prefix,
        bos=model.id_to_piece(model.bos_id()) if model.bos_id() >= 0 else None,
        ends=(model.id_to_piece(model.eos_id()),) if model.eos_id() >= 0 else (),
        adds_bos=model.bos_id() >= 0,
    )  # fmt: skip


def _from_tiktoken(path: Path, settings: dict[str, Any]) -> Vocabulary:
    ranks: dict[bytes, int] = {}
    for n, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{path}, line {n}: not a token in base64 and its rank") from error
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: its {len(ranks)} ranks aren't 0, 1, 2, …: damaged or cut short")
    if not all(bytes([byte]) in ranks for byte in range(256)):  # of which the library makes what is no longer token
        raise UserError(f"{path}: damaged: some of the 256 bytes have no rank")
    added, special = _added_tokens(settings)
    ends: tuple[str, ...] = ()
    if not special:
        size = len(ranks) + len(LLAMA3_CONTROL)
        expected = read_json(path.parent / "config.json", missing_ok=True).get("vocab_size", size)
        if expected != size:  # the control tokens' ids follow from the number of ranks, so it had better be right
            raise UserError(
                f"{path}: {len(ranks)} ranks and {size - len(ranks)} control tokens aren't the {expected} of config.json"
            )
        special = {name: len(ranks) + n for n, name in enumerate(LLAMA3_CONTROL)}
        ends = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
    encoding = tiktoken.Encoding(path.name, pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    pieces: list[bytes | None] = [None] * (max(ranks.values()) + 1)
    for token, i in ranks.items():
        pieces[i] = token
    ids = special | added
    _place(pieces, ids)
    matched = {False: _any_of(added), True: _any_of(ids)}

    def encode(text: str, special: bool) -> list[int]:
        out: list[int] = []
        for n, part in enumerate(matched[special].split(text)):
            if n % 2:
                out.append(ids[part])
            else:
                out += [i for stretch in _stretches(part) for i in encoding.encode_ordinary(stretch)]
        return out

    bos = "<|begin_of_text|>" if "<|begin_of_text|>" in special else None
    return Vocabulary(encode, pieces, special, frozenset(ids.values()), False, bos=bos, ends=ends, adds_bos=bos is not None)


def _stretches(text: str) -> Iterator[str]:
    """A text, cut where a run of white space, or of none, gets too long for the library's regular expressions."""
    start = 0
    for run in re.finditer(r"\s+|\S+", text if len(text) > LONGEST_RUN else ""):
        for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:end]
            start = end
    yield text[start:]


def _added_tokens(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Plain and control tokens, name -> id, that the configuration adds to a vocabulary."""
    plain: dict[str, int] = dict(settings["added_tokens"])
    special: dict[str, int] = {}
    for i, token in settings.get("added_tokens_decoder", {}).items():
        plain.pop(token["content"], None)
        (special if token.get("special") else plain)[token["content"]] = int(i)
    for key in NAMED:
        if settings.get(key) in plain:
            special[settings[key]] = plain.pop(settings[key])
    return plain, special


def _place(pieces: list[bytes | None], tokens: dict[str, int]) -> None:
    """Write tokens into the table by their ids, making it longer as needed."""
    pieces += [None] * (max(tokens.values(), default=-1) + 1 - len(pieces))
    for name, i in tokens.items():
        pieces[i] = name.encode()


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `names` as group 1: the longest first, for one may begin with another."""
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")" if names else "((?!))")


def _settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` and the small files around it as one, names of tokens and the chat template as plain strings."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json(folder / name, missing_ok=True)
    settings["added_tokens"] = read_json(folder / "added_tokens.json", missing_ok=True)
    for key in NAMED:
        if isinstance(settings.get(key), dict):  # an AddedToken written out
            settings[key] = settings[key]["content"]
    template = read_json(folder / "chat_template.json", missing_ok=True).get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template:
        # Marks of what a model is trained on, which jinja2 doesn't know and which change nothing here.
        template = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
        template = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", template)
    settings["chat_template"] = template
    return settings


def _eos_ids(folder: Path, vocabulary: Vocabulary, settings: dict[str, Any]) -> frozenset[int]:
    """Every id that ends a text: those that the checkpoint's files name, and the ends of turn that its template writes."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = read_json(folder / file, missing_ok=True).get("eos_token_id")
        named = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in named):
            raise UserError(f"{folder / file}: eos_token_id is {value!r}; it should be a token's id or a list of ids")
        ids.update(named)
    names = [settings.get("eos_token"), *vocabulary.ends]
    names += [name for name in TURN_ENDS if name in (settings["chat_template"] or "")]
    return frozenset(ids | {vocabulary.special[name] for name in names if name in vocabulary.special})


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Where chat templates run: sandboxed, with what Hugging Face's templates expect to find."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson  # jinja2's own escapes for HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def check_same_vocabulary(a: Tokenizer, b: Tokenizer, name_a: str, name_b: str) -> None:
    """Raises `UserError` that names the first differing id and both its texts, unless ids mean the same to both.

    Two differences are let pass, for neither can change what any text means. An id that only one of the two has may be an
    added token: fine-tuning appends such tokens, in rows that both matrices have from padding, and no text is made of them.
    And where one has a place kept free ("<|reserved_special_token_4|>"), the other may have given it a name.
    """
    if a.pieces == b.pieces:
        return
    for i in range(max(a.n_tokens, b.n_tokens)):
        piece_a, piece_b = a.token_bytes(i), b.token_bytes(i)
        if piece_a == piece_b:
            continue
        holders = [t for t, piece in ((a, piece_a), (b, piece_b)) if piece is not None]
        added = all(i in t.vocabulary.added for t in holders)
        if added and (len(holders) == 1 or any(PLACEHOLDER.search(t.token_text(i)) for t in holders)):
            continue
        raise UserError(
            f"{name_a} and {name_b} have different vocabularies, so one can't draft for the other: "
            f"id {i} is {a.token_text(i)!r} in {name_a} and {b.token_text(i)!r} in {name_b}"
        )
