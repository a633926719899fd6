"""The command line: what it prints, its JSON keys, and one line with status 2 for every mistake a user can make."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
import tokenizers
import torch
from conftest import hf_config, run_command, tiny
from safetensors.torch import load_file, save_file

import checkpoint
import generate
from judge import Head, load_head
from llm import LLM
from tokenizer import Output
from writer import save_checkpoint

CHARS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
V = 264  # 256 bytes, <eos>, padding


def write_tokenizer(folder, chars=CHARS):
    vocab = {"<eos>": 0, **{c: i for i, c in enumerate(chars, 1)}}
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token=None))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.add_special_tokens(["<eos>"])
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def write_checkpoint(folder, seed=0, chars=CHARS, name="llama3", **changes):
    changes = {"vocab_size": V, **changes}
    model = tiny(name, seed=seed, **changes)
    save_checkpoint(folder, hf_config(name, **changes), model.state_dict())
    write_tokenizer(folder, chars)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """checkpoints/ with a target, two drafts and heads, shared by the tests of this file, which don't write there."""
    root = tmp_path_factory.mktemp("house")
    folders = root / "checkpoints"
    write_checkpoint(folders / "Tiny-8B-Chat")
    write_checkpoint(folders / "Tiny-1B", seed=1, num_hidden_layers=1)
    write_checkpoint(folders / "Tiny-1B-padded", seed=1, num_hidden_layers=1, vocab_size=V + 16)
    write_checkpoint(folders / "Other-3B", chars=[*CHARS[:40], CHARS[41], CHARS[40], *CHARS[42:]])
    print_of = checkpoint.fingerprint(folders / "Tiny-8B-Chat")
    head = Head(torch.randn(48, generator=torch.Generator().manual_seed(0)) * 3, 0.0, "post_norm", "Tiny-8B-Chat", print_of)
    head.save(root / "head.pt")
    Head(torch.ones(16), 0.0, "post_norm", "small", print_of).save(root / "narrow.pt")
    Head(torch.ones(48), 0.0, "post_norm", "stranger", "0" * 16).save(root / "stranger.pt")
    return root


def run(house, monkeypatch, capsys, *argv):
    """(status, stdout, stderr) of ``generate.py argv``, run within ``house``."""
    monkeypatch.chdir(house)
    return run_command(generate.main, monkeypatch, capsys, *argv)


PAIR = ("--target", "8B", "--draft", "checkpoints/Tiny-1B", "--prompt", "Hello", "--no-compile", "--dtype", "float32")
JUDGED = (*PAIR, "--judge", "head.pt")


@pytest.mark.parametrize("argv, words", [
    (("--target", "70B"), "no checkpoint '70B'.*checkpoints/ holds Other-3B, Tiny-1B, Tiny-1B-padded, Tiny-8B-Chat and .*nothing"),
    (("--target", "1B"), "fits several.*Tiny-1B, Tiny-1B-padded"),
    (("--target", "8"), "no checkpoint '8'"),
    (("--target", ""), "empty"),
    (("--target", "8B", "--judge", "head.pt"), "--judge head.pt needs a --draft: what"),
    (("--draft", "8B"), "--draft 8B needs a --target"),
    (("--target", "8B", "--verify", "topk"), "--verify topk needs a --draft"),
    ((*PAIR, "--verify", "judge"), "--verify judge needs a head"),
    ((*PAIR, "--verify", "standard", "--threshold", "0.5"), "no meaning"),
    ((*JUDGED, "--threshold", "1.5"), r"--threshold is 1.5.*\[0, 1\]"),
    ((*JUDGED, "--threshold", "-0.1"), r"--threshold is -0.1"),
    ((*JUDGED, "--threshold", "much"), "--threshold.*'much'"),
    ((*PAIR, "--draft-len", "0"), "--draft-len is 0; it must be at least 1"),
    ((*PAIR, "--draft-len", "-3"), "--draft-len is -3"),
    ((*PAIR, "--max-new-tokens", "0"), "--max-new-tokens is 0"),
    ((*PAIR, "--num-samples", "0"), "--num-samples is 0"),
    ((*PAIR, "--temperature", "-1"), "--temperature is -1"),
    ((*PAIR, "--temperature", "nan"), "--temperature is nan"),
    ((*PAIR, "--temperature", "1e-40"), "--temperature is 1e-40"),
    ((*PAIR, "--seed", "99999999999999999999"), "--seed is 99999999999999999999"),
    ((*PAIR, "--verify", "topk", "--threshold", "inf"), "--threshold is inf"),
    ((*PAIR, "--draft-len", "512"), "--draft-len is 512.*below the context of 512"),
    (("--target", "x" * 300), "x{300}"),
    ((*PAIR, "--html", "checkpoints"), "--html checkpoints is a folder"),
    ((*PAIR, "--html", "head.pt/page.html"), "--html head.pt/page.html can't be written there: .*head.pt is no folder"),
    ((*PAIR[:4], "--interactive", "--json"), "--json can't be had with --interactive"),
    ((*PAIR[:4], "--interactive", "--html", "x.html"), "--html can't be had with --interactive"),
    ((*PAIR, "--top-p", "0"), "--top-p is 0; it must be above 0 and at most 1"),
    ((*PAIR, "--top-p", "1.01"), "--top-p is 1.01"),
    ((*PAIR, "--top-k", "-1"), "--top-k is -1"),
    ((*PAIR, "--top-k", "5"), "--top-k 5 has no effect at --temperature 0"),
    ((*PAIR, "--top-p", "0.9"), "--top-p 0.9 has no effect at --temperature 0"),
    ((*PAIR, "--prompt", ""), "the prompt is empty"),
    ((*PAIR, "--stop", "x", ""), "--stop holds an empty text"),
    ((*PAIR[:4], "--prompt-file", "absent.txt"), "absent.txt can't be read"),
    ((*PAIR, "--max-new-tokens", "508"), "a prompt of 5 tokens and --max-new-tokens 508 are 513 together; the context is 512"),
    ((*PAIR, "--prompt", "a" * 600), "the prompt has 600 tokens; the context is 512"),
    ((*PAIR, "--judge", "absent.pt"), "no judge head at absent.pt"),
    ((*PAIR, "--judge", "narrow.pt"), "16 weights, made for small; .*needs 48"),
    ((*PAIR, "--judge", "stranger.pt"), "trained for stranger"),
    ((*PAIR, "--draft", "3B"), "checkpoints/Tiny-8B-Chat.*checkpoints/Other-3B.*41"),
    ((*PAIR, "--verify", "guess"), "guess"),
    ((*PAIR, "--frobnicate"), "--frobnicate"),
])  # fmt: skip
def test_a_users_mistake_takes_one_line_and_status_2(house, monkeypatch, capsys, argv, words):
    status, out, err = run(house, monkeypatch, capsys, *argv)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(words, err), err


@pytest.mark.parametrize("fault, words", [
    ("cut short", "cut short"), ("missing weights", "holds no model"), ("missing key", "lacks 1 of"),
    ("left over", "'layers.9.wo.weight'"), ("shape", r"norm.weight is \(40,\), but config.json makes it \(48,\)"),
    ("architecture", "MambaForCausalLM"), ("no config", "no config.json"), ("config no JSON", "can't be read as JSON"),
    ("no tokenizer", "tokenizer.json"), ("missing shard", "lacks 1 of its 2 weight files: model-00002"),
])  # fmt: skip
def test_a_damaged_checkpoint_takes_one_line_and_status_2(house, tmp_path, monkeypatch, capsys, fault, words):
    folder = tmp_path / "checkpoints" / "broken"
    shutil.copytree(house / "checkpoints" / "Tiny-8B-Chat", folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    metadata = {"layout": checkpoint.LAYOUT, "quantization": "none"}
    if fault == "cut short":
        path.write_bytes(path.read_bytes()[:-8])
    elif fault == "missing weights":
        path.unlink()
    elif fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "config no JSON":
        (folder / "config.json").write_text("{")
    elif fault == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif fault == "architecture":
        (folder / "config.json").write_text(json.dumps(hf_config("llama3", architectures=["MambaForCausalLM"])))
    elif fault == "missing shard":
        files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        index = {"weight_map": {"norm.weight": files[0], "embed.weight": files[1]}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        path.rename(folder / files[0])
    else:
        if fault == "missing key":
            del weights["layers.1.w2.weight"]
        elif fault == "left over":
            weights["layers.9.wo.weight"] = torch.ones(2)
        else:
            weights["norm.weight"] = torch.ones(40)
        save_file(weights, path, metadata)
    status, out, err = run(tmp_path, monkeypatch, capsys, "--target", str(folder), "--prompt", "Hi")
    assert status == 2 and out == "" and err.count("\n") == 1
    assert re.search(words, err), err


def last_json(out):
    return json.loads(out.splitlines()[-1])


def test_json_and_the_rules_agree(house, monkeypatch, capsys):
    plain = ("--target", "8B", *PAIR[4:])
    texts = {}
    for name, argv in {
        "plain": plain, "standard": PAIR, "one": (*JUDGED, "--threshold", "1"), "judge": (*JUDGED, "--threshold", "0.3"),
        "topk": (*PAIR, "--verify", "topk", "--threshold", "1"), "padded": (*PAIR, "--draft", "Tiny-1B-padded"),
    }.items():  # fmt: skip
        status, out, err = run(house, monkeypatch, capsys, *argv, "--max-new-tokens", "40", "--json")
        assert status == 0, err
        r = last_json(out)
        assert out.count("\n") == 1 and r["text"] in err  # the stream goes to stderr
        assert r["new_tokens"] == len(r["tokens"]) and r["finish_reason"] in ("stop", "length")
        assert abs(r["tokens_per_round"] - r["new_tokens"] / r["rounds"]) < 1e-9
        assert r["mean_accepted"] * r["rounds"] == pytest.approx(sum(r["accepted_by"].values()))
        assert r["prompt_tokens"] == 5 and r["config"]["draft_len"] == {"plain": 0, "one": 25, "judge": 25}.get(name, 8)
        assert {"prefill_s", "decode_s", "load_s", "compile_s", "draft_ms", "verify_ms", "other_ms", "bandwidth_gb_s",
                "peak_memory_bytes", "tokens_per_s"} <= set(r)  # fmt: skip
        texts[name] = r
    assert {texts[n]["text"] for n in ("plain", "standard", "one", "topk", "padded")} == {texts["plain"]["text"]}
    assert texts["judge"]["accepted_by"]["judge"] > 0 and texts["one"]["accepted_by"]["judge"] == 0


def test_stop_texts_samples_and_colours(house, monkeypatch, capsys):
    argv = (*JUDGED, "--max-new-tokens", "30", "--temperature", "1")
    whole = last_json(run(house, monkeypatch, capsys, *argv, "--json")[1])["text"]
    stop = whole[7:9]
    cut = last_json(run(house, monkeypatch, capsys, *argv, "--stop", stop, "never", "--json")[1])
    assert cut["text"] == whole[: whole.find(stop)] and cut["finish_reason"] == "stop"
    status, out, err = run(house, monkeypatch, capsys, *argv, "--num-samples", "2", "--show")
    assert status == 0 and err.count("tokens/s") == 2
    assert generate.COLOURS["target"] in out and generate.COLOURS["rule"] in out


def test_each_sample_reads_its_prompt_anew(house, monkeypatch, capsys):
    reads = []
    prefill = generate.Engine.prefill
    monkeypatch.setattr(
        generate.Engine, "prefill", lambda self, *args: reads.append(list(self.target_cache.text)) or prefill(self, *args)
    )
    argv = (*JUDGED, "--max-new-tokens", "20", "--num-samples", "3", "--temperature", "1", "--json")
    result = last_json(run(house, monkeypatch, capsys, *argv)[1])
    assert reads == [[], [], []]
    assert sum(result["accepted_by"].values()) + result["rounds"] >= result["new_tokens"]  # all of the first sample


def test_a_prompt_that_is_no_utf8_can_be_pictured(house, monkeypatch, capsys, tmp_path):
    status, _, err = run(house, monkeypatch, capsys, *PAIR[:4], "--prompt", "a\udcffb", "--no-compile", "--dtype", "float32",
                         "--max-new-tokens", "3", "--html", str(tmp_path / "p.html"))  # fmt: skip
    assert status == 0 and "a?b" in (tmp_path / "p.html").read_text(), err


def typed(monkeypatch, *lines):
    """What people type at the prompt: lines, and exceptions for keys."""
    left = iter(lines)

    def read(prompt):
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


CHAT = (*PAIR[:4], *PAIR[6:], "--interactive", "--max-new-tokens")


def test_interactive_answers_until_end_of_file(house, monkeypatch, capsys):
    typed(monkeypatch, "Hello", "", "x" * 600, KeyboardInterrupt(), "again")
    status, out, err = run(house, monkeypatch, capsys, *CHAT, "5")
    assert status == 0 and err.count("tokens/s") == 2
    assert "the prompt has 600 tokens; the context is 512; ask something else" in err and "Ctrl-D ends the conversation" in err


@pytest.fixture()
def chatty(house, tmp_path):
    """The pair with a chat template, so that a conversation has a memory."""
    for name in ("Tiny-8B-Chat", "Tiny-1B"):
        shutil.copytree(house / "checkpoints" / name, tmp_path / "checkpoints" / name)
        (tmp_path / "checkpoints" / name / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
        )
    return tmp_path


def test_ctrl_c_at_any_place_of_a_turn_drops_the_turn_alone(chatty, monkeypatch, capsys):
    """While the prompt is encoded, and between the answer and the next prompt."""
    for place in ("fitting", "summary"):
        original, calls = getattr(generate, place), []

        def interrupted(*args, original=original, calls=calls):
            calls.append(args)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return original(*args)

        monkeypatch.setattr(generate, place, interrupted)
        typed(monkeypatch, "Hello", "Go on")
        status, out, err = run(chatty, monkeypatch, capsys, *CHAT, "5")
        monkeypatch.setattr(generate, place, original)
        assert status == 0 and len(calls) == 2 and err.count("Ctrl-D ends the conversation") == 1 and err.count("tokens/s") == 1


@pytest.mark.parametrize("single", [False, True])
def test_a_target_of_one_task_says_so_and_begins_each_question_anew(chatty, monkeypatch, capsys, single):
    if single:
        path = chatty / "checkpoints" / "Tiny-8B-Chat" / "generation_config.json"
        path.write_text(json.dumps({"single_task": "little sums"}))
    prompts, prefill = [], generate.Engine.prefill
    monkeypatch.setattr(generate.Engine, "prefill", lambda self, ids, seed: prompts.append(len(ids)) or prefill(self, ids, seed))
    typed(monkeypatch, "one", "two")
    assert run(chatty, monkeypatch, capsys, *PAIR, "--max-new-tokens", "5")[2].count("little sums") == single
    status, _, err = run(chatty, monkeypatch, capsys, *CHAT, "5")
    assert status == 0 and err.count("this target knows one task, little sums; ") == err.count("begins anew") == single
    assert (prompts[1] == prompts[2]) == single


def test_the_demo_pair_says_what_it_knows_where_it_is_asked_something(tmp_path, monkeypatch, capsys):
    short = ("--no-compile", "--max-new-tokens", "3")
    assert "one task" not in run(tmp_path, monkeypatch, capsys, *short)[2]
    status, out, err = run(tmp_path, monkeypatch, capsys, *short, "--prompt", "Why is the sky blue?")
    assert status == 0 and "this target knows one task, little sums in words" in err and "one task" not in out


def test_a_head_alone_judges_for_the_demo_pair(tmp_path, monkeypatch, capsys):
    head = load_head(generate.DEMO / "judge.pt")
    dataclasses.replace(head, threshold=0.75).save(tmp_path / "mine.pt")
    argv = ("--judge", "mine.pt", "--no-compile", "--max-new-tokens", "9", "--json")
    config = last_json(run(tmp_path, monkeypatch, capsys, *argv)[1])["config"]
    assert (config["judge"], config["threshold"], config["dtype"]) == ("mine.pt", 0.75, "float32")
    assert config["draft"] == str(generate.DEMO / "draft")
    llm = LLM(judge=tmp_path / "mine.pt", compile=False)
    assert llm.engine().threshold == 0.75 and llm.target.norm.weight.dtype == torch.float32


def test_colours_are_explained_on_a_terminal(house, monkeypatch, capsys):
    argv = (*JUDGED, "--max-new-tokens", "9")
    status, out, err = run(house, monkeypatch, capsys, *argv)
    assert status == 0 and "\033" not in out + err
    assert "accepted by the rule alone" not in run(house, monkeypatch, capsys, *argv, "--show")[2]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    status, out, err = run(house, monkeypatch, capsys, *argv)
    assert status == 0 and err.count(f"{generate.COLOURS['rule']}drafted, accepted by the rule alone") == 1 and "\033" in out


def test_a_conversation_is_kept_in_the_caches_and_forgotten_from_its_start(chatty, monkeypatch, capsys):
    prompts, read = [], []
    prefill, step = generate.Engine.prefill, checkpoint.Transformer.step

    def counted(self, tokens, *rest, compiled=True):
        read.append(0 if compiled else len(tokens))
        return step(self, tokens, *rest, compiled=compiled)

    monkeypatch.setattr(generate.Engine, "prefill", lambda self, ids, seed: prompts.append(len(ids)) or prefill(self, ids, seed))
    monkeypatch.setattr(checkpoint.Transformer, "step", counted)
    typed(monkeypatch, "one" * 20, "two" * 20, "three" * 20, "four" * 20)
    status, _, err = run(chatty, monkeypatch, capsys, *CHAT, "100")
    assert status == 0 and err.count("tokens/s") == 4
    assert prompts[1] > prompts[0] + 100 and prompts[3] + 100 <= 512
    assert err.count("the context of 512 tokens is full: the first") >= 1
    first = 2 * (prompts[0] - 1)  # by both models
    assert sum(read) < first + 2 * (prompts[1] + sum(prompts[2:]))  # the second question goes on from the first answer


def test_ctrl_c_stops_the_answer_and_not_the_conversation(chatty, monkeypatch, capsys):
    add, seen = Output.add, []

    def interrupted(self, tokens, accepted_by):
        seen.append(len(tokens))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return add(self, tokens, accepted_by)

    monkeypatch.setattr(Output, "add", interrupted)
    typed(monkeypatch, "Hello", "Go on")
    status, out, err = run(chatty, monkeypatch, capsys, *CHAT, "40")
    assert status == 0 and out.count("[stopped]") == 1 and err.count("tokens/s") == 2
    monkeypatch.setattr(Output, "add", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    status, out, _ = run(chatty, monkeypatch, capsys, *PAIR, "--max-new-tokens", "40")
    assert status == 130 and "[stopped]" not in out


def test_several_samples_are_all_in_the_json(house, monkeypatch, capsys):
    argv = (*JUDGED, "--max-new-tokens", "20", "--num-samples", "3", "--temperature", "1", "--json")
    result = last_json(run(house, monkeypatch, capsys, *argv)[1])
    assert len(result["texts"]) == 3 and result["texts"][0] == result["text"] and len(set(result["texts"])) == 3
