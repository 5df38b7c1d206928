"""Weights are brought into memory while torch is imported, where they will be read and there is room."""

import dataclasses
import gc

from unwall.train import ahead
from unwall.train.options import Options
from unwall.train.start import without_collector


def test_files_are_asked_for_only_where_they_will_be_read(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "data.txt").write_text("one two")
    (tmp_path / "model" / "config.json").write_text("{}")
    options = Options(
        model=str(tmp_path / "model"), data=(str(tmp_path / "data.txt"),), out=str(tmp_path / "out"), lora=False
    )  # fmt: skip
    assert ahead.read_ahead(options) is None
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 5000)
    asked = []
    monkeypatch.setattr(ahead.os, "posix_fadvise", lambda _, *rest: asked.append(rest))
    found = ahead.read_ahead(options)
    assert found is not None
    found.join()
    assert [(start, advice) for start, _, advice in asked] == [(0, ahead.os.POSIX_FADV_WILLNEED)]
    (tmp_path / "out" / "checkpoints" / "step-1").mkdir(parents=True)  # it goes on from there
    assert ahead.read_ahead(options) is None
    adapters = dataclasses.replace(options, lora=True)  # whose base is read again
    found = ahead.read_ahead(adapters)
    assert found is not None
    found.join()
    monkeypatch.setattr(ahead, "_free_bytes", lambda: 10_000)
    assert ahead.read_ahead(adapters) is None


def test_the_collector_comes_back_as_it_was():
    was = gc.isenabled()
    try:
        for before in (True, False):
            gc.enable() if before else gc.disable()
            with without_collector():
                assert not gc.isenabled()
            assert gc.isenabled() is before
    finally:
        gc.enable() if was else gc.disable()
