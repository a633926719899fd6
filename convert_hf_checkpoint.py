"""Hugging Face safetensors to this project's layout: q/k/v and gate/up fused, one output shard in memory at a time."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from torch import Tensor

import checkpoint
from files import read_json
from linear import MODES
from model import Config
from writer import SHARD_BYTES, CheckpointWriter, Step, bytes_in, copy_side_files, stream_checkpoint

# Hugging Face's name within a layer -> ours, and the place of the part in a fused weight
LAYER_NAMES = {
    "input_layernorm.weight": ("attn_norm.weight", 0),
    "self_attn.q_proj": ("wqkv", 0),
    "self_attn.k_proj": ("wqkv", 1),
    "self_attn.v_proj": ("wqkv", 2),
    "self_attn.o_proj": ("wo", 0),
    "self_attn.q_norm.weight": ("q_norm.weight", 0),
    "self_attn.k_norm.weight": ("k_norm.weight", 0),
    "post_attention_layernorm.weight": ("ffn_norm.weight", 0),
    "mlp.gate_proj": ("w13", 0),
    "mlp.up_proj": ("w13", 1),
    "mlp.down_proj": ("w2", 0),
}
TOP_NAMES = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "output.weight"}
PARTS = {"wqkv": 3, "w13": 2}  # weights that are made of several; all others are one
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names the dtypes of weights that aren't quantized
DERIVED = re.compile(r"rotary_emb\.inv_freq$|masked_bias$|attn\.bias$")  # buffers that old exports carry along


def our_name(name: str) -> tuple[str, int] | None:
    """Our name for a Hugging Face weight and the place of it in a fused one; None for a buffer that isn't a weight.

    Raises:
        UserError: a name that no supported architecture has.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name], 0
    if DERIVED.search(name):
        return None
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match:
        layer, rest = match.groups()
        stem, _, kind = rest.rpartition(".")
        if rest in LAYER_NAMES:
            ours, place = LAYER_NAMES[rest]
            return f"layers.{layer}.{ours}", place
        if stem in LAYER_NAMES and kind in ("weight", "bias"):
            ours, place = LAYER_NAMES[stem]
            return f"layers.{layer}.{ours}.{kind}", place
    raise UserError(f"the checkpoint holds {name!r}, which none of the supported architectures has")


def plan(sources: dict[str, Path], config: Config) -> dict[str, list[tuple[str, Path]]]:
    """For each of our weights, the source weights it is made of, in order, and the file each lies in.

    Raises:
        UserError: a part of a fused weight is missing.
    """
    parts: dict[str, dict[int, tuple[str, Path]]] = {}
    for name, path in sources.items():
        found = our_name(name)
        if found is None or (found[0] == "output.weight" and config.tie_embeddings):
            continue
        parts.setdefault(found[0], {})[found[1]] = (name, path)
    for ours, got in parts.items():
        need = next((n for key, n in PARTS.items() if f".{key}." in ours), 1)
        if len(got) != need:
            have = ", ".join(name for name, _ in got.values())
            raise UserError(f"{ours} needs {need} weights of the checkpoint, which has only {have}")
    return {ours: [got[i] for i in sorted(got)] for ours, got in parts.items()}


def sources_of(source: Path) -> tuple[dict[str, Path], dict[str, int]]:
    """The file and the bytes of each weight of a checkpoint. Raises UserError where it is incomplete, quantized or converted."""
    sources: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    for path in checkpoint.weight_files(source):
        with checkpoint.open_shard(path) as shard:
            if (shard.metadata() or {}).get("layout"):
                raise UserError(f"{path} has this project's layout already; it needs no conversion")
            for name in shard.keys():
                if name in sources:
                    raise UserError(f"{path} and {sources[name]} both hold {name!r}; remove the one that doesn't belong")
                dtype = shard.get_slice(name).get_dtype()
                if our_name(name) is not None and dtype not in FLOATS:  # numbers without a meaning but for their steps
                    raise UserError(
                        f"{path}: {name} is {dtype}, so the checkpoint is quantized already; convert the one it was made from"
                    )
                sources[name], sizes[name] = path, bytes_in(shard, name)
    return sources, sizes


def has_own_head(sources: dict[str, Path]) -> bool:
    """Whether a checkpoint whose configuration ties its output projection to its embeddings has another one none the less."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if embedding not in sources or head not in sources:
        return False
    tied = read_parts([(embedding, sources[embedding])])
    return not torch.equal(read_parts([(head, sources[head])]).to(tied.dtype), tied)


def steps_of(sources: dict[str, Path], sizes: dict[str, int], config: Config) -> list[Step]:
    """What it takes to convert a checkpoint. Raises UserError where a part of a fused weight is missing."""
    return [
        Step(ours, sum(sizes[name] for name, _ in made_of), functools.partial(read_parts, made_of))
        for ours, made_of in plan(sources, config).items()
    ]


def read_parts(parts: list[tuple[str, Path]]) -> Tensor:
    """One of our weights: the source weights it is made of, one below the other. Only those are in memory."""
    tensors: list[Tensor] = []
    for name, path in parts:
        with checkpoint.open_shard(path) as shard:
            tensors.append(shard.get_tensor(name))
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise UserError(f"{', '.join(name for name, _ in parts)} of {parts[0][1].parent} have shapes that don't fit together")
    return torch.cat(tensors)


def convert(source: Path, target: Path, dtype: torch.dtype | None, quantization: str = "none") -> None:
    """Convert the checkpoint in ``source`` into a new folder ``target``; an interrupted conversion goes on where it stopped.

    Args:
        dtype: the weights' dtype there; None keeps each as it is.
        quantization: ``none`` or one of ``linear.MODES``.

    Raises:
        UserError: the source is incomplete, quantized or of an unknown architecture, a weight doesn't fit into the dtype,
            ``target`` is a checkpoint already, or the disk is full.
    """
    config, raw = checkpoint.load_config(source), read_json(source / "config.json")
    sources, sizes = sources_of(source)
    if config.tie_embeddings and has_own_head(sources):  # the weights know better
        config, raw = dataclasses.replace(config, tie_embeddings=False), raw | {"tie_word_embeddings": False}
        print(f"{source}: config.json ties the output to the embeddings; its own lm_head.weight is kept", file=sys.stderr)
    steps = steps_of(sources, sizes, config)
    stamps = checkpoint.stamps(source)
    shard_bytes = min(SHARD_BYTES, max(size for _, size, _ in stamps))
    writer = CheckpointWriter(target, config.tie_embeddings, quantization, [*stamps, str(dtype)], shard_bytes)
    copy_side_files(source, target)
    stream_checkpoint(writer, steps, raw, dtype)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder with config.json and model*.safetensors as Hugging Face ships them")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new checkpoint folder (default: checkpoints/NAME of the source folder)"
    )
    parser.add_argument("--dtype", choices=checkpoint.DTYPES, help="dtype of the weights written (default: as they are)")
    parser.add_argument("--quantize", choices=("none", *MODES), default="none", help="quantize on the way (default: none)")
    args = parser.parse_args()
    out = args.out or checkpoint.ROOT / args.source.resolve().name
    if out.resolve() == args.source.resolve():
        raise UserError(f"source and output are both {out}; choose another --out")
    convert(args.source, out, checkpoint.DTYPES[args.dtype] if args.dtype else None, args.quantize)


if __name__ == "__main__":
    run_cli(main)
