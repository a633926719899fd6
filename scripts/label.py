"""Label answers for a judge, one JSON line each: which tokens are right though the target would have put them otherwise.

manual      you point at the mistake in each answer (the paper's way, arXiv 2501.19309); tuples are taken over as they are
mine        where the draft would part from the target's answer its token is put in and the target finishes: if the answer is
            still right, the token was harmless (AutoJudge, arXiv 2504.20039); needs a task whose answers can be checked
likelihood  the same places in any text: harmless if the text that follows stays about as likely (SelfJudge, arXiv 2510.02329)

A run that was interrupted goes on where it stopped when it is run again.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from tasks import SHOTS, TASKS, Problem, encode, question_and_answer, read_problems
from torch import Tensor
from tqdm import tqdm

import checkpoint
from engine import TARGET, Sampling, draw, match_vocabulary, warp
from files import append_jsonl, check_writable, read_jsonl, resume_jsonl, write_jsonl, write_text
from judge import IGNORE, RIGHT, WRONG, Labelled, Tuple, log_probabilities, parse_tuple, span_labels, token_spans
from llm import DEMO, default_dtype
from model import Reader, Transformer, common_length
from page import Passage, Span, page, token_texts
from tokenizer import Output, Tokenizer
from tp import Ranks, default_device, ranks_of, told

REMEDY = {  # what to do where not one label was made
    "mine": "give questions that the target can answer (see that the data's answers are in the task's form), or take likelihood, "
    "which needs no right answers",
    "likelihood": "give more questions, or a draft that differs from the target",
    "manual": "label at least one answer",
}
REALIGN = 16  # tokens to look through for where an earlier answer goes on


class Labels(NamedTuple):
    """What a method says about one answer; fields as in ``judge.Labelled``."""

    tokens: list[int]
    labels: list[int]
    alternatives: list[tuple[int, int, int]]
    scores: list[float] | None = None  # likelihood: of each alternative, in nats


class Miner:
    """Both automatic methods: the models, and what they read with. ``cap``: new tokens an answer may have."""

    def __init__(
        self, args: argparse.Namespace, target: Transformer, draft: Transformer, tokenizer: Tokenizer, cap: int, max_len: int
    ) -> None:
        self.args, self.target, self.draft, self.tokenizer, self.cap = args, target, draft, tokenizer, cap
        self.sampling = Sampling(args.temperature, seed=args.seed)
        self.sampling.check()
        self.target_reader, self.draft_reader = Reader(target, max_len), Reader(draft, max_len)

    def finish(self, problem: Problem, prompt: list[int], start: list[int], earlier: list[int] = []) -> tuple[list[int], str]:
        """An answer that begins with the tokens ``start`` and goes on as the target would: ids, a stop token included, and text.

        An answer with another token in it mostly goes on like the ``earlier`` one without. So the target reads that one's next
        tokens too, says its own at each place, and all of it up to the first that differs was worth one pass. The guesses
        don't change what comes out: each place has its own draw.
        """
        output, tokens, at, reach = Output(self.tokenizer, self.cap, problem.stop), list(start), len(start), 1
        generator = torch.Generator().manual_seed(self.sampling.seed)
        uniform = torch.rand(self.cap, generator=generator).to(self.target_reader.hidden.device)
        ended = output.add(tokens, [TARGET] * len(tokens))
        while not ended:
            guess = earlier[at : at + min(reach, self.cap - len(tokens) - 1)]
            said = self.said_by_target(prompt, [*tokens, *guess], uniform[len(tokens) :], len(guess) + 1)
            n = common_length(guess, said)
            tokens += said[: n + 1]
            ended = output.add(said[: n + 1], [TARGET] * (n + 1))
            at, reach = at + n + 1, 2 * reach + 1
            if earlier[at - 1 : at] != said[n : n + 1]:  # find the place again: right behind, or where this token comes next
                at, reach = (earlier.index(said[n], at) + 1 if said[n] in earlier[at : at + REALIGN] else at), 1
        stop = [output.stopped_by] if output.stopped_by is not None else []
        return output.tokens + stop, output.text

    @torch.inference_mode()
    def said_by_target(self, prompt: list[int], answer: list[int], uniform: Tensor, n: int) -> list[int]:
        """What the target says at the last n places of an answer and behind it: n tokens, drawn with uniform [>= n] if at all."""
        logits = warp(self.target.logits(self.target_reader.read(prompt + answer)[-n:])[0], self.sampling)
        if self.sampling.temperature == 0:
            return logits.argmax(-1).tolist()
        return [int(draw(row, uniform[i : i + 1])) for i, row in enumerate(logits.softmax(-1))]

    def drafted(self, prompt: list[int], answer: list[int]) -> list[int]:
        """What the draft would say in place of each token of an answer, greedily."""
        with torch.inference_mode():
            states = self.draft_reader.read(prompt + answer[:-1])[len(prompt) - 1 :]
            logits = match_vocabulary(self.draft.logits(states)[0], self.target.config.vocab_size)
            return logits.argmax(-1).tolist()

    def mine(self, problem: Problem, prompt: list[int]) -> Labels | str:
        """Labels of the draft's tokens by what becomes of the answer; or why there are none: the target's own answer is wrong."""
        is_right = problem.is_right
        assert is_right is not None
        answer, text = self.finish(problem, prompt, [])
        if not told(lambda: is_right(text)):
            return "the target's own answer is wrong" + (f" and cut off at {self.cap} tokens" if len(answer) == self.cap else "")
        harmless, alternatives, place = set[int](), list[tuple[int, int, int]](), 0
        said = self.drafted(prompt, answer)
        while (place := next((i for i in range(place, len(answer)) if said[i] != answer[i]), len(answer))) < len(answer):
            other, text = self.finish(problem, prompt, answer[:place] + [said[place]], answer)
            if not told(functools.partial(is_right, text)):
                alternatives.append((place, said[place], WRONG))
            elif other[place : place + 1] == [said[place]]:
                answer, said = other, self.drafted(prompt, other)
                harmless.add(place)
            else:  # the token begins a stop text: the answer ends here
                answer = answer[:place]
                alternatives.append((place, said[place], RIGHT))
            place += 1
        return Labels(answer, [RIGHT if i in harmless else IGNORE for i in range(len(answer))], alternatives)

    @torch.inference_mode()
    def likelihood(self, problem: Problem, prompt: list[int]) -> Labels | str:
        """Labels of the draft's tokens by how likely the target finds them and the next tokens of the answer after them; or why
        there are none: the answer is empty.
        """
        if self.args.given:
            assert problem.given is not None
            answer = self.tokenizer.encode(problem.given)
        else:
            answer = self.finish(problem, prompt, [])[0]
        if not answer:
            return "the answer is empty"
        said = self.drafted(prompt, answer)
        logits = self.target.logits(self.target_reader.read(prompt + answer)[len(prompt) - 1 : -1])[0]
        own = log_probabilities(logits, torch.tensor(answer, device=logits.device))
        first = log_probabilities(logits, torch.tensor(said, device=logits.device)) - own  # what the substitution itself costs
        window, alternatives, scores = self.args.window, list[tuple[int, int, int]](), list[float]()
        # from the end: a reading at one place spoils what was read behind it only
        for place in reversed([i for i in range(len(answer)) if said[i] != answer[i]]):
            rest = answer[place + 1 : place + 1 + window]
            states = self.target_reader.read(prompt + answer[:place] + [said[place]] + rest)[len(prompt) + place :]
            logits = self.target.logits(states[: len(rest)])[0]
            after = log_probabilities(logits, torch.tensor(rest, dtype=torch.int64, device=logits.device)).sum()
            after -= own[place + 1 : place + 1 + len(rest)].sum()
            score = float(first[place] + after)
            alternatives.append((place, said[place], RIGHT if score > -self.args.threshold else WRONG))
            scores.append(score)
        return Labels(answer, [IGNORE] * len(answer), alternatives[::-1], scores[::-1])


def record(question: str, raw: bool, found: Labels, tokenizer: Tokenizer, who: dict[str, Any]) -> dict[str, Any]:
    """A line of the file. ``who``: how it was made, by what models, with what settings."""
    names = {name: who[name] for name in ("how", "target", "draft", "seed")}
    item = Labelled(question, raw, tokenizer.decode(found.tokens), found.tokens, found.labels, found.alternatives, **names)
    return item._asdict() | who | ({"scores": found.scores} if found.scores is not None else {})


def resume(path: Path, who: dict[str, Any], questions: list[str]) -> list[dict[str, Any]]:
    """The lines an earlier run wrote. Raises UserError when they were made otherwise, or for other questions."""

    def check(rows: list[dict[str, Any]]) -> None:
        for number, row in enumerate(rows, 1):
            if {name: row.get(name) for name in who} != who:
                raise UserError(f"{path}, line {number} was made otherwise (by {row.get('how')}); choose another --out")
        if [row.get("question") for row in rows] != questions[: len(rows)]:
            raise UserError(f"{path} holds labels of other questions; choose another --out")

    return resume_jsonl(path, check)


def label_automatically(args: argparse.Namespace, ranks: Ranks) -> None:
    """Label a task's problems by ``mine`` or ``likelihood``, as one of the ranks; rank 0 writes the files."""
    problems = read_problems(args.task, args.data, args.limit)
    if args.method == "mine" and not all(problem.is_right for problem in problems):
        raise UserError(f"--task {args.task} can't be mined: no program can tell whether its answers are right")
    if args.method == "likelihood" and args.given and not all(problem.given for problem in problems):
        raise UserError(f"--task {args.task} has no given answers; leave --given out")
    pair = checkpoint.find_pair(args.target, args.draft)
    names = ("task", "temperature", "dtype", *(("threshold", "window", "given") if args.method == "likelihood" else ()))
    settings = {name: getattr(args, name) for name in names}
    settings["weights"] = [checkpoint.fingerprint(folder) for folder in (pair.target, pair.draft) if folder is not None]
    who = {"how": args.method, "target": pair.target.name, "draft": pair.draft and pair.draft.name, "seed": args.seed,
           "settings": settings}  # fmt: skip
    rows = told(lambda: resume(args.out, who, [problem.turns[0] for problem in problems]))
    prompts = [encode(pair.tokenizer, problem, args.task) for problem in problems]
    given = max(len(pair.tokenizer.encode(p.given)) if p.given else 0 for p in problems)
    max_len = max(map(len, prompts)) + max(TASKS[args.task].cap, given) + 1
    if max_len > pair.context:
        raise UserError(f"the longest prompt and its answer may take {max_len} tokens; the models' context is {pair.context}")
    target, draft = pair.load(checkpoint.DTYPES[args.dtype], args.device)
    assert draft is not None
    miner = Miner(args, target, draft, pair.tokenizer, TASKS[args.task].cap, max_len)
    method: Callable[[Problem, list[int]], Labels | str] = getattr(miner, args.method)
    if ranks.rank == 0:
        note = TASKS[args.task].note
        print(f"{len(problems)} questions of {args.data or args.task}" + (f"; {note}" if note else ""), file=sys.stderr)
    start, fresh = time.perf_counter(), 0
    bar = tqdm(
        range(len(rows), len(problems)), initial=len(rows), total=len(problems), desc=args.method, unit="question", disable=None
    )
    for i in bar:
        found = method(problems[i], prompts[i])
        if isinstance(found, str):
            row = who | {"question": problems[i].turns[0], "skipped": found}
        else:
            row = record(problems[i].turns[0], TASKS[args.task].raw, found, pair.tokenizer, who)
            fresh += sum(label != IGNORE for label in found.labels) + len(found.alternatives)
        if ranks.rank == 0:
            append_jsonl(args.out, row)
        rows.append(row)
        bar.set_postfix(labels=fresh, refresh=False)
    if ranks.rank == 0:
        finish(args, pair, rows, fresh, time.perf_counter() - start)


def finish(args: argparse.Namespace, pair: checkpoint.Pair, rows: list[dict[str, Any]], fresh: int = 0, seconds: float = 0) -> None:
    """Say what the file holds, and draw it if asked to. Raises UserError where it holds no label."""
    print(summary(rows, fresh, seconds))
    if args.html is not None:
        facts = [f"by {args.method}", f"target {pair.target.name}", *([f"draft {pair.draft.name}"] if pair.draft else [])]
        passages = [passage(row, pair.tokenizer) for row in rows if "skipped" not in row]
        write_text(args.html, page("Labelled answers", facts, passages))
    if rows and not any(labels_in(row) for row in rows):
        raise UserError(f"{args.out} holds no label: {REMEDY[args.method]}")


def passage(row: dict[str, Any], tokenizer: Tokenizer) -> Passage:
    """A labelled answer as it is drawn, other tokens in front of those that they were judged in the stead of."""
    kinds = {RIGHT: "right", WRONG: "wrong", IGNORE: "plain"}
    scores = row.get("scores") or [None] * len(row["alternatives"])
    others: dict[int, list[Span]] = {}
    for (place, token, label), score in zip(row["alternatives"], scores):
        notes = [f"the draft's token: {'harmless' if label == RIGHT else 'it matters'}"]
        notes += [f"likelihood {score:+.1f} nats"] if score is not None else []
        others.setdefault(place, []).append(Span(tokenizer.token_text(token), kinds[label], notes))
    spans: list[Span] = []
    for i, (text, label) in enumerate(zip(token_texts(tokenizer, row["tokens"]), row["labels"])):
        spans += [*others.get(i, ()), Span(text, kinds[label])]
    return Passage(row["question"], spans + others.get(len(row["tokens"]), []))


def labels_in(row: dict[str, Any]) -> list[int]:
    """The labels of a line, right or wrong."""
    labels = (*row.get("labels", ()), *(label for _, _, label in row.get("alternatives", ())))
    return [label for label in labels if label != IGNORE]


def summary(rows: list[dict[str, Any]], fresh: int, seconds: float) -> str:
    """What the file holds, and what a label cost."""
    labels = [label for row in rows for label in labels_in(row)]
    right, wrong = labels.count(RIGHT), labels.count(WRONG)
    reasons = Counter(row["skipped"] for row in rows if "skipped" in row)
    agreed = sum("skipped" not in row and not labels_in(row) for row in rows)
    said = [f"{n} skipped as {reason}" for reason, n in reasons.most_common()]
    said += [f"in {agreed} the draft would say the same throughout"] if agreed else []
    cost = f"; {fresh} made now, {seconds / fresh:.2f} s each, {3600 * fresh / seconds:.0f} an hour" if fresh else ""
    of = "; ".join([f"from {len(rows)} questions", *said])
    return f"{right + wrong} labels ({right} right, {wrong} wrong) {of}{cost}"


def words_of(text: str) -> list[tuple[int, int]]:
    """The characters [start, end) of each word."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def numbered(text: str) -> str:
    """A text with a number in front of each word."""
    out, at = "", 0
    for n, (start, end) in enumerate(words_of(text), 1):
        out += f"{text[at:start]}\033[2m{n}\033[0m {text[start:end]}"
        at = end
    return out + text[at:]


def ask(words: int) -> tuple[int, int] | str | None:
    """What is typed: (first, last) word of the mistake, "back", "quit", or None for an answer without one."""
    while True:
        try:
            said = input("mistake (first-last word, nothing if there is none, b: back, q: quit) > ").strip()
        except EOFError:
            return "quit"
        if said in ("b", "q"):
            return "back" if said == "b" else "quit"
        if not said:
            return None
        match = re.fullmatch(r"(\d+)(?:\s*[- ]\s*(\d+))?", said)
        if match:
            first, last = int(match[1]), int(match[2] or match[1])
            if 1 <= first <= last <= words:
                return first, last
        print(f"{said!r} is no span of the words 1 to {words}, such as 7 or 7-9")


def label_by_hand(args: argparse.Namespace) -> None:
    """Show answers one by one and take the span of the mistake in each."""

    def parse(row: Any) -> Tuple | dict[str, str]:
        return parse_tuple(row) if "mistake" in row else question_and_answer(row)

    pair = checkpoint.find_pair(args.target)
    settings = {"label_rule": args.label_rule, "raw": args.raw}
    who = {"how": "manual", "target": pair.target.name, "draft": None, "seed": 0, "settings": settings}
    answers = [item for row in read_jsonl(args.file, parse) for item in unfold(row)]
    rows, stop = resume(args.out, who, [question for question, _, _ in answers]), pair.tokenizer.end_of_answer(args.raw)
    while len(rows) < len(answers):
        question, answer, mistake = answers[len(rows)]
        if mistake == "ask":
            print(f"\n\033[1m{len(rows) + 1}/{len(answers)}\033[0m {question}\n\n{numbered(answer)}\n")
            said = ask(len(words_of(answer)))
            if said == "quit":
                break
            if said == "back":
                step_back(rows, answers, args.out)
                continue
            words = words_of(answer)
            mistake = (words[said[0] - 1][0], words[said[1] - 1][1]) if isinstance(said, tuple) else None
        tokens = pair.tokenizer.encode(answer)
        if mistake is None:
            found = Labels(tokens + stop, [RIGHT] * (len(tokens) + len(stop)), [])
        else:
            found = Labels(tokens, span_labels(token_spans(pair.tokenizer, tokens, answer), mistake, args.label_rule), [])
        row = record(question, args.raw, found, pair.tokenizer, who)
        append_jsonl(args.out, row)
        rows.append(row)
    finish(args, pair, rows)


def unfold(row: Tuple | dict[str, str]) -> Iterator[tuple[str, str, Any]]:
    """(question, answer, mistake) of a row: the two answers of a tuple, or one whose mistake is to be asked for."""
    if isinstance(row, Tuple):
        yield row.question, row.correct, None
        yield row.question, row.wrong, row.mistake
    else:
        yield row["question"], row["answer"], "ask"


def step_back(rows: list[dict[str, Any]], answers: list[tuple[str, str, Any]], out: Path) -> None:
    """Take back the last answer that was asked for, and what came after it."""
    asked = [i for i in range(len(rows)) if answers[i][2] == "ask"]
    if not asked:
        return print("this is the first answer")
    del rows[asked[-1] :]
    write_jsonl(out, rows)


def parse_args() -> argparse.Namespace:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = p.add_subparsers(dest="method", required=True, metavar="{manual,mine,likelihood}")
    manual = methods.add_parser("manual", help="point at mistakes by hand")
    manual.add_argument("file", type=Path, help="JSON lines of question and answer, or of tuples")
    manual.add_argument("--labels-after", choices=("span", "rest"), default="span", dest="label_rule",
                        help="what follows a mistake is left out (span) or wrong too (rest); default: span")  # fmt: skip
    manual.add_argument("--raw", action="store_true", help="the questions are whole prompts: no chat template")
    for name, words in (("mine", "by the final answer"), ("likelihood", "by the likelihood of what follows")):
        auto = methods.add_parser(name, help=words)
        auto.add_argument(
            "--task", choices=TASKS, default="demo-train", help="where the questions come from; your own: qa (default: demo-train)"
        )
        auto.add_argument("--data", type=Path, metavar="FILE",
                          help=f"the task's JSON-lines file; gsm8k's last {SHOTS} rows are worked examples, not asked")  # fmt: skip
        auto.add_argument("--limit", type=int, default=100, metavar="N", help="questions (default: 100)")
        auto.add_argument(
            "--draft", default=str(DEMO / "draft"), metavar="NAME", help="the draft to be judged (default: the demo's)"
        )
        auto.add_argument(
            "--temperature", type=float, default=0.0, metavar="T", help="of the target's answers (default: 0, greedy)"
        )
        auto.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
        auto.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo pair")
        auto.add_argument("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    auto.add_argument("--threshold", type=float, default=18.0, metavar="X",
                      help="likelihood that may be lost, in nats, over the token and what follows (default: 18)")  # fmt: skip
    auto.add_argument("--window", type=int, default=20, metavar="N", help="tokens that follow (default: 20)")
    auto.add_argument("--given", action="store_true", help="label the data's own answers, not the target's")
    for method in methods.choices.values():
        method.add_argument(
            "--target", default=str(DEMO / "target"), metavar="NAME", help="the judge is for it (default: the demo's)"
        )
        method.add_argument("--html", type=Path, metavar="FILE", help="write all labels as a page")
        method.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to append; a run goes on from it")
    args = p.parse_args()
    if args.method != "manual":
        args.dtype = args.dtype or default_dtype(args.target)
    check_writable("--out", args.out)
    check_writable("--html", args.html)
    if args.method == "likelihood" and (args.window < 1 or args.threshold < 0):
        raise UserError(f"--window is {args.window} and --threshold {args.threshold:g}; at least 1 and at least 0 are needed")
    return args


def main() -> None:
    args = parse_args()
    if args.method == "manual":
        return label_by_hand(args)
    with ranks_of(args.device) as ranks:
        label_automatically(args, ranks)


if __name__ == "__main__":
    run_cli(main)
