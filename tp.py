"""Tensor parallelism: what each rank holds, the collectives, start-up and shut-down.

Attention is divided by heads, the feed-forward by its inner columns, embedding and output projection by vocabulary; where
there are more ranks than key/value heads, several ranks hold the same one. A layer sums over the ranks twice, after the
attention's and after the feed-forward's last product; one more sum follows the embedding, and the logits are gathered, or for
greedy decoding only each rank's best. Ranks that run as one process each are started by torchrun.

Ranks never decide apart: what a block commits is computed by every rank from the same gathered bytes, and rank 0's result is
then everyone's (``agree``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError

if TYPE_CHECKING:
    from model import Config

BEAT_S, SILENCE_S = 0.5, 6.0  # how often a rank gives a sign of life, and how long the others wait for one
SMALL_BYTES = 1 << 20  # sums of at most this go over symmetric memory where there is NVLink


class Ranks(NamedTuple):
    """Which part of how many: ``Ranks()`` is a model that isn't divided."""

    rank: int = 0
    size: int = 1


def world() -> Ranks:
    """All ranks that run, and which of them this is."""
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Ranks()


# --- what a rank holds -----------------------------------------------------------------------------------------------


def obstacles(config: Config, size: int, group: int = 1) -> list[str]:
    """What of a model can't be divided over ``size`` ranks, with its numbers.

    Args:
        group: inputs that share a step of a quantized weight; a rank must have whole groups.
    """
    if size == 1:
        return []
    H, K = config.n_heads, config.n_kv_heads
    counts = {"attention heads": H, "feed-forward columns": config.ffn_dim, "vocabulary entries": config.vocab_size}
    bad = [f"{count} {name}" for name, count in counts.items() if count % size]
    bad += [f"{K} key/value heads"] if K % size and size % K else []
    inputs = {"attention outputs": H * config.head_dim, "feed-forward columns": config.ffn_dim}
    groups = [f"{count} {name} in groups of {group}" for name, count in inputs.items() if count % (size * group)]
    return bad or groups


def check_divides(config: Config, size: int, what: str, group: int = 1) -> None:
    """Raises UserError unless a model of this configuration can be divided over ``size`` ranks."""
    bad = obstacles(config, size, group)
    if bad:
        fits = ", ".join(str(n) for n in range(2, config.n_heads + 1) if not obstacles(config, n, group))
        raise UserError(f"{what} can't be divided over {size} ranks: it has {', '.join(bad)}; it can be over {fits or 1}")


def local_config(config: Config, size: int) -> Config:
    """The configuration of one rank's part: its heads, columns and vocabulary entries."""
    return dataclasses.replace(
        config, n_heads=config.n_heads // size, n_kv_heads=max(1, config.n_kv_heads // size),
        ffn_dim=config.ffn_dim // size, vocab_size=config.vocab_size // size,
    )  # fmt: skip


def ranges(name: str, shape: tuple[int, ...], config: Config, ranks: Ranks) -> tuple[int, list[tuple[int, int]]] | None:
    """How a rank cuts a weight of the whole model: the dimension, and the ranges [start, stop) of it. None: it takes all.

    Args:
        shape: the weight's own, as it lies in the file; a quantized one's is shorter along its inputs.
    """
    stem = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
    r, n = ranks
    if n == 1:
        return None
    if stem in ("wo", "w2"):  # by inputs
        if name.endswith(".bias") or len(shape) == 1:
            return None
        return 1, [(shape[1] * r // n, shape[1] * (r + 1) // n)]
    if stem in ("embed", "output"):
        parts = [(0, config.vocab_size)]
    elif stem == "w13":
        parts = [(0, config.ffn_dim), (config.ffn_dim, config.ffn_dim)]
    elif stem == "wqkv":
        H, K, C = config.n_heads, config.n_kv_heads, config.head_dim
        own = max(1, K // n)
        first = r * K // n  # several ranks have the same where n > K
        kv = [(start + first * C, start + (first + own) * C) for start in (H * C, (H + K) * C)]
        return 0, [(H * C * r // n, H * C * (r + 1) // n), *kv]
    else:
        return None
    return 0, [(start + width * r // n, start + width * (r + 1) // n) for start, width in parts]


# --- the collectives -------------------------------------------------------------------------------------------------

_symmetric: Tensor | None = None  # what one-shot sums on CUDA go through, once ``start`` found NVLink


@torch.library.custom_op("engine::sum_ranks", mutates_args=())
def sum_ranks(x: Tensor) -> Tensor:
    """The sum of every rank's x."""
    if _symmetric is not None and x.nbytes <= SMALL_BYTES and x.dtype == _symmetric.dtype:
        x, group = x.contiguous(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        return torch.ops.symm_mem.one_shot_all_reduce_copy(_symmetric[: x.numel()], x.view(-1), "sum", group).view_as(x)
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out)
    return out


@sum_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name of torch 2.13, and older


def gather(x: Tensor) -> Tensor:
    """Every rank's x, [ranks, ...]."""
    out = x.new_empty(dist.get_world_size() * x.numel())
    _all_gather(out, x.flatten())
    return out.view(-1, *x.shape)


def gather_last(x: Tensor) -> Tensor:
    """Every rank's x [..., n], one behind the other: [..., ranks * n]."""
    return gather(x).movedim(0, -2).flatten(-2)


def best_of(logits: Tensor, ranks: Ranks, limit: int) -> Tensor:
    """The likeliest token [T], the first of equals, of logits [T, n] of which each rank has its part, ``n`` tokens wide.

    Args:
        limit: tokens from this one on are padding, and never chosen.
    """
    return best_and_log_p(logits, ranks, limit, None)[0]


def best_and_log_p(logits: Tensor, ranks: Ranks, limit: int, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``best_of``, the logits [T] of these, and the log-probabilities [T] of ``tokens`` [T] (None without any).

    Of the logits only each rank's best and their sum are sent, four numbers a place.
    """
    n = logits.shape[-1]
    first = ranks.rank * n
    if first + n > limit:
        logits = logits.masked_fill(torch.arange(first, first + n, device=logits.device) >= limit, -math.inf)
    best = logits.argmax(-1)
    own = best if tokens is None else (tokens - first).clamp(0, n - 1)
    mine = logits.gather(-1, own[:, None])[:, 0]
    value = logits.gather(-1, best[:, None])[:, 0]
    if ranks.size == 1:
        return best, value, None if tokens is None else mine - logits.logsumexp(-1)
    parts = [value, (best + first).float()]  # ids are exact in fp32 up to 2^24
    if tokens is not None:
        parts += [logits.logsumexp(-1), torch.where((tokens >= first) & (tokens < first + n), mine, -math.inf)]
    every = gather(torch.stack(parts, -1))  # [ranks, T, 2 or 4]
    winner = every[..., 0].argmax(0)  # of equals the lowest rank, which has the lowest ids
    best = every[..., 1].gather(0, winner[None])[0].long()
    return best, every[..., 0].amax(0), None if tokens is None else every[..., 3].amax(0) - every[..., 2].logsumexp(0)


def agree(x: Tensor, check: bool = False) -> None:
    """Make x rank 0's on every rank.

    Args:
        check: a debugging aid: first compare, and end this run where a rank had decided otherwise.
    """
    if check:
        different = [i for i, other in enumerate(gather(x)) if not torch.equal(other, gather(x)[0])]
        if different:
            raise RuntimeError(f"ranks {different} decided otherwise than rank 0")
    dist.broadcast(x, 0)


def largest(x: Tensor) -> Tensor:
    """The largest of every rank's x, element by element, in place."""
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


_store: dist.Store | None = None  # the rendezvous, once ``start`` has joined it
_questions = itertools.count()


def told(ask: Callable[[], Any]) -> Any:
    """What ``ask`` gives on rank 0, which alone is asked, on every rank; a UserError too. It may take any time."""
    if not dist.is_initialized():
        return ask()
    value = mistake = None
    key = f"told/{next(_questions)}"
    if dist.get_rank() == 0:
        try:
            value = ask()
        except UserError as error:
            mistake = str(error)
    if _store is not None:  # a collective would wait ten minutes and give up: people think longer
        if dist.get_rank() == 0:
            _store.set(key, "")
        while not _store.check([key]):
            time.sleep(0.02)
    box = [value, mistake]
    dist.broadcast_object_list(box, 0)
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same(what: str, value: str) -> None:
    """Raises UserError, on every rank, unless all ranks have the same ``value`` of ``what``."""
    values = gather_objects(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"rank {rank} has another {what} than rank 0: {other}, not {values[0]}; all must read the same files")


@contextmanager
def together() -> Iterator[None]:
    """Let a user's mistake that only some ranks can see end all of them: they leave the block together or not at all."""
    mine = None
    try:
        yield
    except UserError as error:
        mine = str(error)
    every = gather_objects(mine)
    for rank, message in enumerate(every):
        if message is not None:
            raise UserError((f"rank {rank}: " if None in every else "") + message)


# --- start-up and shut-down ------------------------------------------------------------------------------------------


class Watch:
    """Ends this process, with a word, soon after another rank has died: a collective would wait for it for minutes.

    Each rank counts up a number in the rendezvous store; one whose number stands still is gone.
    """

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self.store, self.ranks = store, ranks
        self.stopped = threading.Event()
        store.set(f"name/{ranks.rank}", f"rank {ranks.rank} (host {socket.gethostname()}, process {os.getpid()})")
        store.set(f"beat/{ranks.rank}", "0")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        seen = dict.fromkeys(range(self.ranks.size), ("", time.monotonic()))
        beat = 0
        try:
            while not self.stopped.wait(BEAT_S):
                beat += 1
                self.store.set(f"beat/{self.ranks.rank}", str(beat))
                for rank, (last, when) in seen.items():
                    now = self.store.get(f"beat/{rank}").decode() if self.store.check([f"beat/{rank}"]) else ""
                    if now == "failed" and rank != self.ranks.rank:
                        self._end(self.store.get(f"name/{rank}").decode())
                    elif now != last or now == "done":
                        seen[rank] = (now, time.monotonic())
                    elif time.monotonic() - when > SILENCE_S:
                        self._end(self.store.get(f"name/{rank}").decode() if self.store.check([f"name/{rank}"]) else f"rank {rank}")
        except dist.DistError:
            if not self.stopped.is_set():
                self._end("the rendezvous store, on the node of rank 0,")

    def _end(self, who: str) -> None:
        print(f"error: {who} is gone; rank {self.ranks.rank} ends too", file=sys.__stderr__, flush=True)
        os._exit(1)

    def all_say(self, message: str) -> bool:
        """Whether every rank ends with this message: they have two seconds to say so."""
        with suppress(dist.DistError):  # who holds the store has heard all, and is gone
            self.store.set(f"error/{self.ranks.rank}", message)
            keys, limit = [f"error/{rank}" for rank in range(self.ranks.size)], time.monotonic() + 2
            while not self.store.check(keys):
                if time.monotonic() > limit:
                    return False
                time.sleep(0.05)
            return all(self.store.get(key).decode() == message for key in keys)
        return True

    def close(self, end: str = "done") -> None:
        """Say that this rank has done its work, and the others go on, or that it ``failed``, and they end."""
        self.stopped.set()
        self.thread.join()
        with suppress(dist.DistError):  # the others may have been done before, and have taken the store with them
            self.store.set(f"beat/{self.ranks.rank}", end)


_watch: Watch | None = None


def default_device() -> str:
    """CUDA where there is some."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises UserError for CUDA on a machine that hasn't it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("`device` is cuda; this machine has no CUDA device that PyTorch can use")


def start(device: str) -> Ranks:
    """Join the ranks that torchrun started; without torchrun there is one, and nothing to do.

    Only rank 0 prints from here on.

    Raises:
        UserError: no CUDA device, or fewer than processes on this machine.
    """
    global _watch, _store
    check_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        here, wanted = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if wanted > here:  # as every rank of this machine finds
            raise UserError(f"{wanted} ranks on a machine with {here} GPUs; lower --nproc_per_node")
        torch.cuda.set_device(local)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank that waits for another in a collective would not hear of Ctrl-C
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=5))))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size,
        timeout=timedelta(minutes=10), device_id=torch.device(device, local) if device == "cuda" else None,
    )  # fmt: skip
    _store = dist.PrefixStore("told", store)
    _watch = Watch(dist.PrefixStore("watch", store), Ranks(rank, size))
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the process's end)
    if device == "cuda":
        _use_symmetric_memory()
    return Ranks(rank, size)


def _use_symmetric_memory() -> None:
    """Let small sums go through symmetric memory, if all ranks are on this machine and reach each other's memory."""
    global _symmetric
    import torch.distributed._symmetric_memory as symm_mem

    reachable = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == dist.get_world_size() and all(
        torch.cuda.can_device_access_peer(torch.cuda.current_device(), other)
        for other in range(torch.cuda.device_count())
        if other != torch.cuda.current_device()
    )
    votes = gather(torch.tensor([int(reachable)], device="cuda"))
    if not bool(votes.all()):
        return
    _symmetric = symm_mem.empty(SMALL_BYTES // 2, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    symm_mem.rendezvous(_symmetric, dist.group.WORLD.group_name)  # type: ignore[union-attr]


@contextmanager
def ranks_of(device: str) -> Iterator[Ranks]:
    """``start``, and an orderly end. A rank that fails by itself ends the others; where a collective failed, the watch has
    time to name the rank that failed it."""
    ranks = start(device)
    if _watch is None:
        yield ranks
        return
    try:
        yield ranks
    except BaseException as error:
        if isinstance(error, UserError):
            error.shared = _watch.all_say(str(error))
            _watch.close("done" if error.shared else "failed")
            raise
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error)):
            time.sleep(SILENCE_S + 4 * BEAT_S)
        _watch.close("failed")
        raise
    _watch.close()
    dist.destroy_process_group()
