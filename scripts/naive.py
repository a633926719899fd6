"""Decoding as it is defined, one whole pass a token and nothing kept: what the engine is tested against. Greedy, fp32, slow."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import RULE, STANDARD, TARGET
from judge import Head
from model import Transformer


def greedy(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """n tokens of plain greedy decoding."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def is_greedy(model: Transformer, prompt: list[int], tokens: list[int]) -> bool:
    """Whether ``tokens`` are the model's greedy choices after ``prompt``, checked by one whole pass."""
    said = model(torch.tensor([prompt + tokens]))[0].argmax(-1)[len(prompt) - 1 : -1]
    return said.tolist() == tokens


def verdict(target: Transformer, head: Head, state: Tensor, log_p: Tensor) -> float:
    """The judge's probability that a token is right, from the target's state [D] at it before the final norm, and its log_p."""
    seen = target.norm(state) if head.kind == "post_norm" else state
    return float(torch.sigmoid(seen @ head.weight + head.bias + head.log_p * log_p))


def judged(
    target: Transformer, draft: Transformer, prompt: list[int], n: int, M: int, head: Head | None, delta: float
) -> tuple[list[int], list[str]]:
    """Judge decoding as DESIGN.md words it; without a head, standard speculative decoding.

    Returns at least n tokens, and who accepted each.
    """
    ids, who = list(prompt), []
    while len(ids) - len(prompt) < n:
        for drafts_left in range(M, -1, -1):
            token = greedy(draft, ids, 1)[0]
            states = target.hidden(torch.tensor([[*ids, token]]))[0]
            before = target.logits(states)[0][-2]  # of what follows ids
            said = int(before.argmax()) == token
            log_p = before.log_softmax(-1)[token]
            likely = head is not None and float(log_p.exp()) >= head.floor
            right = head is not None and likely and verdict(target, head, states[-1], log_p) > delta
            if not drafts_left or not (said or right):
                break
            ids.append(token)
            who.append(STANDARD if said else RULE)
        ids.append(int(before.argmax()))
        who.append(TARGET)
    return ids[len(prompt) :], who
