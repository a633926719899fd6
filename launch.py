"""How a round gets onto the device, and what comes back: run as it is, or captured once as a CUDA graph and replayed.

A graph of a round has thousands of nodes, and launching it takes the host milliseconds. So the next round is launched before
the last one's outcome is read, and the host's work hides behind the device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Where a round's time went: each mark gives the time since the last one to a name. Events on CUDA, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []  # seconds, or events on CUDA

    def mark(self, name: str) -> None:
        if self.cuda:
            # an event that is part of a graph is recorded anew by each replay
            event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def taken(self) -> list[tuple[str, Any]]:
        """The marks since the last call."""
        marks, self.marks = self.marks, []
        return marks


def spent(marks: list[tuple[str, Any]]) -> dict[str, float]:
    """Milliseconds by name from the first mark to the last. On CUDA the device must have passed them all."""
    total: dict[str, float] = {}
    for (_, last), (name, now) in zip(marks, marks[1:]):
        ms = (now - last) * 1e3 if isinstance(now, float) else last.elapsed_time(now)
        total[name] = total.get(name, 0.0) + ms
    return total


@dataclass
class Flight:
    """A round under way. Its outcome may be read until as many more were launched as there are slots.

    Args:
        M: tokens it drafts.
        result: the round's result vector, on its way to the host.
        trace: the same of an engine's trace, if it keeps one.
        marks: the round's stopwatch.
        arrived: on CUDA, the event behind the copies.
    """

    M: int
    result: Tensor
    trace: Tensor | None
    marks: list[tuple[str, Any]]
    arrived: Any = None

    def outcome(self) -> tuple[list[int], dict[str, float], list[list[float]] | None]:
        """The result, the milliseconds by name, and the trace; waits until they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.result.tolist(), spent(self.marks), None if self.trace is None else self.trace.tolist()


@dataclass
class Slot:
    """What one of the rounds under way needs for itself: room on the host, and graphs whose events are its own."""

    result: Tensor
    trace: Tensor | None
    graphs: dict[Any, tuple[Any, list[tuple[str, Any]]]] = field(default_factory=dict)


class Launcher:
    """Launches rounds that may be under way together; on the device they run one after another.

    Args:
        result, trace: where every round leaves its outcome, on the device.
        watch: the stopwatch that rounds mark.
        slots: rounds that may be under way at once.
        generator: the source of random numbers that rounds draw from.
        capture: replay rounds as CUDA graphs: the first round of a kind runs as it is, which compiles and measures what it
            needs, and the second one is captured.
    """

    def __init__(
        self, result: Tensor, trace: Tensor | None, watch: Stopwatch, slots: int, generator: torch.Generator, capture: bool
    ) -> None:
        self.result, self.trace, self.watch, self.generator, self.capture = result, trace, watch, generator, capture
        self.cuda = result.device.type == "cuda"
        self.slots = [Slot(self._on_host(result), None if trace is None else self._on_host(trace)) for _ in range(slots)]
        self.known: set[Any] = set()  # kinds of round that have run as they are
        self.pool = torch.cuda.graph_pool_handle() if capture else None
        self.launched = 0

    def _on_host(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda)

    def launch(self, kind: Any, M: int, run: Callable[[], None]) -> Flight:
        """Launch ``run``, a round that drafts M tokens. Rounds of one ``kind`` do the same work on the same buffers."""
        slot = self.slots[self.launched % len(self.slots)]
        self.launched += 1
        if self.capture and kind in self.known:
            if kind not in slot.graphs:
                slot.graphs[kind] = self._captured(run)
            graph, marks = slot.graphs[kind]
            graph.replay()
        else:
            run()
            marks = self.watch.taken()
            self.known.add(kind)
        slot.result.copy_(self.result, non_blocking=True)
        if self.trace is not None and slot.trace is not None:
            slot.trace.copy_(self.trace, non_blocking=True)
        arrived = None
        if self.cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return Flight(M, slot.result, slot.trace, marks, arrived)

    def _captured(self, run: Callable[[], None]) -> tuple[Any, list[tuple[str, Any]]]:
        """A round as a CUDA graph, and its stopwatch's events. Capturing runs nothing on the device."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # other threads, such as NCCL's watchdog, may go on asking the device what they like
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            run()
        return graph, self.watch.taken()
