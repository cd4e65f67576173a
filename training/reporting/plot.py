"""The style of the figures of commands and benchmarks. This imports matplotlib: import it late."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from training.reporting.metrics import write_or_warn

BLUE, GREEN, ORANGE, GRAY, PALE = "#0072b2", "#009e73", "#e69f00", "#8a8a8a", "#c8c8c8"
# The colors of curves. The first six are those of Okabe and Ito, which color-blind readers can distinguish.
COLORS = (BLUE, "#d55e00", GREEN, "#cc79a7", "#56b4e9", ORANGE, "#7f3c8d", "#666666")
NARROW, MEDIUM, WIDE = 5.4, 8.0, 12.0  # inches: legible on a phone; whole on a phone; the width of a page

# Use it as ``with style():`` or as a decorator around all drawing code, because matplotlib reads most settings when
# an element is added.
style = partial(
    rc_context,
    {
        "figure.dpi": 150,
        "figure.constrained_layout.use": True,
        "figure.titlesize": "large",
        "figure.titleweight": "bold",
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=COLORS),
        "grid.alpha": 0.25,
        "errorbar.capsize": 3,
        "legend.frameon": False,
        "legend.fontsize": "small",
    },
)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a whole; log a warning if it cannot be written."""
    picture = BytesIO()
    figure.savefig(picture)
    write_or_warn(path, picture.getvalue())


def embedded(figure: Figure) -> str:
    """Return a figure as a data URL with a transparent background, for a page."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"
