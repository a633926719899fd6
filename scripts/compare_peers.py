"""This engine beside transformers and llama.cpp on a CPU: the same model, prompts and precision, greedy; ratios printed.

Everyone in turn continues the same token ids, once by n tokens and once by twice as many, and the difference of the two times is
what n tokens took: so neither reading the prompt nor the last block's overhang counts. A peer that isn't installed is left out,
with a word. transformers gets the weights of our checkpoint; llama.cpp reads its own files (--gguf, --draft-gguf).

    pip install -r requirements-peers.txt
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from benchmark import Setting, engine_of, parse_setting, spread
from evaluate import check_once
from tasks import TASKS, encode, read_problems
from torch import Tensor
from tqdm import tqdm

import checkpoint
from convert_hf_checkpoint import LAYER_NAMES, PARTS, TOP_NAMES
from engine import Engine
from linear import MODES
from llm import DEMO, default_dtype
from model import Config, common_length

OURS = "ours"


class Peer(NamedTuple):
    """Someone who decodes: ids of a prompt and a number of new tokens, to those tokens."""

    name: str
    complete: Callable[[list[int], int], list[int]]


def our_peers(args: argparse.Namespace, pair: checkpoint.Pair, settings: list[Setting]) -> list[Peer]:
    """An engine for each setting."""
    target, draft = pair.load(checkpoint.DTYPES[args.dtype], quantization=args.quantize)
    if not args.no_compile:
        for model in (target, draft):
            if model is not None:
                model.compile_blocks(dynamic=True)
    engines = {s.name: engine_of(s, target, draft) for s in settings}

    def complete(engine: Engine) -> Callable[[list[int], int], list[int]]:
        def run(prompt: list[int], n: int) -> list[int]:
            engine.forget()  # the prompt is read, whatever came before
            return engine.complete(prompt, n)

        return run

    for engine in engines.values():
        engine.warm_up()
    return [Peer(f"{OURS}: {name}", complete(engine)) for name, engine in engines.items()]


def their_weights(folder: Path) -> dict[str, Tensor]:
    """Our checkpoint's weights by Hugging Face's names, fused ones taken apart."""
    config = checkpoint.load_config(folder)
    source = checkpoint.open_source(folder, config)
    single = {ours: theirs for theirs, (ours, _) in LAYER_NAMES.items() if ours not in PARTS}
    found = {}
    for name in source.files:
        tensor = checkpoint.read_part(source, name, config)
        top = next((theirs for theirs, ours in TOP_NAMES.items() if ours == name), None)
        if top is not None:
            found[top] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        stem, _, kind = rest.rpartition(".")
        if stem in PARTS:
            names = [theirs for theirs, (ours, _) in LAYER_NAMES.items() if ours == stem]
            for theirs, part in zip(names, tensor.split(widths(stem, config))):
                found[f"model.layers.{layer}.{theirs}.{kind}"] = part
        else:
            found[f"model.layers.{layer}.{single[rest] if rest in single else f'{single[stem]}.{kind}'}"] = tensor
    return found


def widths(stem: str, config: Config) -> list[int]:
    """Rows of each part of a fused weight."""
    if stem == "w13":
        return [config.ffn_dim] * 2
    return [config.n_heads * config.head_dim] + [config.n_kv_heads * config.head_dim] * 2


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """Our checkpoint as transformers would have it. Raises ImportError."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=dtype)
    model.load_state_dict({name: t.to(dtype) for name, t in their_weights(folder).items()}, strict=False, assign=True)
    model.tie_weights()
    rebuilt = type(model.model.rotary_emb)(config=model.config)  # its buffers aren't weights
    model.model.rotary_emb = rebuilt
    return model.eval()


def transformers_peers(args: argparse.Namespace, pair: checkpoint.Pair, max_len: int) -> list[Peer]:
    """Plain decoding, the same compiled with a static cache, and assisted generation. Raises ImportError."""
    dtype = checkpoint.DTYPES[args.dtype]
    model = transformers_model(pair.target, dtype)

    def complete(which: Any, cache: Any = None, **options: Any) -> Callable[[list[int], int], list[int]]:
        def run(prompt: list[int], n: int) -> list[int]:
            ids, room = torch.tensor([prompt]), {}
            if cache is not None:
                cache.reset()
                room = {"past_key_values": cache}
            lengths = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False, "pad_token_id": 0}
            out = which.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **room, **options)
            return out[0, len(prompt) :].tolist()

        return run

    peers = [Peer("transformers: plain", complete(model))]
    if not args.no_compile:
        import transformers

        compiled = transformers_model(pair.target, dtype)
        compiled.forward = torch.compile(compiled.forward)
        cache = transformers.StaticCache(config=compiled.config, max_cache_len=max_len)  # of one size, or each text would compile
        peers.append(Peer("transformers: static cache, compiled", complete(compiled, cache)))
    if pair.draft is not None:
        peers.append(Peer("transformers: assisted", complete(model, assistant_model=transformers_model(pair.draft, dtype))))
    return peers


def llama_peers(args: argparse.Namespace, max_len: int) -> list[Peer]:
    """Plain decoding of a GGUF file and, with a draft's, speculation. Raises ImportError."""
    import llama_cpp

    threads = torch.get_num_threads()

    def load(path: Path, **options: Any) -> Any:
        try:
            return llama_cpp.Llama(
                str(path), n_ctx=max_len + 64, n_threads=threads, n_threads_batch=threads, verbose=False, **options
            )
        except ValueError as error:
            raise UserError(f"{path} can't be loaded by llama.cpp: {error}") from None

    def complete(llama: Any) -> Callable[[list[int], int], list[int]]:
        def run(prompt: list[int], n: int) -> list[int]:
            llama.reset()
            tokens: list[int] = []
            for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
                tokens.append(token)
                if len(tokens) == n:
                    break
            return tokens

        return run

    peers = [Peer("llama.cpp: plain", complete(load(args.gguf)))]
    if args.draft_gguf is not None:
        draft = load(args.draft_gguf)

        class Drafting(llama_cpp.llama_speculative.LlamaDraftModel):
            def __call__(self, input_ids: Any, /, **options: Any) -> Any:
                import numpy

                drafted = []
                for token in draft.generate(input_ids.tolist(), temp=0.0, repeat_penalty=1.0):
                    drafted.append(token)
                    if len(drafted) == args.draft_len:
                        break
                return numpy.array(drafted, dtype=numpy.intc)

        peers.append(Peer("llama.cpp: speculative", complete(load(args.gguf, draft_model=Drafting(), logits_all=True))))
    return peers


def gather_peers(args: argparse.Namespace, pair: checkpoint.Pair, settings: list[Setting], max_len: int) -> list[Peer]:
    """Ours, and those that are installed and can be had; a word about the others."""
    others: list[Peer] = []
    folders = [folder for folder in (pair.target, pair.draft) if folder is not None]
    kept = {checkpoint.open_source(folder, checkpoint.load_config(folder)).quantization for folder in folders}
    if args.quantize != "none" or kept != {"none"}:
        print("transformers is left out: it has no weights of this form on a CPU", file=sys.stderr)
    else:
        try:
            others += transformers_peers(args, pair, max_len)
        except ImportError:
            print("transformers is left out: it isn't installed (pip install -r requirements-peers.txt)", file=sys.stderr)
    if args.gguf is None:
        print("llama.cpp is left out: it needs --gguf FILE", file=sys.stderr)
    else:
        try:
            others += llama_peers(args, max_len)
        except ImportError:
            print("llama.cpp is left out: it isn't installed (pip install -r requirements-peers.txt)", file=sys.stderr)
    return our_peers(args, pair, settings) + others


def measure(peers: list[Peer], prompts: list[list[int]], repeat: int, n: int) -> dict[str, dict[str, Any]]:
    """Tokens a second of each, and how many of its first 2 n tokens are as ours of plain decoding."""
    speeds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    same: dict[str, list[int]] = {peer.name: [] for peer in peers}
    prompts = prompts[:repeat]
    for i in tqdm(range(-len(prompts), repeat), desc="texts of each", disable=None):  # each prompt once, unmeasured, to warm up
        prompt, reference = prompts[i % len(prompts)], list[int]()
        for peer in peers:
            times = []
            for count in (n, 2 * n):
                start = time.perf_counter()
                tokens = peer.complete(prompt, count)
                times.append(time.perf_counter() - start)
            reference = reference or tokens
            if i >= 0:
                same[peer.name].append(common_length(reference, tokens))
                if times[1] > times[0]:  # or else something else held the shorter text up
                    speeds[peer.name].append(n / (times[1] - times[0]))
    return {
        name: {"tokens_per_s": spread(found) if found else None, "n": len(found), "as_ours": statistics.mean(same[name])}
        for name, found in speeds.items()
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown: our plain decoding and our best over each. Who was held up in every text has none."""
    middles = {name: r["tokens_per_s"][0] for name, r in rows.items() if r["tokens_per_s"] is not None}
    plain = middles.get(f"{OURS}: plain", math.nan)
    best = max((speed for name, speed in middles.items() if name.startswith(OURS)), default=math.nan)
    lines = ["| who | tokens/s | our plain over it | our best over it | tokens as ours |", "| --- " + "| ---: " * 4 + "|"]
    for name, r in rows.items():
        middle, low, high = r["tokens_per_s"] or [math.nan] * 3
        lines.append(
            f"| {name} | {middle:.2f} ({low:.2f}–{high:.2f}) | {plain / middle:.2f} | {best / middle:.2f} | {r['as_ours']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", default=str(DEMO / "target"), metavar="NAME", help="checkpoint (default: the demo's)")
    p.add_argument("--draft", metavar="NAME", help="draft checkpoint")
    p.add_argument("--judge", type=Path, metavar="FILE", help="judge head")
    p.add_argument("--gguf", type=Path, metavar="FILE", help="the target for llama.cpp, of the same precision")
    p.add_argument("--draft-gguf", type=Path, metavar="FILE", help="the draft for llama.cpp")
    p.add_argument("--task", choices=TASKS, default="demo", help="where prompts come from (default: demo)")
    p.add_argument("--data", type=Path, metavar="FILE", help="the task's JSON-lines file")
    p.add_argument("--limit", type=int, default=3, metavar="N", help="prompts (default: 3)")
    p.add_argument("--repeat", type=int, default=3, metavar="N", help="texts of each (default: 3)")
    p.add_argument("--new-tokens", type=int, default=48, metavar="N", help="n, as above (default: 48)")
    p.add_argument("--draft-len", type=int, default=8, metavar="M",
                   help="tokens drafted a round by llama.cpp, and by a rule standard without @M (default: 8)")  # fmt: skip
    p.add_argument("--rules", metavar="LIST",
                   help="ours, as benchmark.py takes them, such as plain,judge@8 (default: plain, standard, judge)")  # fmt: skip
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo")
    p.add_argument("--quantize", choices=["none", *MODES], default="none", help="our weights (default: none)")
    p.add_argument("--no-compile", action="store_true", help="nobody compiles")
    p.add_argument("--json", action="store_true", help="end stdout with one JSON object; the table goes to stderr")
    args = p.parse_args()
    args.dtype = args.dtype or default_dtype(args.target)
    for name in ("limit", "repeat", "new_tokens", "draft_len"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    for name in ("gguf", "draft_gguf"):
        path = getattr(args, name)
        if path is not None and not path.is_file():
            raise UserError(f"--{name.replace('_', '-')} {path} is no file")
    for name in ("judge", "draft_gguf"):
        needed = "draft" if name == "judge" else "gguf"
        if getattr(args, name) is not None and getattr(args, needed) is None:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} needs a --{needed}")
    drafting = [] if args.draft is None else ["standard", *(["judge"] if args.judge is not None else [])]
    args.rules = args.rules or ",".join(["plain", *drafting])
    rules = [f"{text}@{args.draft_len}" if text == "standard" else text for text in args.rules.split(",")]
    check_once(rules)
    if "plain" not in rules:
        raise UserError(f"--rules {args.rules} lacks plain, which everyone is compared with")
    if args.draft is None and rules != ["plain"]:
        raise UserError(f"--rules {args.rules} needs a --draft")
    rules.sort(key=lambda text: text != "plain")  # everyone's tokens are held against those of the first
    pair = checkpoint.find_pair(args.target, args.draft, args.judge)
    prompts = [encode(pair.tokenizer, problem, args.task) for problem in read_problems(args.task, args.data, args.limit)]
    max_len = max(map(len, prompts)) + 2 * args.new_tokens
    heads = {} if pair.head is None else {"judge": pair.head}
    settings = [parse_setting(text, heads, max_len) for text in rules]  # before anything is loaded
    with torch.inference_mode():
        rows = measure(gather_peers(args, pair, settings, max_len), prompts, args.repeat, args.new_tokens)
    print(table(rows), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps({"new_tokens": args.new_tokens, "threads": torch.get_num_threads(), "dtype": args.dtype, "peers": rows}))


if __name__ == "__main__":
    run_cli(main)
