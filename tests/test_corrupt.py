"""Damaged files by the hundred: a user's mistake in one line, or what the undamaged files give; never another answer unsaid.

What no format can notice is said here too: where a weight's own numbers are hit, loading may go on, and ``checkpoint.verify``
must find it; and a configuration or tokenizer that still reads as one is taken at its word.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections import Counter
from dataclasses import replace

import convert_gguf
import gguf
import pytest
import torch
import train_judge
import verify
from conftest import ROOT, hf_config, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_cli import V, write_tokenizer
from test_convert_gguf import bpe_metadata, gguf_tensors, metadata, tiny_model, train_bpe, write_gguf
from test_convert_hf_checkpoint import hf_model
from test_tokenizer import make_json, make_spm, make_tiktoken

import checkpoint
import quantize
from convert_hf_checkpoint import convert
from errors import UserError
from judge import IGNORE, RIGHT, WRONG, Head, load_head, read_labels
from tokenizer import load_tokenizer
from training import Seen
from writer import CheckpointWriter, Step, save_checkpoint, stream_checkpoint

FORMS = ("none", "int8", "int4-g32")
JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 3, 2**40, 10**30, 0.5, float("nan"), float("inf"), "", "x", "int8", "F16", "I32", [], [1], {}, {"a": 1}]
)


def many(n):
    return settings(
        max_examples=n, derandomize=True, database=None, deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def altered(draw, value):
    """A JSON value with one place in it changed, left out, doubled or renamed, or the whole of it replaced."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 9)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["deeper"] * 6 + ["gone", "renamed", "swapped"]))
        value = value.copy()
        if how == "gone":
            del value[key]
        elif how == "swapped":
            other = draw(st.sampled_from(keys))
            value[key], value[other] = value[other], value[key]
        elif how == "renamed" and isinstance(value, dict):
            value[draw(st.sampled_from(["x", key + "x", key.replace("0", "1")]))] = value.pop(key)
        else:
            value[key] = altered(draw, value[key])
        return value
    return draw(JUNK)


def harm(draw, folder, others):
    """Damage one file of a folder, in any way that disks, downloads and people do. Returns its name and what was done.
    ``others``: folders of other models, whose files may come in its place."""
    name = draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    path = folder / name
    data = path.read_bytes()
    head = 8 + struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" else 0
    kinds = ["flipped", "flipped", "cut", "longer", "empty", "folder", "dangling", "gone", "swapped", "another's"]
    how = draw(st.sampled_from(kinds + ["altered"] * 6 if path.suffix == ".json" or head else kinds))
    if how == "flipped":
        damaged = bytearray(data)
        end = draw(st.sampled_from([head or len(data), len(data)]))
        for at in draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
            damaged[at] ^= draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 255]))
        path.write_bytes(damaged)
    elif how == "altered":
        value = json.loads(data[8:head] if head else data)
        text = json.dumps(altered(draw, value)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[head:] if head else text)
    elif how == "cut":
        path.write_bytes(data[: draw(st.integers(0, len(data) - 1))])
    elif how in ("longer", "empty"):
        path.write_bytes(data + draw(st.binary(min_size=1, max_size=9)) if how == "longer" else b"")
    elif how in ("swapped", "another's"):
        there = [*folder.iterdir()] if how == "swapped" else [other / name for other in others if (other / name).is_file()]
        other = draw(st.sampled_from([p for p in there if p.suffix == path.suffix] or [path]))
        theirs = other.read_bytes()
        if how == "swapped":
            other.write_bytes(data)
        path.write_bytes(theirs)
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "dangling":
            path.symlink_to("nowhere")
    return name, how


def attempt(work):
    """What some work gives, or the one line that ``run_cli`` would print in its stead."""
    try:
        return work()
    except UserError as error:
        return str(error)
    except OSError as error:
        assert error.filename is not None
        return f"{error.filename}: {error.strerror}"


def answer(folder):
    """What a pair of this target says to a prompt: ids and logits."""
    pair = checkpoint.find_pair(str(folder))
    model, _ = pair.load(torch.float32)
    ids = pair.tokenizer.encode_question("Hi 2 you")
    logits = model(torch.tensor([ids]))[0]
    pair.tokenizer.decode(logits.argmax(-1).tolist())
    return ids, logits


def fresh(whole, folder):
    """A copy of a folder, in place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(whole, folder)


def same(got, good):
    return not isinstance(got, str) and got[0] == good[0] and torch.equal(got[1], good[1])


def write(folder, seed, form):
    """A checkpoint in shards, of one of FORMS."""
    model = tiny(seed=seed, vocab_size=V)
    writer = CheckpointWriter(folder, False, form, shard_bytes=60_000)
    for name, value in model.state_dict().items():
        writer.add(name, value)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    writer.close(hf_config("llama3", vocab_size=V))
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Of each form a checkpoint, what it answers, and others that have files of the same names."""
    root = tmp_path_factory.mktemp("good")
    made = {form: [write(root / f"{form}-{seed}", seed, form) for seed in (0, 1)] for form in FORMS}
    folders = [folder for several in made.values() for folder in several]
    return {form: (own, answer(own), [f for f in folders if f != own]) for form, (own, _) in made.items()}


# ---- checkpoints


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_checkpoint(good, tmp_path, form):
    whole, expected, others = good[form]
    outcomes = Counter()

    @many(120)
    @given(st.data())
    def damage(data):
        folder = fresh(whole, tmp_path / "damaged")
        name, _ = harm(data.draw, folder, others)
        got = attempt(lambda: answer(folder))
        outcomes[isinstance(got, str)] += 1
        if isinstance(got, str) or same(got, expected):
            return
        if name.endswith(".safetensors"):  # a number of some weight was hit
            assert isinstance(attempt(lambda: checkpoint.verify(folder)), str)
            assert isinstance(attempt(lambda: quantize.quantize(folder, tmp_path / "new", "int8")), str)
            assert not (tmp_path / "new" / "config.json").exists()
        else:  # what it says now is what it says
            assert (folder / name).read_bytes() != (whole / name).read_bytes() and name.endswith(".json")

    damage()
    assert outcomes[True] > 50 and outcomes[False] > 10


def test_what_is_whole_is_found_to_be(good, monkeypatch, capsys):
    for form in FORMS:
        monkeypatch.setattr(sys, "argv", ["verify.py", str(good[form][0])])
        verify.main()
        assert f"{good[form][0]}: {21 if form == 'none' else 34} weights are what was written" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["verify.py", str(ROOT / "demo" / "draft")])
    with pytest.raises(UserError, match="before there were checksums"):
        verify.main()


@pytest.mark.parametrize("form", FORMS)
def test_no_byte_of_a_weight_is_beyond_its_checksum(good, tmp_path, form):
    whole, _, _ = good[form]

    @many(25)
    @given(st.data())
    def damage(data):
        folder = fresh(whole, tmp_path / "damaged")
        path = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
        bytes_ = bytearray(path.read_bytes())
        bytes_[data.draw(st.integers(8 + struct.unpack("<Q", bytes_[:8])[0], len(bytes_) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(bytes_)
        with pytest.raises(UserError, match=f"{path.name} is damaged"):
            checkpoint.verify(folder)

    damage()


def test_a_shard_of_another_conversion_is_refused(good, tmp_path):
    (whole, _, _), other = good["none"], good["none"][2][0]
    for path in sorted(whole.glob("*.safetensors")):
        folder = fresh(whole, tmp_path / "mixed")
        shutil.copyfile(other / path.name, folder / path.name)
        with pytest.raises(UserError, match="not written by one conversion"):
            answer(folder)


@pytest.mark.parametrize("key, value, words", [
    ("num_hidden_layers", 2**40, "num_hidden_layers = 1099511627776, but there are only 21 weights"),
    ("vocab_size", 2**62, "sizes that no"),
    ("rope_theta", 1e-300, "rope_theta = 1e-300; it must be a number from 1"), ("rope_theta", 1e300, "rope_theta = 1e.300"),
])  # fmt: skip
def test_what_no_model_has_is_told_at_once(good, tmp_path, key, value, words):
    folder = fresh(good["none"][0], tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**hf_config("llama3", vocab_size=V), key: value}))
    with pytest.raises(UserError, match=words):
        checkpoint.load_model(folder, torch.float32)


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    weights = dict(tiny(vocab_size=V).state_dict())
    weights["layers.1.wo.weight"] = weights["layers.1.wo.weight"].clone().index_fill_(0, torch.tensor([3]), float("nan"))
    for form in FORMS:
        with pytest.raises(UserError, match=r"layers\.1\.wo\.weight holds numbers beyond float32's range, or none"):
            save_checkpoint(tmp_path / form, hf_config("llama3", vocab_size=V), weights, form)
    big = [Step(n, t.nbytes, lambda t=t: t * 1e6) for n, t in tiny(vocab_size=V).state_dict().items()]
    with pytest.raises(UserError, match="float16's range"):
        writer = CheckpointWriter(tmp_path / "half", False)
        stream_checkpoint(writer, big, hf_config("llama3", vocab_size=V), torch.float16)
    folder = write(tmp_path / "scale", 0, "int8")
    for file in folder.glob("*.safetensors"):
        with checkpoint.open_shard(file) as shard:
            tensors, metadata = {name: shard.get_tensor(name) for name in shard.keys()}, shard.metadata()
        tensors |= {name: tensor / 0 for name, tensor in tensors.items() if name == "layers.2.w2.scale"}
        save_file(tensors, file, metadata)
    with pytest.raises(UserError, match=r"layers\.2\.w2\.scale holds numbers beyond"):
        answer(folder)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path):
    folder = write(tmp_path / "m", 0, "none")
    shutil.copyfile(ROOT / "demo" / "target" / "tokenizer.model", folder / "tokenizer.model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=f"the tokenizer has 640 tokens, but the model {V}"):
        answer(folder)
    write_tokenizer(folder)
    added = json.loads((folder / "tokenizer.json").read_text())
    added["added_tokens"].append({**added["added_tokens"][0], "id": V + 2, "content": "<pad>"})
    (folder / "tokenizer.json").write_text(json.dumps(added))
    answer(folder)  # some checkpoints' padding token has no row


# ---- what is converted


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two of Hugging Face's folders, in shards."""
    root = tmp_path_factory.mktemp("hf")
    for name in ("llama3", "qwen2"):
        hf_model(root / name, name, "60KB", vocab_size=V)
        write_tokenizer(root / name)
    return root / "llama3", root / "qwen2"


@pytest.mark.parametrize("form", ["none", "int8"])
def test_a_damaged_source(sources, tmp_path, form):
    whole, other = sources
    convert(whole, tmp_path / "expected", None, form)
    expected = answer(tmp_path / "expected")

    @many(80)
    @given(st.data())
    def damage(data):
        folder, out = fresh(whole, tmp_path / "damaged"), tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        name, how = harm(data.draw, folder, [other])
        told = attempt(lambda: convert(folder, out, None, form))
        if told is not None:
            assert not (out / "config.json").exists()
            return
        assert checkpoint.verify(out) > 20
        if not same(answer(out), expected):  # Hugging Face's files have no checksums, and a configuration is taken at its word
            assert how in ("flipped", "altered") or (name, how) == ("config.json", "another's"), (name, how)

    damage()


def test_a_damaged_gguf_file(tmp_path):
    model = tiny_model("llama", num_hidden_layers=1)
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(path, "llama", metadata("llama", model), bpe_metadata(train_bpe(), "llama-bpe"), gguf_tensors(model, "llama"))
    whole, numbers = path.read_bytes(), min(int(t.data_offset) for t in gguf.GGUFReader(path).tensors)
    convert_gguf.convert(path, out)
    expected = answer(out)

    @many(100)
    @given(st.data())
    def damage(data):
        damaged, how = bytearray(whole), data.draw(st.sampled_from(["flipped"] * 5 + ["cut", "longer"]))
        if how == "flipped":
            end = data.draw(st.sampled_from([300, numbers, len(whole)]))
            for at in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
        path.write_bytes(damaged + b"xyz" * (how == "longer"))
        shutil.rmtree(out, ignore_errors=True)
        told = attempt(lambda: convert_gguf.convert(path, out))
        if told is not None:
            assert {*tmp_path.iterdir()} == {path}
        elif how != "flipped":
            assert how == "longer" and same(answer(out), expected)
        else:
            answer(out)  # GGUF has no checksums either

    damage()


# ---- tokenizers, heads, labels


MAKE = {"json": make_json, "spm": lambda folder: make_spm(folder, "bpe"), "tiktoken": make_tiktoken}


@pytest.mark.parametrize("kind", MAKE)
def test_a_damaged_tokenizer(tmp_path, kind):
    def use(folder):
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode_question("Hi 2 you, ünï 🎉 <|im_end|>"), tokenizer.encode_prompt("the <tool> x")
        tokenizer.end_of_answer()
        return ids, [tokenizer.token_text(i) for i in range(tokenizer.n_tokens)], tokenizer.decode(ids[0]), tokenizer.eos_ids

    for name, make in MAKE.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    (tmp_path / "spm" / "tokenizer.vocab").unlink()  # which nobody reads
    others = [tmp_path / name for name in MAKE if name != kind]
    use(tmp_path / kind)

    @many(100)
    @given(st.data())
    def damage(data):
        folder = fresh(tmp_path / kind, tmp_path / "damaged")
        harm(data.draw, folder, others)
        attempt(lambda: use(folder))

    damage()


def test_a_damaged_head_is_refused_or_the_same(tmp_path):
    path = tmp_path / "head.pt"
    head = Head(torch.randn(48), 0.5, "post_norm", "m", "f")
    head.save(path)
    whole, outcomes = path.read_bytes(), Counter()

    @many(150)
    @given(st.data())
    def damage(data):
        (folder := tmp_path / "damaged").mkdir(exist_ok=True)
        (folder / "head.pt").write_bytes(whole)
        harm(data.draw, folder, [])
        got = attempt(lambda: load_head(folder / "head.pt"))
        shutil.rmtree(folder)
        outcomes[isinstance(got, str)] += 1
        if not isinstance(got, str):
            assert torch.equal(got.weight, head.weight) and replace(got, weight=head.weight) == head

    damage()
    assert min(outcomes.values()) > 15


def test_damaged_labels(tmp_path):
    tokenizer = load_tokenizer(ROOT / "demo" / "target")
    ids = tokenizer.encode(" First we have 12.")
    labelled = {
        "question": "q", "raw": True, "answer": tokenizer.decode(ids), "tokens": ids, "labels": [1] * (len(ids) - 1) + [0],
        "alternatives": [[1, 40, 0], [2, 41, 1]], "how": "mine", "target": "t", "draft": "d", "seed": 0,
        "settings": {"label_rule": "span"},
    }  # fmt: skip
    rows = [labelled, {"question": "q2", "correct": " it is 4", "wrong": " it is 5", "mistake": [7, 8]}]

    @many(150)
    @given(st.data())
    def damage(data):
        row, how = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["altered", "flipped", "cut"]))
        lines = [json.dumps(altered(data.draw, r) if how == "altered" and i == row else r) for i, r in enumerate(rows)]
        text = bytearray("\n".join(lines).encode())
        if how == "flipped":
            text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del text[data.draw(st.integers(0, len(text) - 1)) :]
        (tmp_path / "labels.jsonl").write_bytes(text)
        got = attempt(lambda: read_labels(tmp_path / "labels.jsonl", tokenizer))
        for example in [] if isinstance(got, str) else got:
            assert len(example.labels) == len(example.answer) and {*example.labels} <= {RIGHT, WRONG, IGNORE}
            assert all(0 <= token < tokenizer.n_tokens for token in example.answer)

    damage()


def test_states_that_are_not_what_was_read_are_read_anew(tmp_path):
    path = tmp_path / "s.states"
    seen = Seen(torch.randn(5, 4), torch.randn(5), torch.tensor([True, False, True, True, False]))

    def is_it(found):
        return found is not None and all(map(torch.equal, found, seen))

    train_judge.keep_states(path, "key", seen)
    assert is_it(train_judge.cached_states(path, "key")) and train_judge.cached_states(path, "other") is None
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 4
        path.write_bytes(data)
        data[at] ^= 4
        found = train_judge.cached_states(path, "key")
        assert found is None or is_it(found)
