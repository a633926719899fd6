"""The engine as a library: models that are loaded once and then decode one prompt after another.

    from llm import LLM

    llm = LLM("8B", draft="1B", judge="head.pt")
    print(llm.generate("Why is the sky blue?", max_new_tokens=100).text)
    for piece in llm.stream([{"role": "user", "content": "And at dusk?"}], temperature=0.7):
        print(piece.text, end="", flush=True)

Mistakes raise ``errors.UserError``. Threads may share an ``LLM``: their texts wait for each other.
"""

from __future__ import annotations

import dataclasses
import difflib
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, cast

import checkpoint
from engine import Engine, Generation, Sampling, cache_length, check_vocabulary, decode
from errors import UserError
from judge import RULES, check_threshold, default_threshold
from linear import MODES
from pace import LENGTHS
from tokenizer import Output, Tokenizer
from tp import check_device, default_device

DEMO = Path(__file__).parent / "demo"
CONTEXT = 8192  # tokens a text may have by default: caches for a whole context of 131,072 would take 17 GB for an 8B
ENGINES = 4  # kept ready: on CUDA each has its graphs
ROLES = ("system", "user", "assistant", "tool", "ipython")  # ipython: Llama 3's name for a tool's answer
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]  # text, ids, or a conversation's messages
# what an option may be, and that in words
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed"), (Integral, "a whole number")),
    **dict.fromkeys(("threshold", "temperature", "top_p"), (Real, "a number")),
    "verify": (str, "a rule's name"), "draft_len": ((Integral, str), "a whole number, or auto"),
}  # fmt: skip


def is_demo(target: str | Path) -> bool:
    """Whether a checkpoint is the demo pair's target."""
    return Path(target).resolve() == (DEMO / "target").resolve()


def default_dtype(target: str | Path) -> str:
    """The dtype where none is asked for: float32 for the demo pair, whose size costs nothing then, else bfloat16."""
    return "float32" if is_demo(target) else "bfloat16"


@dataclass(frozen=True)
class Options:
    """How one text is decoded; the names are the command line's, and None is its default."""

    max_new_tokens: int = 256
    stop: Sequence[str] = ()  # texts before which the answer ends
    verify: str | None = None  # ``judge`` with a head, else ``standard``
    threshold: float | None = None  # the rule's knob
    draft_len: int | str | None = None  # a number or ``auto``; 25 under the judge, else 8
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    raw: bool = False  # continue the prompt as it is, without the chat template

    def __post_init__(self) -> None:
        """Raises UserError for a value of another kind than its option's."""
        for name, (kind, words) in KINDS.items():
            value = getattr(self, name)
            unset = value is None and getattr(Options, name) is None
            if not unset and (isinstance(value, bool) or not isinstance(value, kind)):
                raise UserError(f"`{name}` is {value!r}; it must be {words}")
        if not isinstance(self.stop, Sequence) or isinstance(self.stop, str) or not all(isinstance(s, str) for s in self.stop):
            raise UserError(f"`stop` is {self.stop!r}; give a list of texts")
        if "" in self.stop:
            raise UserError("`stop` holds an empty text, which would end every answer before it begins; leave it out")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def settled(self, has_draft: bool, has_head: bool) -> Options:
        """With every default filled in.

        Raises:
            UserError: a value that can't be, or options that contradict each other or the models at hand.
        """
        verify = self.verify or ("judge" if has_head else "standard")
        if verify not in ("standard", *RULES):
            raise UserError(f"`verify` is {verify!r}; there are standard, {', '.join(RULES)}")
        if verify != "standard" and not has_draft:
            raise UserError(f"`verify` {verify} needs a `draft`")
        if verify == "judge" and not has_head:
            raise UserError("`verify` judge needs a head: give its file as `judge`")
        if self.threshold is not None:
            if verify == "standard":
                raise UserError(f"`threshold` {self.threshold:g} has no meaning for `verify` standard")
            check_threshold(verify, self.threshold)
        draft_len = self.draft_len if self.draft_len is not None else 25 if verify == "judge" else 8
        if draft_len != "auto" and (isinstance(draft_len, str) or draft_len < 1):
            raise UserError(f"`draft_len` is {draft_len}; it must be at least 1, or auto")
        if self.max_new_tokens < 1:
            raise UserError(f"`max_new_tokens` is {self.max_new_tokens}; it must be at least 1")
        self.sampling.check()
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            given = f"`top_k` {self.top_k}" if self.top_k else f"`top_p` {self.top_p:g}"
            raise UserError(
                f"{given} has no effect at `temperature` 0, which takes the likeliest token; give a temperature above 0"
            )
        return dataclasses.replace(self, verify=verify, draft_len=draft_len)


def options_named(given: dict[str, Any]) -> Options:
    """The options of these names. Raises UserError for a name that there isn't, with the one that may have been meant."""
    names = [field.name for field in dataclasses.fields(Options)]
    for name in given.keys() - set(names):
        near = difflib.get_close_matches(name, names, 1)
        raise UserError(f"there is no option {name!r}; " + (f"is `{near[0]}` meant?" if near else f"there are {', '.join(names)}"))
    return Options(**given)


def encode(tokenizer: Tokenizer, prompt: Prompt, options: Options, context: int) -> list[int]:
    """A prompt's ids.

    Raises:
        UserError: it is none, or empty, has a message that is none, or leaves no room for the new tokens in a text of ``context``.
    """
    if isinstance(prompt, Sequence) and not prompt:
        raise UserError("the prompt is empty; give some text")
    if isinstance(prompt, str):
        ids = tokenizer.encode_question(prompt, options.raw)
    elif is_list_of(dict, prompt):
        messages = list(cast(Sequence[dict[str, Any]], prompt))
        check_messages(messages)
        ids = tokenizer.encode_chat(messages)
    elif is_list_of(Integral, prompt):
        ids = list(map(int, cast(Sequence[int], prompt)))
    else:
        raise UserError("the prompt must be one text, a list of token ids or a list of messages; give several texts one by one")
    if len(ids) > context:
        raise UserError(f"the prompt has {len(ids)} tokens; the context is {context}")
    if len(ids) + options.max_new_tokens > context:
        raise UserError(
            f"a prompt of {len(ids)} tokens and `max_new_tokens` {options.max_new_tokens} are "
            f"{len(ids) + options.max_new_tokens} together; the context is {context}"
        )
    return ids


def is_list_of(kind: type, value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(isinstance(item, kind) and not isinstance(item, bool) for item in value)


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raises UserError for a message that a chat template would leave out, or make another's."""
    for n, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"message {n} has the role {role!r}; there are {', '.join(ROLES)}")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UserError(f"message {n} has the content {content!r}; a content must be text")


class Piece(NamedTuple):
    """Some text, and who accepted its token: ``standard``, ``rule`` or ``target``."""

    text: str
    accepted_by: str


class Stream:
    """An iterator of a text's pieces as rounds commit them. ``result`` is the text so far with its numbers.

    Who has heard enough just leaves. The lock is held while a round runs and not in between, so that a stream left half read is in
    nobody's way: the next text, of any thread, ends it, which a later ``next`` tells by a UserError.
    """

    def __init__(
        self, engine: Engine, prompt: list[int], tokenizer: Tokenizer, options: Options, lock: threading.RLock
    ) -> None:  # fmt: skip
        self._lock, self._pieces = lock, deque[Piece]()
        output = Output(
            tokenizer, options.max_new_tokens, options.stop, lambda text, who: self._pieces.append(Piece(text, who))
        )  # fmt: skip
        self.result = Generation(output)
        self._steps = decode(engine, prompt, output, options.seed)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        with self._lock:
            while not self._pieces:
                self.result = next(self._steps)
            return self._pieces.popleft()


class LLM:
    """A target, with a draft and a judge if given, loaded once. With neither target nor draft: the demo pair, which knows one
    task, little sums in words.

    One text at a time: threads wait for each other's ``generate``. What a prompt has in common with the start of the last text,
    answer included, isn't read again.

    Args:
        target, draft: checkpoint folders, or names under ``checkpoints/``. A ``checkpoint.Pair`` for a target is a pair that was
            found already.
        judge: a head's file, made for the target by ``scripts/train_judge.py``.
        context: tokens that a text may have, prompt included; caches are allocated for it (default: the models', at most 8,192).
        max_draft_len: the most tokens that may be drafted a round (default: 36, the most that ``auto`` takes).
        dtype: of weights and caches, by name (default: bfloat16; float32 for the demo pair).
        device: default: cuda where there is one.
        quantize: weights of both models, ``none`` or one of ``linear.MODES``.
        draft_tp: 1 lets every rank have the whole draft.
        compile: compile the models' blocks, once.
        trace, check_ranks: see ``Engine``.

    Raises:
        UserError: a file that isn't there or can't be read, models or a head that don't fit together.
    """

    def __init__(
        self,
        target: str | Path | checkpoint.Pair | None = None,
        draft: str | Path | None = None,
        judge: str | Path | None = None,
        *,
        context: int | None = None,
        max_draft_len: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        quantize: str = "none",
        draft_tp: int | None = None,
        compile: bool = True,
        trace: bool = False,
        check_ranks: bool = False,
    ) -> None:
        device = device or default_device()
        dtypes, forms = (None, *checkpoint.DTYPES), ("none", *MODES)
        for name, value, there_are in (
            ("dtype", dtype, dtypes),
            ("device", device, ("cuda", "cpu")),
            ("quantize", quantize, forms),
        ):
            if value not in there_are:
                raise UserError(f"`{name}` is {value!r}; there are {', '.join(filter(None, there_are))}")
        check_device(device)
        if target is None and draft is None:
            target, draft, judge = DEMO / "target", DEMO / "draft", judge or DEMO / "judge.pt"
        if target is None:
            raise UserError(f"`draft` {draft} needs a `target`")
        if not isinstance(target, checkpoint.Pair):
            target = checkpoint.find_pair(
                str(target), None if draft is None else str(draft), None if judge is None else Path(judge)
            )  # fmt: skip
        self.pair, self.tokenizer = target, target.tokenizer
        self.context = min(self.pair.context, CONTEXT) if context is None else context
        if not (isinstance(self.context, int) and 2 <= self.context <= self.pair.context):
            raise UserError(f"a context of {self.context!r} tokens was asked for; the models' is {self.pair.context}")
        longest = min(LENGTHS[-1], self.pair.context - 1) if max_draft_len is None else max_draft_len
        if not isinstance(longest, int) or longest < 1:
            raise UserError(f"room for {longest!r} drafted tokens a round was asked for; it must be a number of at least 1")
        dtype = dtype or default_dtype(self.pair.target)
        self.target, self.draft = self.pair.load(checkpoint.DTYPES[dtype], device, quantize, draft_tp == 1)
        if compile:
            for model in (self.target, self.draft):
                if model is not None:
                    model.compile_blocks(dynamic=device == "cpu")
        self.max_draft_len = longest if self.draft is not None else 0
        length = cache_length(self.context, self.max_draft_len, int(device == "cuda"))
        self.caches = self.target.new_cache(length), self.draft.new_cache(length) if self.draft is not None else None
        self.trace, self.check_ranks = trace, check_ranks
        self._engines: OrderedDict[Options, Engine] = OrderedDict()
        self._lock = threading.RLock()

    def settled(self, options: Options) -> Options:
        """Options with every default filled in. Raises UserError for what can't be with these models."""
        full = options.settled(self.draft is not None, self.pair.head is not None)
        if full.threshold is None and full.verify in RULES:
            full = dataclasses.replace(full, threshold=default_threshold(str(full.verify), self.pair.head))
        if self.draft is not None and not isinstance(full.draft_len, str) and (full.draft_len or 0) > self.max_draft_len:
            raise UserError(f"`draft_len` is {full.draft_len}; there is room for {self.max_draft_len} drafted tokens a round")
        return full

    def engine(self, **options: Any) -> Engine:
        """The engine for ``Options`` of these names: made when first asked for, and kept while it is among the last few."""
        full = self.settled(options_named(options))
        key = dataclasses.replace(full, max_new_tokens=1, stop=(), seed=0, raw=False)
        with self._lock:
            if key not in self._engines:
                adapt = full.draft_len == "auto"
                self._engines[key] = Engine(
                    self.target, self.draft, draft_len=min(self.max_draft_len, LENGTHS[-1]) if adapt else int(full.draft_len or 0),
                    verify=str(full.verify), threshold=full.threshold or 0.0, sampling=full.sampling, max_len=self.context,
                    trace=self.trace, check_ranks=self.check_ranks, adapt=adapt, caches=self.caches,
                )  # fmt: skip
            self._engines.move_to_end(key)
            while len(self._engines) > ENGINES:
                self._engines.popitem(last=False)
            return self._engines[key]

    def _is_compiled(self, engine: Engine) -> bool:
        """Whether another engine has made all that this needs. To warm it up would cost rounds, and the text in the caches."""
        if engine.lengths or engine.launcher.capture:  # it must know what rounds cost, or has graphs of its own
            return False
        return any(other.warm and other.M == engine.M for other in self._engines.values())

    def encode(self, prompt: Prompt, **options: Any) -> list[int]:
        """A prompt's ids, chat template applied.

        Raises:
            UserError: it is empty, leaves no room for the new tokens, or has ids that the target doesn't know.
        """
        ids = encode(self.tokenizer, prompt, options_named(options), self.context)
        check_vocabulary(ids, self.target.config.vocab_size)
        return ids

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Decode a prompt, piece by piece.

        Args:
            prompt: text, ids, or messages as ``[{"role": "user", "content": "…"}]``.
            options: those of ``Options``.

        Raises:
            UserError: at once, for a prompt that doesn't fit and for options that can't be.
        """
        ids, engine, given = self.encode(prompt, **options), self.engine(**options), options_named(options)
        with self._lock:
            if not engine.warm and not self._is_compiled(engine):  # which is not to count as the first text's time
                engine.warm_up(len(ids), len(ids) + given.max_new_tokens)
        return Stream(engine, ids, self.tokenizer, given, self._lock)

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Decode a prompt; ``stream`` says what may be given. Another thread's ``generate`` is waited for."""
        with self._lock:
            stream = self.stream(prompt, **options)
            deque(stream, maxlen=0)
            return stream.result
