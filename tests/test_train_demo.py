"""The demo pair's making: what the corpora teach, and that a run that was killed goes on to the same end."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys

import demo_task as task
import pytest
import safetensors.torch
import sentencepiece
import torch
import train_demo
from conftest import ROOT

import checkpoint
from errors import UserError

PIECES = sentencepiece.SentencePieceProcessor(model_file=str(ROOT / "demo" / "target" / "tokenizer.model"))


@pytest.mark.parametrize("own", [(task.FIRST,), (task.SECOND,), (task.FIRST, task.SECOND, task.THIRD)])
def test_what_is_said_is_what_is_read_but_for_wordings_that_arent_ones_own(own):
    rng = random.Random(0)
    writer = train_demo.Writer(PIECES, own)
    for problem in itertools.islice(task.training_problems(rng, frozenset()), 30):
        pieces = task.write_solution(problem, rng, (0.3, 0.4, 0.3))
        row = writer.answer(pieces, rng, train_demo.NO_MISTAKES)
        assert PIECES.decode([token.read for token in row]) == task.to_text(pieces)
        assert all(token.weight > 0 for token in row)
        expected = []
        for piece in pieces:
            ids = PIECES.encode(piece.text)
            if piece.wording is not None and piece.wording not in own:
                ids[0] = PIECES.encode(task.WORDINGS[piece.kind][own[0]])[0]
            expected += ids
        assert [token.say for token in row] == expected


def test_mistakes_are_read_and_only_their_mending_is_learned():
    rng = random.Random(1)
    writer = train_demo.Writer(PIECES, (task.FIRST,))
    mended = 0
    for problem in itertools.islice(task.training_problems(rng, frozenset()), 60):
        pieces = task.write_solution(problem, rng, (1, 0, 0))
        row = writer.answer(pieces, rng, train_demo.LATE._replace(share=1.0, counts=(1,)))
        text = PIECES.decode([token.read for token in row])
        mend = next(m for m in task.MENDS if m in text)
        before, after = text.split(mend)
        right = task.to_text(pieces)
        unlearned = PIECES.decode([token.read for token in row if token.weight == 0])
        assert right.endswith(after) and before.endswith(unlearned) and task.is_right(problem, text)
        # all that is learned, but the mend, is the right answer; the start of a wrong number that is right so far is said twice
        said = PIECES.decode([token.say for token in row if token.weight > 0]).replace(mend, "", 1)
        assert said.endswith(after) and before[: len(before) - len(unlearned)] in right
        mended += bool(unlearned)
    assert mended > 50


def test_careless_sums_forget_carry_and_borrow_where_said():
    for a, b in itertools.product(range(10, 100), range(10, 61)):
        carries, borrows = a % 10 + b % 10 >= 10, a % 10 < b % 10
        assert task.careless_add(a, b) == a + b - 10 * (carries and b % 10 >= 8)
        assert task.careless_add(a, -b) == a - b + 10 * (borrows and b % 10 >= 8)


def contents(path):
    """A file's bytes; of weights the tensors, since safetensors writes its metadata in any order."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    return {name: tensor.view(torch.int16).tolist() for name, tensor in safetensors.torch.load_file(path).items()}


def cut_down(monkeypatch):
    """The recipes take seconds."""
    for name in ("TARGET", "DRAFT"):
        recipe = dataclasses.replace(getattr(train_demo, name), dim=16, n_layers=2, ffn_dim=16, steps=5, batch_tokens=340)
        monkeypatch.setattr(train_demo, name, recipe)
    monkeypatch.setattr(train_demo, "SAVE_EVERY", 2)
    monkeypatch.setattr(train_demo, "TUPLES", 4)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(train_demo, "train_tokenizer", lambda seed: (ROOT / "demo" / "target" / "tokenizer.model").read_bytes())


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The recipes cut down to seconds; returns a function that runs the script."""
    cut_down(monkeypatch)

    def run(name, *more):
        work, out = tmp_path / f"{name}-work", tmp_path / name
        monkeypatch.setattr(sys, "argv", ["train_demo.py", "--work", str(work), "--out", str(out), *more])
        train_demo.main()
        return {path.relative_to(out): contents(path) for path in out.rglob("*") if path.is_file()}

    return run


def test_a_killed_run_goes_on_to_the_same_pair(small, monkeypatch, tmp_path):
    whole = small("whole")
    pair = checkpoint.find_pair(
        str(tmp_path / "whole" / "target"), str(tmp_path / "whole" / "draft"), tmp_path / "whole" / "judge.pt"
    )
    assert pair.load(torch.float32)[0].config.dim == 16
    loss_of, counts = train_demo.loss_of, {"left": 0}

    def dies_after(*args):
        counts["left"] -= 1
        if counts["left"] < 0:
            raise KeyboardInterrupt
        return loss_of(*args)

    monkeypatch.setattr(train_demo, "loss_of", dies_after)
    for steps in (3, 4, 3):  # killed in the target's training, after it, and in the draft's
        counts["left"] = steps
        with pytest.raises(KeyboardInterrupt):
            small("killed")
        assert not (tmp_path / "killed").exists()
    counts["left"] = 99
    assert small("killed") == whole
    assert small("killed") == whole  # once more changes nothing


def test_another_runs_state_is_refused(small):
    small("pair")
    with pytest.raises(UserError, match="seed 0.*choose another folder"):
        small("pair", "--seed", "1")
