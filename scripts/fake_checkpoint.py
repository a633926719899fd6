"""Write a checkpoint of random weights in Hugging Face's form, with a known model's shapes: to try conversion, quantizing and
memory on, where nobody wants to download the real one first. It has no tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import torch
from safetensors.torch import save_file
from shapes import ROWS, shape
from torch import Tensor
from tqdm import tqdm

from files import check_room, write_json
from model import Config


def shapes_of(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face's names and shapes of a model's weights, in the order its layers run."""
    D, F, Q, K = config.dim, config.ffn_dim, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, D)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (D,)
        for name, rows in (("q", Q), ("k", K), ("v", K)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, D)
            if config.qkv_bias:
                yield f"{layer}.self_attn.{name}_proj.bias", (rows,)
        if config.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (D, Q)
        yield f"{layer}.post_attention_layernorm.weight", (D,)
        yield f"{layer}.mlp.gate_proj.weight", (F, D)
        yield f"{layer}.mlp.up_proj.weight", (F, D)
        yield f"{layer}.mlp.down_proj.weight", (D, F)
    yield "model.norm.weight", (D,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, D)


def write(config: Config, out: Path, shard_bytes: int) -> None:
    """Write the weights, a shard in memory at a time, their index and config.json.

    Raises:
        UserError: the folder holds something already, or the disk has no room.
    """
    weights = list(shapes_of(config))
    total = sum(2 * torch.Size(shape).numel() for _, shape in weights)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    check_room(out, total)
    generator, shards, pending = torch.Generator().manual_seed(0), list[list[str]](), dict[str, Tensor]()

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, out / f"model-{len(shards):05d}.safetensors", {"format": "pt"})
        pending.clear()

    with tqdm(total=total, desc=str(out), unit="B", unit_scale=True, disable=None) as bar:
        for name, size in weights:
            tensor = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * size[1] ** -0.5
            if pending and sum(t.nbytes for t in pending.values()) + tensor.numel() * 2 > shard_bytes:
                flush()
            pending[name] = tensor.bfloat16()
            bar.update(pending[name].nbytes)
    flush()
    files = {name: f"model-{i:05d}.safetensors" for i, names in enumerate(shards, 1) for name in names}
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    write_json(out / "config.json", hf_config(config))


def hf_config(config: Config) -> dict:
    """The configuration as Hugging Face writes it."""
    return {
        "architectures": [config.architecture], "hidden_size": config.dim, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim, "vocab_size": config.vocab_size, "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling or None,
        "tie_word_embeddings": config.tie_embeddings, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("shape", choices=list(ROWS), metavar="SHAPE", help=f"one of {', '.join(ROWS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument("--shard-gb", type=float, default=4.0, metavar="GB", help="weights in one file (default: 4)")
    args = parser.parse_args()
    if not args.shard_gb > 0:
        raise UserError(f"--shard-gb is {args.shard_gb:g}; it must be above 0")
    write(shape(args.shape), args.out, int(args.shard_gb * 1e9))


if __name__ == "__main__":
    run_cli(main)
