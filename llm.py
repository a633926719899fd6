"""The engine as a library: models that are loaded once and then decode one prompt after another.

    from llm import LLM

    llm = LLM("8B", draft="1B", judge="head.pt")
    print(llm.generate("Why is the sky blue?", max_new_tokens=100).text)
    for piece in llm.stream([{"role": "user", "content": "And at dusk?"}], temperature=0.7):
        print(piece.text, end="", flush=True)

Mistakes raise ``errors.UserError``, whose text names the option as the command line spells it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

import checkpoint
from engine import Engine, Generation, Sampling, cache_length, check_vocabulary, decode
from errors import UserError
from judge import RULES, check_threshold, default_threshold
from pace import LENGTHS
from tokenizer import Output, Tokenizer

DEMO = Path(__file__).parent / "demo"
CONTEXT = 8192  # tokens a text may have by default: caches for a whole context of 131,072 would take 17 GB for an 8B
ENGINES = 4  # kept ready: on CUDA each has its graphs
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]  # text, ids, or a conversation's messages


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

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def settled(self, has_draft: bool, has_head: bool) -> Options:
        """With every default filled in.

        Raises:
            UserError: a value that can't be, or options that contradict each other or the models at hand.
        """
        if isinstance(self.stop, str):
            raise UserError(f"--stop is {self.stop!r}; give a list of texts")
        verify = self.verify or ("judge" if has_head else "standard")
        if verify not in ("standard", *RULES):
            raise UserError(f"--verify is {verify!r}; there are standard, {', '.join(RULES)}")
        if verify != "standard" and not has_draft:
            raise UserError(f"--verify {verify} needs a --draft")
        if verify == "judge" and not has_head:
            raise UserError("--verify judge needs a head: give --judge FILE")
        if self.threshold is not None:
            if verify == "standard":
                raise UserError(f"--threshold {self.threshold:g} has no meaning for --verify standard")
            check_threshold(verify, self.threshold)
        draft_len = self.draft_len if self.draft_len is not None else 25 if verify == "judge" else 8
        if draft_len != "auto" and (not isinstance(draft_len, int) or draft_len < 1):
            raise UserError(f"--draft-len is {draft_len}; it must be at least 1, or auto")
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        self.sampling.check()
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            given = f"--top-k {self.top_k}" if self.top_k else f"--top-p {self.top_p:g}"
            raise UserError(
                f"{given} has no effect at --temperature 0, which takes the likeliest token; give a temperature above 0"
            )
        return dataclasses.replace(self, verify=verify, draft_len=draft_len)


def encode(tokenizer: Tokenizer, prompt: Prompt, options: Options, context: int) -> list[int]:
    """A prompt's ids. Raises UserError when it is empty, or leaves no room for the new tokens in a text of ``context``."""
    if not prompt or not prompt[-1] and not isinstance(prompt[-1], int):
        raise UserError("the prompt is empty; give some text")
    if isinstance(prompt, str):
        ids = tokenizer.encode_question(prompt, options.raw)
    elif isinstance(prompt[0], dict):
        ids = tokenizer.encode_chat(list(cast(Sequence[dict[str, Any]], prompt)))
    else:
        ids = list(cast(Sequence[int], prompt))
    if len(ids) > context:
        raise UserError(f"the prompt has {len(ids)} tokens; the context is {context}")
    if len(ids) + options.max_new_tokens > context:
        raise UserError(
            f"a prompt of {len(ids)} tokens and --max-new-tokens {options.max_new_tokens} are "
            f"{len(ids) + options.max_new_tokens} together; the context is {context}"
        )
    return ids


class Piece(NamedTuple):
    """Some text, and who accepted its token: ``standard``, ``rule`` or ``target``."""

    text: str
    accepted_by: str


class Stream:
    """A text's pieces as rounds commit them. ``result`` is the text so far with its numbers; who has heard enough just leaves."""

    def __init__(self, engine: Engine, prompt: list[int], tokenizer: Tokenizer, options: Options) -> None:
        self._pieces: list[Piece] = []
        output = Output(
            tokenizer, options.max_new_tokens, options.stop, lambda text, who: self._pieces.append(Piece(text, who))
        )  # fmt: skip
        self.result = Generation(output)
        self._steps = decode(engine, prompt, output, options.seed)

    def __iter__(self) -> Iterator[Piece]:
        for self.result in self._steps:
            yield from self._pieces
            self._pieces.clear()


class LLM:
    """A target, with a draft and a judge if given, loaded once. Without arguments: the demo pair.

    One text at a time. What a prompt has in common with the start of the last text, answer included, isn't read again.

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
        if target is None and draft is None and judge is None:
            target, draft, judge, dtype = DEMO / "target", DEMO / "draft", DEMO / "judge.pt", dtype or "float32"
        if target is None:
            raise UserError("--draft and --judge need a --target")
        if not isinstance(target, checkpoint.Pair):
            target = checkpoint.find_pair(
                str(target), None if draft is None else str(draft), None if judge is None else Path(judge)
            )  # fmt: skip
        self.pair, self.tokenizer = target, target.tokenizer
        self.context = min(self.pair.context, CONTEXT) if context is None else context
        if not 2 <= self.context <= self.pair.context:
            raise UserError(f"a context of {self.context} tokens was asked for; the models' is {self.pair.context}")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.target, self.draft = self.pair.load(checkpoint.DTYPES[dtype or "bfloat16"], device, quantize, draft_tp == 1)
        if compile:
            for model in (self.target, self.draft):
                if model is not None:
                    model.compile_blocks(dynamic=device == "cpu")
        longest = min(LENGTHS[-1], self.pair.context - 1) if max_draft_len is None else max_draft_len
        self.max_draft_len = longest if self.draft is not None else 0
        length = cache_length(self.context, self.max_draft_len, int(device == "cuda"))
        self.caches = self.target.new_cache(length), self.draft.new_cache(length) if self.draft is not None else None
        self.trace, self.check_ranks = trace, check_ranks
        self._engines: OrderedDict[Options, Engine] = OrderedDict()

    def settled(self, options: Options) -> Options:
        """Options with every default filled in. Raises UserError for what can't be with these models."""
        full = options.settled(self.draft is not None, self.pair.head is not None)
        if full.threshold is None and full.verify in RULES:
            full = dataclasses.replace(full, threshold=default_threshold(str(full.verify), self.pair.head))
        if self.draft is not None and isinstance(full.draft_len, int) and full.draft_len > self.max_draft_len:
            raise UserError(f"--draft-len is {full.draft_len}; there is room for {self.max_draft_len} drafted tokens a round")
        return full

    def engine(self, **options: Any) -> Engine:
        """The engine for ``Options`` of these names: made when first asked for, and kept while it is among the last few."""
        full = self.settled(Options(**options))
        key = dataclasses.replace(full, max_new_tokens=1, stop=(), seed=0, raw=False)
        if key not in self._engines:
            adapt = full.draft_len == "auto"
            self._engines[key] = Engine(
                self.target, self.draft, draft_len=self.max_draft_len if adapt else int(full.draft_len or 0),
                verify=str(full.verify), threshold=full.threshold or 0.0, sampling=full.sampling, max_len=self.context,
                trace=self.trace, check_ranks=self.check_ranks, adapt=adapt, caches=self.caches,
            )  # fmt: skip
        self._engines.move_to_end(key)
        while len(self._engines) > ENGINES:
            self._engines.popitem(last=False)
        return self._engines[key]

    def encode(self, prompt: Prompt, **options: Any) -> list[int]:
        """A prompt's ids, chat template applied.

        Raises:
            UserError: it is empty, leaves no room for the new tokens, or has ids that the target doesn't know.
        """
        ids = encode(self.tokenizer, prompt, Options(**options), self.context)
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
        ids, engine = self.encode(prompt, **options), self.engine(**options)
        if engine.lengths and engine.pace is None:
            engine.warm_up()  # to adapt it must know what rounds cost
        return Stream(engine, ids, self.tokenizer, Options(**options))

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Decode a prompt; ``stream`` says what may be given."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result
