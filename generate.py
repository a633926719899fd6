"""The command line: decode with a target, a draft and a judge. The engine is in ``engine.py``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch

import checkpoint
from engine import RULE, STANDARD, TARGET, Engine, Generation
from files import check_writable, write_text
from judge import RULES, knobs
from linear import MODES
from llm import CONTEXT, DEMO, LLM, Options, default_dtype, encode
from page import KINDS, Passage, generated_spans, page
from tp import Ranks, default_device, ranks_of, same, together, told

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives input() line editing and a history, where the system has it

DEMO_PROMPT = (
    "Ada has 36 buttons. Ada buys 2 jars of 14 buttons each. A friend brings 14 buttons. Ada sends away 2 jars with 6 buttons "
    "in each. How many buttons are left in the end?"
)
COLOURS = {STANDARD: "\033[32m", RULE: "\033[1;36m", TARGET: "\033[33m"}
RESET = "\033[0m"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises UserError for values that can't be, and for options that contradict each other."""
    p = Parser(description="Decode with a target, a draft and a judge. Without arguments: the demo pair.")
    add = p.add_argument
    add("--target", metavar="NAME", help="checkpoint folder or name under checkpoints/ (default: the demo's target)")
    add("--draft", metavar="NAME", help="draft checkpoint; without one, plain decoding")
    add("--judge", metavar="FILE", type=Path, help="judge head, made by scripts/train_judge.py for the target (alone: the demo's)")
    add("--verify", choices=["standard", *RULES], help="who accepts drafts (default: judge with a head, else standard)")
    add("--threshold", type=float, metavar="X", help=f"the rule's knob and its default: {knobs()}")
    add("--draft-len", type=draft_length, metavar="M", help="tokens drafted a round, or auto: the number that promises the most "
        "tokens/s, by the acceptance so far (default: 25 under the judge, else 8)")  # fmt: skip
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="F", type=Path, help="read the prompt from a UTF-8 file")
    prompt.add_argument("--interactive", action="store_true", help="chat: read prompts from the terminal until end of file")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="length cap in tokens (default: 256)")
    add("--stop", nargs="+", default=[], metavar="TEXT", help="end the text before the first of these")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (default: 0, all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample among the fewest tokens of probability P (default: 1)")
    add("--seed", type=int, default=0, help="of the draws; sample i uses seed + i (default: 0)")
    add("--dtype", choices=list(checkpoint.DTYPES), help="of weights and caches (default: bfloat16; float32 for the demo pair)")
    add("--quantize", choices=["none", *MODES], default="none",
        help="weights of both models; checkpoints that are quantized already need no word (default: none)")  # fmt: skip
    add("--draft-tp", type=int, metavar="N", help="ranks that share the draft: all (the default), or 1, so that each has all of it")
    add("--check-ranks", action="store_true", help="compare what the ranks decide in every round, for debugging")
    add("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    add("--no-compile", action="store_true", help="run the blocks uncompiled: starts sooner, decodes slower")
    add("--num-samples", type=int, default=1, metavar="N", help="generate N times; figures are medians (default: 1)")
    add("--show", action="store_true", help="colour each token by who accepted it, even when stdout is no terminal")
    add("--html", metavar="FILE", type=Path, help="write a page of the tokens, who accepted or rejected each, and by what numbers")
    add("--json", action="store_true", help="print one JSON object as the last line of stdout; all else goes to stderr")
    args = p.parse_args(argv)
    if args.target is None and args.draft is None:
        args.target, args.draft = str(DEMO / "target"), str(DEMO / "draft")
        if args.judge is None and args.verify in (None, "judge"):
            args.judge = DEMO / "judge.pt"
    check_args(args)
    return args


def draft_length(text: str) -> int | str:
    """What follows --draft-len. Raises UserError where it is neither a number nor ``auto``."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise UserError(f"--draft-len is {text!r}; it must be a number of tokens, or auto") from None


def check_args(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on each other. Raises UserError for what can't be."""
    if args.target is None:
        raise UserError(f"--draft {args.draft} needs a --target")
    if args.draft is None and args.judge is not None:
        raise UserError(f"--judge {args.judge} needs a --draft: what it judges is a draft's tokens")
    full = options_of(args).settled(args.draft is not None, args.judge is not None)
    args.verify, args.draft_len, args.dtype = full.verify, full.draft_len, args.dtype or default_dtype(args.target)
    if args.num_samples < 1:
        raise UserError(f"--num-samples is {args.num_samples}; it must be at least 1")
    if args.html is not None and args.interactive:
        raise UserError("--html can't be had with --interactive")
    check_writable("--html", args.html)
    if args.interactive and (args.json or args.num_samples > 1):
        raise UserError(f"{'--json' if args.json else '--num-samples'} can't be had with --interactive")


def options_of(args: argparse.Namespace) -> Options:
    return Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})


def load(args: argparse.Namespace, pair: checkpoint.Pair, context: int) -> LLM:
    """Load the models and allocate caches for texts of ``context`` tokens."""
    longest = None if args.draft_len == "auto" else args.draft_len
    return LLM(
        pair, context=context, max_draft_len=longest, dtype=args.dtype, device=args.device, quantize=args.quantize,
        draft_tp=args.draft_tp, compile=not args.no_compile, trace=args.html is not None, check_ranks=args.check_ranks,
    )  # fmt: skip


def report(
    a: argparse.Namespace, pair: checkpoint.Pair, engine: Engine, runs: list[Generation], prompt_tokens: int, load_s: float,
    compile_s: float,
) -> dict:  # fmt: skip
    """The JSON object of ``--json``: medians over samples; text, ids, rounds and who accepted what are the first sample's."""
    first = runs[0].output
    all_ms = [now.ms for run in runs for now in run.rounds]
    target_bytes, draft_bytes = engine.target.weight_bytes(), engine.draft.weight_bytes() if engine.draft is not None else 0
    read = [sum(target_bytes + now.drafted * draft_bytes for now in run.rounds) for run in runs]
    return {
        "text": first.text,
        "texts": [run.text for run in runs],
        "tokens": first.tokens,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(first.tokens),
        "finish_reason": first.finish_reason,
        "tokens_per_s": statistics.median(r.tokens_per_s for r in runs),
        "prefill_s": statistics.median(r.prefill_s for r in runs),
        "decode_s": statistics.median(r.decode_s for r in runs),
        "load_s": load_s,
        "compile_s": compile_s,
        "rounds": len(runs[0].rounds),
        "mean_accepted": statistics.median(r.mean_accepted for r in runs),
        "tokens_per_round": statistics.median(len(r.output.tokens) / len(r.rounds) for r in runs),
        "accepted_by": {"standard": runs[0].accepted(STANDARD), "judge": runs[0].accepted(RULE)},
        "draft_ms": statistics.median(ms.get("draft", 0.0) for ms in all_ms),
        "verify_ms": statistics.median(ms.get("verify", 0.0) for ms in all_ms),
        "other_ms": statistics.median(ms.get("other", 0.0) for ms in all_ms),
        "bandwidth_gb_s": statistics.median(size / r.decode_s for size, r in zip(read, runs)) / 1e9,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if engine.device.type == "cuda" else checkpoint.peak_memory(),
        "config": {
            "target": str(pair.target), "draft": str(pair.draft) if pair.draft else None,
            "judge": str(a.judge) if a.judge else None, "verify": engine.verify,
            "threshold": engine.threshold if engine.verify in RULES else None,
            "floor": engine.target.judge_floor if engine.verify == "judge" else None, "draft_len": a.draft_len if engine.M else 0,
            "temperature": a.temperature, "top_k": a.top_k, "top_p": a.top_p, "seed": a.seed, "dtype": a.dtype,
            "quantize": engine.target.quantization, "device": a.device, "ranks": engine.target.ranks.size,
            "num_samples": a.num_samples, "compile": not a.no_compile,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        },
    }  # fmt: skip


def run_once(args: argparse.Namespace, llm: LLM, prompt: list[int], seed: int, colour: bool) -> Generation:
    """Generate one text and stream it to the terminal, with ``--json`` to stderr. Where people chat Ctrl-C ends it early."""
    out = sys.stderr if args.json else sys.stdout
    stream = llm.stream(prompt, **vars(dataclasses.replace(options_of(args), seed=seed)))
    try:
        for piece, who in stream:
            print(f"{COLOURS[who]}{piece}{RESET}" if colour else piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        if not args.interactive:
            raise
        print(" [stopped]", end="", file=out)
    print(file=out, flush=True)
    return stream.result


def summary(run: Generation, drafting: bool) -> str:
    """One line about a run, for people."""
    n, rounds = len(run.tokens), len(run.rounds)
    if not rounds:
        return "[no tokens]"
    speed = f"{run.tokens_per_s:.1f} tokens/s, prefill {run.prefill_s:.2f} s]"
    if not drafting:
        return f"[{n} tokens, one at a time; {speed}"
    return (
        f"[{n} tokens in {rounds} round{'s' * (rounds > 1)}: {run.mean_accepted:.1f} drafted tokens accepted a round "
        f"({run.accepted(STANDARD)} by the standard test, {run.accepted(RULE)} by the rule alone); {speed}"
    )


def picture(pair: checkpoint.Pair, engine: Engine, question: str, run: Generation) -> str:
    """The run as an HTML page."""
    rule = engine.verify if engine.verify == "standard" else f"{engine.verify} at {engine.threshold:g}"
    facts = [f"target {pair.target.name}", f"draft {pair.draft.name if pair.draft else 'none'}", f"rule {rule}",
             f"{run.mean_accepted:.1f} drafted tokens accepted a round", f"{len(run.output.tokens)} tokens"]  # fmt: skip
    spans = generated_spans(pair.tokenizer, run.rounds, len(run.output.tokens))
    return page("Who accepted what", facts, [Passage(question, spans)])


def ask() -> str | None:
    """What is typed at the prompt, None at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        print(file=sys.stderr)  # leave the shell's prompt on a line of its own
        return None


def fitting(llm: LLM, messages: list[dict[str, str]], options: Options) -> list[int]:
    """The ids of a conversation. What doesn't fit into the context is dropped from its start, with a word to the user.

    Raises:
        UserError: the last question alone doesn't fit.
    """
    dropped = 0
    while True:
        try:
            prompt = llm.encode(messages, **vars(options))
        except UserError:
            if len(messages) < 3:
                raise
            del messages[:2]
            dropped += 1
            continue
        if dropped:
            print(f"[the context of {llm.context} tokens is full: the first {dropped} answers are forgotten]", file=sys.stderr)
        return prompt


def answer(args: argparse.Namespace, llm: LLM, messages: list[dict[str, str]], text: str, colour: bool) -> None:
    """Answer a question in the light of ``messages``, to which both are added if the model can make something of them."""
    options, asked = options_of(args), [*messages, {"role": "user", "content": text}]
    try:
        alone = args.raw or not llm.tokenizer.has_chat_template
        prompt = llm.encode(text, **vars(options)) if alone else fitting(llm, asked, options)
        run = run_once(args, llm, prompt, args.seed, colour)
    except UserError as error:
        return print(f"{error.line()}; ask something else", file=sys.stderr)
    if llm.pair.single_task is None:
        messages[:] = [*asked, {"role": "assistant", "content": run.text}]
    print(summary(run, llm.draft is not None), file=sys.stderr)


def chat(args: argparse.Namespace, pair: checkpoint.Pair, colour: bool) -> None:
    """Read prompts from the terminal and answer each in the light of the conversation so far, until Ctrl-D. Ctrl-C, whenever it
    comes, drops what is under way."""
    llm = load(args, pair, min(pair.context, CONTEXT))
    llm.engine(**vars(options_of(args))).warm_up()
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = told(ask)
            if text is None:
                return
            if text:
                answer(args, llm, messages, text, colour)
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the conversation)", file=sys.stderr)


def legend() -> str:
    """One line about the colours of tokens."""
    return "; ".join(f"{COLOURS[who]}{KINDS[who][0]}{RESET}" for who in COLOURS)


def main() -> None:
    args = parse_args()
    with ranks_of(args.device) as ranks:
        run(args, ranks)


def run(args: argparse.Namespace, ranks: Ranks) -> None:
    """Do what the command line asks, as one of the ranks."""
    if args.draft_tp is not None and args.draft is None:
        raise UserError(f"--draft-tp {args.draft_tp} needs a --draft")
    if args.draft_tp not in (None, 1, ranks.size):
        choices = f"1 or {ranks.size}, the number of ranks" if ranks.size > 1 else "1, for there is one rank (torchrun starts more)"
        raise UserError(f"--draft-tp is {args.draft_tp}; it must be {choices}")
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    out = sys.stderr if args.json else sys.stdout
    colour = args.show or (out.isatty() and not args.json)
    if colour and out.isatty() and pair.draft is not None:
        print(legend(), file=sys.stderr)
    if args.interactive:
        if pair.caution:
            print(f"[{pair.caution}; each question begins anew]", file=sys.stderr)
        return chat(args, pair, colour)
    text, options = DEMO_PROMPT if args.prompt is None else args.prompt, options_of(args)
    with together():
        if args.prompt_file is not None:
            try:
                text = args.prompt_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                said = getattr(error, "strerror", None) or error
                raise UserError(f"--prompt-file {args.prompt_file} can't be read: {said}") from None
        prompt = encode(pair.tokenizer, text, options, pair.context)
    if pair.caution and (args.prompt is not None or args.prompt_file is not None):
        print(f"[{pair.caution}]", file=sys.stderr)
    same("prompt", str(prompt))
    start = time.perf_counter()
    llm = load(args, pair, len(prompt) + args.max_new_tokens)
    load_s = time.perf_counter() - start
    engine = llm.engine(**vars(options))
    compile_s = engine.warm_up(len(prompt), engine.max_len)
    runs = []
    for i in range(args.num_samples):
        engine.forget()  # so that each sample reads the prompt, and is timed doing so
        runs.append(run_once(args, llm, prompt, args.seed + i, colour))
        print(summary(runs[-1], llm.draft is not None), file=sys.stderr)
    if args.html is not None and ranks.rank == 0:
        write_text(args.html, picture(pair, engine, text, runs[0]))
    if args.json:
        print(json.dumps(report(args, pair, engine, runs, len(prompt), load_s, compile_s), ensure_ascii=False))


if __name__ == "__main__":
    run_cli(main)
