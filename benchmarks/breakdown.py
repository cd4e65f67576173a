"""The time of a profiled window by category, from a Chrome trace of torch.profiler.

On a GPU what counts are its kernels and copies, each with the name of the operator that launched it and of those around
that one; on a CPU it is every operator's own time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CATEGORIES = ("matmul", "attention", "cross entropy", "optimizer", "copies", "elementwise")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ATTENTION = re.compile(r"attention|sdpa|flash|fmha", re.IGNORECASE)
_MATMUL = re.compile(r"gemm|nvjet|xmma|cutlass|splitk|(^|::|_)(add|b|badd)?mm$|matmul|aten::linear", re.IGNORECASE)
_LOSS = re.compile(r"cross_?entropy|log_?softmax|nll_?loss", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|sgd|optimizer|foreach|multi_tensor", re.IGNORECASE)
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a window went.

    Attributes:
        total: Its length in seconds.
        seconds: Of each of ``CATEGORIES``. Kernels that overlap count each.
        idle: Seconds in which nothing was computed.
    """

    total: float
    seconds: dict[str, float]
    idle: float

    @classmethod
    def read(cls, path: Path, window: str) -> Breakdown:
        """Read a trace.

        Args:
            path: Of the file that ``export_chrome_trace`` wrote.
            window: The name of the ``record_function`` around what is looked at; the device has ended its work in it.

        Raises:
            ValueError: The trace has no such window, or nothing was computed in it.
        """
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
        frames = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == window]
        if not frames:
            raise ValueError(f"the trace has no event {window!r}")
        start, end = frames[0]["ts"], frames[0]["ts"] + frames[0]["dur"]
        events = [e for e in events if start <= e["ts"] < end and e["name"] != window]
        operators = list(_operators(events))
        device = [e for e in events if e.get("cat") in _DEVICE]
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        if device:
            launched_by = {o.id: o.names for o in operators if o.id is not None}
            for event in device:
                names = (event["name"], *launched_by.get(event["args"].get("External id"), ()))
                seconds[category(names)] += event["dur"] / 1e6
            busy = [(e["ts"], e["ts"] + e["dur"]) for e in device]
        else:
            for operator in operators:
                seconds[category(operator.names)] += operator.own / 1e6
            busy = [(o.start, o.end) for o in operators]
        if not busy:
            raise ValueError(f"nothing was computed in {window!r}")
        total = (end - start) / 1e6
        return cls(total, seconds, total - _covered(busy, end) / 1e6)


def category(names: Sequence[str]) -> str:
    """Return the category of what is called ``names[0]`` within ``names[1:]``, from the innermost outwards."""
    own, everything = " ".join(names[:1]), "\n".join(names)
    if _COPY.search(own):
        return "copies"
    if _ATTENTION.search(everything):
        return "attention"
    if any(_MATMUL.search(name) for name in names[:2]):
        return "matmul"
    if _LOSS.search(everything):
        return "cross entropy"
    return "optimizer" if _OPTIMIZER.search(everything) else "elementwise"


@dataclass
class _Operator:
    """An operator on the host; ``own`` is its time without that of those that it called, all in microseconds."""

    id: int | None
    names: tuple[str, ...]
    start: float
    end: float
    own: float


def _operators(events: list[dict]) -> Iterator[_Operator]:
    """Yield the host's operators, each with its own name and those of the ones around it, of the same thread."""
    by_thread: dict[tuple, list[dict]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for of_thread in by_thread.values():
        around: list[_Operator] = []
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            while around and around[-1].end <= start:
                around.pop()
            outer = around[-1] if around else None
            if outer is not None:
                outer.own -= min(end, outer.end) - start
            names = (event["name"], *(outer.names if outer else ()))
            operator = _Operator(event.get("args", {}).get("External id"), names, start, end, end - start)
            around.append(operator)
            yield operator


def _covered(intervals: list[tuple[float, float]], end: float) -> float:
    """Return the length of the union of ``intervals``, as far as it lies before ``end``."""
    covered, reached = 0.0, float("-inf")
    for first, last in sorted(intervals):
        last = min(last, end)
        covered += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return covered
