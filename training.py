"""The training of a judge head: what a target makes of labelled tokens, and the linear head that tells the right ones from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError
from judge import IGNORE, RIGHT, WRONG, Example, log_probabilities
from model import Reader, Transformer

LEAST = 30  # right and wrong tokens each, from which it is learned what a log-probability counts


class Seen(NamedTuple):
    """What the target makes of N labelled tokens, on the CPU."""

    states: Tensor  # [N, D] at each, before the final norm, in the model's dtype
    log_p: Tensor  # [N] fp32, their log-probabilities
    own: Tensor  # [N] bool, whether it would have said the same


@torch.inference_mode()
def read_states(model: Transformer, examples: Sequence[Example], progress: Callable[..., Any] = lambda rows: rows) -> Seen:
    """Read all examples with the target; nothing behind an example's last labelled token."""
    texts = []
    for example in examples:
        used = max((i + 1 for i, label in enumerate(example.labels) if label != IGNORE), default=0)
        texts.append(example.prompt + example.answer[:used])
    reader, seen = Reader(model, max(map(len, texts))), []
    for example, text in progress(list(zip(examples, texts))):
        wanted = torch.tensor([len(example.prompt) + i for i, label in enumerate(example.labels) if label != IGNORE])
        if len(wanted):
            states, tokens = reader.read(text), torch.tensor(text)[wanted]
            logits = model.logits(states[wanted - 1])[0].cpu()
            seen.append(Seen(states[wanted].cpu(), log_probabilities(logits, tokens), logits.argmax(-1) == tokens))
    if not seen:
        raise UserError("no token of these answers carries a label")
    return Seen(*map(torch.cat, zip(*seen)))


def as_features(model: Transformer, states: Tensor, kind: str) -> Tensor:
    """What a head of a ``kind`` looks at, fp32 [N, D], from states before the final norm."""
    weight = model.norm.weight
    with torch.inference_mode():
        return (
            torch.cat([model.norm(part.to(weight.device)).cpu() for part in states.split(4096)]).float()
            if kind == "post_norm"
            else states.float()
        )


def labels_of(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """(labels [N], question numbers [N]) of the labelled tokens, in the order of ``read_states``."""
    pairs = [(label, example.question) for example in examples for label in example.labels if label != IGNORE]
    labels, questions = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return labels, questions


class TrainResult(NamedTuple):
    """A fitted head, and scores w·h + b + log_p · (log-probability) of tokens of questions that were held out."""

    weight: Tensor  # [D] fp32, on raw states
    bias: float
    epochs: int
    right: Tensor  # scores of the right tokens, ascending
    wrong: Tensor  # the same of the wrong ones
    log_p: float = 0.0  # what a token's log-probability adds to its score
    auc_without: float = math.nan  # auc of w·h + b alone

    @property
    def auc(self) -> float:
        """Probability that a right token scores above a wrong one."""
        return auc_of(self.right, self.wrong)

    def at(self, threshold: float) -> Operating:
        """What a δ means on the held-out tokens."""
        stopped, lost = self.wrong.sigmoid() <= threshold, self.right.sigmoid() <= threshold
        return Operating(
            threshold, float(stopped.float().mean()), int(stopped.sum()) / max(1, int(stopped.sum() + lost.sum())),
            1 - float(lost.float().mean()),
        )  # fmt: skip

    def threshold_for(self, recall: float) -> float:
        """The least δ that stops at least this share of the held-out wrong tokens."""
        return float(self.wrong.sigmoid()[max(0, math.ceil(recall * len(self.wrong)) - 1)])

    def calibration(self, bins: int = 10) -> list[tuple[float, float, float]]:
        """(mean sigmoid, share right, share of all) in each tenth of [0, 1]; right and wrong count alike as a whole, as they
        do in training."""
        score = torch.cat((self.right, self.wrong)).sigmoid()
        weight = torch.cat((torch.full_like(self.right, 0.5 / len(self.right)), torch.full_like(self.wrong, 0.5 / len(self.wrong))))
        is_right = torch.arange(len(score)) < len(self.right)
        rows = []
        for at in range(bins):
            inside = (score * bins).long().clamp(max=bins - 1) == at
            total = float(weight[inside].sum())
            if total > 0:
                share = float(weight[inside & is_right].sum()) / total
                rows.append((float((score * weight)[inside].sum()) / total, share, total))
        return rows


class Operating(NamedTuple):
    """A head at one δ, on held-out tokens."""

    threshold: float
    recall: float  # wrong tokens that are stopped
    precision: float  # stopped tokens that are wrong
    kept: float  # right tokens that are accepted


def auc_of(right: Tensor, wrong: Tensor) -> float:
    """Probability that a number of ``right`` is above one of ``wrong``, both ascending; ties are counted half."""
    below, upto = torch.searchsorted(wrong, right), torch.searchsorted(wrong, right, right=True)
    return float((below + upto).double().mean() / 2 / max(1, len(wrong)))


def parts_of(labels: Tensor, questions: Tensor, generator: torch.Generator) -> Tensor:
    """Divide questions into ten parts (fewer, where fewer have a mistake), those with a wrong token and the others alike.

    Returns:
        For each token, the part its question is in: [N].
    """
    with_mistake = questions[labels == WRONG].unique()
    without = questions[~torch.isin(questions, with_mistake)].unique()
    n = min(10, max(1, len(with_mistake)))
    part = torch.zeros(int(questions.max()) + 1, dtype=torch.int64)
    for kind in (with_mistake, without):
        part[kind[torch.randperm(len(kind), generator=generator)]] = torch.arange(len(kind)) % n
    return part[questions]


def weigh_log_p(scores: Tensor, log_p: Tensor, is_right: Tensor) -> tuple[float, float]:
    """c and shift for which scores + c · log_p + shift tell right tokens from wrong ones best: logistic regression, in which right
    and wrong weigh the same. (0, 0) unless c is above 0 by twice its standard error, or where there are few of a kind.

    Args:
        scores, log_p, is_right: [N] each, of tokens that a head has not seen.
    """
    if min(int(is_right.sum()), int((~is_right).sum())) < LEAST:
        return 0.0, 0.0
    y, scores = is_right.double(), scores.double()
    weights = y / (2 * y.sum()) + (1 - y) / (2 * (1 - y).sum())
    x, found = torch.stack((log_p.double(), torch.ones_like(y)), 1), torch.zeros(2, dtype=torch.float64, requires_grad=True)
    keep = 1e-3  # or log-probabilities that divide them exactly would count without bound
    optimizer = torch.optim.LBFGS([found], max_iter=500, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (
            F.binary_cross_entropy_with_logits(scores + x @ found, y, weights, reduction="sum") + keep / 2 * found.square().sum()
        )
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        p = (scores + x @ found).sigmoid()
        curvature = (x * (weights * p * (1 - p))[:, None]).t() @ x + keep * torch.eye(2, dtype=torch.float64)
        each = x * (weights * (p - y))[:, None]  # Huber's estimate: the weights aren't counts
        error = torch.linalg.solve(curvature, each.t())[0].norm()
    c, shift = found.tolist()
    return (c, shift) if c > 2 * float(error) else (0.0, 0.0)


def train_head(
    states: Tensor,
    labels: Tensor,
    questions: Tensor,
    log_p: Tensor | None = None,
    own: Tensor | None = None,
    seed: int = 0,
    lr: float = 1e-4,
    weight_decay: float = 0.1,
    batch: int = 128,
    max_epochs: int = 1000,
    patience: int = 5,
) -> TrainResult:
    """Fit ten linear heads by weighted cross-entropy, each stopped early on another tenth of the *questions*; the result is
    their mean.

    Every token is scored by the one head that hasn't seen its question, so that all mistakes there are serve to choose δ by.
    The heads are trained side by side, at the cost of one. Wrong tokens weigh n_right / n_wrong, which makes up for there
    being about one in twenty. States are standardised, and the scale is folded back into the weights returned.

    What the target's log-probability of a token adds is found on the scores of tokens that a head hasn't seen. Those, and what
    is said of the head, are of tokens that the target would have put otherwise, where there are some of both kinds: the others
    are the standard test's.

    Args:
        states: [N, D] fp32; labels: [N], RIGHT or WRONG; questions: [N], whose answer a token comes from.
        log_p: [N] fp32, as in ``Seen``; without it log-probabilities count nothing.
        own: [N] bool, as in ``Seen``; without it no token is taken to be the target's own.

    Raises:
        UserError: there are too few right or wrong tokens to learn from some and to test on others.
    """
    generator = torch.Generator().manual_seed(seed)
    part = parts_of(labels, questions, generator)
    held = part == torch.arange(int(part.max()) + 1)[:, None]  # [heads, N]: the tokens that a head doesn't learn from
    is_right = labels == RIGHT
    enough = [all((side & kind).any() for side in (h, ~h) for kind in (is_right, ~is_right)) for h in held]
    held = held[torch.tensor(enough)]  # a part may have no right token, where there are few
    if not len(held):
        here = " and ".join(
            f"{int(kind.sum())} {name} ones of {len(questions[kind].unique())}"
            for name, kind in (("right", is_right), ("wrong", ~is_right))
        )
        raise UserError(f"a head needs right tokens of at least two questions, and wrong ones of two; here are {here}")
    ratio = (~held & is_right).sum(1) / (~held & ~is_right).sum(1)
    weights = torch.where(is_right, 1.0, ratio[:, None])
    mean, std = states.mean(0), states.std(0).clamp(min=1e-6)
    x, y = (states - mean) / std, labels.float()
    w = torch.zeros(len(held), states.shape[1], requires_grad=True)
    b = torch.zeros(len(held), requires_grad=True)
    optimizer = torch.optim.AdamW([w, b], lr=lr, weight_decay=weight_decay)

    def losses(rows: Tensor, chosen: Tensor) -> Tensor:
        scores = w @ x[rows].t() + b[:, None]
        each = F.binary_cross_entropy_with_logits(scores, y[rows].expand_as(scores), weights[:, rows], reduction="none")
        return (each * chosen[:, rows]).sum(1)

    best_w, best_b, best_loss = torch.zeros_like(w), torch.zeros_like(b), torch.full_like(b, math.inf)
    best_epoch, going = torch.zeros(len(held), dtype=torch.int64), torch.ones(len(held), dtype=torch.bool)
    for epoch in range(1, max_epochs + 1):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            optimizer.zero_grad()
            losses(rows, ~held).sum().div(batch).backward()
            optimizer.step()
        with torch.no_grad():
            now = sum(losses(rows, held) for rows in torch.arange(len(x)).split(4096)) / held.sum(1)
            better = going & (now < best_loss * 0.999)  # on states that a plane separates the loss would creep down for ever
            best_w[better], best_b[better], best_loss[better], best_epoch[better] = w[better], b[better], now[better], epoch
            going &= epoch - best_epoch < patience
        if not going.any():
            break
    scores = torch.cat([(best_w @ rows.t() + best_b[:, None]).t() for rows in x.split(4096)])[held.t()]
    token = torch.arange(len(x)).expand_as(held).t()[held.t()]
    if own is not None and len(labels[~own].unique()) == 2:
        scores, token = scores[~own[token]], token[~own[token]]

    def by_label(scores: Tensor) -> tuple[Tensor, Tensor]:
        right, wrong = (scores[labels[token] == label].sort().values for label in (RIGHT, WRONG))
        return right, wrong

    c, shift, without = 0.0, 0.0, auc_of(*by_label(scores))
    if log_p is not None:
        c, shift = weigh_log_p(scores, log_p[token], is_right[token])
        scores = scores + c * log_p[token] + shift
    weight, epochs = best_w.mean(0) / std, round(float(best_epoch.float().mean()))
    return TrainResult(weight, float(best_b.mean() - weight @ mean) + shift, epochs, *by_label(scores), c, without)
