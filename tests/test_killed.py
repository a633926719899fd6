"""Commands that are killed: whatever they had done, nothing half-written loads, and run again they give what they would have.

Each runs in a process of its own that gets SIGKILL before its nth change to a file, for every n there is; or from the kernel in
the middle of writing a file (RLIMIT_FSIZE); or from outside, at any time.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace

import convert_gguf
import evaluate
import label
import pytest
import torch
import train_judge
from conftest import hf_config, tiny
from test_checkpoint import contents
from test_cli import V, write_tokenizer
from test_convert_gguf import bpe_metadata, gguf_tensors, metadata, tiny_model, train_bpe, write_gguf
from test_convert_hf_checkpoint import hf_model
from tqdm import tqdm

import checkpoint
import quantize
from convert_hf_checkpoint import convert
from errors import UserError
from files import remove
from judge import load_head, read_labels
from tokenizer import load_tokenizer
from writer import save_checkpoint

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def run(work, folder, kill_at=None, room=None, after=None):
    """Work in a forked process; returns its exit status, -n where signal n ended it.

    ``kill_at``: before which of its changes to files under ``folder`` it is killed; ``room``: the bytes that a file may have, in
    writing more of which it is; ``after``: after how many seconds.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status, told = 1, os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        tqdm.set_lock(threading.RLock())  # tqdm's own is all processes', and one that is killed may hold it
        changes = itertools.count()

        def change(event, args):
            if event not in CHANGES or not str(args[0]).startswith(str(folder)):
                return
            if (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)) and next(changes) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(change)
        if room is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        work()
        status = 0
    except BaseException:
        os.dup2(told, 2)
        traceback.print_exc()
    finally:
        os._exit(status)


def ways(work, folder, step=1):
    """Kill some work, begun anew by the caller each time, before each of its changes, or each ``step``th."""
    for n in itertools.count(0, step):
        status = run(work, folder, kill_at=n)
        if status == 0:
            return
        assert status == -signal.SIGKILL
        yield n


def loads(folder):
    """Whether a folder is a checkpoint that can be used."""
    try:
        checkpoint.find_pair(str(folder)).load(torch.float32)
    except UserError:
        return False
    return True


def without_run(files):
    """The contents of a checkpoint's files but for the mark of who wrote them."""
    return {name: ({**c[0], "run": ""}, c[1]) if isinstance(c, tuple) else c for name, c in files.items()}


def command(main, *argv):
    """The main function of a script with a command line, for ``run``."""

    def work():
        sys.argv = ["script.py", *map(str, argv)]
        main()

    return work


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    hf_model(root / "hf", "llama3", "60KB", vocab_size=V)
    write_tokenizer(root / "hf")
    model = tiny_model("llama", num_hidden_layers=1)
    parts = metadata("llama", model), bpe_metadata(train_bpe(), "llama-bpe"), gguf_tensors(model, "llama")
    write_gguf(root / "model.gguf", "llama", *parts)
    convert(root / "hf", root / "plain", None)
    return root


@pytest.mark.parametrize("how, step", [("convert", 2), ("convert int8", 5), ("quantize int8", 5), ("quantize int4-g32", 5)])
def test_converting_and_quantizing(sources, tmp_path, how, step):
    what, _, form = how.partition(" ")

    def work(out):
        if what == "convert":
            return lambda: convert(sources / "hf", out, None, form or "none")
        return lambda: quantize.quantize(sources / "plain", out, form)

    assert run(work(tmp_path / "whole"), tmp_path) == 0
    wanted, n = contents(tmp_path / "whole"), 0
    assert len([name for name in wanted if name.endswith(".safetensors")]) > 2 - ("int4" in how)
    out = tmp_path / "out"
    largest = max(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    cut = (room for room in range(100, largest, largest // 4) if run(work(out), tmp_path, room=room) == -signal.SIGXFSZ)
    for _ in itertools.chain(ways(work(out), tmp_path, step), cut):
        if loads(out):  # there was nothing left to do but to remove an empty folder
            remove(out / "config.json.partial")
            assert contents(out) == wanted
        else:
            assert run(work(out), tmp_path) == 0 and contents(out) == wanted
        shutil.rmtree(out)
        n += 1
    assert n > 30 / step


@pytest.mark.parametrize("force", [False, True])
def test_converting_a_gguf_file(sources, tmp_path, force):
    def work():
        convert_gguf.convert(sources / "model.gguf", out, "float32", force)

    out = tmp_path / "out"
    assert run(work, tmp_path) == 0
    wanted, old, n = without_run(contents(out)), without_run(contents(sources / "plain")), 0
    shutil.rmtree(out)
    for _ in ways(work, tmp_path, 1 + force):
        if out.exists():
            assert without_run(contents(out)) in (wanted, old)
        if not loads(out) or force:
            assert run(work, tmp_path) == 0
        assert without_run(contents(out)) == wanted and [*tmp_path.iterdir()] == [out]
        shutil.rmtree(out)
        if force:
            shutil.copytree(sources / "plain", out)
        n += 1
    assert n > 5


def test_another_models_side_files_are_not_taken_over(sources, tmp_path):
    """An interrupted conversion leaves its tokenizer's files, which the next into that folder may not have."""
    other = shutil.copytree(sources / "hf", tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    out = tmp_path / "out"
    assert next(n for n in ways(lambda: convert(other, out, None), tmp_path) if list(out.glob("*.safetensors"))) > 0
    with pytest.raises(UserError, match="chat_template.jinja is not of .*hf"):
        convert(sources / "hf", out, None)
    (out / "chat_template.jinja").unlink()
    convert(sources / "hf", out, None)
    convert(sources / "hf", tmp_path / "alone", None)
    assert contents(out) == contents(tmp_path / "alone")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft that answer in no time, as options."""
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("target", "draft")):
        model = tiny(seed=seed, vocab_size=257, num_hidden_layers=1)
        save_checkpoint(root / name, hf_config("llama3", vocab_size=257, num_hidden_layers=1), model.state_dict())
        write_tokenizer(root / name)
    return "--target", root / "target", "--draft", root / "draft", "--dtype", "float32"


def lines(path):
    """The lines of a run's file, but for how long things took."""
    return [{k: v for k, v in json.loads(line).items() if k not in ("ms", "decode_s")} for line in path.read_text().splitlines()]


def test_labelling(pair, tmp_path):
    out, page = tmp_path / "labels.jsonl", tmp_path / "page.html"
    argv = "likelihood", "--task", "demo-train", "--limit", "2", "--threshold", "4", *pair, "--out", out, "--html", page
    kill_and_compare(command(label.main, *argv), out, tmp_path, lambda: read_labels(out, load_tokenizer(pair[1])), 5)


def test_evaluating(pair, tmp_path):
    out = tmp_path / "answers.jsonl"
    argv = "--limit", "2", "--rules", "draft,topk:99", "--no-compile", *pair, "--draft-len", "16", "--out", out
    kill_and_compare(command(evaluate.main, *argv), out, tmp_path, lambda: lines(out), 4)


def kill_and_compare(work, out, folder, read, least):
    """Kill what writes lines before each change of a file, in the middle of lines and at any time; run it again and compare.
    ``read``: refuses the file while its last line is cut short. ``least``: how many changes there are."""
    seconds = time.perf_counter()
    assert run(work, folder) == 0
    seconds = time.perf_counter() - seconds
    wanted, size, n = lines(out), out.stat().st_size, 0
    draws = random.Random(0)
    there = {path.name for path in folder.iterdir()}
    clear(folder)
    cut = (room for room in (size // 3, size - 2) if run(work, folder, room=room) == -signal.SIGXFSZ)
    outside = (s for s in (draws.random() * seconds for _ in range(2)) if run(work, folder, after=s) is not None)
    for _ in itertools.chain(ways(work, folder), cut, outside):
        before = out.read_bytes() if out.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]
        if before != whole and not is_json(before[len(whole) :]):  # a line may lack no more than its end
            with pytest.raises((UserError, ValueError)):
                read()
        assert run(work, folder) == 0
        read()
        assert out.read_bytes().startswith(whole) and lines(out) == wanted
        assert {path.name for path in folder.iterdir()} == there
        clear(folder)
        n += 1
    assert n >= least + 4


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def clear(folder):
    for path in folder.iterdir():
        path.unlink()


def test_training(pair, tmp_path):
    labels, head, n = tmp_path / "labels.jsonl", tmp_path / "head.pt", 0
    argv = "likelihood", "--task", "demo-train", "--limit", "4", "--threshold", "4", *pair, "--out", labels
    assert run(command(label.main, *argv), tmp_path) == 0
    work = command(train_judge.main, labels, *pair[:2], *pair[4:], "--lr", "1e-2", "--out", head)
    assert run(work, tmp_path) == 0
    wanted, there = load_head(head), {path.name for path in tmp_path.iterdir()}
    assert len(there) == 3

    def again():
        for name in there - {labels.name}:
            (tmp_path / name).unlink(missing_ok=True)

    again()
    cut = (room for room in (100, 2000) if run(work, tmp_path, room=room) == -signal.SIGXFSZ)
    for _ in itertools.chain(ways(work, tmp_path), cut):
        if head.exists():
            assert torch.equal(load_head(head).weight, wanted.weight)
        assert run(work, tmp_path) == 0
        got = load_head(head)
        assert torch.equal(got.weight, wanted.weight) and replace(got, weight=wanted.weight) == wanted
        assert {path.name for path in tmp_path.iterdir()} == there
        again()
        n += 1
    assert n > 6
