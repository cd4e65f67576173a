"""The pages: self-contained, and readable in a real browser at the width of a desktop and of a phone."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from composed import compose
from sweep_jobs import chunk_sweep, leave

from conf.instantiate import to_config, to_dict
from training.reporting.timeline import beside
from training.studies.planning.comparison import Row, _bars
from training.studies.planning.comparison import write as write_comparison
from training.studies.planning.paper import best_of_each, command, predict_on_paper, timeline_of
from training.studies.planning.trial import Trial
from training.studies.sweep.report import page, results
from training.studies.sweep.table import read_table
from training.studies.verification.layouts import COMPARED, Compared
from training.studies.verification.probes import Finding
from training.studies.verification.report import Report
from training.studies.verification.report import write as write_certificate

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = "python train.py -m model=resnet50 'parallel.chunks=1,2,3' logger.tags=[<b>]"
ABOUT = {
    "git_commit": "0123456789abcdef", "git_dirty": True, "python": "3.12.1", "platform": "Linux 6.1 x86_64",
    "cpu": {"model": "Some CPU", "cores": 2}, "gpus": [{"name": "Some GPU", "memory_bytes": 1}],
    "packages": {"torch": "2.13.0"},
}  # fmt: skip
FOOT = (
    "Python 3.12.1, torch 2.13.0 · Linux 6.1 x86_64, Some CPU, 2 cores, Some GPU · commit 0123456789abcdef with changes"
)


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """Of nine jobs, of which the first has recorded a timeline."""
    sweep = chunk_sweep(tmp_path_factory.mktemp("sweep"))
    (sweep / "0" / "timeline.png").write_bytes(b"\x89PNG")
    (sweep / "0" / "environment.json").write_text(json.dumps(ABOUT))
    return page(read_table(sweep), COMMAND)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A model with a note of a probe, two layouts that ran, one of them wrong, and two that were not compared."""
    configuration = {"verify": {"tolerance": 1e-5, "steps": 3}, "train": {"precision": "fp64", "global_batch_size": 8}}
    about = {**ABOUT, "model": "toy", "parameters": 1234, "data": "numbers", "date": "2026-01-01", "seed": 1}
    about |= {"command": "python train.py mode=verify", "configuration": configuration}
    run = {"differences": dict.fromkeys(COMPARED, (1e-16, "step 1")), "seconds": 1.2}
    wrong = {
        **run,
        "differences": dict.fromkeys(COMPARED, (1e-2, "step 2")),
        "ratios": dict.fromkeys(COMPARED, 3.0),
        "reason": "first differs at " + 90 * "x",
    }
    report = Report(
        about,
        limits=dict.fromkeys(COMPARED, 1e-5),
        probes=[Finding("shapes", holds=True), Finding("repeats", "b", "draws from numpy's generator in training")],
        layouts=[
            Compared("parallel=single chunks=4", holds=True, losses=[3.5, 4.0, 2.0, 2.5], **run),
            Compared("parallel=pipe_fsdp dp=2 pp=2 schedule=1f1b", holds=False, losses=[3.5, 4.1, 2.1, 2.6], **wrong),
            Compared("parallel=model_parallel pp=4", reason="4 stages but only 3 layers"),
            Compared("parallel=ddp dp=8", reason="needs 8 processes, and verify.processes=4", needs=8),
        ],
        complete=True,
    )
    folder = tmp_path_factory.mktemp("certificate")
    write_certificate(report, folder)
    return (folder / "certificate.html").read_text()


@pytest.fixture(scope="module")
def compared():
    """The toy's strategies on a laptop, as if each had run as predicted."""
    cfg = to_config(to_dict(compose("model=toy", "parallel=auto", "cluster=laptop", "mode=plan")))
    best = best_of_each(predict_on_paper(cfg)[0]).values()
    trials = [
        Trial(one.seconds.total, 1 << 30, steps={r: 3 * [own] for r, own in timeline_of(one).items()})
        if one.layout.pp > 1
        else Trial(one.seconds.total, 1 << 30)
        for one in best
    ]
    return [Row(one, trial) for one, trial in zip(best, trials, strict=True)]


@pytest.fixture(scope="module")
def comparison(compared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.studies.planning.comparison.describe", lambda: ABOUT)
        commands = [command([], row.best) for row in compared]
        write_comparison(compared, "toy, 64 samples", commands, ["fsdp: no memory"], folder)
    assert {path.name for path in folder.iterdir()} == {
        "comparison.html", "comparison.json", "comparison.png", "timelines.png"
    }  # fmt: skip
    return (folder / "comparison.html").read_text()


@pytest.fixture(scope="module")
def pages(html, certificate, comparison):
    return {"report": html, "certificate": certificate, "comparison": comparison}


def test_a_sweep_has_this_page(html):
    """Its text, a cell a line, without the time and the place of the sweep."""
    lines = re.sub(r"<[^>]*>", "", re.sub("\u200b|<style>.*</style>", "", html, flags=re.S)).splitlines()
    text = "\n".join(line.strip() for line in lines if line.strip()) + "\n"
    text = re.sub(r"finished · .*", "finished · TIME", re.sub(r"hydra.sweep.dir=\S+", "hydra.sweep.dir=PATH", text))
    assert text == (Path(__file__).parent / "pages" / "sweep.txt").read_text()


@pytest.mark.parametrize("name, pictures", [("report", 2), ("certificate", 0), ("comparison", 2)])
def test_nothing_comes_from_elsewhere_and_nothing_runs(pages, name, pictures):
    text = pages[name]
    shown = re.findall(r'\b(?:src|srcset)="([^"]*)"', text)
    assert len(shown) == pictures and all(link.startswith("data:") for link in shown)
    links = ["0/", "0/timeline.png", *(f"{n}/" for n in range(1, 9))] if name == "report" else []
    assert re.findall(r'<a href="([^"]*)"', text) == links
    assert "<script" not in text and "url(" not in text and "@import" not in text


def test_all_pages_have_one_look_and_end_with_commit_versions_and_machine(pages):
    assert len({text.partition("<style>")[2].partition("</style>")[0] for text in pages.values()}) == 1
    for text in pages.values():
        foot = re.search("<footer>(.*)</footer>", text, flags=re.S)
        assert " ".join(foot[1].split()) == FOOT


def test_each_layout_of_the_certificate_has_its_differences_its_losses_and_its_reason(certificate):
    assert "not the same in every layout</span>" in certificate and "0 of 1 layouts train as one" in certificate
    assert certificate.count("<polyline") == 2 and ">4.1</text>" in certificate and ">2</text>" in certificate
    assert "from 3.5 to 2.5, those" in certificate and certificate.count(">reference</span>") == 1
    assert "2 not compared: 1 need more processes (verify.processes=8 compares them), 1 are not" in certificate
    assert certificate.count('class="bad" title="step 2">1e-02<') == len(COMPARED)
    assert "4 stages but only 3 layers: <span" in certificate and "layer b: draws from" in certificate


def test_each_cell_of_the_comparison_says_what_it_is(comparison):
    columns, cells = re.findall("<th>(.*)</th>", comparison), re.findall('<td data-name="(.*?)"', comparison)
    assert len(set(columns)) == len(columns) and cells == columns * comparison.count("<pre>")
    assert "fsdp: no memory" in comparison


def test_nothing_is_cut_off_in_the_pictures_of_the_comparison(compared):
    row = next(row for row in compared if row.trial.steps)
    layout = replace(row.best.layout, schedule="interleaved_1f1b", stages_per_rank=4, recompute="full")
    long = replace(row, best=replace(row.best, layout=layout))
    for figure in (_bars([*compared, long], 40 * "n"), beside(timeline_of(row.best), row.trial.steps, 60 * "n")):
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
        assert box.x0 >= 0 and box.x1 <= figure.get_figwidth() and box.y0 >= 0 and box.y1 <= figure.get_figheight()


FASTEST = [
    (2.0, 20, "Fastest: parallel=a with step_time_s 1 s; the worst, parallel=c, has 3 s."),
    (1.05, 20, "Best median: parallel=a with step_time_s 1 s; the worst, parallel=c, has 3 s. Its spread (10–90 %) "
     "overlaps that of parallel=b: any"),
    (2.0, 11, "has 3 s. 9 steps after the warm-up are too few to compare speeds; train for 12 or more."),
]  # fmt: skip


@pytest.mark.parametrize("second, steps, said", FASTEST)
def test_a_job_is_called_the_fastest_only_where_enough_steps_and_their_spreads_show_it(tmp_path, second, steps, said):
    for num, (name, seconds) in enumerate({"a": 1.0, "b": second, "c": 3.0}.items()):
        leave(tmp_path, num, f"parallel={name}", times=[seconds * (1 + 0.05 * (i % 5 - 2)) for i in range(steps)])
    assert said in next(results(read_table(tmp_path)))


def test_a_sweep_in_which_nothing_has_trained_has_a_page_too(tmp_path):
    leave(tmp_path, 0, "seed=1", status="failed", error="no")
    leave(tmp_path, 1, "seed=2", status="waiting")
    text = page(read_table(tmp_path), COMMAND)
    assert "failed: no" in text and "waiting: not started" in text and "<img" not in text


@pytest.mark.parametrize("width, scheme", [pytest.param(1200, "light", marks=pytest.mark.slow), (500, "dark")])
def test_a_browser_shows_them_without_complaint_and_without_sideways_scrolling(pages, width, scheme, tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium on the PATH: apt-get install chromium")
    messages, schemes, shown, across = [], [], [], []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        view.on("console", lambda message: messages.append(message.text))
        view.on("pageerror", lambda error: messages.append(str(error)))
        view.on("request", lambda request: schemes.append(request.url.split(":")[0]))
        for name, text in pages.items():
            path = tmp_path / f"{name}.html"
            path.write_text(text, encoding="utf-8")
            view.goto(path.as_uri())
            shown += view.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth, i.clientWidth])")
            across.append(view.evaluate("document.documentElement.scrollWidth"))
        chromium.close()
    assert messages == [] and set(schemes) <= {"file", "data"}
    assert len(shown) == 4 and all(natural > 0 and drawn > min(400, 0.8 * width) for natural, drawn in shown)
    assert max(across) <= width
