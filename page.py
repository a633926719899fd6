"""One self-contained HTML page of judged tokens: each coloured by who accepted or rejected it, with its numbers at hand.

Kinds are told apart by shade *and* by underline, so that the page serves in the dark, in print and without colour vision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from engine import Note, Round
from tokenizer import Tokenizer

# kind -> (legend, hue of Okabe and Ito's colour-blind-safe palette, underline)
KINDS = {
    "standard": ("drafted, the target would have said it too", "#009e73", "solid"),
    "rule": ("drafted, accepted by the rule alone", "#0072b2", "double"),
    "target": ("the target's own", "#e69f00", "dotted"),
    "rejected": ("drafted, rejected", "#d55e00", "line-through"),
    "right": ("labelled right, or harmless in the answer's stead", "#0072b2", "double"),
    "wrong": ("labelled wrong", "#d55e00", "line-through"),
    "plain": ("not labelled", "", "none"),
}

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fdfdfb; --soft: #6b6b70; --line: #d9d9d4; --card: #ffffff; --wash: 18% }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececee; --paper: #17181a; --soft: #9a9aa2; --line: #36373b; --card: #232428; --wash: 32% }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 46rem; padding: 2.5rem 1.25rem 8rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.25rem; margin: 0 0 .75rem }
.meta, .legend { color: var(--soft); font-size: .85rem }
.meta span { margin-right: 1.25rem; white-space: nowrap }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.25rem; margin: 1rem 0 }
section { border-top: 1px solid var(--line); padding: 1.25rem 0 .5rem }
.question { color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .9rem }
.answer { font-size: 1.06rem; line-height: 2.15; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
.t { position: relative; border-radius: 3px; padding: .12em 0; cursor: help;
  text-decoration-thickness: 2px; text-underline-offset: .28em;
  -webkit-print-color-adjust: exact; print-color-adjust: exact }
.t:focus { outline: 2px solid var(--ink); outline-offset: 1px }
.n { display: none; position: absolute; left: 0; top: 100%; z-index: 2; min-width: 15rem; padding: .6rem .75rem;
  text-decoration: none;
  background: var(--card); color: var(--ink); border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 6px 24px #0003;
  font: .8rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre }
.t:hover, .t:focus { z-index: 3 }
.t:hover > .n, .t:focus > .n { display: block }
.t:nth-child(4n) > .n { left: auto; right: 0 }
.b { color: var(--soft); border: 1px solid var(--line); border-radius: 3px; padding: 0 .2em; font-size: .75em; user-select: none }
@media print { body { padding: 0; max-width: none } .n { display: none !important } }
"""


class Span(NamedTuple):
    """A token as it is shown: its text, its kind (of KINDS), and lines of numbers for who points at it."""

    text: str
    kind: str
    notes: Sequence[str] = ()


class Passage(NamedTuple):
    """A question and the tokens of its answer."""

    question: str
    answer: Sequence[Span]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each id of a text adds to it; where that isn't a whole character, or it is a control token, its name."""
    stream = tokenizer.stream()
    return [stream.push([i]) or tokenizer.token_text(i) for i in ids]


def describe(tokenizer: Tokenizer, note: Note, own: int | None = None) -> list[str]:
    """Lines about one place of a block: a drafted token's numbers, or what the target had to say in its stead (``own``)."""
    lines = []
    if own is None:
        lines.append(f"target {note.p:6.1%}")
        if not math.isnan(note.q):
            lines.append(f"draft  {note.q:6.1%}")
        if not math.isnan(note.judge):
            lines.append(f"judge   {note.judge:.3f}")
    if own is None and note.best != note.drafted:
        lines.append(f"the target would have said {tokenizer.token_text(note.best)!r} ({note.p_best:.1%})")
    elif own is not None:
        said = "its likeliest" if own == note.best else f"likeliest: {tokenizer.token_text(note.best)!r}"
        lines.append(f"the target's own word ({said}, {note.p_best:.1%})")
    return lines


def generated_spans(tokenizer: Tokenizer, rounds: Sequence[Round], shown: int) -> list[Span]:
    """The first ``shown`` tokens of a traced text, each rejected token in front of the one that took its place."""
    texts = token_texts(tokenizer, [token for now in rounds for token in now.tokens])
    spans: list[Span] = []
    at = 0
    for now in rounds:
        assert now.notes is not None
        for token, who, note in zip(now.tokens, now.accepted_by, now.notes):
            if at == shown:
                return spans
            if who == "target" and note.drafted >= 0:
                spans.append(Span(tokenizer.token_text(note.drafted), "rejected", describe(tokenizer, note)))
            spans.append(Span(texts[at], who, describe(tokenizer, note, token if who == "target" else None)))
            at += 1
    return spans


def _span(span: Span) -> str:
    # a line end inside a token would otherwise be invisible and take its underline with it
    word = span.text.lstrip(" ")
    space = span.text[: len(span.text) - len(word)] if word else ""  # between words nothing is coloured
    text = escape(word or span.text).replace("\n", '<span class="b">\\n</span>\n')
    notes = escape("\n".join(span.notes))
    card = f'<span class="n" role="tooltip">{notes}</span>' if notes else ""
    return f'{space}<span class="t {span.kind}" tabindex="0">{text}{card}</span>'


def page(title: str, facts: Sequence[str], passages: Sequence[Passage]) -> str:
    """The whole page as HTML.

    Args:
        facts: short phrases under the title: models, rule, figures.
    """
    used = {span.kind for passage in passages for span in passage.answer}
    shades = "".join(
        f".{kind} {{ background: color-mix(in srgb, {hue} var(--wash), transparent); text-decoration: "
        f"{line if line == 'line-through' else f'underline {line}'} {hue} }}\n"
        for kind, (_, hue, line) in KINDS.items()
        if line != "none"
    )
    legend = "".join(f'<span><span class="t {kind}">token</span> {escape(KINDS[kind][0])}</span>' for kind in KINDS if kind in used)
    body = "".join(
        f'<section><p class="question">{escape(passage.question)}</p>\n'
        f'<p class="answer">{"".join(map(_span, passage.answer)).lstrip()}</p></section>\n'
        for passage in passages
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{shades}</style>\n<h1>{escape(title)}</h1>\n"
        f'<p class="meta">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</p>\n'
        f'<p class="legend">{legend}</p>\n{body}\n</html>\n'
    )
