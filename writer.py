"""How a checkpoint is written: one weight at a time, at most a shard in memory, taken up where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from checkpoint import (
    ITEM_BYTES,
    LAYOUT,
    check_finite,
    checksum,
    context_and_tokenizer,
    is_quantized,
    meta_weights,
    open_shard,
    peak_memory,
    quantized_parts,
    sample,
)
from errors import UserError
from files import SIDE_FILES, check_room, hold, remove, replacing, write_json
from model import Config
from tokenizer import FILES as TOKENIZER_FILES

SHARD_BYTES = 4 << 30


class CheckpointWriter:
    """Write a checkpoint one tensor at a time, holding at most one output shard in memory.

    Every file gets a temporary name first and is renamed when it is whole; ``close`` writes the index and then config.json,
    which makes the folder a checkpoint. Shards that an interrupted run with the same ``run`` left are kept: ``done`` names the
    weights in them, which need not be added again. Those of any other run are removed.

    Args:
        tied: the model's output projection is its embedding; on disk it is left out, but for a quantized one.
        quantization: how the weights are kept: ``none`` or one of ``linear.MODES``.
        run: what decides the files' contents, the order of the weights included; None when no run can take up from this one.
        shard_bytes: of weights in one file, unless a weight alone has more; with the weight that comes next it is all that is
            held in memory.
    """

    def __init__(
        self, folder: Path, tied: bool, quantization: str = "none", run: Any = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.let_go = weakref.finalize(self, os.close, hold(folder))
        if (folder / "config.json").exists():  # another process may have ended just now
            self.let_go()
            raise UserError(f"{folder} is a checkpoint already; remove it or choose another name")
        self.folder, self.tied, self.quantization, self.shard_bytes = folder, tied, quantization, shard_bytes
        key = [secrets.token_hex() if run is None else run, tied, quantization, shard_bytes]
        self.run = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self.pending: dict[str, Tensor] = {}
        self.samples: dict[str, str] = {}
        self.shards = self._resume()
        self.done = {name for _, names in self.shards for name in names}

    def _resume(self) -> list[tuple[Path, list[str]]]:
        """The finished shards, in order; files that don't belong to them are removed if they are this program's."""
        for stale in [*self.folder.glob("*.partial"), *self.folder.glob("model.safetensors.index.json")]:
            remove(stale)
        found = list[tuple[Path, list[str]]]()
        for path in sorted(self.folder.glob("*.safetensors")):
            number = re.match(r"model-(\d+)", path.name)
            try:
                with open_shard(path) as shard:
                    metadata, names = shard.metadata() or {}, list(shard.keys())
            except UserError:
                if number is None:
                    raise
                metadata, names = {"layout": LAYOUT}, []  # the machine went down while it was written
            if metadata.get("layout") != LAYOUT:
                raise UserError(f"{path} is not of an interrupted run of this program; choose another folder")
            if number and metadata.get("run") == self.run and int(number[1]) == len(found) + 1:
                found.append((path, names))
            else:
                path.unlink()
        return found

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Append one tensor, brought to a dtype and quantized where it is to be; it is kept until its shard is full.

        Raises:
            UserError: it holds numbers that are none, or too big for the dtype.
        """
        if self.tied and name == "output.weight":
            return
        source, tensor = tensor, tensor if dtype is None else tensor.to(dtype)
        check_finite(name, tensor)
        parts, anew = {name: tensor.contiguous()}, self.quantization != "none" and is_quantized(name)
        if anew:
            parts = quantized_parts(name, tensor, self.quantization, divided=False)
        elif self.quantization != "none" and self.tied and name == "embed.weight":
            parts |= quantized_parts("output.weight", tensor, self.quantization, divided=False)
        size = sum(part.nbytes for part in parts.values())
        if self.pending and sum(t.nbytes for t in self.pending.values()) + size > self.shard_bytes:
            self._flush()
        self.pending |= parts
        if anew or (tensor.dtype == torch.float16 and source.dtype != torch.float16):  # whose small numbers are others
            self.samples[name] = sample(len(source), lambda a, b: source[a:b], whole=source.dim() == 1)

    def _flush(self) -> None:
        path = self.folder / f"model-{len(self.shards) + 1:05d}.safetensors"
        names = list(self.pending)
        sums = json.dumps({name: checksum(tensor) for name, tensor in self.pending.items()})
        samples = json.dumps(self.samples)
        write_tensors(path, self.pending, quantization=self.quantization, run=self.run, samples=samples, crc32=sums)
        self.shards.append((path, names))
        self.pending, self.samples = {}, {}

    def close(self, config: dict[str, Any]) -> None:
        """Write what is pending, the index if there are several shards, and config.json."""
        if self.pending:
            self._flush()
        n = len(self.shards)
        weight_map, size = {}, 0
        for i, (path, names) in enumerate(self.shards, 1):
            final = self.folder / ("model.safetensors" if n == 1 else f"model-{i:05d}-of-{n:05d}.safetensors")
            os.replace(path, final)
            weight_map.update(dict.fromkeys(names, final.name))
            size += final.stat().st_size
        if n > 1:
            write_json(
                self.folder / "model.safetensors.index.json",
                {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
            )
        write_json(self.folder / "config.json", config)
        self.let_go()


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file under a temporary name, then rename it. Raises UserError where the disk is full."""
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata={"format": "pt", "layout": LAYOUT, **metadata})
        except SafetensorError as error:  # the library's own form of an OSError
            raise UserError(f"{path} can't be written: {error}") from None
        partial.chmod(0o644)  # the library makes it readable by its owner alone


def save_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], quantization: str = "none") -> None:
    """Write a whole checkpoint from tensors in memory, named as ``Transformer.state_dict()`` names them."""
    writer = CheckpointWriter(folder, bool(config.get("tie_word_embeddings")), quantization)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close(config)


def bytes_in(shard: Any, name: str) -> int:
    """Bytes of a weight in an open file, from its header alone."""
    rows = shard.get_slice(name)
    return math.prod(rows.get_shape()) * ITEM_BYTES.get(rows.get_dtype(), 1)


class Step(NamedTuple):
    """A weight of a checkpoint to be written: its name, the bytes it is read from, and how to get it."""

    name: str
    bytes: int
    read: Callable[[], Tensor]


def stream_checkpoint(writer: CheckpointWriter, steps: list[Step], config: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Write a checkpoint weight by weight, with a progress bar, and say at the end what memory it took.

    Args:
        dtype: of the weights that aren't quantized; None leaves each as it is.

    Raises:
        UserError: the weights are not those of the configuration; the disk has no room for what is still to come, or gets full.
    """
    todo = [step for step in steps if step.name not in writer.done]
    shapes = {name: tuple(t.shape) for name, t in meta_weights(writer.folder, Config.from_hf(config), len(steps)).items()}
    whole = meta_weights(writer.folder, Config.from_hf(config), len(steps), writer.quantization)
    missing = sorted(set(shapes) - {step.name for step in steps} - ({"output.weight"} if writer.tied else set()))
    left_over = sorted({step.name for step in steps} - set(shapes))
    if missing or left_over:
        what = f"lacks {missing[0]}" if missing else f"has {left_over[0]} too many"
        raise UserError(f"the source {what}: {len(missing)} of {len(shapes)} weights are missing and {len(left_over)} left over")
    bytes_of = {step.name: step.bytes for step in steps}
    need = sum(
        t.numel() * (dtype.itemsize if dtype is not None else 0) or bytes_of.get(name, 0)
        if t.is_floating_point() and not name.endswith(".scale")
        else t.nbytes
        for name, t in whole.items()
        if name not in writer.done and not (writer.tied and writer.quantization == "none" and name == "output.weight")
    )
    check_room(writer.folder, need)
    total = sum(step.bytes for step in steps)
    done = total - sum(step.bytes for step in todo)
    with tqdm(total=total, initial=done, desc=str(writer.folder), unit="B", unit_scale=True, disable=None) as bar:
        for step in todo:
            tensor = step.read()
            if tuple(tensor.shape) != shapes[step.name]:
                raise UserError(f"{step.name} is {tuple(tensor.shape)}, but config.json makes it {shapes[step.name]}")
            if not tensor.is_floating_point():
                raise UserError(f"the source's {step.name} is of dtype {tensor.dtype}, which isn't a weight's")
            writer.add(step.name, tensor, dtype)
            bar.update(step.bytes)
    writer.close(config)
    print(f"wrote {writer.folder}; peak memory {peak_memory() / 1e9:.2f} GB", file=sys.stderr)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and generation_config.json.

    Raises:
        UserError: the source's can't be read, which is better known before hours of work; the target has one that the source
            lacks, as an interrupted conversion of another model may have left it.
    """
    if any(path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):  # a source may be weights alone
        context_and_tokenizer(source)
    target.mkdir(parents=True, exist_ok=True)
    theirs, found = (
        {path.name for path in [folder / name for name in SIDE_FILES] + sorted(folder.glob("*.tiktoken")) if path.is_file()}
        for folder in (source, target)
    )
    for name in sorted(found - theirs):
        raise UserError(f"{target / name} is not of {source}, which has no such file; remove it or choose another folder")
    for name in sorted(theirs):
        shutil.copyfile(source / name, target / name)
