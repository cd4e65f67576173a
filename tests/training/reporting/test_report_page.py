"""report.html: self-contained, and readable in a real browser at the width of a desktop and of a phone."""

import re
import shutil
from pathlib import Path

import pytest
from sweep_jobs import chunk_sweep, leave

from training.studies.sweep.report import page, results
from training.studies.sweep.table import read_table

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = "python train.py -m model=resnet50 'parallel.chunks=1,2,3' logger.tags=[<b>]"


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """Of nine jobs, of which the first has recorded a timeline."""
    sweep = chunk_sweep(tmp_path_factory.mktemp("sweep"))
    (sweep / "0" / "timeline.png").write_bytes(b"\x89PNG")
    return page(read_table(sweep), COMMAND)


def test_a_sweep_has_this_page(html):
    """Its text, a cell a line, without the time and the place of the sweep."""
    lines = re.sub(r"<[^>]*>", "", re.sub("\u200b|<style>.*</style>", "", html, flags=re.S)).splitlines()
    text = "\n".join(line.strip() for line in lines if line.strip()) + "\n"
    text = re.sub(r"finished · .*", "finished · TIME", re.sub(r"hydra.sweep.dir=\S+", "hydra.sweep.dir=PATH", text))
    assert text == (Path(__file__).parent / "pages" / "sweep.txt").read_text()


def test_nothing_comes_from_elsewhere_and_nothing_runs(html):
    shown = re.findall(r'\b(?:src|srcset)="([^"]*)"', html)
    assert len(shown) == 2 and all(link.startswith("data:") for link in shown)
    assert re.findall(r'<a href="([^"]*)"', html) == ["0/", "0/timeline.png", *(f"{n}/" for n in range(1, 9))]
    assert "<script" not in html and "url(" not in html and "@import" not in html


@pytest.mark.parametrize(
    "second, steps, said",
    [
        (2.0, 20, "Fastest: parallel=a with step_time_s 1 s; the worst, parallel=c, has 3 s."),
        (1.05, 20, "Best median: parallel=a with step_time_s 1 s; the worst, parallel=c, has 3 s. Its spread (10–90 %) "
         "overlaps that of parallel=b: any"),
        (2.0, 11, "has 3 s. 9 steps after the warm-up are too few to compare speeds; train for 12 or more."),
    ],
)  # fmt: skip
def test_a_job_is_called_the_fastest_only_where_enough_steps_and_their_spreads_show_it(tmp_path, second, steps, said):
    for num, (name, seconds) in enumerate({"a": 1.0, "b": second, "c": 3.0}.items()):
        leave(tmp_path, num, f"parallel={name}", times=[seconds * (1 + 0.05 * (i % 5 - 2)) for i in range(steps)])
    assert said in next(results(read_table(tmp_path)))


def test_a_sweep_in_which_nothing_has_trained_has_a_page_too(tmp_path):
    leave(tmp_path, 0, "seed=1", status="failed", error="no")
    leave(tmp_path, 1, "seed=2", status="waiting")
    text = page(read_table(tmp_path), COMMAND)
    assert "failed: no" in text and "waiting: not started" in text and "<img" not in text


@pytest.mark.parametrize("width, scheme", [(1200, "light"), (500, "dark")])
def test_a_browser_shows_it_without_complaint_and_without_sideways_scrolling(html, width, scheme, tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -r requirements-dev.txt")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium on the PATH: apt-get install chromium")
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    messages, schemes = [], []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        view.on("console", lambda message: messages.append(message.text))
        view.on("pageerror", lambda error: messages.append(str(error)))
        view.on("request", lambda request: schemes.append(request.url.split(":")[0]))
        view.goto(path.as_uri())
        shown = view.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth, i.clientWidth])")
        across = view.evaluate("document.documentElement.scrollWidth")
        chromium.close()
    assert messages == [] and set(schemes) <= {"file", "data"}
    assert len(shown) == 2 and all(natural > 0 and drawn > min(400, 0.8 * width) for natural, drawn in shown)
    assert across <= width
