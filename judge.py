"""Who accepts a drafted token: the standard test, the rules that relax it, and the judge head with its labels.

A block is M drafted tokens and what the target said when it read ``[cur, d_1, ..., d_M]`` in one pass: logits L_0..L_M, where
L_{i-1} predicts d_i, and judge logits z_0..z_M, where z_i was taken at d_i's own position, after the target had read it (and
counts d_i's log-probability as the head's training found that to help).
Token i is accepted when the standard test OR the chosen rule accepts it; the block ends before the first token that neither
does (judge decoding, arXiv 2501.19309). To try a rule of your own, add a function to ``RULES``.

"Logits" below are those after temperature, top-k and top-p (-inf where excluded), so their softmax is what is sampled from;
at temperature 0 they are the model's own.
"""

from __future__ import annotations

import codecs
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from errors import UserError
from files import read_jsonl, replacing
from model import Transformer
from tokenizer import Tokenizer

KINDS = ("pre_norm", "post_norm")
LABEL_RULES = ("span", "rest")
IGNORE, WRONG, RIGHT = -1, 0, 1  # token labels


class Block(NamedTuple):
    """What a rule may look at. M drafted tokens, V tokens in the vocabulary."""

    drafted: Tensor  # [M] int64
    best: Tensor  # [M] int64, the target's likeliest token in the place of each
    logits: Tensor | None  # [M, V] fp32, the target's, that predict each drafted token; greedy, standard and judge do without
    draft_logits: Tensor | None  # [M, V] fp32, the draft's own at the same places; kept when sampling and for the rule kl
    judge: Tensor | None  # [M] fp32, z_i of each drafted token, as ``judge_logits`` gives them; None without a head
    log_p: Tensor | None = None  # [M] fp32, each drafted token's by the target, before temperature, top-k and top-p
    floor: float = 0.0  # the judge takes no token of less probability than this; needs log_p when above 0


def known(logits: Tensor | None) -> Tensor:
    """Logits that a rule can't do without. Raises ValueError where they weren't kept."""
    if logits is None:
        raise ValueError("this rule needs the logits of all tokens")
    return logits


def judge_rule(block: Block, threshold: float) -> Tensor:
    """sigmoid(z_i) > δ, and the token is not one that the target all but excludes (p < floor). δ = 1 accepts nothing."""
    if block.judge is None:
        raise ValueError("the rule judge needs a head")
    right = block.judge.sigmoid() > threshold
    if block.floor == 0:
        return right
    if block.log_p is None:
        raise ValueError("the judge's floor needs the target's log-probabilities")
    return right & (block.log_p >= math.log(block.floor))


def topk_rule(block: Block, threshold: float) -> Tensor:
    """The token is among the target's K likeliest (K = threshold)."""
    logits = known(block.logits)
    own = logits.gather(-1, block.drafted[:, None])
    return ((logits > own).sum(-1) < threshold) & (own[:, 0] > -math.inf)


def typical_rule(block: Block, threshold: float) -> Tensor:
    """Medusa's typical acceptance (arXiv 2401.10774): p > min(ε, δ·e^-H), with ε = threshold and δ = sqrt(ε)."""
    log_p = known(block.logits).log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    limit = (math.sqrt(threshold) * torch.exp(-entropy)).clamp(max=threshold)
    return p.gather(-1, block.drafted[:, None])[:, 0] > limit


def kl_rule(block: Block, threshold: float) -> Tensor:
    """JuDi (arXiv 2601.04766): KL(p‖q) < τ, but where the target's top probability exceeds 0.9 only its own token."""
    log_p, log_q = known(block.logits).log_softmax(-1), known(block.draft_logits).log_softmax(-1)
    p = log_p.exp()
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    possible = log_p.gather(-1, block.drafted[:, None])[:, 0] > -math.inf
    return (divergence < threshold) & possible & ((p.amax(-1) <= 0.9) | (block.best == block.drafted))


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [T] of tokens [T] under logits [T, V]."""
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def judge_logits(model: Transformer, read: Tensor, log_p: Tensor) -> Tensor:
    """z_i of drafted tokens.

    Args:
        read: what the head's row says at their own positions, [M] fp32.
        log_p: their log-probabilities by the target, [M] fp32.
    """
    return read if model.judge_log_p == 0 else read + model.judge_log_p * log_p


class Rule(NamedTuple):
    """A relaxation of the standard test, its knob and what the knob may be."""

    accepts: Callable[[Block, float], Tensor]  # of a block and the knob's value: [M] bool
    default: float
    low: float
    high: float
    knob: str  # its name, for messages


RULES = {
    "judge": Rule(judge_rule, 0.5, 0.0, 1.0, "δ"),
    "topk": Rule(topk_rule, 5, 1, math.inf, "K"),
    "typical": Rule(typical_rule, 0.09, 0.0, 1.0, "ε"),
    "kl": Rule(kl_rule, 0.3, 0.0, math.inf, "τ"),
}


def rules_with_knobs() -> str:
    """The rules as a list of them takes each, for --help: judge[:δ], topk[:K] and so on."""
    return ", ".join(f"{name}[:{rule.knob}]" for name, rule in RULES.items())


def knobs() -> str:
    """The rules' knobs and their defaults, for --help."""
    defaults = {name: "the head's" if name == "judge" else f"{rule.default:g}" for name, rule in RULES.items()}
    return ", ".join(f"{rule.knob} for {name} ({defaults[name]})" for name, rule in RULES.items())


def check_threshold(verify: str, threshold: float) -> None:
    """Raises UserError when ``threshold`` is not a possible value of the rule's knob."""
    rule = RULES[verify]
    if not (rule.low <= threshold <= rule.high and threshold < math.inf) or (verify == "topk" and threshold != int(threshold)):
        whole = "a whole number " if verify == "topk" else ""
        limits = f"in [{rule.low:g}, {rule.high:g}]" if rule.high < math.inf else f"of at least {rule.low:g}"
        raise UserError(f"`threshold` is {threshold:g}; for the rule {verify} it is {rule.knob}, {whole}{limits}")


def default_threshold(verify: str, head: Head | None) -> float:
    """The rule's knob where nobody set it: the head's own δ for the judge."""
    return head.threshold if head is not None and verify == "judge" else RULES[verify].default


def standard_test(block: Block, uniform: Tensor | None) -> Tensor:
    """Speculative sampling's own test (arXiv 2211.17192), [M] bool.

    Args:
        uniform: fp32 draws [M] in [0, 1); None at temperature 0, where a token passes if the target would have said it.
    """
    if uniform is None:
        return block.best == block.drafted
    if block.draft_logits is None or block.logits is None:
        raise ValueError("speculative sampling needs the logits of both models")
    own = block.drafted[:, None]
    p = block.logits.softmax(-1).gather(-1, own)[:, 0]
    q = block.draft_logits.softmax(-1).gather(-1, own)[:, 0]
    return uniform * q < p  # strict: a token of probability 0 fails even on a draw of 0


class Verdict(NamedTuple):
    """Who accepted what. ``n`` is the length of the accepted run, a 0-d int64 tensor; the others are [M] bool."""

    n: Tensor
    standard: Tensor
    rule: Tensor


def verdict(block: Block, verify: str, threshold: float, uniform: Tensor | None) -> Verdict:
    """Apply the standard test and the rule ``verify`` (``standard`` for none), and find the leading accepted run.

    Raises:
        UserError: the rule gives no boolean for each drafted token.
    """
    standard = standard_test(block, uniform)
    relaxed = torch.zeros_like(standard) if verify == "standard" else RULES[verify].accepts(block, threshold)
    if not isinstance(relaxed, Tensor) or relaxed.dtype != torch.bool or relaxed.shape != standard.shape:
        gave = f"{relaxed.dtype} {list(relaxed.shape)}" if isinstance(relaxed, Tensor) else type(relaxed).__name__
        wanted = f"torch.bool {list(standard.shape)}, one for each drafted token"
        raise UserError(f"the rule {verify} gives {gave}; it must give {wanted}")
    n = (standard | relaxed).long().cumprod(0).sum(0)
    return Verdict(n, standard, relaxed)


def next_distribution(logits: Tensor, draft_logits: Tensor, n: Tensor) -> Tensor:
    """The distribution [V] of the token after the accepted run, when sampling.

    p_n − q_{n+1} clipped at 0 and normalised: what is left of the target's distribution once the draft's part is taken out.
    Where nothing is left, and for the bonus token after a whole accepted block, p_n itself.

    Args:
        logits: the target's, [M + 1, V].
        draft_logits: the draft's, [M, V].
        n: 0-d int64, accepted tokens.
    """
    M = draft_logits.shape[0]
    p = logits.index_select(0, n.view(1))[0].softmax(-1)
    q = draft_logits.index_select(0, n.clamp(max=M - 1).view(1))[0].softmax(-1)
    rest = (p - torch.where(n < M, q, 0.0)).clamp(min=0)
    return torch.where(rest.sum() > 0, rest, p)


@dataclass
class Head:
    """A judge: z = weight·h + bias + log_p · (the token's log-probability) on the target's last-layer state h, and what it was
    made for."""

    weight: Tensor  # [D] fp32
    bias: float
    kind: str  # pre_norm: h before the final RMSNorm; post_norm: after it
    model: str  # the target's name, for people
    fingerprint: str  # checkpoint.fingerprint of the target
    threshold: float = 0.5
    label_rule: str = "span"
    floor: float = 1e-4  # the judge takes no token that the target gives less probability
    log_p: float = 0.0

    def fuse(self, model: Transformer) -> None:
        """Let the target carry this head."""
        model.fuse_judge(self.weight, self.bias, self.kind, self.floor, self.log_p)

    def on(self, model: Transformer) -> Transformer:
        """A twin of the target that carries this head; the target stays as it is."""
        twin = model.twin()
        self.fuse(twin)
        return twin

    def save(self, path: Path) -> None:
        """Write the head; loadable with ``torch.load(weights_only=True)``."""
        with replacing(path) as partial:
            torch.save({"format": "judge-head-1", **asdict(self)}, partial)

    def check(self, fingerprint: str, dim: int, model: str) -> None:
        """Raises UserError unless the head was trained for this target."""
        if self.weight.shape != (dim,):
            raise UserError(f"the head has {self.weight.numel()} weights, made for {self.model}; {model} needs {dim}")
        if self.fingerprint != fingerprint:
            raise UserError(
                f"the head was trained for {self.model} ({self.fingerprint}), not for {model} ({fingerprint}); "
                "a head fits the one set of weights it was trained on"
            )


def load_head(path: Path) -> Head:
    """Read a head. Raises UserError when the file is missing, damaged, or not a head."""
    try:
        with zipfile.ZipFile(path) as parts:  # which it is; PyTorch doesn't look at its checksums
            if parts.testzip() is not None:
                raise zipfile.BadZipFile
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no judge head at {path}") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except Exception:  # damaged pickles fail in any way, and what they say is of no help
        raise UserError(f"{path} is damaged, or not a judge head (made by scripts/train_judge.py)") from None
    if not isinstance(raw, dict) or raw.pop("format", None) != "judge-head-1":
        raise UserError(f"{path} is not a judge head (made by scripts/train_judge.py)")
    try:
        head = Head(**raw)
    except TypeError as error:
        raise UserError(f"{path} is not a judge head this version can read: {error}") from None
    numbers = all(isinstance(x, float | int) for x in (head.bias, head.threshold, head.floor, head.log_p))
    vector = isinstance(head.weight, Tensor) and head.weight.dim() == 1 and head.weight.is_floating_point()
    if not numbers or not vector or not math.isfinite(head.bias + head.log_p) or not bool(head.weight.isfinite().all()):
        raise UserError(f"{path}: the head's weights are not a vector of finite numbers")
    if head.kind not in KINDS or head.label_rule not in LABEL_RULES or not (0 <= head.threshold <= 1 and 0 <= head.floor <= 1):
        raise UserError(
            f"{path}: kind {head.kind!r}, labels {head.label_rule!r}, δ {head.threshold}, floor {head.floor} aren't a head's"
        )
    return head


class Tuple(NamedTuple):
    """What people label: a question, a right answer, a wrong one, and the characters of its mistake, [start, end)."""

    question: str
    correct: str
    wrong: str
    mistake: tuple[int, int]


class Labelled(NamedTuple):
    """An answer whose tokens were judged: a line of what ``scripts/label.py`` writes."""

    question: str
    raw: bool  # the question is a whole prompt, not to be put into the chat template
    answer: str
    tokens: list[int]
    labels: list[int]  # RIGHT, WRONG or IGNORE for each token
    alternatives: list[tuple[int, int, int]]  # (place, token, label): another token judged in place of the answer's own
    how: str  # manual, mine or likelihood
    target: str
    draft: str | None
    seed: int


class Example(NamedTuple):
    """One answer to learn from: the prompt's ids, the answer's ids and a label for each of those."""

    question: int
    prompt: list[int]
    answer: list[int]
    labels: list[int]


def parse_tuple(row: Any) -> Tuple:
    """A row with the fields of ``Tuple``. Raises ValueError, KeyError or TypeError."""
    item = Tuple(row["question"], row["correct"], row["wrong"], tuple(row["mistake"]))
    if not all(isinstance(text, str) and text for text in item[:3]):
        raise ValueError("question, correct and wrong must be text")
    start, end = item.mistake
    if not 0 <= start < end <= len(item.wrong):
        raise ValueError(f"the mistake [{start}, {end}) lies outside the wrong answer's {len(item.wrong)} characters")
    return item


def parse_labelled(row: Any, tokenizer: Tokenizer) -> Labelled:
    """A row with the fields of ``Labelled``, made with this tokenizer. Raises ValueError, KeyError or TypeError."""
    item = Labelled(**{name: row[name] for name in Labelled._fields})
    if not isinstance(item.question, str):
        raise ValueError("the question must be text")
    tokens, places = [*item.tokens, *(token for _, token, _ in item.alternatives)], range(len(item.tokens) + 1)
    if len(item.labels) != len(item.tokens) or not all(place in places for place, _, _ in item.alternatives):
        raise ValueError(f"there must be a label for each of the {len(item.tokens)} tokens, and alternatives to them only")
    if not {*item.labels, *(label for _, _, label in item.alternatives)} <= {RIGHT, WRONG, IGNORE}:
        raise ValueError(f"labels must be {RIGHT} (right), {WRONG} (wrong) or {IGNORE} (left out)")
    if not all(isinstance(i, int) and 0 <= i < tokenizer.n_tokens for i in tokens) or tokenizer.decode(item.tokens) != item.answer:
        raise ValueError("the tokens don't spell the answer: they were made with another tokenizer")
    return item


def read_labels(path: Path, tokenizer: Tokenizer, label_rule: str = "span", raw: bool = False) -> list[Example]:
    """Examples from a JSON-lines file of ``Tuple`` or ``Labelled``. Lines of one question get one question number.

    Args:
        label_rule: for tuples, what comes after the mistake (see ``span_labels``).
        raw: for tuples, the questions are whole prompts.

    Raises:
        UserError: naming a line that is neither.
    """
    numbers: dict[str, int] = {}

    def parse(row: Any) -> list[Example]:
        if "skipped" in row:
            return []
        if "tokens" not in row:
            return tuple_examples(parse_tuple(row), tokenizer, number(row["question"]), label_rule, raw)
        item = parse_labelled(row, tokenizer)
        made = dict(row.get("settings", {})).get("label_rule", label_rule)
        if made != label_rule:
            raise ValueError(f"labelled by the rule {made!r}, not {label_rule!r}")
        prompt, question = tokenizer.encode_question(item.question, item.raw), number(item.question)
        return [Example(question, prompt, item.tokens, item.labels)] + [
            Example(question, prompt, [*item.tokens[:place], token], [IGNORE] * place + [label])
            for place, token, label in sorted(item.alternatives)
        ]

    def number(question: str) -> int:
        return numbers.setdefault(question, len(numbers))

    examples = [example for several in read_jsonl(path, parse) for example in several]
    if not examples:
        raise UserError(f"{path} holds no labelled answer")
    return examples


def token_spans(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """The characters [start, end) of ``text`` that each of its ids completes.

    Raises:
        ValueError: the tokenizer writes the text otherwise than it was given.
    """
    back = tokenizer.decode(ids)
    if back != text:
        raise ValueError(f"the tokenizer gives {back!r} back for {text!r}; use that form, so that characters can be counted")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    written = (b"" if i in tokenizer.hidden_ids else tokenizer.token_bytes(i) or b"" for i in ids)
    ends = list(accumulate(len(decoder.decode(data)) for data in written))
    extra = (ends[-1] if ends else 0) - len(text)  # a space that SentencePiece puts in front
    ends = [max(0, end - extra) for end in ends]
    return list(zip([0, *ends], ends))


def tuple_examples(item: Tuple, tokenizer: Tokenizer, number: int, label_rule: str = "span", raw: bool = False) -> list[Example]:
    """Both answers of a tuple, a label for each token; the stop token belongs to a right answer."""
    prompt, stop = tokenizer.encode_question(item.question, raw), tokenizer.end_of_answer(raw)
    right, wrong = tokenizer.encode(item.correct), tokenizer.encode(item.wrong)
    labels = span_labels(token_spans(tokenizer, wrong, item.wrong), item.mistake, label_rule)
    return [
        Example(number, prompt, right + stop, [RIGHT] * (len(right) + len(stop))),
        Example(number, prompt, wrong, labels),
    ]


def span_labels(pieces: Sequence[tuple[int, int]], mistake: tuple[int, int], label_rule: str) -> list[int]:
    """Labels of a wrong answer's tokens from the characters of its mistake.

    Args:
        pieces: each token's characters, [start, end); a token that completes none (a part of a multi-byte character) has
            start = end and belongs to the character that comes next.
        mistake: the mistake's characters, [start, end).
        label_rule: what comes after the mistake is left out (``span``) or wrong as well (``rest``).

    Returns:
        RIGHT before the mistake, WRONG for every token that touches it, then IGNORE or WRONG.
    """
    after = WRONG if label_rule == "rest" else IGNORE
    return [RIGHT if max(end, start + 1) <= mistake[0] else WRONG if start < mistake[1] else after for start, end in pieces]
