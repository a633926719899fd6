"""Bring a GGUF file in: dequantised weights in this project's layout, the tokenizer, and the configuration.

    python scripts/convert_gguf.py FILE.gguf --out checkpoints/NAME [--dtype bfloat16|float16|float32] [--force]

Llama-, Qwen2- and Qwen3-architecture files are read, quantised in any way the `gguf` package can undo. The result is a
checkpoint folder like any other: `config.json` in Hugging Face form, `tokenizer.json`, and safetensors. The folder is
written under a temporary name and renamed once it is whole; at most one fused tensor and one output shard are in memory.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm

from checkpoint import DTYPES, check_finite, load_config, open_source
from files import check_room, hold, write_json
from tokenizer import load_tokenizer
from writer import CheckpointWriter

try:
    import gguf
except ImportError:  # an extra: nothing else in the project needs it
    gguf = None  # type: ignore[assignment]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROWS_AT_ONCE = 4096  # rows dequantised to fp32 at a time, so that a big embedding is never held in fp32

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

# our name for a token with a part to play -> that in GGUF's key
NAMED_TOKENS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "pad": "padding", "unk": "unknown"}

# How text is cut before the merges, by tokenizer.ggml.pre: each is the expression of the model family's own tokenizer.
# SmolLM and GPT-2 use the byte-level pre-tokenizer's built-in expression; SmolLM cuts single digits off before it.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
LLAMA3_SPLIT = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
PRE_TOKENIZERS = {
    "qwen2": QWEN2_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "smollm": None,
    "gpt-2": None,
}

# Control tokens that end a text. A GGUF file names one eos id only; its runtime finds the others by these names.
END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")


def bounded_reader(path: Path) -> Any:
    """The package's reader, which by itself would go on beyond the file's end for as many items as a damaged count says."""

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("a value reaches beyond the end")
            return super()._get(offset, dtype, count, override_order)

    return Reader(path)


class GgufFile:
    """A GGUF file opened for reading: `meta`, key -> value, and `tensors`, name -> the package's tensor record.

    Raises `UserError` when the file is missing, isn't GGUF, is cut short, is one part of several, or is of an architecture
    this project doesn't run.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the path of a .gguf file")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path}: not a GGUF file (it doesn't begin with 'GGUF')")
        try:
            reader = bounded_reader(path)
            self.meta = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
            # On a file cut short the package fails wherever its views run out of bytes.
            raise UserError(f"{path}: damaged or cut short at {path.stat().st_size} bytes ({error})") from error
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.arch = str(self.meta.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise UserError(f"{path}: architecture {self.arch!r} isn't supported; supported: {', '.join(ARCHITECTURES)}")
        if self.meta.get("split.count", 1) > 1:
            raise UserError(f"{path}: one of {self.meta['split.count']} parts; merge them with llama-gguf-split first")

    def need(self, key: str) -> Any:
        """The metadata value `key`; `{arch}` in it stands for the architecture."""
        key = key.format(arch=self.arch)
        if key not in self.meta:
            raise UserError(f"{self.path}: metadata key {key!r} is missing")
        return self.meta[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Like `need`, with a default."""
        return self.meta.get(key.format(arch=self.arch), default)

    def count(self, key: str, default: int | None = None) -> int:
        """Like `need` or `get`, for a number that is one for the whole model."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int):
            raise UserError(f"{self.path}: {key.format(arch=self.arch)} differs from layer to layer, which isn't supported")
        return value

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, rows first (GGUF stores it the other way round)."""
        if name not in self.tensors:
            raise UserError(f"{self.path}: tensor {name!r} is missing")
        return [int(n) for n in reversed(self.tensors[name].shape)]

    def values(self) -> int:
        """The number of values in all tensors together."""
        return sum(math.prod(self.shape(name)) for name in self.tensors)

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name`, dequantised, in `dtype`."""
        out = torch.empty(self.shape(name), dtype=dtype)
        tensor = self.tensors[name]
        try:
            for start in range(0, len(out), ROWS_AT_ONCE):
                rows = tensor.data[start : start + ROWS_AT_ONCE]
                out[start : start + ROWS_AT_ONCE] = torch.from_numpy(
                    np.array(gguf.quants.dequantize(rows, tensor.tensor_type), dtype=np.float32)
                )
        except NotImplementedError as error:
            raise UserError(f"{self.path}: {name} is quantised as {tensor.tensor_type.name}, which can't be undone") from error
        check_finite(f"{self.path}: {name}", out)
        return out


def plain(value: float) -> float:
    """A float32 of the metadata as the short decimal it was made from (1e-06, not 9.999999974752427e-07)."""
    return float(str(np.float32(value)))


def model_config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """`config.json` in Hugging Face form for this file's model."""
    heads = file.count("{arch}.attention.head_count")
    dim = file.count("{arch}.embedding_length")
    head_dim = file.count("{arch}.attention.key_length", dim // heads)
    if file.get("{arch}.expert_count", 0):
        raise UserError(f"{file.path}: a mixture of experts, which isn't supported")
    if file.get("{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{file.path}: RoPE on a part of the head isn't supported")
    # Attention is over the whole context here; the two agree as far as a sliding window reaches.
    context = file.count("{arch}.context_length")
    context = min(context, file.get("{arch}.attention.sliding_window") or context)
    theta = plain(file.get("{arch}.rope.freq_base", 10000.0))
    return {
        "architectures": [ARCHITECTURES[file.arch]],
        "model_type": file.arch,
        "hidden_size": dim,
        "intermediate_size": file.count("{arch}.feed_forward_length"),
        "num_hidden_layers": file.count("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": context,
        "rms_norm_eps": plain(file.need("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": dtype,
    }


def rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling of the RoPE frequencies, linear or Llama 3's, or None.

    Of Llama 3's scaling GGUF doesn't keep the four numbers, only the divisor of each frequency that follows from them. Every
    published Llama has low 1, high 4 and 8,192 original positions; the divisors are computed from these again and must agree.
    """
    kind = file.get("{arch}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": plain(file.need("{arch}.rope.scaling.factor"))}
    if kind != "none":
        raise UserError(f"{file.path}: RoPE scaling of type {kind!r} isn't supported")
    if "rope_freqs.weight" not in file.tensors:
        return None
    divisors = file.load("rope_freqs.weight", torch.float32).double()
    factor, low, high, original = float(f"{divisors.max():.4g}"), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 1: a high frequency, left as it is
    if not torch.allclose(1 / ((1 - share) / factor + share), divisors, rtol=1e-4):
        raise UserError(f"{file.path}: rope_freqs.weight isn't Llama 3's scaling, the only one supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k from GGUF's interleaved RoPE order (x0 y0 x1 y1 …) to half-split (x0 x1 … y0 y1 …), head by head."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])  # [H, hd/2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def fused_names(file: GgufFile, config: dict[str, Any]) -> dict[str, list[str]]:
    """This project's tensor name -> the GGUF tensors stacked in it, for the whole model.

    Raises `UserError` if the file lacks one of them, or has one that would be left over.
    """
    names = {"embed.weight": ["token_embd.weight"]}
    if config["num_hidden_layers"] > len(file.tensors):
        raise UserError(f"{file.path}: {config['num_hidden_layers']} layers, but only {len(file.tensors)} tensors")
    for i in range(config["num_hidden_layers"]):
        new, old = f"layers.{i}", f"blk.{i}"
        names[f"{new}.attn_norm.weight"] = [f"{old}.attn_norm.weight"]
        names[f"{new}.wqkv.weight"] = [f"{old}.attn_{x}.weight" for x in "qkv"]
        if config["attention_bias"]:
            names[f"{new}.wqkv.bias"] = [f"{old}.attn_{x}.bias" for x in "qkv"]
        if file.arch == "qwen3":
            names[f"{new}.q_norm.weight"] = [f"{old}.attn_q_norm.weight"]
            names[f"{new}.k_norm.weight"] = [f"{old}.attn_k_norm.weight"]
        names[f"{new}.wo.weight"] = [f"{old}.attn_output.weight"]
        if config["attention_bias"] and file.arch != "qwen2":  # Hugging Face's flag means all four; Qwen2 has only three
            names[f"{new}.wo.bias"] = [f"{old}.attn_output.bias"]
        names[f"{new}.ffn_norm.weight"] = [f"{old}.ffn_norm.weight"]
        names[f"{new}.w13.weight"] = [f"{old}.ffn_gate.weight", f"{old}.ffn_up.weight"]
        names[f"{new}.w2.weight"] = [f"{old}.ffn_down.weight"]
    names["norm.weight"] = ["output_norm.weight"]
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ["output.weight"]
    used = {part for parts in names.values() for part in parts}
    for missing in sorted(used - file.tensors.keys()):
        raise UserError(f"{file.path}: tensor {missing!r} is missing")
    for extra in sorted(file.tensors.keys() - used - {"rope_freqs.weight"}):
        raise UserError(f"{file.path}: tensor {extra!r} isn't part of a {ARCHITECTURES[file.arch]}")
    return names


def fused_tensors(file: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors one after another, named and laid out as this project's checkpoints have them."""
    names = fused_names(file, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, sources in tqdm(names.items(), desc=file.path.name, unit="tensor", disable=None):
        parts = []
        for source in sources:
            part = file.load(source, dtype)
            kind = source.split(".")[-2]
            # Only the Llama architecture is stored interleaved; Qwen's rows are in half-split order already.
            turned = file.arch == "llama" and kind in heads
            if turned and len(part) % (2 * heads[kind]):
                raise UserError(f"{file.path}: {source} has {len(part)} rows, which don't divide into {heads[kind]} heads")
            parts.append(half_split(part, heads[kind]) if turned else part)
        if len({part.shape[1:] for part in parts}) > 1:
            raise UserError(f"{file.path}: {', '.join(sources)} have shapes that don't fit together")
        yield name, torch.cat(parts) if len(parts) > 1 else parts[0]


def bpe(file: GgufFile, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    """The BPE model of these tokens and merges."""
    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, merges, **options)
    except Exception as error:  # the library raises nothing more particular
        raise UserError(f"{file.path}: its merges don't fit its tokens ({error})") from error


def byte_level_tokenizer(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer (GGUF's "gpt2") from the file's tokens and merges."""
    pre = file.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"{file.path}: pre-tokenizer {pre!r} isn't supported; supported: {', '.join(PRE_TOKENIZERS)}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.need("tokenizer.ggml.merges"))]
    split = PRE_TOKENIZERS[pre]
    # Llama 3's tokenizer is tiktoken: a word that is a token stays whole, whatever the merges would make of it.
    tokenizer = Tokenizer(bpe(file, tokens, merges, ignore_merges=split is LLAMA3_SPLIT))
    cuts: list[Any] = []
    if split is not None:
        cuts.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    elif pre == "smollm":
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_tokenizer(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """A BPE tokenizer with byte fallback (GGUF's "llama", from SentencePiece) from the file's tokens and scores.

    SentencePiece joins the pair whose union has the best score, and ranks merges by nothing else; so every way to cut a
    piece into two pieces is a merge, ranked by the piece's score.
    """
    vocab = set(tokens)
    scores = file.need("tokenizer.ggml.scores")
    merges: list[tuple[str, str]] = []
    for i in sorted((i for i, kind in enumerate(types) if kind == NORMAL), key=lambda i: -scores[i]):
        cuts = [(tokens[i][:n], tokens[i][n:]) for n in range(1, len(tokens[i]))]
        merges += [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(bpe(file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def convert_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """The file's tokenizer, its `tokenizer_config.json` and the model's `generation_config.json`."""
    kind = file.need("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{file.path}: tokenizer of kind {kind!r} isn't supported; supported: gpt2, llama")
    tokens = file.need("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(tokens) > file.shape("token_embd.weight")[0]:
        raise UserError(f"{file.path}: {len(tokens)} tokens, but only {file.shape('token_embd.weight')[0]} rows for them")
    while types[-1] == UNUSED:  # rows that only round the matrix's size up
        tokens, types = tokens[:-1], types[:-1]
    tokenizer = byte_level_tokenizer(file, tokens) if kind == "gpt2" else sentencepiece_tokenizer(file, tokens, types)
    added = [(token, token_type) for token, token_type in zip(tokens, types) if token_type in (UNKNOWN, CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=token_type != USER_DEFINED, normalized=False) for token, token_type in added])

    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in NAMED_TOKENS.items()}
    ids = {name: i for name, i in ids.items() if i is not None and i < len(tokens)}
    add_bos = file.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # what the format's runtime takes for granted
        add_bos = kind == "llama" or PRE_TOKENIZERS[file.need("tokenizer.ggml.pre")] is LLAMA3_SPLIT
    if add_bos and "bos" not in ids:
        raise UserError(f"{file.path}: texts are to begin with bos, but there's no bos_token_id")
    if add_bos:
        bos = tokens[ids["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, ids["bos"])])
    ends = {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in END_NAMES}
    ends |= {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    config = {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad", "unk") if name in ids}
    config |= {"add_bos_token": bool(add_bos), "tokenizer_class": "PreTrainedTokenizerFast"}
    if file.get("tokenizer.chat_template"):
        config["chat_template"] = file.get("tokenizer.chat_template")
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    return tokenizer, config, generation | {"eos_token_id": sorted(ends)}


def convert(source: Path, out: Path, dtype: str = "bfloat16", force: bool = False) -> None:
    """Convert the GGUF file `source` into the checkpoint folder `out`.

    `dtype` is a name in `DTYPES`. With `force` an existing checkpoint in `out` is replaced, once its successor is whole.
    Raises `UserError` for a file that can't be converted, and leaves nothing behind then.
    """
    if gguf is None:
        raise UserError("the package gguf is needed here: pip install gguf")
    if out.exists() and not force:
        raise UserError(f"{out} exists already; choose another name, or --force to replace it")
    if out.exists() and not (out / "config.json").is_file():
        raise UserError(f"{out} isn't a checkpoint, so --force won't remove it")
    file = GgufFile(source)
    try:
        config = model_config(file, dtype)
        tokenizer, tokenizer_config, generation = convert_tokenizer(file)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:  # a value of another type
        raise UserError(f"{source}: damaged: its metadata can't be understood ({error})") from error
    size = file.values() * DTYPES[dtype].itemsize
    print(f"{source}, {source.stat().st_size / 1e9:.2f} GB, becomes {size / 1e9:.2f} GB of {dtype} in {out}", file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out.parent, size)
    partial, old = out.with_name(out.name + ".partial"), out.with_name(out.name + ".old.partial")
    for folder in (partial, old):
        if folder.is_dir():
            os.close(hold(folder))  # nobody writes to it
        shutil.rmtree(folder, ignore_errors=True)
    try:
        writer = CheckpointWriter(partial, bool(config["tie_word_embeddings"]))
        for name, tensor in fused_tensors(file, config, DTYPES[dtype]):
            writer.add(name, tensor)
        tokenizer.save(str(partial / "tokenizer.json"))
        write_json(partial / "tokenizer_config.json", tokenizer_config)
        write_json(partial / "generation_config.json", generation)
        writer.close(config)
        open_source(partial, load_config(partial))
        load_tokenizer(partial)
        if out.exists():  # moved, for a folder half removed could neither be used nor replaced
            out.rename(old)
        partial.rename(out)
    finally:
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = Parser(description="Convert a GGUF file to a checkpoint folder.")
    parser.add_argument("file", type=Path, help="a .gguf file of the Llama, Qwen2 or Qwen3 architecture")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write, e.g. checkpoints/NAME")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the written weights (default: bfloat16)")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    args = parser.parse_args()
    convert(args.file, args.out, args.dtype, args.force)
    print(f"wrote {args.out}; next: python generate.py --target {shlex.quote(str(args.out))}")


if __name__ == "__main__":
    run_cli(main)
