"""Tokens per second of each engine as horizontal bars."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unwall.svg import Picture

_WIDTH, _LABEL, _BAR, _GAP, _HEAD = 1100, 540, 18, 6, 34
_OURS, _PEER, _FAILED = "#1f6feb", "#8c959f", "#b35900"


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """One block of bars for each run and shape, each with a scale of its own."""
    from unwall.svg import Picture  # here: the suite's own process needs neither torch nor unwall before

    picture, top = Picture(_WIDTH), 10
    for result in results:
        for shape in dict.fromkeys(row["shape"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["shape"] == shape]
            picture.text(10, top + 18, f"{result['title']}: {shape}, tokens/s", bold=True)
            top += _HEAD
            most = max((row["tokens_per_s"] for row in rows if row["status"] == "ok"), default=1.0)
            for row in rows:
                _bar(picture, row, top, most)
                top += _BAR + _GAP
            top += 14
    picture.height = top
    return str(picture)


def _bar(picture: "Picture", row: Mapping[str, Any], top: int, most: float) -> None:
    name = row["engine"] if len(row["engine"]) < 84 else row["engine"][:82] + "…"
    picture.text(_LABEL - 8, top + 13, name, anchor="end")
    if row["status"] != "ok":
        picture.text(_LABEL, top + 13, row["status"], fill=_FAILED)
        return
    width = max(1.0, (_WIDTH - _LABEL - 90) * row["tokens_per_s"] / most)
    picture.box(_LABEL, top, width, _BAR, _OURS if row["engine"].startswith("unwall") else _PEER)
    picture.text(_LABEL + width + 6, top + 13, f"{row['tokens_per_s']:.0f}")
