"""Where a checkpoint lies and how it is read, and a pair that fits together; writer.py writes one.

A checkpoint is a folder: ``config.json`` (Hugging Face's form), ``model.safetensors`` or numbered shards with
``model.safetensors.index.json``, the tokenizer's files and ``generation_config.json``. The weights carry this project's
names, which are those of ``Transformer.state_dict()``, and each weight file says so in its metadata. ``config.json`` is
written last: a folder without it is not a checkpoint, so an interrupted conversion can never be loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from errors import UserError
from files import read_json
from judge import Head, load_head
from linear import MODES, QUANTIZED, choose, quantized
from model import Config, Transformer
from tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from tp import Ranks, largest, ranges, same, together, world

ROOT = Path("checkpoints")
BESIDE = Path(__file__).resolve().parent / "checkpoints"  # looked into as well, whatever folder a command runs in
FITS_A_CACHE = 1 << 26  # bytes of a target that one thread reads fast enough
LAYOUT = "fused-1"  # in every weight file's metadata: these names, q/k/v and gate/up fused, half-split RoPE
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the dtypes, in safetensors' names, that a weight which isn't quantized may have
KEPT_AS = {torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}  # and those of one that is


def find_checkpoint(name: str) -> Path:
    """The folder that ``name`` means: a path, else a name under ``checkpoints/``, else the one there with ``name`` as a whole part.

    It looks into the current folder's ``checkpoints/``, then into the one beside the scripts. A whole part is what stands between
    ``-``, ``_``, ``.`` or the ends, whatever its case: ``8B`` is in ``Llama-3.1-8B-Instruct`` and not in ``Llama-3.2-18B``. A copy
    in fewer bits, ``Llama-3.1-8B-Instruct-int8``, is in its original's way only where the part says ``int8`` too.

    Raises:
        UserError: none or several fit; the message lists the checkpoints there are.
    """
    if not name:
        raise UserError("the checkpoint's name is empty; give a folder or a name under checkpoints/")
    roots = [ROOT] if ROOT.resolve() == BESIDE.resolve() else [ROOT, BESIDE]
    for folder in (Path(name), *(root / name for root in roots)):
        if folder.is_dir():
            if (folder / "config.json").is_file():
                return folder
            raise UserError(f"{folder} holds no config.json, so it is not a checkpoint (or its conversion was interrupted)")
    part = re.compile(rf"(?:^|[-_./]){re.escape(name)}(?:$|[-_./])", re.IGNORECASE)
    looked = []
    for root in roots:
        known = sorted(p.parent for p in root.glob("*/config.json")) + sorted(p.parent for p in root.glob("*/*/config.json"))
        fits = [p for p in known if part.search(p.relative_to(root).as_posix())]
        fits = [p for p in fits if not any(p.name == f"{q.name}-{mode}" and p.parent == q.parent for q in fits for mode in MODES)]
        if len(fits) == 1:
            return fits[0]
        listing = ", ".join(p.relative_to(root).as_posix() for p in (fits or known)) or "nothing"
        if fits:
            raise UserError(f"{name!r} fits several checkpoints under {root}/: {listing}; give one whole name")
        looked.append(f"{root}/ holds {listing}")
    raise UserError(f"no checkpoint {name!r}: no such folder, and {' and '.join(looked)}")


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
    except OSError as error:
        raise UserError(f"{path} can't be read: {error}") from None
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
        strange = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
        if strange:
            raise UserError(f"{index}: its weight_map names {strange[0]!r}, which is no file of {folder}")
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


def stamps(folder: Path) -> list[tuple[str, int, int]]:
    """What tells a checkpoint's weight files from others: of each its name, its bytes and when it was written."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder)]


class Source(NamedTuple):
    """A checkpoint's weights as they lie on disk: each name's file and shape, and how they are kept."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    quantization: str  # none or one of linear.MODES
    sums: dict[str, int]  # each weight's checksum; none in files written before there were any


def facts(path: Path, metadata: dict[str, str], key: str) -> dict[str, Any]:
    """A JSON object in a weight file's metadata, {} where there is none."""
    try:
        value = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: its metadata's {key} can't be read; convert it again")
    return value


def meta_weights(folder: Path, config: Config, weights: int, quantization: str = "none") -> dict[str, Tensor]:
    """A configuration's weights on the meta device.

    Args:
        folder: the checkpoint's, for the message.
        weights: how many there are to fill them, so that an absurd number of layers is told and not built.

    Raises:
        UserError: the configuration can't be that of any weights.
    """
    if config.n_layers > weights:
        raise UserError(f"{folder}: config.json gives num_hidden_layers = {config.n_layers}, but there are only {weights} weights")
    try:
        with torch.device("meta"):
            return Transformer(config, quantization=quantization).state_dict()
    except (RuntimeError, OverflowError, TypeError):  # sizes whose product no tensor can have
        raise UserError(f"{folder}: config.json gives sizes that no model has") from None


def open_source(folder: Path, config: Config) -> Source:
    """Look at a checkpoint's headers.

    Raises:
        UserError: a file is missing, cut short or of another layout; a weight is missing, left over or of another shape or dtype
            than the configuration says; the files are quantized in different ways, or not of one conversion.
    """
    files, shapes, dtypes, sums = dict[str, Path](), dict[str, tuple[int, ...]](), dict[str, str](), dict[str, int]()
    kept, runs = dict[Path, str](), dict[Path, str | None]()
    for path in weight_files(folder):
        with open_shard(path) as shard:
            metadata = shard.metadata() or {}
            _check_layout(path, metadata, list(shard.keys()))
            kept[path], runs[path] = metadata.get("quantization", "none"), metadata.get("run")
            sums |= facts(path, metadata, "crc32")
            for name in shard.keys():
                if name in files:
                    raise UserError(f"{path} and {files[name]} both hold {name!r}; remove the one that doesn't belong")
                rows = shard.get_slice(name)
                files[name], shapes[name], dtypes[name] = path, tuple(rows.get_shape()), rows.get_dtype()
    first, quantization = next(iter(kept.items()))
    for path, mode in kept.items():
        if mode != quantization:
            raise UserError(f"{path} is of quantization {mode}, but {first} of {quantization}")
        if mode not in ("none", *MODES):
            raise UserError(f"{path} is of quantization {mode!r}; known are none, {', '.join(MODES)}")
        if runs[path] != runs[first]:
            raise UserError(f"{path} and {first} were not written by one conversion; convert the checkpoint again")
    wanted = meta_weights(folder, config, len(files), quantization)
    if config.tie_embeddings and quantization == "none":
        del wanted["output.weight"]  # the same memory as embed.weight
    for name, path in files.items():
        if name not in wanted:
            raise UserError(f"{path} holds {name!r}, which a {config.architecture} of this configuration doesn't have")
        if shapes[name] != tuple(wanted[name].shape):
            raise UserError(f"{path}: {name} is {shapes[name]}, but config.json makes it {tuple(wanted[name].shape)}")
        floats = wanted[name].is_floating_point() and not name.endswith(".scale")
        if dtypes[name] not in (ITEM_BYTES if floats else [KEPT_AS[wanted[name].dtype]]):
            raise UserError(f"{path}: {name} is of dtype {dtypes[name]}, which it can't be")
    missing = sorted(set(wanted) - set(files))
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} of {len(wanted)} weights: {', '.join(missing[:3])}")
    return Source(files, shapes, quantization, sums)


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", ranks: Ranks = Ranks(), quantization: str = "none"
) -> Transformer:
    """Build the model of a checkpoint, or one rank's part of it, of which it reads no more.

    It is made on the meta device, its weights memory-mapped where they need no change, and assigned.

    Args:
        dtype: of the weights that aren't quantized, and of what is computed.
        quantization: how to quantize a checkpoint that isn't: one of ``linear.MODES``, or ``none``.

    Raises:
        UserError: what ``open_source`` says; a model that doesn't divide over the ranks; a checkpoint that is quantized otherwise;
            a weight that doesn't fit into the dtype.
    """
    with together():
        config = load_config(folder)
        source = open_source(folder, config)
        kept = form_of(folder, source.quantization, quantization)
        with torch.device("meta"):
            model = Transformer(config, ranks, kept)
    found: dict[str, Tensor] = {}
    anew = kept != source.quantization
    # the largest first: what turning one into its form takes beside it is then gone before the most is held
    for name in sorted(source.files, key=lambda name: (-math.prod(source.shapes[name]), name)):
        tensor = read_part(source, name, config, ranks)
        if anew or tensor.dim() == 1 or name.endswith(".scale"):  # all others would have to be read for it
            check_finite(f"{source.files[name]}: {name}", tensor)
        if anew and name == "embed.weight" and config.tie_embeddings:
            found |= quantized_parts("output.weight", tensor.to(device), kept, False)
        if anew and is_quantized(name):
            found |= quantized_parts(name, tensor.to(device), kept, ranks.size > 1)
        elif tensor.is_floating_point() and not name.endswith(".scale"):
            found[name] = tensor.to(device=device, dtype=dtype)
            if tensor.dtype != dtype:  # one that needs no change is mapped, and not read before it is used
                check_finite(name, found[name])
        else:
            found[name] = tensor.to(device)
    if config.tie_embeddings and kept == "none":
        found["output.weight"] = found["embed.weight"]
    model.load_state_dict(found, assign=True)
    model.tie()
    model.pack()
    if model.norm.weight.device.type == "cpu":
        choose(dtype, kept)
    return model.requires_grad_(False).eval()


def form_of(folder: Path, quantization: str, wanted: str) -> str:
    """How the weights of a checkpoint that has one quantization are kept where another, or none, is asked for.

    Raises:
        UserError: it has one already, and not this.
    """
    if "none" not in (quantization, wanted) and quantization != wanted:
        raise UserError(f"{folder} is {quantization} already; it can't be quantized to {wanted}")
    return wanted if quantization == "none" else quantization


def check_finite(name: str, weight: Tensor) -> None:
    """Raises UserError for a weight that holds infinities or what is no number: a model of it would answer, with rubbish."""
    if weight.is_floating_point() and not all(bool(end.isfinite()) for end in weight.aminmax()):  # at memory's speed
        dtype = str(weight.dtype).removeprefix("torch.")
        raise UserError(f"{name} holds numbers beyond {dtype}'s range, or none at all: choose another `dtype`, or fetch it again")


def is_quantized(name: str) -> bool:
    """Whether this is the weight of a layer that quantization changes."""
    return name.endswith(".weight") and name.split(".")[-2] in QUANTIZED


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a weight's bytes: twice as quick as a cryptographic hash, and accidents are all that is looked for."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def check_sum(source: Source, name: str, tensor: Tensor) -> None:
    """Raises UserError where a whole weight, as it was read, is not what was written."""
    if name in source.sums and checksum(tensor) != source.sums[name]:
        raise UserError(f"{source.files[name]} is damaged: {name} is not what was written; convert it again")


def quantized_parts(name: str, weight: Tensor, mode: str, divided: bool) -> dict[str, Tensor]:
    """The parameters of a layer quantized under a mode; where ranks hold some of its columns each, as if it were whole.

    Rounding hides what is no number: ``check_finite`` comes first.
    """
    stem = name.removesuffix(".weight")
    mode = "int8" if stem == "output" else mode
    by_columns = divided and mode == "int8" and stem.endswith((".wo", ".w2"))
    magnitude = largest(weight.abs().amax(1).float()) if by_columns else None
    return {f"{stem}.{part}": value for part, value in quantized(weight, mode, magnitude).items()}


def read_part(source: Source, name: str, config: Config, ranks: Ranks = Ranks()) -> Tensor:
    """A weight, or a rank's part of it, on the CPU. A whole one is memory-mapped; of a part nothing else is read."""
    cut = ranges(name, source.shapes[name], config, ranks)
    with open_shard(source.files[name]) as shard:
        if cut is None:
            tensor = shard.get_tensor(name)
            # each rank adds its bias to a sum over ranks, so only one of them may have it
            return torch.zeros_like(tensor) if ranks.rank and name.endswith(("wo.bias", "w2.bias")) else tensor
        rows, (dim, parts) = shard.get_slice(name), cut
        return torch.cat([rows[a:b] if dim == 0 else rows[:, a:b] for a, b in parts], dim)


def verify(folder: Path) -> int:
    """Read every weight of a checkpoint once and compare it with the checksum that was written with it.

    Returns:
        How many were compared: none where the files were written before there were checksums.

    Raises:
        UserError: naming the first that differs, or what ``open_source`` says; some have a checksum and some not.
    """
    config = load_config(folder)
    source = open_source(folder, config)
    unknown = sorted(source.files.keys() - source.sums.keys())
    if source.sums and unknown:
        raise UserError(f"{source.files[unknown[0]]} is damaged: it has no checksum of {unknown[0]}; convert it again")
    for name in tqdm(source.files, desc=str(folder), unit="weight", disable=None):
        check_sum(source, name, read_part(source, name, config))
    return len(source.sums)


def _check_layout(path: Path, metadata: dict[str, str], keys: list[str]) -> None:
    if metadata.get("layout") != LAYOUT:
        if any(key.startswith("model.") for key in keys):
            raise UserError(f"{path} has Hugging Face's layout: run python convert_hf_checkpoint.py {path.parent} first")
        raise UserError(f"{path} has layout {metadata.get('layout')!r}; this program reads {LAYOUT!r}")


def sample(height: int, rows: Callable[[int, int], Tensor], whole: bool) -> str:
    """A short hash of a weight of ``height`` rows: of four of them, or of all. Values are taken as bfloat16."""
    value = rows(0, height) if whole else torch.cat([rows(i, i + 1) for i in range(0, height, -(-height // 4))])
    return hashlib.sha256(value.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fingerprint(folder: Path) -> str:
    """A short name for the weights a judge head belongs to: a hash of the norms and of a few rows of every matrix.

    It is the same whichever dtype the checkpoint was written in, quantized or not: where weights were changed on the way, the
    files carry samples of what they were made from.
    """
    parts: dict[str, str] = {}
    for path in sorted({*open_source(folder, load_config(folder)).files.values()}):
        with open_shard(path) as shard:
            metadata = shard.metadata() or {}
            samples = facts(path, metadata, "samples")
            parts |= samples
            for name in shard.keys():
                anew = metadata.get("quantization", "none") != "none" and (is_quantized(name) or name.endswith(".scale"))
                if anew or name in samples:
                    continue
                rows = shard.get_slice(name)
                shape = rows.get_shape()
                parts[name] = sample(shape[0], lambda a, b: rows[a:b], whole=len(shape) == 1)
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Pair:
    """A target with its draft and its head, found and checked to fit together; no weights are read yet."""

    target: Path
    draft: Path | None
    head: Head | None
    tokenizer: Tokenizer
    context: int  # tokens that both models have room for
    single_task: str | None = None  # all that the target can be asked, where its generation_config.json says so

    @property
    def caution(self) -> str:
        """What whoever asks it something should know; empty for a target of any task."""
        return f"this target knows one task, {self.single_task}; it answers all else with gibberish" if self.single_task else ""

    def load(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", quantization: str = "none", whole_draft: bool = False
    ) -> tuple[Transformer, Transformer | None]:
        """Both models, the head fused into the target's output projection. Where several ranks run, their parts of them.

        Args:
            quantization: how to quantize checkpoints that aren't, as in ``load_model``.
            whole_draft: every rank has the whole draft, so that draft steps need no collectives.
        """
        if world().size > 1:
            same("target", fingerprint(self.target))
            same("draft", fingerprint(self.draft) if self.draft is not None else "none")
        draft: Transformer | None = None
        model = load_model(self.target, dtype, device, world(), quantization)
        if self.head is not None:
            self.head.fuse(model)
        if self.draft is not None:
            draft = load_model(self.draft, dtype, device, Ranks() if whole_draft else world(), quantization)
        if model.weight_bytes() < FITS_A_CACHE and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # threads wait for each other longer than they work, much longer where cores are busy
        return model, draft


def find_pair(target: str, draft: str | None = None, judge: Path | None = None) -> Pair:
    """Find the checkpoints by name (see ``find_checkpoint``) and the head by its file, and check that they fit together.

    Raises:
        UserError: one of them isn't there, can't be read or doesn't fit: different vocabularies, a head made for another model.
    """
    with together():
        folder, other = find_checkpoint(target), None
        context, tokenizer = context_and_tokenizer(folder)
        if draft is not None:
            other = find_checkpoint(draft)
            room, theirs = context_and_tokenizer(other)
            context = min(context, room)
            check_same_vocabulary(tokenizer, theirs, str(folder), str(other))
        head = head_for(folder, judge) if judge is not None else None
        single_task = read_json(folder / "generation_config.json", missing_ok=True).get("single_task")
        return Pair(folder, other, head, tokenizer, context, single_task)


def context_and_tokenizer(folder: Path) -> tuple[int, Tokenizer]:
    """A checkpoint's context and tokenizer.

    Raises:
        UserError: the tokenizer has more learned tokens than the model: it is another model's. Added ones may lie beyond the
            model's, as some checkpoints' padding token does.
    """
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    beyond = range(config.vocab_size, tokenizer.n_tokens)
    if any(tokenizer.token_bytes(i) is not None and i not in tokenizer.vocabulary.added for i in beyond):
        raise UserError(f"{folder}: the tokenizer has {tokenizer.n_tokens} tokens, but the model {config.vocab_size}")
    return config.max_seq_len, tokenizer


def head_for(target: Path, path: Path) -> Head:
    """Read a head made for a target. Raises UserError when it can't be read, or was made for another model."""
    head = load_head(path)
    head.check(fingerprint(target), load_config(target).dim, str(target))
    return head


def peak_memory() -> int:
    """The most memory, in bytes, that this process has had so far, files it has mapped included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
