"""The benchmark: what it replays, what one rank's part is, what it hands to the roofline, and its mistakes."""

from __future__ import annotations

import json

import benchmark
import pytest
import roofline
import shapes
import torch
from conftest import tiny

from errors import UserError
from linear import MODES
from tp import Ranks

SMALL = ("Llama", 128, 2, 8, 4, 256, 512, 512, 1e4, False)
SMALLER = ("Qwen2", 128, 1, 4, 4, 128, 512, 512, 1e4, True)


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch):
    monkeypatch.setitem(shapes.ROWS, "small", SMALL)
    monkeypatch.setitem(shapes.ROWS, "smaller", SMALLER)


def run(capsys, monkeypatch, command):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *command.split(), "--json"])
    monkeypatch.setattr(benchmark, "READ_BYTES", 1 << 20)
    benchmark.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


RANDOM = "--random-weights small smaller --dtype float32 --no-compile --repeat 2 --limit 2 --new-tokens 40 --prompt-tokens 9"


@pytest.mark.parametrize("accepted", [0.0, 2.5, 4.75, 5.0])
def test_a_given_acceptance_is_replayed(capsys, monkeypatch, accepted):
    said = run(capsys, monkeypatch, f"{RANDOM} --rules standard@5,judge@5 --acceptance {accepted}")
    for row in said["settings"].values():
        assert row["mean_accepted"] == pytest.approx(accepted, abs=0.15)
        assert row["draft_len"] == 5


def test_every_figure_is_there_and_the_parts_make_the_round(capsys, monkeypatch):
    said = run(capsys, monkeypatch, f"{RANDOM} --rules plain,standard@5,judge@auto")
    assert list(said["settings"]) == ["plain", "standard@5", "judge@auto"]
    for name, row in said["settings"].items():
        assert (row["draft_step_ms"] is None) == (name == "plain")
        for key in ("tokens_per_s", "verify_ms", "other_ms", "round_ms", "prefill_s", "first_token_s"):
            middle, low, high = row[key]
            assert low <= middle <= high
        assert row["first_token_s"][0] > row["prefill_s"][0]
        assert 0 < row["verify_ms"][1] < row["round_ms"][2]
    assert said["settings"]["plain"]["mean_accepted"] == 0
    assert {(p["model"], p["rows"]) for p in said["passes"]} >= {("small", 1), ("smaller", 1), ("small", 6)}


def test_the_roofline_is_calibrated_by_it(capsys, monkeypatch, tmp_path):
    said = run(capsys, monkeypatch, f"{RANDOM} --rules plain,standard@5 --acceptance 3")
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(said))
    machine = roofline.calibrated(roofline.Machine("cpu", 3e10, 1e11, cpu=True), file, {"float32"})
    assert set(machine.measured) == {1, 6}


def test_one_ranks_part_has_its_shapes_and_no_collectives(capsys, monkeypatch):
    args = benchmark.parse_args(["--random-weights", "small", "--rank-of", "4", "--dtype", "float32"])
    part = benchmark.from_nothing(args, Ranks()).target
    real = shapes.random_model(shapes.shape("small"), "none", torch.float32, "cpu", Ranks(1, 4))
    assert {n: p.shape for n, p in part.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert part.ranks.size == 1
    assert run(capsys, monkeypatch, RANDOM + " --rank-of 4")["rank_of"] == 4


@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize("name", ["small", "smaller"])
def test_random_weights_of_every_form_give_finite_logits(mode, name):
    model = shapes.random_model(shapes.shape(name), mode, torch.bfloat16, "cpu")
    cache = model.new_cache(16)
    logits = model.logits(model.step(torch.arange(5), torch.arange(5), cache, 16))[0]
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


def test_rooms_are_settings_of_their_own(capsys, monkeypatch):
    said = run(capsys, monkeypatch, f"{RANDOM} --rules plain --room 64 400")
    assert list(said["settings"]) == ["plain/64", "plain/400"]


def test_a_checkpoints_text_ends_at_its_stop_token():
    engine = benchmark.Engine(tiny(), max_len=100)
    whole = [token for now in benchmark.take(engine, [1, 2, 3], 50, frozenset()).rounds for token in now.tokens]
    assert len(whole) == 50
    sample = benchmark.take(engine, [1, 2, 3], 50, frozenset({whole[10]}))
    assert [token for now in sample.rounds for token in now.tokens] == whole[: whole.index(whole[10]) + 1]
    assert sample.tokens == whole.index(whole[10])


@pytest.mark.parametrize("new_tokens", [7, 12, 13])
def test_tokens_behind_the_end_are_not_counted(new_tokens):
    target = tiny()
    engine = benchmark.Engine(target, target, draft_len=5, max_len=100)  # accepts all: blocks of 6
    sample = benchmark.take(engine, [1, 2, 3], new_tokens, frozenset())
    assert sample.tokens == new_tokens and len(sample.rounds) == -(-new_tokens // 6)
    assert sample.accepted == new_tokens - new_tokens // 6
    weights, each = target.weight_bytes(), target.position_bytes()
    expected = sum(6 * (weights + (3 + 6 * i) * each) for i in range(len(sample.rounds)))
    assert sample.read_bytes == expected


@pytest.mark.parametrize("command, said", [
    ("--acceptance 3", "--acceptance is for --random-weights"),
    ("--rank-of 2", "--rank-of is for --random-weights"),
    ("--random-weights huge", "--random-weights is huge"),
    ("--random-weights small --target x", "takes the place"),
    ("--random-weights small --rules standard", "needs a draft"),
    ("--random-weights small --rank-of 3", "3 ranks"),
    (RANDOM + " --rules plain@3", "drafts nothing"),
    (RANDOM + " --rules standard@0", "@M must be a whole number of at least 1"),
    (RANDOM + " --rules standard@many", "@M must be a whole number of at least 1"),
    (RANDOM + " --rules draft", "give it as --target"),
    (RANDOM + " --room 20", "--room is 20"),
    ("--repeat 0", "--repeat is 0"),
    (RANDOM + " --acceptance nan", "--acceptance is nan"),
    (RANDOM + " --acceptance 6 --rules judge@5", "--acceptance is 6; judge@5 drafts 5 tokens"),
    (RANDOM + " --acceptance 6 --rules plain", "no meaning for plain"),
    (RANDOM + " --acceptance 6 --rules judge@auto", "whose length would follow"),
    (RANDOM + " --rules plain,plain", "'plain' twice"),
    (RANDOM + " --rules plain --room 400 400", "'plain/400' twice"),
    (RANDOM + " --data nowhere", "takes the place"),
    ("--target demo/target --judge demo/judge.pt", "needs a --draft"),
])  # fmt: skip
def test_mistakes_are_told(capsys, monkeypatch, command, said):
    with pytest.raises(UserError, match=said):
        run(capsys, monkeypatch, command)
