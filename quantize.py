"""Quantize a checkpoint into a new one, one shard in memory at a time. What the forms are is in ``linear.py``."""

from __future__ import annotations

import functools
from pathlib import Path

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

from torch import Tensor

import checkpoint
from files import read_json
from linear import MODES
from model import Config
from writer import SHARD_BYTES, CheckpointWriter, Step, bytes_in, copy_side_files, stream_checkpoint


def quantize(source: Path, target: Path, mode: str) -> None:
    """Write the checkpoint ``source`` anew, quantized; an interrupted run goes on where it stopped.

    Raises:
        UserError: the source is damaged or quantized already, ``target`` is a checkpoint already, or the disk is full.
    """
    config = checkpoint.load_config(source)
    weights = checkpoint.open_source(source, config)
    if weights.quantization != "none":
        raise UserError(f"{source} is {weights.quantization} already; quantize the checkpoint it was made from")
    steps = []
    for name, path in weights.files.items():
        with checkpoint.open_shard(path) as shard:
            read = functools.partial(read_checked, weights, name, config)
            steps.append(Step(name, bytes_in(shard, name), read))
    stamps = checkpoint.stamps(source)
    shard_bytes = min(SHARD_BYTES, max(size for _, size, _ in stamps))
    writer = CheckpointWriter(target, config.tie_embeddings, mode, stamps, shard_bytes)
    copy_side_files(source, target)
    stream_checkpoint(writer, steps, read_json(source / "config.json"), None)


def read_checked(source: checkpoint.Source, name: str, config: Config) -> Tensor:
    """A whole weight, compared with its checksum: what is damaged now would be so in every copy."""
    tensor = checkpoint.read_part(source, name, config)
    checkpoint.check_sum(source, name, tensor)
    return tensor


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="NAME", help="checkpoint to quantize; it is left as it is")
    parser.add_argument("--mode", choices=MODES, default="int8", help="default: int8")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new checkpoint folder (default: beside it, with the mode added)")
    args = parser.parse_args()
    source = checkpoint.find_checkpoint(args.checkpoint)
    source = source if source.name not in ("", "..") else source.resolve()
    quantize(source, args.out or source.with_name(f"{source.name}-{args.mode}"), args.mode)


if __name__ == "__main__":
    run_cli(main)
