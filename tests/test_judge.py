"""The acceptance rules as properties, the head's file, its labels and its training."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import train_judge
from conftest import ROOT, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import judge
import training
from errors import UserError
from judge import IGNORE, RIGHT, WRONG, Block, Head
from tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ROOT / "demo" / "target")


@st.composite
def blocks(draw, V=7):
    """A random block of up to 6 drafted tokens, with ties, excluded tokens (-inf) and extreme judge logits among them."""
    M = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (M + 1, V), generator=generator).float()
    draft_logits = torch.randint(-3, 4, (M, V), generator=generator).float()
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -math.inf
        logits[:, 0] = 0.0
        draft_logits[torch.rand(draft_logits.shape, generator=generator) < 0.3] = -math.inf
        draft_logits[:, 1] = 0.0
    drafted = torch.multinomial(draft_logits.softmax(-1), 1, generator=generator)[:, 0]
    z = torch.randn(M, generator=generator) * draw(st.sampled_from([0.1, 3.0, 1000.0]))
    uniform = torch.rand(M, generator=generator) if draw(st.booleans()) else None
    log_p = torch.rand(M, generator=generator).log() * 3
    return (
        Block(drafted, logits[:M].argmax(-1), logits[:M], draft_logits, z, log_p, draw(st.sampled_from([0.0, 1e-3, 0.1]))),
        logits,
        uniform,
    )


def naive_run(block, accepted):
    """The leading run of accepted tokens, one at a time."""
    n = 0
    while n < len(block.drafted) and accepted[n]:
        n += 1
    return n


@settings(deadline=None, max_examples=100)
@given(blocks(), st.sampled_from(["standard", *judge.RULES]), st.floats(0, 1))
def test_verdict_is_the_leading_run_of_either_test(case, verify, threshold):
    block, _, uniform = case
    if verify == "topk":
        threshold = max(1, round(threshold * 7))
    v = judge.verdict(block, verify, threshold, uniform)
    assert int(v.n) == naive_run(block, (v.standard | v.rule).tolist())
    assert v.n.dim() == 0 and v.n.dtype == torch.int64
    p, q = block.logits.softmax(-1), block.draft_logits.softmax(-1)
    for i, d in enumerate(block.drafted.tolist()):
        if uniform is None:
            assert bool(v.standard[i]) == (int(block.logits[i].argmax()) == d)
        else:
            assert bool(v.standard[i]) == (float(uniform[i] * q[i, d]) < float(p[i, d]))
        if p[i, d] == 0:
            assert not v.standard[i]
            assert not v.rule[i] or verify == "judge"
        if verify == "judge":
            judged = float(block.judge[i].sigmoid()) > threshold and math.exp(float(block.log_p[i])) >= block.floor
            assert bool(v.rule[i]) == judged or abs(math.exp(float(block.log_p[i])) - block.floor) < 1e-6
        elif verify == "topk":
            assert bool(v.rule[i]) == (p[i, d] > 0 and int((block.logits[i] > block.logits[i, d]).sum()) < threshold)
        elif verify == "typical":
            entropy = -sum(float(x) * math.log(float(x)) for x in p[i] if x > 0)
            limit = min(threshold, math.sqrt(threshold) * math.exp(-entropy))
            assert bool(v.rule[i]) == (float(p[i, d]) > limit) or abs(float(p[i, d]) - limit) < 1e-6
        elif verify == "kl":
            kl = sum(float(a) * math.log(float(a) / float(b)) if b > 0 else math.inf for a, b in zip(p[i], q[i]) if a > 0)
            close = p[i, d] > 0 and (p[i].max() <= 0.9 or int(p[i].argmax()) == d)
            assert bool(v.rule[i]) == (kl < threshold and bool(close)) or abs(kl - threshold) < 1e-5


@settings(deadline=None, max_examples=60)
@given(blocks())
def test_delta_one_is_the_standard_test_and_delta_is_monotone(case):
    block, _, uniform = case
    standard = judge.verdict(block, "standard", 0.0, uniform)
    assert torch.equal(judge.verdict(block, "judge", 1.0, uniform).n, standard.n)
    lengths = [int(judge.verdict(block, "judge", d, uniform).n) for d in (0.0, 0.3, 0.5, 0.9, 1.0)]
    assert lengths == sorted(lengths, reverse=True)


@settings(deadline=None, max_examples=60)
@given(blocks())
def test_next_distribution_is_the_residual(case):
    block, logits, _ = case
    M = len(block.drafted)
    p, q = logits.softmax(-1), block.draft_logits.softmax(-1)
    for n in range(M + 1):
        got = judge.next_distribution(logits, block.draft_logits, torch.tensor(n))
        rest = (p[n] - q[n]).clamp(min=0) if n < M else p[n]
        expected = rest if rest.sum() > 0 else p[n]
        torch.testing.assert_close(got, expected)
        assert (got[p[n] == 0] == 0).all() and got.sum() > 0


def test_residual_of_equal_distributions_is_the_target():
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    got = judge.next_distribution(logits, logits[:1], torch.tensor(0))
    torch.testing.assert_close(got, logits[0].softmax(-1))


@pytest.mark.parametrize("verify, bad, words", [
    ("judge", 1.5, r"δ, in \[0, 1\]"), ("judge", -0.1, "δ"), ("judge", math.nan, "δ"), ("topk", 0, "at least 1"),
    ("topk", 2.5, "whole number"), ("typical", 2, "ε"), ("kl", -1, "at least 0"),
])  # fmt: skip
def test_thresholds_out_of_range_are_refused(verify, bad, words):
    with pytest.raises(UserError, match=words):
        judge.check_threshold(verify, bad)
    judge.check_threshold(verify, judge.RULES[verify].default)


@pytest.mark.parametrize("gives, words", [
    (lambda block, knob: torch.ones(3), r"gives torch.float32 \[3\]; it must give torch.bool \[3\], one for each drafted token"),
    (lambda block, knob: block.logits > 0, r"gives torch.bool \[3, 5\]"),
    (lambda block, knob: torch.tensor(True), r"gives torch.bool \[\]"),
    (lambda block, knob: [True] * 3, "gives list"), (lambda block, knob: None, "gives NoneType"),
])  # fmt: skip
def test_a_rule_that_gives_no_booleans_is_told_in_a_line(monkeypatch, gives, words):
    monkeypatch.setitem(judge.RULES, "mine", judge.Rule(gives, 1.0, 0.0, 2.0, "k"))
    block = judge.Block(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5), None, None)
    with pytest.raises(UserError, match=f"the rule mine {words}"):
        judge.verdict(block, "mine", 1.0, None)


def head(**changes):
    return Head(**{"weight": torch.arange(4.0), "bias": 0.5, "kind": "pre_norm", "model": "m", "fingerprint": "ab", **changes})


def test_head_survives_its_file_and_refuses_other_models(tmp_path):
    saved = head(threshold=0.7, label_rule="rest")
    saved.save(tmp_path / "h.pt")
    loaded = judge.load_head(tmp_path / "h.pt")
    assert torch.equal(loaded.weight, saved.weight)
    assert (loaded.bias, loaded.kind, loaded.threshold, loaded.label_rule) == (0.5, "pre_norm", 0.7, "rest")
    loaded.check("ab", 4, "m")
    with pytest.raises(UserError, match="4 weights.*needs 8"):
        loaded.check("ab", 8, "n")
    with pytest.raises(UserError, match=r"trained for m \(ab\), not for n \(cd\)"):
        loaded.check("cd", 4, "n")


@pytest.mark.parametrize("content", [
    b"", b"not a head", {"weight": 1}, "pickle",
    {"kind": "sideways"}, {"weight": torch.tensor([math.nan])}, {"bias": math.inf}, {"threshold": 3.0}, {"extra": 1},
])  # fmt: skip
def test_files_that_are_no_head_are_refused(tmp_path, content):
    path = tmp_path / "h.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "pickle":
        torch.save({"format": "judge-head-1", "weight": judge.Rule}, path)  # a class: weights_only refuses it
    elif "weight" in content and content["weight"] == 1:
        torch.save(content, path)
    else:
        head().save(path)
        torch.save({**torch.load(path), **content}, path)
    with pytest.raises(UserError, match="h.pt"):
        judge.load_head(path)
    with pytest.raises(UserError, match="no judge head"):
        judge.load_head(tmp_path / "absent.pt")


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_span_labels_cover_the_mistake_whatever_the_boundaries(lengths, data):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    pieces = list(zip([0, *ends], ends))
    total = ends[-1]
    start = data.draw(st.integers(0, max(0, total - 1)))
    stop = data.draw(st.integers(start + 1, max(start + 1, total)))
    for rule, after in (("span", IGNORE), ("rest", WRONG)):
        labels = judge.span_labels(pieces, (start, stop), rule)
        for (a, b), label in zip(pieces, labels):
            if any(start <= c < stop for c in range(a, b)):
                assert label == WRONG
            elif b <= start and a < start:
                assert label == RIGHT
            elif a >= stop:
                assert label == after


@pytest.mark.parametrize("line, words", [
    ("{", "line 2"), ('{"question": "q"}', "line 2: no 'correct'"), ("[1]", "line 2"),
    ('{"question": "q", "correct": "a", "wrong": "b", "mistake": [0, 2]}', r"\[0, 2\) lies outside the wrong answer's 1"),
    ('{"question": "q", "correct": "a", "wrong": "b", "mistake": [0]}', "line 2"),
    ('{"question": "q", "correct": "", "wrong": "b", "mistake": [0, 1]}', "must be text"),
])  # fmt: skip
def test_a_bad_tuple_is_refused_with_its_line(tmp_path, line, words):
    path = tmp_path / "tuples.jsonl"
    good = '{"question": "q", "correct": "a", "wrong": "bc", "mistake": [1, 2]}\n'
    path.write_text(good)
    assert [e.labels for e in judge.read_labels(path, TOKENIZER)] == [[RIGHT, RIGHT], [RIGHT, WRONG]]
    path.write_text(good + line)
    with pytest.raises(UserError, match=words):
        judge.read_labels(path, TOKENIZER)


ANSWER = TOKENIZER.encode(" First we have 12 + 3")
GOOD = {
    "question": "q", "raw": False, "answer": " First we have 12 + 3", "tokens": ANSWER,
    "labels": [IGNORE] * (len(ANSWER) - 1) + [RIGHT],
    "alternatives": [[2, ANSWER[0], WRONG], [0, ANSWER[1], RIGHT]], "how": "mine", "target": "t", "draft": "d", "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("change, words", [
    ({"tokens": ANSWER[::-1]}, "another tokenizer"), ({"tokens": [*ANSWER[:-1], 99999]}, "another tokenizer"),
    ({"labels": [RIGHT]}, "a label for each"), ({"labels": [7] * len(ANSWER)}, "labels must be"),
    ({"alternatives": [[99, 5, RIGHT]]}, "alternatives to them"), ({"answer": " Last we have 12 + 3"}, "another tokenizer"),
    ({"raw": None, "how": None, "tokens": None}, "line 2"),
])  # fmt: skip
def test_a_bad_labelled_answer_is_refused_with_its_line(tmp_path, change, words):
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change))
    with pytest.raises(UserError, match=f"line 2.*{words}" if words != "line 2" else words):
        judge.read_labels(path, TOKENIZER)


def test_alternatives_are_read_in_the_answers_stead(tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (GOOD, GOOD | {"question": "other"}, GOOD)))
    examples = judge.read_labels(path, TOKENIZER)
    assert [e.question for e in examples] == [0] * 3 + [1] * 3 + [0] * 3  # one question, one number: never on both sides of a split
    own, first, second = examples[:3]
    assert own.answer == ANSWER and own.prompt == TOKENIZER.encode_question("q")
    assert (first.answer, first.labels) == ([ANSWER[1]], [RIGHT])
    assert (second.answer, second.labels) == ([*ANSWER[:2], ANSWER[0]], [IGNORE, IGNORE, WRONG])
    labels, questions = training.labels_of(examples)
    assert labels.tolist() == [RIGHT, RIGHT, WRONG] * 3 and questions.tolist() == [0] * 3 + [1] * 3 + [0] * 3


@pytest.mark.parametrize("kind", judge.KINDS)
def test_training_finds_a_direction_and_folds_the_scale_back(kind):
    model = tiny(scale=0.05)  # small weights: the last state still shows the token read
    generator = torch.Generator().manual_seed(0)
    examples = []
    for q in range(80):  # token 7 is the mistake
        answer = torch.randint(8, 131, (12,), generator=generator).tolist()
        labels = [RIGHT] * 12
        if q % 2:
            answer[6], labels[6:] = 7, [WRONG] + [IGNORE] * 5
        examples.append(judge.Example(q, [1, 2, 3], answer, labels))
    seen = training.read_states(model, examples)
    whole = torch.stack([model(torch.tensor([e.prompt + e.answer]))[0, 2:-1] for e in examples])
    tokens, used = torch.tensor([e.answer for e in examples]), torch.tensor([e.labels for e in examples]) != IGNORE
    wanted = whole.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(seen.log_p, wanted[used])
    assert torch.equal(seen.own, (whole.argmax(-1) == tokens)[used])
    states = training.as_features(model, seen.states, kind)
    labels, questions = training.labels_of(examples)
    assert len(states) == 40 * 12 + 40 * 7 and int((labels == WRONG).sum()) == 40
    result = training.train_head(states, labels, questions, lr=1e-2, batch=64, max_epochs=12)
    again = training.train_head(states, labels, questions, lr=1e-2, batch=64, max_epochs=12)
    assert torch.equal(result.weight, again.weight)  # deterministic
    score = states @ result.weight + result.bias
    assert (score[labels == WRONG] < 0).float().mean() > 0.9
    assert (score[labels == RIGHT] > 0).float().mean() > 0.9
    assert result.auc > 0.9
    with pytest.raises(UserError, match="0 wrong"):
        training.train_head(states, torch.ones_like(labels), questions)


def result_of(right, wrong):
    return training.TrainResult(torch.zeros(1), 0.0, 1, torch.tensor(right).sort().values, torch.tensor(wrong).sort().values)


def test_auc_by_hand():
    assert result_of([1.0, 2.0], [0.0, 1.5]).auc == 0.75
    assert result_of([1.0], [1.0]).auc == 0.5


scores = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=30)


@given(scores, scores, st.floats(0, 1))
def test_the_threshold_is_the_least_that_stops_enough_mistakes(right, wrong, recall):
    result = result_of(right, wrong)
    threshold = result.threshold_for(recall)
    assert result.at(threshold).recall >= recall - 1e-6
    # of the whole list at once, as it is computed there: the last bit may differ for one number alone
    p_right, p_wrong = result.right.sigmoid().tolist(), result.wrong.sigmoid().tolist()
    assert sum(p < threshold for p in p_wrong) < max(1, recall * len(wrong) + 1e-6)
    row = result.at(threshold)
    stopped, lost = sum(p <= threshold for p in p_wrong), sum(p <= threshold for p in p_right)
    assert abs(row.precision - stopped / max(1, stopped + lost)) < 1e-6 and abs(row.kept - 1 + lost / len(right)) < 1e-6


def test_calibration_weighs_right_and_wrong_alike():
    bins = result_of([3.0] * 30, [-3.0]).calibration()
    assert [(round(mean, 3), share, round(weight, 6)) for mean, share, weight in bins] == [(0.047, 0.0, 0.5), (0.953, 1.0, 0.5)]
    (only,) = result_of([0.01] * 9, [0.01] * 3).calibration()
    assert abs(only[1] - 0.5) < 1e-6


def test_a_report_has_no_row_of_calibration_that_holds_nothing():
    result = result_of([3.0] * 999 + [0.0], [-3.0] * 1000)
    assert len(result.calibration()) == 3
    assert train_judge.report(result, 0.9, 0.5).count("of the weight") == 2


def separable(n_questions, n_wrong):
    labels = torch.tensor([RIGHT] * 6 * n_questions)
    labels[torch.arange(n_wrong) * 6] = WRONG
    questions = torch.arange(n_questions).repeat_interleave(6)
    return torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0)) + 3 * labels[:, None], labels, questions


@pytest.mark.parametrize("n_wrong", [2, 3, 23])
def test_even_a_few_mistakes_are_on_both_sides_of_the_split(n_wrong):
    for seed in range(5):
        result = training.train_head(*separable(23, n_wrong), seed=seed, lr=1e-2, max_epochs=3)
        assert len(result.wrong) >= 1 and len(result.right) >= 1
        assert 0 <= result.threshold_for(0.9) <= 1 and result.calibration()


def test_every_token_is_scored_by_a_head_that_has_not_seen_its_question():
    questions = torch.arange(40).repeat_interleave(6)
    labels = torch.where(torch.randperm(40, generator=torch.Generator().manual_seed(1))[questions] < 20, RIGHT, WRONG)
    states = torch.nn.functional.one_hot(questions).float()  # each question can be learnt by heart, and tells nothing of others
    result = training.train_head(states, labels, questions, lr=1e-2, max_epochs=50)
    assert len(result.wrong) == len(result.right) == 120
    by_heart = states @ result.weight + result.bias
    assert by_heart[labels == RIGHT].min() > by_heart[labels == WRONG].max()
    assert result.auc < 0.7


def test_what_a_log_probability_counts_is_found():
    """Where half of what makes a token right shows in its log-probability alone."""
    generator = torch.Generator().manual_seed(0)
    states, shown, hidden = (torch.randn(3000, n, generator=generator) for n in (8, 1, 1))
    states[:, :1] = shown
    log_p = -4 + hidden[:, 0]
    labels = (shown + hidden)[:, 0].add(torch.randn(3000, generator=generator) / 2).gt(0).long()
    questions, own = torch.arange(3000) // 5, torch.zeros(3000, dtype=torch.bool)
    without = training.train_head(states, labels, questions, lr=1e-2)
    result = training.train_head(states, labels, questions, log_p, own, lr=1e-2)
    assert torch.equal(without.weight, result.weight) and without.log_p == 0
    assert 0.7 < result.log_p / float(result.weight[0]) < 1.5 and result.auc > without.auc + 0.1
    score = (states @ result.weight + result.bias + result.log_p * log_p).sigmoid()
    assert abs(float((score > 0.5).long().eq(labels).float().mean()) - result.auc) < 0.1  # the shift is in the bias
    own[labels == RIGHT] = torch.rand(int((labels == RIGHT).sum()), generator=generator) < 0.5
    log_p = torch.where(own, -0.01, log_p)  # sure of its own tokens, which say nothing of the others
    assert abs(training.train_head(states, labels, questions, log_p, own, lr=1e-2).log_p - result.log_p) < 0.4


@given(st.integers(0, 10**6), st.sampled_from([1.0, 30.0]), st.sampled_from([0.1, 1.0, 12.0]), st.sampled_from([-8.0, 0.0, 8.0]))
@settings(deadline=None, max_examples=40)
def test_what_a_log_probability_counts_is_the_best_whatever_the_scores(seed, reach, spread, offset):
    """For scores of any width and offset: nothing near it loses less."""
    generator = torch.Generator().manual_seed(seed)
    scores = offset + spread * torch.randn(200, generator=generator).double()
    log_p = -reach * torch.rand(200, generator=generator).double()
    is_right = log_p + reach / 4 * torch.randn(200, generator=generator) > -reach / 2
    y = is_right.double()
    weights = y / (2 * y.sum()) + (1 - y) / (2 * (1 - y).sum())

    def loss(c, shift):
        z = scores + c * log_p + shift
        return float((weights * torch.nn.functional.softplus(torch.where(is_right, -z, z))).sum()) + 5e-4 * (c * c + shift * shift)

    c, shift = training.weigh_log_p(scores, log_p, is_right)
    if c:
        steps = [(a, b) for a in (-0.05, 0.0, 0.05) for b in (-0.05, 0.0, 0.05)]
        assert all(loss(c, shift) <= loss(c * (1 + a), shift + b * (1 + abs(shift))) + 1e-9 for a, b in steps)
    assert c >= 0 and (c > 0 or shift == 0) and (c > 0 or spread > 1)
    assert training.weigh_log_p(scores, log_p, ~is_right) == (0.0, 0.0)


def test_a_log_probability_that_says_nothing_seldom_counts():
    counts = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        is_right = torch.rand(200, generator=generator) < 0.6
        scores, log_p = is_right + torch.randn(200, generator=generator), -torch.rand(200, generator=generator).exp()
        counts += training.weigh_log_p(scores, log_p, is_right)[0] > 0
    assert counts <= 8  # 2.3 % are above two standard errors


def test_what_is_said_of_a_head_is_of_what_the_standard_test_leaves_to_it():
    states, labels, questions = separable(40, 20)
    own = (labels == RIGHT) & (torch.arange(len(labels)) % 3 > 0)
    result = training.train_head(states, labels, questions, torch.zeros(len(labels)), own, lr=1e-2, max_epochs=5)
    assert len(result.wrong) == int((labels == WRONG).sum()) and len(result.right) == int(((labels == RIGHT) & ~own).sum())
    none = training.train_head(states, labels, questions, torch.zeros(len(labels)), labels == RIGHT, lr=1e-2, max_epochs=5)
    assert len(none.right) == int((labels == RIGHT).sum())  # nothing right is left to it: then of all


def test_too_few_tokens_say_nothing_of_log_probabilities():
    few = training.LEAST - 1
    for n_right, n_wrong, some in ((few, 100, False), (100, few, False), (few + 1, few + 1, True)):
        is_right = torch.arange(n_right + n_wrong) < n_right
        c, _ = training.weigh_log_p(torch.zeros(len(is_right)), torch.where(is_right, -1.0, -3.0), is_right)
        assert (c > 0) == some


def test_the_heads_are_what_each_would_be_alone():
    states, labels, questions = separable(24, 12)
    options = {"lr": 1e-2, "batch": 4096, "patience": 1000, "max_epochs": 7}
    result = training.train_head(states, labels, questions, **options)
    part = training.parts_of(labels, questions, torch.Generator().manual_seed(0))
    mean, std = states.mean(0), states.std(0)
    x, weights, biases = (states - mean) / std, [], []
    for i in range(10):
        seen = part != i
        w, b = torch.zeros(4, requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.AdamW([w, b], lr=1e-2, weight_decay=0.1)
        ratio = (labels[seen] == RIGHT).sum() / (labels[seen] == WRONG).sum()
        for _ in range(7):
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                x[seen] @ w + b, labels[seen].float(), torch.where(labels[seen] == WRONG, ratio, 1.0), reduction="sum"
            )
            (loss / 4096).backward()
            optimizer.step()
        weights.append(w.detach())
        biases.append(b.detach())
    weight = torch.stack(weights).mean(0) / std
    assert torch.allclose(result.weight, weight, atol=1e-5)
    assert abs(result.bias - float(torch.stack(biases).mean() - weight @ mean)) < 1e-5


@pytest.mark.parametrize("n_wrong", [0, 1])
def test_too_few_mistakes_are_told(n_wrong):
    with pytest.raises(UserError, match="at least two questions"):
        training.train_head(*separable(20, n_wrong))


def test_answers_without_a_label_are_told():
    with pytest.raises(UserError, match="no token"):
        training.read_states(tiny(), [judge.Example(0, [1, 2], [3, 4], [IGNORE, IGNORE])])


def test_a_damaged_head_is_one_line_whatever_the_damage(tmp_path):
    path = tmp_path / "head.pt"
    Head(torch.randn(8), 0.5, "post_norm", "m", "f").save(path)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for at in torch.randint(0, len(whole), (3,), generator=generator).tolist():
            damaged[at] ^= int(torch.randint(1, 256, (1,), generator=generator))
        path.write_bytes(bytes(damaged))
        try:
            head = judge.load_head(path)
            assert head.weight.shape == (8,) and 0 <= head.threshold <= 1
        except UserError as error:
            assert str(path) in str(error)
    for field, bad in (
        ("bias", "x"),
        ("threshold", "x"),
        ("floor", None),
        ("log_p", math.nan),
        ("log_p", "a"),
        ("weight", torch.arange(8)),
        ("kind", 3),
        ("bias", math.nan),
    ):
        torch.save(
            {"format": "judge-head-1", **dataclasses.asdict(Head(torch.randn(8), 0.5, "post_norm", "m", "f")), field: bad}, path
        )
        with pytest.raises(UserError, match="head"):
            judge.load_head(path)


def test_a_text_that_the_tokenizer_rewrites_is_refused():
    assert judge.token_spans(TOKENIZER, TOKENIZER.encode(" 12 é"), " 12 é")[-1][1] == 5

    class Composing:  # as one that normalises to NFC
        hidden_ids: frozenset = frozenset()

        def decode(self, ids):
            return "caf\u00e9"

    with pytest.raises(ValueError, match="use that form"):
        judge.token_spans(Composing(), [1, 2], "cafe\u0301")
