"""``unwall report``: one page about a run, whatever of the run there is."""

import json
import math
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from unwall.cli import app
from unwall.report.chart import Curve, Level, chart
from unwall.report.page import write_report
from unwall.report.run import ReportError, read_run

SECTIONS = ("Loss and speed", "Memory per tier", "One step", "The plan and what was measured")


def line(step, **more):
    bytes_held = {"device": 2**30 + step, "host": 2**33, "disk": 2**34}
    return {
        "kind": "step", "step": step, "loss": 2 + math.exp(-step), "lr": 1e-4, "grad_norm": 1.5, "tokens": 1024,
        "seconds": 0.5, "tokens_per_second": 2048.0, "bound_fraction": 0.8, "live_bytes": bytes_held,
        "peak_bytes": bytes_held, "stall_seconds": {"host>device": 0.01}, "allocated_bytes": 3 * 2**30,
    } | more  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """As ``unwall train`` writes it."""
    parts = {"imports": 4.0, "planning": 0.5, "weights": 5.5}
    lines = [{"kind": "start", "step": 0, "seconds": 10.0, "parts": parts}]
    lines += [line(step) for step in range(1, 41)] + [{"kind": "eval", "step": 40, "loss": 2.1}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    prediction = {"step_s": 0.4, "bound_s": 0.3, "bound_by": "disk", "tokens_per_s": 2500, "peak_bytes": {"device": 2**30}}
    prediction["terms_bytes"] = {"device": {"parameters": 2**30, "activations": 2**30}}
    said = {"version": 1, "status": "finished", "steps": 40, "answer": "fits <b>", "plan": {"device_bytes": 2**31}}
    said |= {"prediction": prediction, "model": {"name": "tiny & small"}, "options": {"lr": 1e-4}}
    (tmp_path / "run.json").write_text(json.dumps(said))
    spans = [("compute", "layers.0", 0, 900), ("stall", "layers.1", 900, 100), ("disk>host", "layers.1", 0, 1000)]
    events = [{"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us} for cat, name, start, us in spans]
    (tmp_path / "profile.json").write_text(json.dumps({"traceEvents": events}))
    return tmp_path


def test_one_page_holds_everything(run):
    found = CliRunner().invoke(app, ["report", str(run)])
    assert found.exit_code == 0, found.output
    html = (run / "report.html").read_text()
    assert found.output.strip() == str(run / "report.html")
    assert [name for name in SECTIONS if name not in html] == []
    assert "tiny &amp; small" in html
    assert "fits &lt;b&gt;" in html
    assert not re.search(r"(src|href)=\"(?!#)|https?://|@import|url\(", html), "something comes from elsewhere"
    assert "Compute waited 0.1 ms in all, 10.0% of the step" in html
    assert "disk&gt;host" in html
    assert "The first step was done 10.0 s after the command, on rank 0" in html
    assert "weights 5.5 s" in html
    assert "<td>1.25</td>" in html, "the step took 1.25 times what was predicted"
    assert "<td>2.0 GiB</td><td>3.0 GiB</td><td>1.50</td>" in html, "what torch held on the device, with activations"
    assert "with activations" in html.partition("Waiting for each link")[0], "and over time"


def test_what_is_missing_or_broken_is_named(run):
    with (run / "log.jsonl").open("a") as log:
        log.write('{"kind": "step", "lo\n[1]\n')
        log.write(json.dumps({"step": 43, "loss": None, "live_bytes": 3, "stall_seconds": 4}) + "\n")
    (run / "run.json").unlink()
    (run / "profile.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    html = write_report(run, run / "other.html").read_text()
    problems = [
        "log.jsonl, line 43: is not JSON",
        "log.jsonl, line 44: is not an object",
        "run.json: is missing",
        "profile.json",
    ]
    assert [problem for problem in problems if problem not in html] == []
    assert len(read_run(run).steps) == 41


def test_a_directory_that_is_no_run_is_one_line(tmp_path):
    (tmp_path / "log.jsonl").write_text("nothing\n")
    for path, said in ((tmp_path / "none", "no such directory"), (tmp_path / "log.jsonl", "is a file"), (tmp_path, "no step")):
        found = CliRunner().invoke(app, ["report", str(path)])
        assert found.exit_code == 2
        assert said in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    (tmp_path / "log.jsonl").write_text(json.dumps(line(1)) + "\n")
    found = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "none" / "report.html")])
    assert (found.exit_code, "cannot be written: No such file or directory; give a file" in found.stderr) == (2, True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"there is no log\.jsonl in it"):
        read_run(tmp_path / "empty")


def chromium(*arguments):
    name = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if name is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    flags += ["--disable-dev-shm-usage", "--no-first-run"]  # which may be small
    return subprocess.run([name, *flags, *arguments], capture_output=True, text=True, timeout=280, check=True).stdout


PRESSED = """<script>
addEventListener("error", event => document.title = "failed: " + event.message);
addEventListener("load", () => {
  const press = (what, key) => what.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const svg = document.querySelector("figure.chart svg"), box = document.querySelector(".lanes");
  svg.focus(); press(svg, "Home"); press(svg, "ArrowRight");
  const read = svg.parentElement.querySelector(".readout").textContent;
  press(box, "+");
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  const after = getComputedStyle(document.body).backgroundColor;
  const wide = box.scrollWidth > box.clientWidth, fits = document.body.scrollWidth <= innerWidth;
  document.title = JSON.stringify({read, wide, fits, before, after});
});
</script>"""


def test_it_works_by_keyboard_and_in_light_and_dark(run):
    """In a browser. What the page did is written into its title."""
    page = write_report(run)
    page.write_text(page.read_text().replace("</body>", f"{PRESSED}</body>"))
    html = chromium("--window-size=1200,900", "--dump-dom", page.as_uri())
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", html)[1])
    assert found["read"].startswith("step 2: loss 2.135")
    assert found["wide"]
    assert found["fits"]
    assert found["before"] != found["after"]


def test_a_level_far_above_the_curves_does_not_flatten_them():
    held = Curve("held", "device", [(1, 1.0), (2, 2.0)])
    levels = [Level("predicted", "c2", 3.0), Level("budget", "c7", 2000.0)]
    found = chart("Device", [held], levels, shown=lambda value: f"{value:g}", from_zero=True)
    assert found.count('class="level') == 1
    assert "budget 2000, above the chart" in found
