"""Who accepts a drafted token: the standard test, the rules that relax it, and the judge head with its training.

A block is M drafted tokens and what the target said when it read ``[cur, d_1, ..., d_M]`` in one pass: logits L_0..L_M, where
L_{i-1} predicts d_i, and judge logits z_0..z_M, where z_i was taken at d_i's own position, after the target had read it.
Token i is accepted when the standard test OR the chosen rule accepts it; the block ends before the first token that neither
does (judge decoding, arXiv 2501.19309). To try a rule of your own, add a function to ``RULES``.

"Logits" below are those after temperature, top-k and top-p (-inf where excluded), so their softmax is what is sampled from;
at temperature 0 they are the model's own.
"""

from __future__ import annotations

import codecs
import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError, read_jsonl
from model import PREFILL_CHUNK, Cache, Transformer, common_length
from tokenizer import Tokenizer

KINDS = ("pre_norm", "post_norm")
LABEL_RULES = ("span", "rest")
IGNORE, WRONG, RIGHT = -1, 0, 1  # token labels


class Block(NamedTuple):
    """What a rule may look at. M drafted tokens, V tokens in the vocabulary."""

    drafted: Tensor  # [M] int64
    logits: Tensor  # [M, V] fp32, the target's, that predict each drafted token
    draft_logits: Tensor | None  # [M, V] fp32, the draft's own at the same places; kept when sampling and for the rule kl
    judge: Tensor | None  # [M] fp32, z_i at each drafted token's own position; None without a head


def judge_rule(block: Block, threshold: float) -> Tensor:
    """sigmoid(z_i) > δ. δ = 1 accepts nothing."""
    if block.judge is None:
        raise ValueError("the rule judge needs a head")
    return block.judge.sigmoid() > threshold


def topk_rule(block: Block, threshold: float) -> Tensor:
    """The token is among the target's K likeliest (K = threshold)."""
    own = block.logits.gather(-1, block.drafted[:, None])
    return ((block.logits > own).sum(-1) < threshold) & (own[:, 0] > -math.inf)


def typical_rule(block: Block, threshold: float) -> Tensor:
    """Medusa's typical acceptance (arXiv 2401.10774): p > min(ε, δ·e^-H), with ε = threshold and δ = sqrt(ε)."""
    log_p = block.logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    limit = (math.sqrt(threshold) * torch.exp(-entropy)).clamp(max=threshold)
    return p.gather(-1, block.drafted[:, None])[:, 0] > limit


def kl_rule(block: Block, threshold: float) -> Tensor:
    """JuDi (arXiv 2601.04766): KL(p‖q) < τ, but where the target's top probability exceeds 0.9 only its own token."""
    if block.draft_logits is None:
        raise ValueError("the rule kl needs the draft's logits")
    log_p, log_q = block.logits.log_softmax(-1), block.draft_logits.log_softmax(-1)
    p = log_p.exp()
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    top, best = p.max(-1)
    possible = block.logits.gather(-1, block.drafted[:, None])[:, 0] > -math.inf
    return (divergence < threshold) & possible & ((top <= 0.9) | (best == block.drafted))


class Rule(NamedTuple):
    """A relaxation of the standard test, its knob and what the knob may be."""

    accepts: Callable[[Block, float], Tensor]
    default: float
    low: float
    high: float
    knob: str


RULES = {
    "judge": Rule(judge_rule, 0.5, 0.0, 1.0, "δ"),
    "topk": Rule(topk_rule, 5, 1, math.inf, "K"),
    "typical": Rule(typical_rule, 0.09, 0.0, 1.0, "ε"),
    "kl": Rule(kl_rule, 0.3, 0.0, math.inf, "τ"),
}


def check_threshold(verify: str, threshold: float) -> None:
    """Raises UserError when ``threshold`` is not a possible value of the rule's knob."""
    rule = RULES[verify]
    if not rule.low <= threshold <= rule.high or (verify == "topk" and threshold != int(threshold)):
        whole = "a whole number " if verify == "topk" else ""
        limits = f"in [{rule.low:g}, {rule.high:g}]" if rule.high < math.inf else f"of at least {rule.low:g}"
        raise UserError(f"--threshold is {threshold:g}; for the rule {verify} it is {rule.knob}, {whole}{limits}")


def default_threshold(verify: str, head: Head | None) -> float:
    """The rule's knob where nobody set it: the head's own δ for the judge."""
    return head.threshold if head is not None and verify == "judge" else RULES[verify].default


def standard_test(block: Block, uniform: Tensor | None) -> Tensor:
    """Speculative sampling's own test (arXiv 2211.17192), [M] bool.

    Args:
        uniform: fp32 draws [M] in [0, 1); None at temperature 0, where a token passes if the target would have said it.
    """
    if uniform is None:
        return block.logits.argmax(-1) == block.drafted
    if block.draft_logits is None:
        raise ValueError("speculative sampling needs the draft's logits")
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
    """Apply the standard test and the rule ``verify`` (``standard`` for none), and find the leading accepted run."""
    standard = standard_test(block, uniform)
    relaxed = torch.zeros_like(standard) if verify == "standard" else RULES[verify].accepts(block, threshold)
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
    """A judge: f(h) = weight·h + bias on the target's last-layer state, and what it was made for."""

    weight: Tensor  # [D] fp32
    bias: float
    kind: str  # pre_norm: h before the final RMSNorm; post_norm: after it
    model: str  # the target's name, for people
    fingerprint: str  # checkpoint.fingerprint of the target
    threshold: float = 0.5
    label_rule: str = "span"

    def save(self, path: Path) -> None:
        """Write the head; loadable with ``torch.load(weights_only=True)``."""
        partial = path.with_name(path.name + ".partial")
        torch.save({"format": "judge-head-1", **asdict(self)}, partial)
        os.replace(partial, path)

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
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no judge head at {path}") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = (str(error) or "it is empty").splitlines()[0]
        raise UserError(f"{path} can't be read as a judge head: {why}") from None
    if not isinstance(raw, dict) or raw.pop("format", None) != "judge-head-1":
        raise UserError(f"{path} is not a judge head (made by scripts/train_judge.py)")
    try:
        head = Head(**raw)
    except TypeError as error:
        raise UserError(f"{path} is not a judge head this version can read: {error}") from None
    sound = isinstance(head.weight, Tensor) and head.weight.dim() == 1 and bool(head.weight.isfinite().all())
    if not sound or not math.isfinite(head.bias):
        raise UserError(f"{path}: the head's weights are not a vector of finite numbers")
    if head.kind not in KINDS or head.label_rule not in LABEL_RULES or not 0 <= head.threshold <= 1:
        raise UserError(f"{path}: kind {head.kind!r}, labels {head.label_rule!r}, δ {head.threshold} aren't a head's")
    return head


class Tuple(NamedTuple):
    """What people label: a question, a right answer, a wrong one, and the characters of its mistake, [start, end)."""

    question: str
    correct: str
    wrong: str
    mistake: tuple[int, int]


class Example(NamedTuple):
    """One answer to learn from: the prompt's ids, the answer's ids and a label for each of those."""

    question: int
    prompt: list[int]
    answer: list[int]
    labels: list[int]


def read_tuples(path: Path) -> list[Tuple]:
    """Tuples from a JSON-lines file with the fields of ``Tuple``. Raises UserError naming a line that isn't one."""

    def parse(row: Any) -> Tuple:
        item = Tuple(row["question"], row["correct"], row["wrong"], tuple(row["mistake"]))
        if not all(isinstance(text, str) and text for text in item[:3]):
            raise ValueError("question, correct and wrong must be text")
        start, end = item.mistake
        if not 0 <= start < end <= len(item.wrong):
            raise ValueError(f"the mistake [{start}, {end}) lies outside the wrong answer's {len(item.wrong)} characters")
        return item

    return read_jsonl(path, parse)


def token_spans(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """The characters [start, end) of ``text`` that each of its ids completes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    written = (b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) or b"" for i in ids)
    ends = list(accumulate(len(decoder.decode(data)) for data in written))
    extra = (ends[-1] if ends else 0) - len(text)  # a space that SentencePiece puts in front
    ends = [max(0, end - extra) for end in ends]
    return list(zip([0, *ends], ends))


def to_examples(tuples: Sequence[Tuple], tokenizer: Tokenizer, label_rule: str = "span", raw: bool = False) -> list[Example]:
    """Both answers of every tuple, a label for each token; the stop token belongs to a right answer.

    Args:
        raw: the questions are whole prompts, not to be put into the chat template.
    """
    stop = sorted(tokenizer.eos_ids)[:1]
    examples = []
    for number, item in enumerate(tuples):
        prompt = tokenizer.encode_question(item.question, raw)
        for text, mistake in ((item.correct, None), (item.wrong, item.mistake)):
            ids = tokenizer.encode(text)
            labels = span_labels(token_spans(tokenizer, ids, text), mistake, label_rule)
            if mistake is None:
                ids, labels = ids + stop, labels + [RIGHT] * len(stop)
            examples.append(Example(number, prompt, ids, labels))
    return examples


def span_labels(pieces: Sequence[tuple[int, int]], mistake: tuple[int, int] | None, label_rule: str) -> list[int]:
    """Labels of an answer's tokens from the characters of its mistake.

    Args:
        pieces: each token's characters, [start, end); a token that completes none (a part of a multi-byte character) has
            start = end and belongs to the character that comes next.
        mistake: the mistake's characters, [start, end); None for a correct answer.
        label_rule: what comes after the mistake is left out (``span``) or wrong as well (``rest``).

    Returns:
        RIGHT before the mistake, WRONG for every token that touches it, then IGNORE or WRONG.
    """
    if mistake is None:
        return [RIGHT] * len(pieces)
    after = WRONG if label_rule == "rest" else IGNORE
    return [RIGHT if max(end, start + 1) <= mistake[0] else WRONG if start < mistake[1] else after for start, end in pieces]


@torch.inference_mode()
def features(
    model: Transformer, examples: Sequence[Example], kind: str, progress: Callable[..., Any] = lambda rows: rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Last-layer states of all labelled answer tokens: (states [N, D] fp32, labels [N], question numbers [N]).

    What an example has in common with the start of the one before (the worked examples of a prompt, a right answer up to the
    mistake planted in it) is read once; nothing behind the last labelled token is read.
    """
    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    texts = []
    for example in examples:
        used = max((i + 1 for i, label in enumerate(example.labels) if label != IGNORE), default=0)
        texts.append(example.prompt + example.answer[:used])
    longest = max(map(len, texts))
    cache = Cache(model.config, longest, dtype, device)
    hidden = torch.empty((longest, model.config.dim), dtype=dtype, device=device)
    states, labels, questions = [], [], []
    last: list[int] = []
    for example, text in progress(list(zip(examples, texts))):
        for start in range(common_length(last, text), len(text), PREFILL_CHUNK):
            positions = torch.arange(start, min(start + PREFILL_CHUNK, len(text)), device=device)
            ids = torch.tensor(text, device=device)[positions]
            hidden[positions] = model.step(ids, positions, cache, int(positions[-1]) + 1, compiled=False)
        last = text
        wanted = [i for i, label in enumerate(example.labels) if label != IGNORE]
        answer = hidden[len(example.prompt) : len(text)][wanted]
        states.append((model.norm(answer) if kind == "post_norm" else answer).float().cpu())
        labels.append(torch.tensor([example.labels[i] for i in wanted]))
        questions.append(torch.full((len(wanted),), example.question))
    return torch.cat(states), torch.cat(labels), torch.cat(questions)


class TrainResult(NamedTuple):
    weight: Tensor  # [D] fp32, on raw states
    bias: float
    epochs: int
    auc: float  # of right against wrong tokens, on the held-out questions
    recall: float  # share of held-out wrong tokens with sigmoid < 0.5
    kept: float  # share of held-out right tokens with sigmoid > 0.5


def train_head(
    states: Tensor,
    labels: Tensor,
    questions: Tensor,
    seed: int = 0,
    wrong_weight: float = 1.0,
    lr: float = 1e-4,
    weight_decay: float = 0.1,
    batch: int = 128,
    max_epochs: int = 1000,
    patience: int = 5,
) -> TrainResult:
    """Fit a linear head by weighted cross-entropy, stopping early on a tenth of the *questions*.

    Wrong tokens weigh n_right / n_wrong times ``wrong_weight``, which makes up for there being about one in twenty. States
    are standardised, and the scale is folded back into the weights returned.

    Args:
        states: [N, D] fp32; labels: [N], RIGHT or WRONG; questions: [N], whose answer a token comes from.

    Raises:
        UserError: the labels hold no wrong token, or no right one.
    """
    generator = torch.Generator().manual_seed(seed)
    unique = questions.unique()
    held = unique[torch.randperm(len(unique), generator=generator)[: max(1, len(unique) // 10)]]
    held_out = torch.isin(questions, held)
    n_right, n_wrong = int((labels[~held_out] == RIGHT).sum()), int((labels[~held_out] == WRONG).sum())
    if not n_right or not n_wrong:
        raise UserError(f"a head needs right and wrong tokens to learn from; these are {n_right} right and {n_wrong} wrong")
    mean, std = states[~held_out].mean(0), states[~held_out].std(0).clamp(min=1e-6)
    x, y = (states - mean) / std, labels.float()
    weights = torch.where(labels == WRONG, n_right / n_wrong * wrong_weight, 1.0)
    w = torch.zeros(states.shape[1], requires_grad=True)
    b = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.AdamW([w, b], lr=lr, weight_decay=weight_decay)

    def loss(rows: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x[rows] @ w + b, y[rows], weights[rows])

    train, val = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
    best, best_loss, best_epoch = (w.detach().clone(), b.item()), math.inf, 0
    for epoch in range(1, max_epochs + 1):
        for rows in train[torch.randperm(len(train), generator=generator)].split(batch):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
        with torch.no_grad():
            now = loss(val).item()
        if now < best_loss * 0.999:  # on states that a plane separates the loss would creep down for ever
            best, best_loss, best_epoch = (w.detach().clone(), b.item()), now, epoch
        elif epoch - best_epoch >= patience:
            break
    score = x[val] @ best[0] + best[1]
    right, wrong = score[labels[val] == RIGHT], score[labels[val] == WRONG]
    weight = best[0] / std
    return TrainResult(
        weight, best[1] - float(weight @ mean), best_epoch, _auc(right, wrong),
        float((wrong < 0).float().mean()), float((right > 0).float().mean()),
    )  # fmt: skip


def _auc(right: Tensor, wrong: Tensor) -> float:
    """Probability that a right token scores above a wrong one, ties counted half."""
    ordered = wrong.sort().values
    below, upto = torch.searchsorted(ordered, right), torch.searchsorted(ordered, right, right=True)
    return float((below + upto).double().mean() / 2 / max(1, len(ordered)))
