"""Acceptance of given texts, the pages and the curves."""

from __future__ import annotations

import json
import re
import shutil
import sys

import accept
import plots
import pytest
import torch
from conftest import ROOT, tiny
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine
from model import Reader
from page import KINDS, Passage, Span, generated_spans, page, token_texts
from tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ROOT / "demo" / "target")
flags = st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=4)


@given(flags)
def test_mean_accepted_by_properties(rows):
    means = [accept.mean_accepted(rows, M) for M in range(1, 41)]
    assert all(0 <= mean <= M for M, mean in enumerate(means, 1))
    if all(map(all, rows)):
        assert means[39] == sum(map(len, rows)) / len(rows)
    if not any(map(any, rows)):
        assert set(means) == {0.0}


def test_mean_accepted_by_hand():
    text = [True, True, False, True, True, True, False, True]
    assert accept.mean_accepted([text], 2) == (2 + 2 + 0 + 1) / 4  # |1 1 x|, |1 1 1| at 3..: rounds 0-2, 3-5, 6, 7
    assert accept.mean_accepted([text], 8) == (2 + 3 + 1) / 3
    assert accept.by_place([[True] * 8, [False] * 8]) == [0.5] * 8


def test_a_text_as_one_block_is_read_at_the_right_places():
    target, draft = tiny(), tiny(seed=1)
    target.fuse_judge(torch.randn(48, generator=torch.Generator().manual_seed(0)), 0.1, "post_norm", 1e-3, 0.5)
    prompt, answer = [5, 6, 7], [9, 11, 2, 40]
    block = accept.read_block(Reader(target, 20), Reader(draft, 20), accept.Text("q", prompt, answer))
    whole, judged = target.logits(target.hidden(torch.tensor([prompt + answer]))[0])
    torch.testing.assert_close(block.logits, whole[2:6])
    log_p = whole[2:6].log_softmax(-1)[torch.arange(4), torch.tensor(answer)]
    torch.testing.assert_close(block.judge, judged[3:7] + 0.5 * log_p)  # read at each token's own place
    torch.testing.assert_close(block.draft_logits, draft(torch.tensor([prompt + answer]))[0, 2:6])
    assert block.drafted.tolist() == answer and block.floor == 1e-3


def test_the_command_on_the_targets_own_answer(tmp_path, command):
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"question": "Mia has 30 beads. She buys 12 more. How many?", "answer": " First we"})
    )
    common = ("scripts/accept.py", str(tmp_path / "d.jsonl"), "--target", "demo/target", "--dtype", "float32")
    done = command(*common, "--draft", "demo/draft", "--judge", "demo/judge.pt", "--rules", "standard,kl,judge", "--json", "--html",
                   str(tmp_path / "p.html"), "--plot", str(tmp_path / "p.png"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["n"] == 1 and set(result["rules"]) == {"standard", "kl", "judge"}
    assert all(len(r["mean_accepted"]) == 40 and 0 <= r["acceptance_rate"] <= 1 for r in result["rules"].values())
    assert "Mia has 30 beads" in (tmp_path / "p.html").read_text() and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    shutil.copytree(ROOT / "demo" / "target", tmp_path / "other")  # on the demo's own there is a head by default
    for rules, words in (("kl", "needs a --draft"), ("judge", "needs --judge"), ("plain", "accepts nothing"), ("x", "'x'")):
        done = command(*common[:3], str(tmp_path / "other"), *common[4:], "--rules", rules)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@given(
    st.lists(st.tuples(st.text(max_size=8), st.sampled_from(list(KINDS)), st.lists(st.text(max_size=9), max_size=3)), max_size=6),
    st.text(),
)
def test_a_page_shows_any_text_and_runs_none_of_it(spans, question):
    html = page("<title>", ["a & b"], [Passage(question + "<script>", [Span(*span) for span in spans])])
    assert "<script" not in html and "<title><" not in html and "http" not in re.sub("&[a-z]+;", "", html.split("<section>")[0])
    assert html.count('class="t ') == len(spans) + len({kind for _, kind, _ in spans})


def test_characters_of_several_tokens_are_named_until_they_are_whole():
    ids = TOKENIZER.encode("a é")
    texts = token_texts(TOKENIZER, [*ids, 2])
    assert texts[-1] == "</s>" and texts[-2] == "é" and texts[-3].startswith("<0x")


def test_a_traced_text_shows_each_rejected_token_before_the_one_in_its_place():
    target, draft = tiny(vocab_size=640), tiny(seed=1, vocab_size=640)
    prompt = [1, 50, 60]
    engine = Engine(target, draft, draft_len=4, max_len=60, trace=True)
    engine.prefill(prompt)
    rounds = list(engine.rounds(3))
    tokens = [token for now in rounds for token in now.tokens]
    p = target(torch.tensor([prompt + tokens]))[0].softmax(-1)
    q = draft(torch.tensor([prompt + tokens]))[0].softmax(-1)
    at = 2
    for now in rounds:
        for note, who, token in zip(now.notes, now.accepted_by, now.tokens):
            assert note.best == int(p[at].argmax()) and abs(note.p_best - float(p[at].max())) < 1e-4
            if note.drafted >= 0:
                assert abs(note.p - float(p[at, note.drafted])) < 1e-4 and abs(note.q - float(q[at, note.drafted])) < 1e-4
                assert (note.drafted == token) == (who != "target") or note.drafted == note.best
            at += 1
    spans = generated_spans(TOKENIZER, rounds, len(tokens) - 1)
    assert sum(span.kind != "rejected" for span in spans) == len(tokens) - 1
    rejected = sum(now.accepted_by[-1] == "target" and now.notes[-1].drafted >= 0 for now in rounds[:-1])
    assert sum(span.kind == "rejected" for span in spans) >= rejected > 3
    plain = Engine(target, max_len=60, trace=True)
    plain.prefill(prompt)
    assert next(plain.rounds(3)).notes[0].drafted == -1


def test_labels_of_curves_keep_apart():
    assert plots.spread([1.0, 1.0, 5.0, 0.9], 0.5) == [1.4, 1.9, 5.0, 0.9]


def test_a_picture_is_asked_for_without_matplotlib(monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.backend_bases"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Exception, match="requirements-plot.txt"):
        plots.check_plot(tmp_path / "p.png")
    plots.check_plot(None)


def test_a_pictures_name_says_its_kind(tmp_path):
    plots.check_plot(tmp_path / "p.SVG")
    for name in ("p.foo", "p"):
        with pytest.raises(Exception, match="ends in one of .*[.]png"):
            plots.check_plot(tmp_path / name)


def test_generate_writes_a_page(tmp_path, command):
    done = command("generate.py", "--no-compile", "--max-new-tokens", "40", "--html", str(tmp_path / "new" / "g.html"))
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "new" / "g.html").read_text()
    assert "judge at" in html and 'class="t rule"' in html and "the target would have said" in html
