"""Tensor parallelism on gloo ranks: the same tokens as one rank's, each reads its part alone, and none outlives another."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, hf_config, tiny
from test_cli import write_tokenizer

import checkpoint
import tp
from engine import Engine, Sampling
from errors import UserError, run_cli
from judge import Head, load_head
from model import Config, Reader, Transformer
from tp import Ranks
from writer import save_checkpoint

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128, "hidden_size": 64,
         "num_hidden_layers": 2, "head_dim": 32}  # fmt: skip
MODELS = ("llama3", "qwen2", "llama-bias")  # with a bias in no product, in q, k and v, and in all of attention
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
N = 12


def decode(case, folder, ranks, check=False):
    """Tokens of one case, and the logits and verdicts of the whole text."""
    load = lambda name, ranks: checkpoint.load_model(folder / name, torch.float32, "cpu", ranks, case.get("quantize", "none"))  # noqa: E731
    target = load(case["target"], ranks)
    weight = torch.randn(64, generator=torch.Generator().manual_seed(5)) / 8
    target.fuse_judge(weight, 0.3, case.get("kind", "post_norm"), 1e-4, 0.2)
    draft = load(case["draft"], Ranks() if case.get("whole_draft") else ranks) if "draft" in case else None
    engine = Engine(
        target, draft, draft_len=5, verify=case.get("verify", "standard"), threshold=case.get("threshold", 0.5),
        sampling=Sampling(case.get("temperature", 0.0), top_p=0.9, seed=7), max_len=len(PROMPT) + N, check_ranks=check,
    )  # fmt: skip
    tokens = engine.complete(PROMPT, N)
    with torch.inference_mode():
        logits, judge = target.logits(Reader(target, len(PROMPT) + len(tokens)).read(PROMPT + tokens))
    return {"tokens": tokens, "logits": logits.tolist(), "judge": judge.tolist()}


def cases():
    pair = {"target": "llama3", "draft": "llama3-draft"}
    every = [{"target": name + end} for name in MODELS for end in ("", "-int8")]
    every += [
        {"target": "qwen2", "quantize": "int8"}, {**pair, "verify": "standard"}, {**pair, "verify": "judge", "kind": "pre_norm"},
        {**pair, "verify": "topk", "threshold": 3}, {**pair, "verify": "kl"}, {**pair, "temperature": 1.0},
        {**pair, "verify": "judge", "temperature": 1.0}, {**pair, "verify": "judge", "whole_draft": True},
        {**pair, "whole_draft": True, "temperature": 0.8}, {"target": "llama3", "draft": "padded-draft", "verify": "judge"},
        {"target": "llama3-int8", "draft": "llama3-draft", "verify": "judge"},
    ]  # fmt: skip
    return every


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tp")
    for name in MODELS:
        for end, mode in (("", "none"), ("-int8", "int8")):
            save_checkpoint(root / (name + end), hf_config(name, **SHAPE), tiny(name, **SHAPE).state_dict(), mode)
    for name, changes in (("llama3-draft", {}), ("padded-draft", {"vocab_size": 160})):
        shape = {**SHAPE, "num_hidden_layers": 1, **changes}
        save_checkpoint(root / name, hf_config("llama3", **shape), tiny("llama3", seed=0, **shape).state_dict())
    return root


def torchrun(size, *argv, **options):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}", *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def as_rank(rank, size, port, work, results):
    """What a forked process does: join the others, work, and send the result home. No ``results``: ``work`` is a main."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}  # fmt: skip

    def main():
        with tp.ranks_of("cpu") as ranks:
            results.put((rank, work(ranks)))

    run_cli(work if results is None else main)


def fork_ranks(size, work, is_command=False):
    """Forked ranks, with nothing like torchrun's agent that would look after them, and their results."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = None if is_command else context.Queue()
    processes = [context.Process(target=as_rank, args=(rank, size, port, work, results)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes, results


def on_ranks(size, work):
    """``work(ranks)`` on each of ``size`` forked ranks, in their order."""
    processes, results = fork_ranks(size, work)
    found = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_any_number_of_ranks_decodes_the_same(folders, size):
    some = cases()[:: size // 2]  # more ranks than cores: every step waits for the slowest
    alone = [decode(case, folders, Ranks()) for case in some]
    for found in on_ranks(size, lambda ranks: [decode(case, folders, ranks, check=True) for case in some]):
        for case, mine, theirs in zip(some, alone, found, strict=True):
            assert theirs["tokens"] == mine["tokens"] and len(mine["tokens"]) == N, case
            for what in ("logits", "judge"):
                assert (torch.tensor(theirs[what]) - torch.tensor(mine[what])).abs().max() < 1e-4, (case, what)


def test_ranks_decode_the_same_in_four_bits(folders):
    case = {"target": "llama3", "quantize": "int4-g32"}
    own = decode(case, folders, Ranks())
    for now in on_ranks(2, lambda ranks: decode(case, folders, ranks)):
        assert now["tokens"] == own["tokens"]
        torch.testing.assert_close(torch.tensor(now["logits"]), torch.tensor(own["logits"]), atol=1e-4, rtol=1e-4)


def own_heads(whole, config, rank, size):
    """What a rank needs of the fused q, k and v: its query heads, and the key and value heads that those look at."""
    heads = whole.unflatten(0, (-1, config.head_dim))
    queries = range(config.n_heads)[rank * config.n_heads // size : (rank + 1) * config.n_heads // size]
    keys = sorted({h * config.n_kv_heads // config.n_heads for h in queries})
    H, K = config.n_heads, config.n_kv_heads
    return torch.cat([heads[i] for i in (*queries, *(H + k for k in keys), *(H + K + k for k in keys))])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_reads_its_part_of_every_weight(folders, size):
    for name in (*MODELS, "llama3-int8"):
        config = checkpoint.load_config(folders / name)
        source = checkpoint.open_source(folders / name, config)
        for weight, shape in source.shapes.items():
            parts = [checkpoint.read_part(source, weight, config, Ranks(rank, size)) for rank in range(size)]
            whole = checkpoint.read_part(source, weight, config)
            assert sum(part.numel() for part in parts) >= whole.numel()
            if weight.split(".")[-2] in ("w2", "wo") and len(shape) > 1:
                assert torch.equal(torch.cat(parts, 1), whole)
            elif weight.split(".")[-2] in ("embed", "output"):
                assert torch.equal(torch.cat(parts), whole)
            elif weight.endswith("wo.bias"):
                assert torch.equal(sum(parts), whole)
            elif weight.endswith(("norm.weight", "w2.scale", "wo.scale")):
                assert all(torch.equal(part, whole) for part in parts)
            elif weight.split(".")[-2] == "wqkv":
                assert all(torch.equal(part, own_heads(whole, config, rank, size)) for rank, part in enumerate(parts)), weight
            elif weight.split(".")[-2] == "w13":
                gates, ups = whole.chunk(2)
                for part, gate, up in zip(parts, gates.chunk(size), ups.chunk(size), strict=True):
                    assert torch.equal(part, torch.cat((gate, up)))
            else:
                raise AssertionError(f"no test knows {weight}")
        model = checkpoint.load_model(folders / name, torch.float32, ranks=Ranks(1, size))
        assert model.layers[0].wo.weight.shape[1] * size == source.shapes["layers.0.wo.weight"][1]


def test_what_doesnt_divide_is_refused_with_the_numbers(folders):
    for changes, words in (
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "6 attention heads"),
        ({"num_key_value_heads": 4, "num_attention_heads": 12, "intermediate_size": 96, "vocab_size": 132}, None),
        ({"intermediate_size": 62}, "62 feed-forward columns"),
        ({"vocab_size": 131}, "131 vocabulary entries"),
    ):
        config = Config.from_hf(hf_config("llama3", **{**SHAPE, **changes}))
        with torch.device("meta"):
            if words is None:
                Transformer(config, Ranks(0, 4))
                continue
            with pytest.raises(UserError, match=f"over 4 ranks: it has .*{words}"):
                Transformer(config, Ranks(0, 4))
    three = Config.from_hf(hf_config("llama3", **{**SHAPE, "num_attention_heads": 12, "num_key_value_heads": 6}))
    assert tp.obstacles(three, 4) == ["6 key/value heads"]
    with torch.device("meta"), pytest.raises(UserError, match="64 feed-forward columns in groups of 32"):
        Transformer(Config.from_hf(hf_config("llama3", **SHAPE)), Ranks(0, 4), "int4-g32")


def die(ranks):
    os.kill(os.getpid(), signal.SIGKILL)


def stumble(ranks):
    raise ValueError("out of luck")


def find_a_mistake(ranks):
    raise UserError("this copy is cut short")


@pytest.mark.parametrize("fate, own, words", [
    (die, -signal.SIGKILL, ""), (stumble, 1, "ValueError: out of luck"), (find_a_mistake, 2, "error: this copy is cut short"),
])  # fmt: skip
def test_without_torchrun_too_a_rank_that_fails_ends_the_others(fate, own, words, capfd):
    def work(ranks):
        if ranks.rank == 1:
            fate(ranks)
        time.sleep(60)  # as in a collective that doesn't notice

    processes, _ = fork_ranks(3, work)
    start = time.monotonic()
    for process in processes:
        process.join(timeout=40)
    assert [process.exitcode for process in processes] == [1, own, 1] and time.monotonic() - start < 30
    err = capfd.readouterr().err
    assert len(re.findall(r"error: rank 1 \(host .*\) is gone; rank [02] ends too", err)) >= 1 and words in err


def test_a_mistake_that_all_ranks_find_is_told_once(capfd):
    processes, _ = fork_ranks(3, find_a_mistake)
    for process in processes:
        process.join(timeout=40)
    assert [process.exitcode for process in processes] == [2, 2, 2]
    assert capfd.readouterr().err.count("error: ") == 1


PUBLISHED = ("generate.py", "--draft", "8B", "--target", "405B", "--judge", "head.pt")


def published(tmp_path):
    """checkpoints/ with an 8B and a 405B whose sizes are in Llama-3.1's proportions, the target in int8, and a head."""
    for name, heads, seed in (("Llama-3.1-8B-Instruct", 8, 1), ("Llama-3.1-405B-Instruct", 32, 0)):
        shape = {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 264, "hidden_size": 8 * heads,
                 "intermediate_size": 24 * heads, "max_position_embeddings": 1024, "num_hidden_layers": 1}  # fmt: skip
        folder = tmp_path / "checkpoints" / name
        mode = "int8" if heads == 32 else "none"
        save_checkpoint(folder, hf_config("llama3", **shape), tiny("llama3", seed=seed, **shape).state_dict(), mode)
        write_tokenizer(folder)
    mark = checkpoint.fingerprint(folder)
    Head(torch.randn(256, generator=torch.Generator().manual_seed(0)), 0.0, "post_norm", folder.name, mark).save(
        tmp_path / "head.pt"
    )


def endless(tmp_path, size):
    """Ranks that decode until they are stopped, once they have begun."""
    published(tmp_path)
    argv = [
        *PUBLISHED[1:],
        "--no-compile",
        "--num-samples",
        "100000",
        "--max-new-tokens",
        "2",
        "--draft-len",
        "2",
        "--prompt",
        "Hi",
    ]
    process = torchrun(size, ROOT / PUBLISHED[0], *argv, cwd=tmp_path, start_new_session=True)
    lines = []
    while not lines or "tokens/s" not in lines[-1]:
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    return process, workers_of(process.pid)


def workers_of(pid):
    """Process ids of the ranks that a torchrun started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "generate.py" in Path(f"/proc/{child}/cmdline").read_text()]


def ended_within(pids, seconds):
    limit = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def test_a_rank_that_is_killed_ends_all_with_its_name(tmp_path):
    process, workers = endless(tmp_path, 4)
    assert len(workers) == 4
    os.kill(workers[2], signal.SIGKILL)
    assert ended_within(workers, 10)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert re.search(r"rank\s*:? 2\b", out), out[-3000:]


def test_ctrl_c_ends_all_at_once(tmp_path):
    process, workers = endless(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    assert ended_within(workers, 10)
    process.communicate(timeout=20)
    assert process.returncode != 0


PAIR = ("--target", "demo/target", "--dtype", "float32")
ON_RANKS = {  # a command, the file it writes, and what of it or of the last line must be the same
    "label": ("label.py", "likelihood", "--given", "--task", "demo-train", "--limit", "1", "--draft", "demo/draft", *PAIR, "--out"),
    "train": ("train_judge.py", "LABELS", "--lr", "1e-3", *PAIR, "--json", "--out"),
    "evaluate": ("evaluate.py", "--limit", "1", "--rules", "judge,topk:3", "--json", "--out"),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_RANKS)
def test_what_makes_and_measures_judges_does_the_same_on_ranks(name, tmp_path, monkeypatch, capfd):
    found = []
    monkeypatch.chdir(ROOT)
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "labels").write_text("".join((ROOT / "demo" / "judge_tuples.jsonl").open().readlines()[:4]))
        argv = [str(folder / "labels") if word == "LABELS" else word for word in ON_RANKS[name]]
        monkeypatch.setattr(sys, "argv", [*argv, str(folder / "out")])
        processes, _ = fork_ranks(ranks, importlib.import_module(argv[0].removesuffix(".py")).main, is_command=True)
        for process in processes:
            process.join(timeout=300)
        out, err = capfd.readouterr()
        assert [process.exitcode for process in processes] == [0] * ranks, err
        json_lines = [line for line in out.splitlines() if line.startswith('{"')]
        assert len(json_lines) == ("--json" in argv), out  # only rank 0 speaks
        found.append((folder / "out", json_lines[0] if json_lines else None))
    (one, said_one), (two, said_two) = found
    if name == "label":
        rows = [json.loads(path.read_text()) for path in (one, two)]
        assert rows[0].pop("scores") == pytest.approx(rows[1].pop("scores"), abs=1e-3)
        assert rows[0] == rows[1]
    elif name == "train":
        assert torch.allclose(load_head(one).weight, load_head(two).weight, atol=1e-3)
        assert json.loads(said_one)["epochs"] == json.loads(said_two)["epochs"]
    else:
        texts = [[json.loads(line).get("texts") for line in path.read_text().splitlines()] for path in (one, two)]
        assert texts[0] == texts[1] and len(texts[0]) == 3


def test_a_mistake_only_one_rank_can_see_is_told_once_with_its_rank(tmp_path):
    published(tmp_path)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "other" / "checkpoints")
    wrong = {**hf_config("llama3"), "vocab_size": 7}
    (tmp_path / "other" / "checkpoints" / "Llama-3.1-8B-Instruct" / "config.json").write_text(json.dumps(wrong))
    for name in ("head.pt",):
        shutil.copy(tmp_path / name, tmp_path / "other")
    script = tmp_path / "elsewhere.py"  # as on a node whose copy of the files is another
    script.write_text(
        f"import os, runpy, sys\nif os.environ['RANK'] == '1': os.chdir('other')\n"
        f"sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(ROOT / 'generate.py')!r}, run_name='__main__')\n"
    )
    process = torchrun(2, script, *PUBLISHED[1:], "--no-compile", cwd=tmp_path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    told = [line for line in out.splitlines() if "error: " in line]
    assert len(told) == 1 and "rank 1" in told[0], out
