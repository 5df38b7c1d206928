"""The demo at a tiny size: the same loss as plain PyTorch, on all three tiers, and a report."""

import pytest

from unwall.demo import DEVICE_SHARE, HOST_SHARE, Size, run


def test_the_demo_trains_as_plain_pytorch_on_all_tiers(tmp_path, capsys):
    size = Size(width=128, layers=4, context=32, batch=2)
    found = run(4, tmp_path / "demo", size, predicts=False)
    assert found.losses == pytest.approx(found.plain_losses, abs=1e-4)
    assert found.losses[-1] < found.losses[0]
    assert found.peak_bytes["device"] <= found.states_bytes / DEVICE_SHARE
    assert found.peak_bytes["host"] <= found.states_bytes / HOST_SHARE
    assert found.peak_bytes["disk"] > 0
    html = found.report.read_text()
    assert all(words in html for words in ("plain PyTorch", "host&gt;disk", "Disk"))
    assert str(found.report) in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "log.jsonl",
        "profile.json",
        "report.html",
        "run.json",
    ]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another directory"):
        run(1, tmp_path, size, predicts=False)
