"""The table of a sweep for a paper, sweep.tex. It needs the package booktabs."""

from __future__ import annotations

import math
import re
from typing import Any

from training.reporting.job_record import short
from training.studies.sweep.table import Table, plus_minus

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def latex(table: Table) -> str:
    """Return the settings with their objective, in bold the best one, and the results of the test.

    Numbers are means with sample standard deviations (n - 1) where a setting has several jobs.
    """
    name, summaries = table.objective.name, [row.summary for row in table.scored]
    tested = sorted({key for one in summaries for key in one if key[:5] == "test_" and isinstance(one[key], float)})
    head = [*table.keys, *["n"] * bool(table.repeated), name, *(key for key in tested if key != name)]
    lines = [[escape(text) for text in head]]
    for row in table.rows:
        numbers = [(row.score, row.deviation, row in table.best)]
        numbers += [(row.summary.get(key), row.deviations.get(key), False) for key in tested if key != name]
        own = [escape(short(row.values.get(key, ""))) for key in table.keys]
        lines.append([*own, *[f"{row.number}"] * bool(table.repeated), *(_number(*one) for one in numbers)])
    first, *rest = (f"{' & '.join(line)} \\\\" for line in lines)
    begin = rf"\begin{{tabular}}{{{'l' * len(table.keys)}{'c' * (len(head) - len(table.keys))}}}"
    return "\n".join([begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", r"\end{tabular}", ""])


def escape(text: str) -> str:
    """Return a text as LaTeX prints it unchanged."""
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _SPECIAL.get(found[0], rf"\{found[0]}"), text)


def _number(mean: Any, deviation: float | None, is_best: bool) -> str:
    if not isinstance(mean, float) or math.isnan(mean):
        return "--"
    shown = re.sub(r"e([+-]\d+)", r" \\cdot 10^{\1}", plus_minus(mean, deviation, sign=r"\pm"))
    return rf"$\mathbf{{{shown}}}$" if is_best else f"${shown}$"
