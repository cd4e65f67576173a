"""report.html: one page without scripts and without anything from elsewhere."""

from __future__ import annotations

import base64
import datetime
import html
import io
import json
from collections.abc import Callable
from typing import Any

from training.sweep.table import Row, Table

# What the page and the console show of a row; columns that no row fills are left out.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "time per step": lambda row: _seconds(row.step_time),
    "10–90 %": lambda row: _range(row.spread),
    "samples/s": lambda row: _number(row.summary.get("samples_per_s")),
    "tokens/s": lambda row: _number(row.summary.get("tokens_per_s")),
    "bubble": lambda row: _percent(row.summary.get("bubble_fraction")),
    "ideal bubble": lambda row: _percent(row.summary.get("ideal_bubble_fraction")),
    "peak memory": lambda row: _memory(row.summary.get("peak_memory_bytes")),
    "final loss": lambda row: _number(row.summary.get("final_loss")),
    "best val. loss": lambda row: _number(row.summary.get("best_val_loss")),
}

_STYLE = """
:root { color-scheme: light; --line: #d8dee4; --dim: #57606a; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.2rem; color: #1f2328; background: #fff;
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); font-size: .9rem; }
pre { background: #f6f8fa; border-radius: 6px; padding: .7rem; margin: .4rem 0; font-size: .85rem;
      white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: .8rem 0; max-width: 56rem; } figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--dim); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-size: .85rem; color: var(--dim); } td { overflow-wrap: anywhere; }
.jobs td { white-space: nowrap; font-size: .93rem; }
tr.best td { background: #e6f5ee; font-weight: 600; } .jobs td.bad { color: #b42318; white-space: normal; }
@media (max-width: 700px) {
  .jobs thead { display: none; }
  .jobs tr { display: block; border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: .2rem 0; }
  .jobs td { display: flex; gap: .8rem; justify-content: space-between; border: 0; padding: .15rem .7rem; }
  .jobs td:empty { display: none; }
  .jobs td::before { content: attr(data-name); color: var(--dim); font-weight: 400; flex: none; }
}
"""


def page(table: Table, command: str) -> str:
    """The whole report: result, figures, table, errors, environment, and the ``command`` that made it."""
    swept = ", ".join(table.keys) or "one job"
    parts = [
        f"<h1>Sweep over {_text(swept)}</h1>",
        f'<p class="dim">{_text(_circumstances(table))}</p>',
        *(f"<p>{_text(line)}</p>" for line in _results(table)),
        *_figures(table),
        "<h2>Jobs</h2>",
        _jobs(table),
        *_errors(table),
        *_timelines(table),
        "<h2>Environment</h2>",
        _environment(table),
        "<h2>Command</h2>",
        f"<pre>{_text(command)}</pre>",
        f'<p class="dim">{_text(_again(table, command))}</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>Sweep over {_text(swept)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _again(table: Table, command: str) -> str:
    added = "" if "hydra.sweep.dir=" in command else f" with hydra.sweep.dir={table.folder} added"
    return f"The same command{added} runs only the jobs that have not finished."


def _circumstances(table: Table) -> str:
    done = sum(row.finished for row in table.rows)
    when = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return " · ".join(filter(None, [table.subject, f"{done} of {len(table.rows)} jobs finished", when]))


def _results(table: Table) -> list[str]:
    """The best job of each model in a sentence."""
    lines = []
    for row in table.rows:
        if not row.best:
            continue
        rivals = [r for r in table.timed if r.summary.get("model") == row.summary.get("model")]
        slowest = max(rivals, key=table.cost)
        factor = table.cost(slowest) / table.cost(row)
        whose = f" of {row.summary['model']}" if sum(r.best for r in table.rows) > 1 else ""
        cost = f"{_seconds(table.cost(row))} per {'sample' if table.per_sample else 'step'}"
        lines.append(f"Fastest{whose}: {row.label} with {cost}, {factor:.2f}x as fast as {slowest.label}.")
    return lines


def _figures(table: Table) -> list[str]:
    if not table.timed:
        return ["<p>No job has trained to its end, so there is nothing to draw.</p>"]
    from training.sweep.figure import NARROW, WIDE, loss_figure, numeric_axis, time_figure

    caption = (
        f"Median of each job's steps after the warm-up; the bars reach from the 10th to the 90th percentile. "
        f"{'Steps are of different sizes, so the time per sample is shown. ' if table.per_sample else ''}"
    )
    if numeric_axis(table) == "parallel.chunks" and any(row.summary.get("schedule") for row in table.timed):
        caption += (
            "Ideal: W / (1 − ideal bubble), that is W·(m+p−1)/m for GPipe and 1F1B with m chunks on p stages. "
            "W, a stage's work if cutting the batch cost nothing, is the smallest measured time × (1 − ideal bubble), "
            "so the curve touches the job that comes nearest to its own ideal."
        )
    found = [_figure([time_figure(table, size) for size in (WIDE, NARROW)], "Time per step of each job", caption)]
    losses = [loss_figure(table, size) for size in (WIDE, NARROW)]
    if losses[0] is not None:
        found.append(_figure(losses, "Training loss of each job", "Training loss over the steps."))
    return found


def _figure(sizes: list, alt: str, caption: str) -> str:
    wide, narrow = (_data_uri(figure) for figure in sizes)
    return (
        f'<figure><picture><source media="(max-width: 700px)" srcset="{narrow}">'
        f'<img alt="{_text(alt)}" src="{wide}"></picture><figcaption>{_text(caption)}</figcaption></figure>'
    )


def _data_uri(figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _jobs(table: Table) -> str:
    columns = {name: show for name, show in COLUMNS.items() if any(show(row) for row in table.rows)}
    names = ["job", *table.keys, "status", *columns]
    head = "".join(f"<th>{_breakable(name)}</th>" for name in names)
    lines = []
    for row in table.rows:
        cells = [str(row.job.num), *(row.values.get(key, "") for key in table.keys)]
        last = ""
        if row.finished:
            cells += [row.job.status, *(show(row) for show in columns.values())]
        else:
            last = f'<td class="bad" data-name="status" colspan="{1 + len(columns)}">{_text(_status(row))}</td>'
        body = "".join(
            f'<td data-name="{_text(name)}">{_text(cell)}</td>' for name, cell in zip(names, cells, strict=False)
        )
        lines.append(f'<tr{" class=best" if row.best else ""}>{body}{last}</tr>')
    body = "\n".join(lines)
    return f'<div class="scroll"><table class="jobs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _status(row: Row) -> str:
    return f"{row.job.status}: {row.problem}".removesuffix(": ")


def _errors(table: Table) -> list[str]:
    """The errors of which the table shows only a line, each once."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        error = (row.job.error or "").strip()
        if error and error != row.problem:
            found.setdefault(error, []).append(row.label)
    shown = [f"<h3>{_text('; '.join(labels))}</h3><pre>{_text(error)}</pre>" for error, labels in found.items()]
    return ["<h2>Errors in full</h2>", *shown] if shown else []


def _timelines(table: Table) -> list[str]:
    """Pictures of pipelines that jobs have left (train.trace=true); the best one's is open."""
    found = []
    for row in table.rows:
        path = row.folder / "timeline.png"
        if path.exists():
            uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
            found.append(
                f"<details{' open' if row.best else ''}><summary>{_text(row.label)}</summary>"
                f'<figure><img alt="Timeline of {_text(row.label)}" src="{uri}"></figure></details>'
            )
    return ["<h2>Timelines</h2>", *found] if found else []


def _environment(table: Table) -> str:
    """What the first job that recorded it has run on."""
    known: dict[str, Any] = {}
    for row in table.rows:
        try:
            known = json.loads((row.folder / "environment.json").read_text())
            break
        except (OSError, ValueError):
            continue
    if not known:
        return "<p>No job came far enough to record it.</p>"
    cpu, commit = known["cpu"], known["git_commit"]
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in known["gpus"]]
    shown = {
        "code": commit and commit[:12] + (" with changes" if known["git_dirty"] else ""),
        "processor": f"{cpu['model']}, {cpu['cores']} cores",
        "memory": known["memory_bytes"] and f"{known['memory_bytes'] / 2**30:.0f} GiB",
        "GPUs": ", ".join(gpus),
        "system": f"{known['platform']}, Python {known['python']}",
        "packages": ", ".join(f"{name} {version}" for name, version in known["packages"].items() if version),
    }
    body = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in shown.items() if value)
    return f"<table>{body}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _breakable(key: str) -> str:
    return _text(key).replace(".", ".<wbr>")


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _range(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return ""
    low, high = (_seconds(value) for value in ends)
    same_unit = low.split()[1] == high.split()[1]
    return f"{low.split()[0] if same_unit else low}–{high}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _memory(ranks: list[int] | None) -> str:
    """The sum over the ranks."""
    return "" if not ranks else f"{sum(ranks) / 2**30:.2f} GiB"
