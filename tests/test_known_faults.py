"""Faults that users have reported of other engines, tried on this one; docs/known-faults.md names the reports."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import ROOT, tiny
from naive import is_greedy
from safetensors.torch import load_file, save_file
from test_cli import last_json, run, write_checkpoint
from test_convert_hf_checkpoint import hf_model
from test_engine import PROMPT, Letters, decode
from test_tokenizer import CONTROL, KINDS, make_json, make_spm, make_tiktoken

import checkpoint
import generate
import quantize
from convert_hf_checkpoint import convert
from engine import STANDARD, TARGET, Engine, Sampling, warp
from engine import generate as generate_text
from errors import UserError
from linear import MODES, Int4Linear, Int8Linear, group_of
from model import rotate
from tokenizer import LONGEST_RUN, Output, Tokenizer, load_tokenizer

FLAGS = ("--no-compile", "--dtype", "float32", "--json")


class Ending(Letters):
    """A tokenizer of two letters a token, some of which end a text."""

    def __init__(self, *ends: int) -> None:
        self.eos_ids = frozenset(ends)


def own_draft(**changes: object) -> Engine:
    """An engine whose draft is its target, so that every block is accepted whole."""
    return Engine(tiny(**changes), tiny(**changes), draft_len=8, max_len=64)


@pytest.fixture(scope="module")
def tokens_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer of each kind."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "json":
            make_json(folder)
        elif kind == "tiktoken":
            make_tiktoken(folder)
        else:
            make_spm(folder, kind.removeprefix("spm-"))
        made[kind] = load_tokenizer(folder)
    return made


def test_every_test_that_the_page_names_is_there():
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "known-faults.md").read_text()))
    assert len(named) > 40
    for file, name in sorted(named):
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


# --- speculative decoding, caches


@pytest.mark.parametrize("cap", [1, 2, 8, 9, 10, 17, 18])
def test_a_cap_is_kept_wherever_in_a_block_it_falls(cap):
    engine, prompt = own_draft(), PROMPT
    for _ in range(2):  # what the first text left behind must not show in the second, which goes on from its cut
        output = generate_text(engine, prompt, Output(Ending(), cap)).output
        assert len(output.tokens) == cap and output.finish_reason == "length"
        assert is_greedy(engine.target, prompt, output.tokens)
        prompt = [*prompt, *output.tokens, 7]


@pytest.mark.parametrize("M", [1, 5, 16])
def test_a_context_is_used_to_its_last_token(M):
    target, draft = (tiny(seed=seed, max_position_embeddings=128) for seed in (0, 1))
    prompt = PROMPT * 13
    tokens = Engine(target, draft, draft_len=M, max_len=128).complete(prompt, 128 - len(prompt))
    assert len(tokens) == 128 - len(prompt) and is_greedy(target, prompt, tokens)


def test_a_pairs_context_is_that_of_the_shorter(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "checkpoints" / "large")
    write_checkpoint(tmp_path / "checkpoints" / "small", seed=1, num_hidden_layers=1, max_position_embeddings=96)
    monkeypatch.chdir(tmp_path)
    assert checkpoint.find_pair("large").context == 512
    assert checkpoint.find_pair("large", "small").context == 96
    pair = ("--target", "large", "--draft", "small", "--prompt", "a" * 60, *FLAGS)
    status, _, err = run(tmp_path, monkeypatch, capsys, *pair, "--max-new-tokens", "37")
    assert status == 2 and "97 together; the context is 96" in err
    assert run(tmp_path, monkeypatch, capsys, *pair, "--max-new-tokens", "36")[0] == 0


def test_figures_leave_out_what_lies_behind_the_end():
    engine = own_draft()
    text = decode(engine, PROMPT, 40)[0]
    end = next(i for i in range(11, 17) if text[i] not in text[:i])  # within the second block of nine
    run = generate_text(engine, PROMPT, Output(Ending(text[end]), 40))
    assert run.output.tokens == text[:end] and run.output.finish_reason == "stop"
    assert sum(len(now.tokens) for now in run.rounds) > end
    assert run.accepted(STANDARD) == end - 1 and run.output.accepted_by.count(TARGET) == 1
    assert run.mean_accepted == (end - 1) / 2


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(1.0, top_k=20), Sampling(1.5, top_p=0.8)])
def test_a_draft_of_the_targets_own_distribution_is_always_accepted(sampling):
    engine = Engine(tiny(), tiny(), draft_len=6, sampling=sampling, max_len=120)
    engine.prefill(PROMPT)
    assert {len(now.tokens) for now in engine.rounds(len(PROMPT))} == {7}


def test_positions_are_exact_in_16_bits():
    model = tiny(max_position_embeddings=8192).bfloat16()
    cache, at = model.new_cache(8192), 8191  # bfloat16 has 8192 in its place
    assert cache.k.dtype == torch.bfloat16 and cache.cos.dtype == torch.float32
    assert abs(float(cache.cos[at, 0]) - math.cos(at)) < 1e-3  # the fastest turns by 1 a position, whatever the scaling
    x = torch.randn(1, 1, model.config.head_dim, generator=torch.Generator().manual_seed(0))
    exact, turned = (rotate(part, cache.cos[at : at + 1], cache.sin[at : at + 1]) for part in (x, x.bfloat16()))
    assert turned.dtype == torch.bfloat16 and (turned - exact).abs().max() < 0.01 * x.abs().max()


# --- where a text ends


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("kind", ["token", "text"])
@pytest.mark.parametrize("where", ["inside", "at", "beyond"])
def test_a_stop_in_the_block_that_crosses_the_cap(before, kind, where):
    tokens, stop = list(range(1, 12)), 20
    cap = {"inside": 6, "at": 5, "beyond": 4}[where]  # the stop is the sixth token
    tokens[5] = stop
    ending = Ending(stop) if kind == "token" else Ending()
    output = Output(ending, cap, [] if kind == "token" else [Letters.decode([stop])])
    assert not output.add(tokens[:before], [TARGET] * before)
    assert output.add(tokens[before:], [TARGET] * (len(tokens) - before))
    # at the cap exactly there is room for the stop text, but nobody has asked for a token behind the fifth
    assert output.finish_reason == ("stop" if where == "inside" else "length")
    assert output.tokens == tokens[: min(5, cap)] and output.text == Letters.decode(output.tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_stop_text_is_found_whatever_its_tokens(tokens_of, kind, size):
    tokenizer, text, stop = tokens_of[kind], "She had the target's answers, 12 apples", "e target's answ"
    ids, alone = tokenizer.encode(text), tokenizer.encode(stop)
    assert not any(ids[i : i + len(alone)] == alone for i in range(len(ids)))
    streamed = []
    output = Output(tokenizer, 100, ["never", stop], lambda piece, who: streamed.append(piece))
    assert any(output.add(ids[i : i + size], [TARGET] * size) for i in range(0, len(ids), size))
    assert output.finish_reason == "stop"
    assert output.text == "".join(streamed) == "She had th"
    assert tokenizer.decode(output.tokens).startswith("She had th") and len(output.tokens) < len(ids)


def test_an_answer_may_have_no_tokens():
    engine = own_draft()
    first = decode(engine, PROMPT, 1)[0][0]
    run = generate_text(engine, PROMPT, Output(Ending(first), 20))
    assert (run.output.tokens, run.output.text, run.output.finish_reason) == ([], "", "stop")
    assert run.tokens_per_s == run.mean_accepted == 0 and len(run.rounds) == 1
    assert is_greedy(engine.target, [*PROMPT, 4], engine.complete([*PROMPT, 4], 20))


# --- sampling and seeds


def test_top_k_comes_before_top_p():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    kept = [int(i) for i in (warp(logits, Sampling(1.0, top_k=2, top_p=0.5)) > -torch.inf)[0].nonzero()]
    assert kept == [3]  # 0.4 of the 0.7 that top-k leaves; top-p first would have kept 0.3 too


def test_a_checkpoint_sets_no_sampling(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "checkpoints" / "large")
    argv = ("--target", "large", "--prompt", "Hello", *FLAGS, "--max-new-tokens", "20")
    plain = last_json(run(tmp_path, monkeypatch, capsys, *argv)[1])
    settings = {"do_sample": True, "temperature": 5.0, "top_k": 3, "top_p": 0.5, "repetition_penalty": 2.0}
    (tmp_path / "checkpoints" / "large" / "generation_config.json").write_text(json.dumps(settings))
    again = last_json(run(tmp_path, monkeypatch, capsys, *argv)[1])
    assert again["tokens"] == plain["tokens"] and again["config"]["temperature"] == 0


def test_each_sample_has_a_seed_of_its_own(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "checkpoints" / "large")
    seeds, prefill = [], generate.Engine.prefill
    monkeypatch.setattr(generate.Engine, "prefill", lambda self, ids, seed: seeds.append(seed) or prefill(self, ids, seed))
    argv = ("--target", "large", "--prompt", "Hello", *FLAGS, "--temperature", "1", "--seed", "7", "--num-samples", "3")
    assert run(tmp_path, monkeypatch, capsys, *argv)[0] == 0
    assert seeds == [7, 8, 9]


def test_a_seeds_text_does_not_depend_on_the_texts_before_it():
    engine = Engine(tiny(), tiny(seed=1), draft_len=4, sampling=Sampling(1.5), max_len=60)
    texts = {seed: decode(engine, PROMPT, 40, seed)[0] for seed in (0, 1, 2)}
    assert len({tuple(text) for text in texts.values()}) == 3
    decode(engine, [9, 9], 11, 5)
    for seed in (2, 0, 1):
        assert decode(engine, PROMPT, 40, seed)[0] == texts[seed]


# --- vocabularies


@pytest.mark.parametrize("kind", KINDS)
def test_spaces_before_punctuation_stay(tokens_of, kind):
    for text in ("x != y", "! ! !", "the word 'social' , and", "do n't , I 'm ?", "' : ' ..."):
        assert tokens_of[kind].decode(tokens_of[kind].encode(text)) == text


def test_truncation_and_padding_in_the_file_change_no_prompt(tmp_path):
    make_json(tmp_path)
    text = "The target reads all of it in one pass. " * 20
    before = load_tokenizer(tmp_path).encode(text)
    changed = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=4096)
    changed.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(text) == before


def test_a_control_token_may_have_any_characters(tmp_path):
    make_json(tmp_path)
    changed = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    changed.add_special_tokens(["<｜end▁of▁sentence｜>"])
    changed.add_tokens(["<｜tool▁sep｜>"])
    changed.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<｜end▁of▁sentence｜>"}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a<｜tool▁sep｜>b<｜end▁of▁sentence｜>", special=True)
    assert tokenizer.eos_ids == {ids[-1]} and tokenizer.decode(ids) == "a<｜tool▁sep｜>b"


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_run_of_one_character_is_read(tokens_of, kind):
    tokenizer = tokens_of[kind]
    for text in (" " * 60_000, "a" * 60_000, "a" * LONGEST_RUN + " b", "é" * (LONGEST_RUN + 1)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("a" * (2 * LONGEST_RUN - 5) + CONTROL[2], special=True)
    assert ids[-1] == tokenizer.vocabulary.special[CONTROL[2]]


def test_white_space_beyond_the_librarys_stack_is_read(tokens_of):
    text = "x" + " " * 1_200_000
    assert tokens_of["tiktoken"].decode(tokens_of["tiktoken"].encode(text)) == text


# --- conversion


def change(folder: Path, config: dict | None = None, **weights: torch.Tensor | None) -> None:
    """Change keys of config.json and weights (None: take it away), whose names are given with __ for a dot."""
    if config:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | config))
    path = folder / "model.safetensors"
    found = load_file(path) | {name.replace("__", "."): value for name, value in weights.items()}
    save_file({name: value for name, value in found.items() if value is not None}, path, {"format": "pt"})


@torch.no_grad()
def test_a_head_that_the_configuration_calls_tied_is_kept(tmp_path, capsys):
    theirs = hf_model(tmp_path / "hf", "llama3")
    change(tmp_path / "hf", {"tie_word_embeddings": True})
    convert(tmp_path / "hf", tmp_path / "ours", None)
    assert "lm_head.weight is kept" in capsys.readouterr().err
    tokens = torch.tensor([PROMPT])
    ours = checkpoint.load_model(tmp_path / "ours", torch.float32)
    assert not ours.config.tie_embeddings
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_head_that_repeats_the_embeddings_is_left_out(tmp_path, capsys):
    theirs = hf_model(tmp_path / "hf", "qwen2")
    embedding = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path / "hf", lm_head__weight=embedding.clone())
    convert(tmp_path / "hf", tmp_path / "ours", None)
    assert "output.weight" not in load_file(tmp_path / "ours" / "model.safetensors") and "kept" not in capsys.readouterr().err
    tokens = torch.tensor([PROMPT])
    ours = checkpoint.load_model(tmp_path / "ours", torch.float32)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_a_head_that_is_missing_is_not_replaced_by_the_embeddings(tmp_path):
    hf_model(tmp_path / "hf", "llama3")
    change(tmp_path / "hf", lm_head__weight=None)
    with pytest.raises(UserError, match=r"lacks output\.weight: 1 of"):
        convert(tmp_path / "hf", tmp_path / "ours", None)


def test_a_second_copy_of_the_weights_is_not_read(tmp_path):
    hf_model(tmp_path / "hf", "mistral", "20KB")
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, tmp_path / "hf" / "consolidated.safetensors")
    convert(tmp_path / "hf", tmp_path / "ours", None)
    checkpoint.load_model(tmp_path / "ours", torch.float32)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer.model"])
def test_a_pointer_that_git_left_in_a_files_place_is_told(tmp_path, name):
    hf_model(tmp_path, "llama3")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 976000\n")
    with pytest.raises(UserError, match=name):
        load_tokenizer(tmp_path) if name.startswith("tokenizer") else convert(tmp_path, tmp_path / "ours", None)


def test_a_folders_name_says_nothing_about_the_model(tmp_path):
    hf_model(tmp_path / "CodeLlama-34b-Llama-3-70B-chat-int4-g32", "qwen2")
    convert(tmp_path / "CodeLlama-34b-Llama-3-70B-chat-int4-g32", tmp_path / "Mistral-7B-int8", None)
    model = checkpoint.load_model(tmp_path / "Mistral-7B-int8", torch.float32)
    assert (model.config.architecture, model.config.n_layers, model.quantization) == ("Qwen2ForCausalLM", 3, "none")


W2 = "model__layers__1__mlp__down_proj"


@pytest.mark.parametrize("weights, words", [
    ({f"{W2}__weight": torch.ones(48, 80).to(torch.float8_e4m3fn)}, "down_proj.weight is F8_E4M3.*quantized already"),
    ({f"{W2}__weight": torch.ones(48, 80, dtype=torch.int8)}, "down_proj.weight is I8.*quantized already"),
    ({f"{W2}__weight_scale_inv": torch.ones(1, 1)}, "down_proj.weight_scale_inv"),
    ({f"{W2}__weight": None, f"{W2}__qweight": torch.ones(10, 48, dtype=torch.int32)}, "down_proj.qweight"),
])  # fmt: skip
def test_weights_that_others_quantized_are_refused(tmp_path, weights, words):
    hf_model(tmp_path / "hf", "llama3")
    change(tmp_path / "hf", **weights)
    with pytest.raises(UserError, match=words):
        convert(tmp_path / "hf", tmp_path / "ours", None)
    assert not (tmp_path / "ours").exists()


# --- numbers that a dtype or a quantization can't hold


def with_weight(folder: Path, value: float) -> Path:
    """A checkpoint in bfloat16 one of whose weights is ``value``."""
    hf_model(folder / "hf", "llama3")
    weight = load_file(folder / "hf" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    weight[3, 5] = value
    change(folder / "hf", **{f"{W2}__weight": weight.bfloat16()})
    return folder / "hf"


@torch.no_grad()
def test_numbers_beyond_float16_are_told(tmp_path):
    source = with_weight(tmp_path, 1e5)
    with pytest.raises(UserError, match=r"layers\.1\.w2\.weight holds numbers beyond float16's range"):
        convert(source, tmp_path / "half", torch.float16)
    assert not (tmp_path / "half" / "config.json").exists()
    convert(source, tmp_path / "ours", torch.bfloat16)
    with pytest.raises(UserError, match="beyond float16's range"):
        checkpoint.load_model(tmp_path / "ours", torch.float16)
    assert checkpoint.load_model(tmp_path / "ours", torch.float32)(torch.tensor([PROMPT])).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_never_converted_nor_quantized(tmp_path, value):
    source = with_weight(tmp_path, value)
    for dtype, mode in ((None, "none"), (torch.float16, "none"), (None, "int8"), (None, "int4-g32")):
        with pytest.raises(UserError, match=r"layers\.1\.w2\.weight holds numbers"):
            convert(source, tmp_path / f"{dtype}-{mode}", dtype, mode)
    change(source, **{f"{W2}__weight": torch.ones(48, 80).bfloat16()})
    convert(source, tmp_path / "ours", None)
    path = tmp_path / "ours" / "model.safetensors"
    weights = load_file(path)
    weights["layers.1.w2.weight"][3, 5] = value
    save_file(weights, path, {"layout": checkpoint.LAYOUT, "quantization": "none"})
    for mode in MODES:
        with pytest.raises(UserError, match=r"layers\.1\.w2\.weight holds numbers"):
            quantize.quantize(tmp_path / "ours", tmp_path / f"ours-{mode}", mode)
        with pytest.raises(UserError, match=r"layers\.1\.w2\.weight holds numbers"):
            checkpoint.load_model(tmp_path / "ours", torch.float32, quantization=mode)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_next_to_nothing_are_quantized_to_next_to_nothing(mode):
    sizes = torch.tensor([0.0, 1e-45, 1e-40, 1e-36, 1.0])
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * sizes[:, None]
    if mode == "int8":
        back = Int8Linear.dequantize(Int8Linear.quantize(weight))
    else:
        back = Int4Linear.dequantize(Int4Linear.quantize(weight, group_of(mode)))
    allowed = 0.02 * sizes + 1e-43 if mode == "int8" else 0.3 * sizes + 1e-39  # near the least steps of fp32 and bfloat16
    assert ((back - weight).abs().amax(1) <= allowed).all()
