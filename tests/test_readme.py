"""The documents keep their word: commands are understood, files that are linked exist, options are listed, the example runs."""

from __future__ import annotations

import re
import shlex

import commands
import pytest
import torch
from conftest import ROOT, tiny
from test_cli import write_checkpoint

import checkpoint
import judge
from engine import Engine
from errors import UserError
from judge import Head

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def lines_of(page):
    """The lines of a page's plain blocks and its code spans, in the order they are read in, and whether it is a block's."""
    text = re.sub(r"\\\n *", "", (ROOT / page).read_text(encoding="utf-8"))
    for found in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$|`([^`]+)`", text, re.M | re.S):
        language, block, span = found.groups()
        for line in [" ".join(span.split())] if span else [] if language else block.splitlines():
            yield line.split(" #")[0].strip(), not span


def commands_of(page):
    """(program, its arguments) of every line that runs one of ours."""
    for line, _ in lines_of(page):
        found = re.search(r"(?:^|=\S+ |\) )(?:python|torchrun)((?: --nproc\S+)*) ((?:scripts/)?\w+\.py)\b(.*)", line)
        if found and page != "docs/commands.md":
            yield found[2], re.sub(r"\[.*?\]|…|\.\.\.| > \S+$", "", found[3]).strip()


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


def test_there_are_commands():
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("program, argv", COMMANDS)
def test_a_command_of_the_documents_is_understood(program, argv):
    assert (ROOT / program).is_file()
    if "--help" not in argv:
        commands.parse(ROOT / program, shlex.split(argv))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text):
        path = (ROOT / page).parent / link
        assert link.startswith("https://") or path.exists(), link
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], anchor
    for name in re.findall(r"`((?:scripts|tests|docs|demo)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_the_list_of_options_is_todays():
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {path.relative_to(ROOT).as_posix() for path in commands.command_files()} == set(re.findall(r"^## (\S+)", written, re.M))
    assert commands.document().split() == written.split(), "python scripts/commands.py writes it anew"


def test_what_parses_nothing_is_no_command(tmp_path):
    (tmp_path / "quiet.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="parses no command line"):
        commands.parse(tmp_path / "quiet.py", [])


def test_the_library_example_runs(tmp_path, monkeypatch, capsys):
    """As it stands, on tiny models of these names."""
    write_checkpoint(tmp_path / "checkpoints" / "Tiny-8B", max_position_embeddings=1024)
    write_checkpoint(tmp_path / "checkpoints" / "Tiny-1B", seed=1, num_hidden_layers=1, max_position_embeddings=1024)
    for name in ("Tiny-8B", "Tiny-1B"):
        (tmp_path / "checkpoints" / name / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    mark = checkpoint.fingerprint(tmp_path / "checkpoints" / "Tiny-8B")
    (tmp_path / "runs").mkdir()
    Head(torch.randn(48), 0.0, "post_norm", "Tiny-8B", mark).save(tmp_path / "runs" / "head.pt")
    monkeypatch.chdir(tmp_path)
    library, _ = EXAMPLES
    exec(compile(library, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 1


def test_the_rules_example_adds_a_rule():
    """At the end of judge.py, as it stands."""
    before = dict(judge.RULES)
    try:
        exec(compile(EXAMPLES[1], "README.md", "exec"), vars(judge))
        (name,) = judge.RULES.keys() - before.keys()
        accepted = [accepted_of(name, threshold) for threshold in (0.0, None, 1e9)]
        assert accepted[0] == accepted_of("standard", None) < accepted[1] < accepted[2] == 1
        helps = {name: commands.parse(ROOT / name, [], only=True).format_help() for name in ("generate.py", "scripts/evaluate.py")}
        assert "margin for margin (1.5)" in " ".join(helps["generate.py"].split())
        assert "margin[:margin]" in helps["scripts/evaluate.py"]
        with pytest.raises(UserError, match=f"`threshold` is -1; for the rule {name} it is margin, of at least 0"):
            judge.check_threshold(name, -1.0)
    finally:
        for key in judge.RULES.keys() - before.keys():
            del judge.RULES[key]
        del judge.margin_rule


def accepted_of(verify, threshold):
    """The share of drafted tokens accepted where a tiny model drafts for another."""
    rule = judge.RULES.get(verify)
    knob = threshold if threshold is not None or rule is None else rule.default
    engine = Engine(tiny(), tiny(seed=1), draft_len=4, verify=verify, threshold=knob or 0.0, max_len=60)
    engine.prefill([1, 2, 3])
    rounds = list(engine.rounds(3))
    return sum(len(now.tokens) - 1 for now in rounds) / sum(now.drafted for now in rounds)
