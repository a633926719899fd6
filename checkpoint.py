"""Where a checkpoint lies, how it is read, and how one is written.

A checkpoint is a folder: ``config.json`` (Hugging Face's form), ``model.safetensors`` or numbered shards with
``model.safetensors.index.json``, the tokenizer's files and ``generation_config.json``. The weights carry this project's
names, which are those of ``Transformer.state_dict()``, and each weight file says so in its metadata. ``config.json`` is
written last: a folder without it is not a checkpoint, so an interrupted conversion can never be loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import UserError
from files import read_json, replacing, write_text
from judge import Head, load_head
from model import Config, Transformer
from tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer

ROOT = Path("checkpoints")
LAYOUT = "fused-1"  # in every weight file's metadata: these names, q/k/v and gate/up fused, half-split RoPE
SHARD_BYTES = 4 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIDE_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def find_checkpoint(name: str, root: Path = ROOT) -> Path:
    """The folder that ``name`` means: a path, else ``root``/name, else the one under ``root`` with ``name`` as a whole part.

    A whole part is what stands between ``-``, ``_``, ``.`` or the ends, whatever its case: ``8B`` is in
    ``Llama-3.1-8B-Instruct`` and not in ``Llama-3.2-18B``.

    Raises:
        UserError: none or several fit; the message lists the checkpoints there are.
    """
    if not name:
        raise UserError("the checkpoint's name is empty; give a folder or a name under checkpoints/")
    for folder in (Path(name), root / name):
        if folder.is_dir():
            if (folder / "config.json").is_file():
                return folder
            raise UserError(f"{folder} holds no config.json, so it is not a checkpoint (or its conversion was interrupted)")
    known = sorted(p.parent for p in root.glob("*/config.json")) + sorted(p.parent for p in root.glob("*/*/config.json"))
    part = re.compile(rf"(?:^|[-_./]){re.escape(name)}(?:$|[-_./])", re.IGNORECASE)
    fits = [p for p in known if part.search(p.relative_to(root).as_posix())]
    if len(fits) == 1:
        return fits[0]
    listing = ", ".join(p.relative_to(root).as_posix() for p in (fits or known)) or "nothing"
    if fits:
        raise UserError(f"{name!r} fits several checkpoints under {root}/: {listing}; give one whole name")
    raise UserError(f"no checkpoint {name!r}: no such folder, and {root}/ holds {listing}")


def load_config(folder: Path) -> Config:
    """The model's configuration. Raises UserError with the folder's name in front."""
    raw = read_json(folder / "config.json")
    try:
        return Config.from_hf(raw)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:  # a value of another type
        raise UserError(f"{folder}/config.json can't be understood: {error}") from None


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """``safe_open`` whose complaints about a damaged file are one line about that file."""
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except SafetensorError as error:
        size = path.stat().st_size
        raise UserError(f"{path} ({size:,} bytes) is damaged or cut short: {error}; fetch or convert it again") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index where it has one; existence is checked.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            other = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pth"))
            hint = f"; {other[0]} isn't read, only safetensors are" if other else ""
            raise UserError(f"{folder} holds no model*.safetensors{hint}")
    missing = [p.name for p in files if not p.is_file()]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} of its {len(files)} weight files: {', '.join(missing[:3])}")
    return files


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Transformer:
    """Build the model of a checkpoint: made on the meta device, its weights memory-mapped and assigned.

    Raises:
        UserError: an unknown architecture, a file that is missing or cut short, a weight that is missing, left over or of
            another shape than the configuration says.
    """
    config = load_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    wanted = dict(model.state_dict())
    if config.tie_embeddings:
        del wanted["output.weight"]  # the same memory as embed.weight
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with open_shard(path) as shard:
            _check_layout(path, shard.metadata() or {}, list(shard.keys()))
            for name in shard.keys():
                if name not in wanted:
                    raise UserError(f"{path} holds {name!r}, which a {config.architecture} of this configuration doesn't have")
                shape = tuple(shard.get_slice(name).get_shape())
                if shape != tuple(wanted[name].shape):
                    raise UserError(f"{path}: {name} is {shape}, but config.json makes it {tuple(wanted[name].shape)}")
                found[name] = shard.get_tensor(name).to(device=device, dtype=dtype)
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} of {len(wanted)} weights: {', '.join(missing[:3])}")
    if config.tie_embeddings:
        found["output.weight"] = found["embed.weight"]
    model.load_state_dict(found, assign=True)
    if config.tie_embeddings:
        model.tie()
    return model.requires_grad_(False).eval()


def _check_layout(path: Path, metadata: dict[str, str], keys: list[str]) -> None:
    if metadata.get("layout") != LAYOUT:
        if any(key.startswith("model.") for key in keys):
            raise UserError(f"{path} has Hugging Face's layout: run python convert_hf_checkpoint.py {path.parent} first")
        raise UserError(f"{path} has layout {metadata.get('layout')!r}; this program reads {LAYOUT!r}")
    if metadata.get("quantization", "none") != "none":
        raise UserError(f"{path} is quantized ({metadata['quantization']}), which can't be read here")


def fingerprint(folder: Path) -> str:
    """A short name for the weights a judge head belongs to: a hash of the norms and of a few rows of every matrix.

    Values are compared as bfloat16, so that it is the same whichever dtype the checkpoint was written in.
    """
    parts: dict[str, bytes] = {}
    for path in weight_files(folder):
        with open_shard(path) as shard:
            for name in shard.keys():
                rows = shard.get_slice(name)
                height = rows.get_shape()[0]
                several = len(rows.get_shape()) > 1  # a norm or a bias is taken whole
                value = torch.cat([rows[i : i + 1] for i in range(0, height, -(-height // 4))]) if several else rows[:]
                parts[name] = value.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(name.encode() + parts[name])
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Pair:
    """A target with its draft and its head, found and checked to fit together; no weights are read yet."""

    target: Path
    draft: Path | None
    head: Head | None
    tokenizer: Tokenizer
    context: int  # tokens that both models have room for

    def load(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Transformer, Transformer | None]:
        """Both models, the head fused into the target's output projection."""
        model = load_model(self.target, dtype, device)
        if self.head is not None:
            model.fuse_judge(self.head.weight, self.head.bias, self.head.kind, self.head.floor)
        return model, load_model(self.draft, dtype, device) if self.draft is not None else None


def find_pair(target: str, draft: str | None = None, judge: Path | None = None) -> Pair:
    """Find the checkpoints by name (see ``find_checkpoint``) and the head by its file, and check that they fit together.

    Raises:
        UserError: one of them isn't there, can't be read or doesn't fit: different vocabularies, a head made for another model.
    """
    folder, other = find_checkpoint(target), None
    context, tokenizer = load_config(folder).max_seq_len, load_tokenizer(folder)
    if draft is not None:
        other = find_checkpoint(draft)
        context = min(context, load_config(other).max_seq_len)
        check_same_vocabulary(tokenizer, load_tokenizer(other), str(folder), str(other))
    return Pair(folder, other, head_for(folder, judge) if judge is not None else None, tokenizer, context)


def head_for(target: Path, path: Path) -> Head:
    """Read a head made for a target. Raises UserError when it can't be read, or was made for another model."""
    head = load_head(path)
    head.check(fingerprint(target), load_config(target).dim, str(target))
    return head


class CheckpointWriter:
    """Write a checkpoint one tensor at a time, holding at most one output shard in memory.

    Every file gets a temporary name first and is renamed when it is whole; ``close`` writes the index and then config.json,
    which makes the folder a checkpoint.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if (folder / "config.json").exists():
            raise UserError(f"{folder} is a checkpoint already; remove it or choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("*.safetensors"), *folder.glob("model.safetensors.index.json"), *folder.glob("*.partial")]:
            if stale.suffix == ".safetensors":
                with open_shard(stale) as shard:
                    if (shard.metadata() or {}).get("layout") != LAYOUT:
                        raise UserError(f"{stale} is not of an interrupted run of this program; choose another folder")
            stale.unlink()
        self.folder, self.shard_bytes = folder, shard_bytes
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; it is kept until its shard is full."""
        held = sum(t.nbytes for t in self.pending.values())
        if self.pending and held + tensor.nbytes > self.shard_bytes:
            self._flush()
        self.pending[name] = tensor.contiguous()
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"model-{len(self.shards) + 1:05d}.safetensors"
        write_tensors(path, self.pending)
        self.shards.append(list(self.pending))
        self.pending = {}

    def close(self, config: dict[str, Any]) -> None:
        """Write what is pending, the index if there are several shards, and config.json."""
        self._flush()
        n = len(self.shards)
        weight_map = {}
        for i, names in enumerate(self.shards, 1):
            final = "model.safetensors" if n == 1 else f"model-{i:05d}-of-{n:05d}.safetensors"
            os.replace(self.folder / f"model-{i:05d}.safetensors", self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if n > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index)
        write_json(self.folder / "config.json", config)


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file under a temporary name, then rename it."""
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={"format": "pt", "layout": LAYOUT, "quantization": "none", **metadata})
        partial.chmod(0o644)  # the library makes it readable by its owner alone


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file under a temporary name, then rename it."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a whole checkpoint from tensors in memory, named as ``Transformer.state_dict()`` names them."""
    writer = CheckpointWriter(folder)
    for name, tensor in tensors.items():
        if not (name == "output.weight" and config.get("tie_word_embeddings")):
            writer.add(name, tensor)
    writer.close(config)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and generation_config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for path in [source / name for name in SIDE_FILES] + sorted(source.glob("*.tiktoken")):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
