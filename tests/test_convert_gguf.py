"""Small GGUF files, written here from transformers' own models the way llama.cpp writes them, and brought in again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import convert_gguf
import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf import GGMLQuantizationType as Q
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import files
from checkpoint import load_model
from errors import UserError, run_cli
from tokenizer import load_tokenizer

CORPUS = [
    "The draft proposes; the target reads it all. It's 12 or 345.",
    "def add(a, b):\n    return a + b\n",
    "日本語 naïve 🎉",
] * 4
MIXED = [
    "The target's draft", "WE'RE  2  345  1", "  x\r\n\r\n\ty \n\n", "日本語のe\u0301 🎉", "a<|im_end|>b", "<s>the", "٣٤ ½", " ",
    "",
]  # fmt: skip
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
           "qwen3": (Qwen3Config, Qwen3ForCausalLM)}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def train_bpe() -> Tokenizer:
    """A byte-level BPE of 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train_bpe()


@pytest.fixture(scope="session")
def spm(tmp_path_factory) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE like Llama 2's: byte fallback, no normalisation."""
    prefix = str(tmp_path_factory.mktemp("spm") / "m")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=prefix, vocab_size=320, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def tiny_model(arch: str, **changes: object):
    """A random model of transformers with logits of order 1, and its configuration."""
    config_class, model_class = MODELS[arch]
    sizes: dict[str, object] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if arch == "qwen2":
        del sizes["head_dim"]
    torch.manual_seed(0)
    config = config_class(**sizes | changes)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Half-split rows of q or k in llama.cpp's order: each head's row j of the first half, then row j of the second."""
    out = torch.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = rows[head * size + j]
            out[head * size + 2 * j + 1] = rows[head * size + size // 2 + j]
    return out


def gguf_tensors(model, arch: str) -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names."""
    c = model.config
    out = {}
    for name, weight in model.state_dict().items():
        if c.tie_word_embeddings and name == "lm_head.weight":
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = interleave(weight, c.num_attention_heads if "q_proj" in name else c.num_key_value_heads)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        out[name] = weight.float().numpy()
    if c.rope_parameters["rope_type"] == "llama3":  # llama.cpp keeps what each frequency is divided by
        head_dim = c.head_dim
        unscaled = c.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        out["rope_freqs.weight"] = (unscaled / model.model.rotary_emb.inv_freq).numpy()
    return out


def metadata(arch: str, model) -> dict[str, object]:
    c = model.config
    return {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size, "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": c.rope_parameters["rope_theta"],
    } | ({} if arch == "qwen2" else {"attention.key_length": c.head_dim})  # fmt: skip


def bpe_metadata(bpe: Tokenizer, pre: str, size: int = 320) -> dict[str, object]:
    """Metadata of a byte-level tokenizer: learned tokens, control tokens, one plain added token, and filler up to `size`."""
    learned = sorted(bpe.get_vocab(), key=bpe.get_vocab().get)
    tokens = [*learned, *CONTROL, "<tool>"]
    types = [1] * len(learned) + [3] * len(CONTROL) + [4]
    filler = [f"[PAD{i}]" for i in range(len(tokens), size)]
    merges = [" ".join(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    end = tokens.index("<|im_end|>")
    return {"model": "gpt2", "pre": pre, "tokens": tokens + filler, "token_type": types + [5] * len(filler), "merges": merges,
            "eos_token_id": end, "bos_token_id": tokens.index("<|endoftext|>")}  # fmt: skip


def spm_metadata(spm: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    n = spm.vocab_size()
    kinds = [6 if spm.is_byte(i) else 3 if spm.is_control(i) else 2 if spm.is_unknown(i) else 1 for i in range(n)]
    return {"model": "llama", "tokens": [spm.id_to_piece(i) for i in range(n)], "scores": [spm.get_score(i) for i in range(n)],
            "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip


def write_gguf(path: Path, arch: str, meta: dict, tokenizer: dict, tensors: dict[str, np.ndarray], kind: Q = Q.F32) -> Path:
    """Write a GGUF file; `kind` is how its matrices are stored."""
    writer = gguf.GGUFWriter(path, arch)
    values = {f"{arch}.{key}": v for key, v in meta.items()} | {f"tokenizer.ggml.{key}": v for key, v in tokenizer.items()}
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.add_string("tokenizer.chat_template", "{{ messages[0].content }}<|im_end|>")
    for name, value in tensors.items():
        if kind is not Q.F32 and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make(tmp_path, bpe):
    """A function that writes a tiny file; its arguments change or, when None, leave out metadata and tensors."""

    def write(arch="llama", pre="llama-bpe", meta=None, tokenizer=None, tensors=None, kind=Q.F32, **config):
        model = tiny_model(arch, **config)
        changed = [
            metadata(arch, model) | (meta or {}),
            bpe_metadata(bpe, pre) | (tokenizer or {}),
            gguf_tensors(model, arch) | (tensors or {}),
        ]
        kept = [{key: value for key, value in part.items() if value is not None} for part in changed]
        return write_gguf(tmp_path / "model.gguf", arch, *kept, kind), model

    return write


# ---- weights


@pytest.mark.parametrize(
    ("arch", "pre", "config"),
    [
        ("llama", "llama-bpe", {}),
        ("llama", "llama-bpe", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", "smollm", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 16}),
        ("llama", "llama-bpe", {"attention_bias": True}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen2", {}),
    ],
)
def test_logits_are_those_of_transformers(make, tmp_path, arch, pre, config):
    path, theirs = make(arch, pre, **config)
    convert_gguf.convert(path, tmp_path / "out", "float32")
    ours = load_model(tmp_path / "out", torch.float32)
    ids = torch.arange(0, 300, 7)[None]
    with torch.inference_mode():
        expected = theirs(ids).logits
        difference = (ours(ids) - expected).abs().max()
    assert expected.std() > 0.3
    assert difference < 1e-4


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0])
def test_quantised_matrices_come_in_as_the_numbers_they_stand_for(make, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(convert_gguf, "ROWS_AT_ONCE", 100)  # embed.weight's 320 rows: three whole pieces and a part
    path, model = make("qwen2", "qwen2", kind=kind)
    convert_gguf.convert(path, tmp_path / "out", "float32")
    ours = load_model(tmp_path / "out", torch.float32)
    original = model.model.embed_tokens.weight.detach()
    expected = gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), kind), kind)
    assert torch.equal(ours.embed.weight, torch.from_numpy(expected))
    assert 0 < (ours.embed.weight - original).abs().max() < 0.1


def test_configuration(make, tmp_path):
    path, _ = make("llama", meta={"attention.sliding_window": 48}, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-6)
    convert_gguf.convert(path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6  # the decimal, not the float32 nearest to it
    assert config["max_position_embeddings"] == 48
    assert config["rope_scaling"] == {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert config["torch_dtype"] == "bfloat16"
    assert load_model(tmp_path / "out", torch.bfloat16).embed.weight.dtype == torch.bfloat16


def test_linear_rope(make, tmp_path):
    path, _ = make(meta={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    convert_gguf.convert(path, tmp_path / "out")
    assert load_model(tmp_path / "out", torch.float32).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


# ---- tokenizers


def reference(bpe: Tokenizer, pre: str):
    """The family's own tokenizer over the same vocabulary: text -> ids."""
    vocab, merges = bpe.get_vocab(), [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    if pre == "qwen2":
        theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
        theirs.add_tokens([*CONTROL, "<tool>"], special_tokens=True)
        return lambda text: theirs(text, add_special_tokens=False).input_ids
    theirs = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    theirs.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
    }[pre]
    theirs.add_special_tokens([*CONTROL, "<tool>"])
    return lambda text: theirs.encode(text).ids


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "smollm", "gpt-2"])
def test_byte_level_tokenizer(make, tmp_path, bpe, pre):
    path, _ = make(pre=pre)
    convert_gguf.convert(path, tmp_path / "out")
    tokenizer, expected = load_tokenizer(tmp_path / "out"), reference(bpe, pre)
    for text in [*MIXED, *CORPUS]:
        assert tokenizer.encode(text, special=True) == expected(text)
    end, bos = bpe.get_vocab_size() + 2, bpe.get_vocab_size()
    assert tokenizer.n_tokens == bpe.get_vocab_size() + 4  # the filler isn't part of the vocabulary
    assert tokenizer.eos_ids == {end, bos}  # <|im_end|>, and <|endoftext|> by its name
    assert tokenizer.encode_prompt("the")[0] == bos if pre == "llama-bpe" else tokenizer.encode_prompt("the")[0] != bos
    assert tokenizer.encode_chat([{"role": "user", "content": "the<|im_end|>"}]).count(end) == 1
    assert tokenizer.encode("<tool>") == [bpe.get_vocab_size() + 3]  # plain text, though added: whole, and kept
    assert tokenizer.decode(tokenizer.encode("x<tool>")) == "x<tool>"


def test_llama3_keeps_a_word_that_is_a_token_whole(make, tmp_path, bpe):
    words = bpe_metadata(bpe, "llama-bpe")
    words["tokens"][300:304], words["token_type"][300:304] = ["zqx", *CONTROL], [1, 3, 3, 3]  # no merge leads to it
    words |= {"bos_token_id": 301, "eos_token_id": 303}
    assert bpe.get_vocab_size() == 300
    path, _ = make(tokenizer=words)
    convert_gguf.convert(path, tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").encode("zqx") == [300]


def test_sentencepiece_tokenizer(make, tmp_path, spm):
    path, _ = make(tokenizer=dict.fromkeys(["pre", "merges"]) | spm_metadata(spm))
    convert_gguf.convert(path, tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    for text in [text for text in [*MIXED, *CORPUS] if "<s>" not in text]:
        assert tokenizer.encode(text) == spm.encode(text)
        assert tokenizer.decode(spm.encode(text)) == text
    assert tokenizer.encode("<s>the", special=True) == [1, *spm.encode("the")]
    assert tokenizer.encode_prompt("the") == [1, *spm.encode("the")]
    assert tokenizer.eos_ids == {2}


@pytest.mark.parametrize(("better", "pieces"), [("ab", ["▁", "ab", "c"]), ("bc", ["▁", "a", "bc"])])
def test_sentencepiece_merges_by_score(make, tmp_path, better, pieces):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "bc"]
    scores = [0.0] * 259 + [-9.0] * 4 + [-1.0 if better == "ab" else -2.0, -1.0 if better == "bc" else -2.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 6
    changes = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1, "eos_token_id": 2}
    path, _ = make(tokenizer=dict.fromkeys(["pre", "merges"]) | changes)
    convert_gguf.convert(path, tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").encode("abc") == [tokens.index(piece) for piece in pieces]


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "dbrx"}, "pre-tokenizer 'dbrx' isn't supported; supported: qwen2, llama-bpe"),
        ({"tokenizer": {"pre": None}}, "pre-tokenizer None"),
        ({"tokenizer": {"model": "bert"}}, "tokenizer of kind 'bert'"),
        ({"tokenizer": {"merges": ["a zzz"]}}, "merges don't fit its tokens"),
        ({"tokenizer": {"tokens": [str(i) for i in range(321)]}}, "321 tokens, but only 320 rows"),
        ({"tokenizer": {"bos_token_id": None}}, "no bos_token_id"),
        ({"meta": {"expert_count": 8}}, "mixture of experts"),
        ({"meta": {"block_count": None}}, "'llama.block_count' is missing"),
        ({"meta": {"attention.head_count": [4, 2]}}, "head_count differs from layer to layer"),
        ({"meta": {"rope.dimension_count": 8}}, "part of the head"),
        ({"meta": {"rope.scaling.type": "yarn"}}, "type 'yarn' isn't supported"),
        ({"meta": {"block_count": 3}}, "tensor 'blk.2.attn_k.weight' is missing"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "tensor 'blk.1.ffn_up.weight' is missing"),
        ({"tensors": {"blk.1.ffn_up.scale": np.ones(1, np.float32)}},
         "tensor 'blk.1.ffn_up.scale' isn't part of a LlamaForCausalLM"),
        ({"tensors": {"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)}}, "isn't Llama 3's scaling"),
        ({"tensors": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "output_norm.weight holds numbers beyond"),
    ],
)  # fmt: skip
def test_what_is_refused(make, tmp_path, changes, reason):
    path, _ = make(**changes)
    with pytest.raises(UserError, match=reason):
        convert_gguf.convert(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]  # nothing half-written


def test_numbers_too_big_for_the_dtype(make, tmp_path):
    path, _ = make(tensors={"output_norm.weight": np.full(64, 1e5, np.float32)})
    with pytest.raises(UserError, match="float16's range"):
        convert_gguf.convert(path, tmp_path / "out", "float16")
    convert_gguf.convert(path, tmp_path / "out", "bfloat16")


def test_an_unknown_architecture(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "gemma3", {}, {}, {})
    with pytest.raises(UserError, match="architecture 'gemma3' isn't supported; supported: llama, qwen2, qwen3"):
        convert_gguf.convert(path, tmp_path / "out")


@pytest.mark.parametrize("part", [0.0, 0.00001, 0.0005, 0.01, 0.05, 0.1, 0.5, 0.99])
def test_a_file_cut_short(make, tmp_path, part):
    path, _ = make()
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(UserError, match="cut short at|not a GGUF file"):
        convert_gguf.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder(make, tmp_path):
    path, _ = make()
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for force, reason in ((False, "exists already"), (True, "isn't a checkpoint")):
        with pytest.raises(UserError, match=reason):
            convert_gguf.convert(path, out, force=force)
    assert (out / "thesis.txt").exists()
    convert_gguf.convert(path, tmp_path / "new")
    convert_gguf.convert(path, tmp_path / "new", "float16", force=True)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["torch_dtype"] == "float16"
    assert not (tmp_path / "new.partial").exists()


def test_what_another_process_writes_is_left_alone(make, tmp_path):
    path, _ = make()
    partial = tmp_path / "out.partial"
    partial.mkdir()
    other = files.hold(partial)
    with pytest.raises(UserError, match="another process writes"):
        convert_gguf.convert(path, tmp_path / "out")
    os.close(other)
    assert partial.is_dir()
    convert_gguf.convert(path, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists() and not partial.exists()


def test_the_command_line(make, tmp_path, monkeypatch, capsys):
    path, _ = make()
    monkeypatch.setattr(sys, "argv", ["convert_gguf.py", str(path), "--out", str(tmp_path / "out"), "--dtype", "float32"])
    run_cli(convert_gguf.main)
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    out, err = capsys.readouterr()
    assert out == f"wrote {tmp_path}/out; next: python generate.py --target {tmp_path}/out\n"
    assert err.startswith(f"{path}, 0.00 GB, becomes 0.00 GB of float32 in {tmp_path}/out\n")
    assert 0 <= size - 4 * convert_gguf.GgufFile(path).values() < 10_000  # the header
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(UserError, match="and its disk has 0.0 GB free"):
        convert_gguf.convert(path, tmp_path / "other")
    with pytest.raises(SystemExit) as caught:
        run_cli(convert_gguf.main)  # the folder exists now
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


def test_without_the_gguf_package(make, tmp_path, monkeypatch):
    path, _ = make()
    monkeypatch.setattr(convert_gguf, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        convert_gguf.convert(path, tmp_path / "out")
