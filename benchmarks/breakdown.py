"""The time of a profiled window by category, from a Chrome trace of torch.profiler.

On a GPU what counts are its kernels and copies, each with the name of the operator that launched it and of those around
that one; on a CPU it is every operator's own time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

CATEGORIES = ("matmul", "attention", "cross entropy", "optimizer", "copies", "elementwise")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ATTENTION = re.compile(r"attention|sdpa|flash|fmha", re.IGNORECASE)
_MATMUL = re.compile(r"gemm|nvjet|xmma|cutlass|splitk|(^|::|_)(add|b|badd)?mm$|matmul|aten::linear", re.IGNORECASE)
_LOSS = re.compile(r"cross_?entropy|log_?softmax|nll_?loss", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|sgd|optimizer|foreach|multi_tensor", re.IGNORECASE)
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)


def breakdown(path: Path, window: str) -> dict[str, float]:
    """Return the seconds of each of ``CATEGORIES``, "idle" ones in which nothing was computed, and their "total".

    Kernels that overlap count each.

    Args:
        path: Of the file that ``export_chrome_trace`` wrote.
        window: The name of the ``record_function`` around what is looked at; the device has ended its work in it.

    Raises:
        ValueError: The trace has no such window, or nothing was computed in it.
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    frame = next((e for e in events if e.get("cat") == "user_annotation" and e["name"] == window), None)
    if frame is None:
        raise ValueError(f"the trace has no event {window!r}")
    end = frame["ts"] + frame["dur"]
    events = [e for e in events if frame["ts"] <= e["ts"] < end and e["name"] != window]
    operators = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    _nest(operators)
    launched_by = {e.get("args", {}).get("External id"): e["names"] for e in operators}
    kernels = [e for e in events if e.get("cat") in _DEVICE]
    for kernel in kernels:
        kernel["own"] = kernel["dur"]
        kernel["names"] = (kernel["name"], *launched_by.get(kernel["args"].get("External id", ""), ()))
    computed = kernels or operators
    if not computed:
        raise ValueError(f"nothing was computed in {window!r}")
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for event in computed:
        seconds[category(event["names"])] += event["own"] / 1e6
    return seconds | {"idle": (frame["dur"] - _covered(computed, end)) / 1e6, "total": frame["dur"] / 1e6}


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


def _nest(operators: list[dict]) -> None:
    """Give each of the host's operators its ``names``, those around it included, and its ``own`` microseconds."""
    around: dict[tuple, list[dict]] = {}  # by thread
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        outer = around.setdefault((event["pid"], event["tid"]), [])
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        event["own"], event["names"] = event["dur"], (event["name"],)
        if outer:
            caller = outer[-1]
            caller["own"] -= min(event["ts"] + event["dur"], caller["ts"] + caller["dur"]) - event["ts"]
            event["names"] += caller["names"]
        outer.append(event)


def _covered(events: list[dict], end: float) -> float:
    """Return the length of the union of the events, as far as it lies before ``end``."""
    covered, reached = 0.0, float("-inf")
    for first, last in sorted((e["ts"], min(e["ts"] + e["dur"], end)) for e in events):
        covered += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return covered
