"""Pictures as SVG, written by hand: bars and curves need no plotting library, which a GPU machine may not have."""

from collections.abc import Iterable
from html import escape

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e", "#c97b12", "#5b6770", "#3aa6a0", "#a8743b", "#b0306a", "#6d7f2c")
"""To tell things apart."""
GRID, FAINT = "#ddd", "#777"


class Picture:
    """Elements, the first drawn first; lengths in pixels from the top left corner. ``str`` of it is the file."""

    def __init__(self, width: float, height: float = 0.0, title: str = "") -> None:
        self.width, self.height = width, height
        self._lines: list[str] = []
        if title:
            self.text(12, 20, title, size=14)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "", thin: bool = False, hover: str = ""
    ) -> None:
        """A rectangle. ``edge``: the colour of its outline; ``hover``: what a mouse over it shows."""
        look = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" fill="{fill}"'
        look += f' stroke="{edge}"' if edge else ""
        look += ' stroke-width="0.3"' if thin else ""
        self._lines.append(f"<rect {look}><title>{escape(hover)}</title></rect>" if hover else f"<rect {look}/>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        size: int = 12,
        bold: bool = False,
        fill: str = "#1f2328",
    ) -> None:
        """``y`` is where the letters stand; ``anchor``: which end of the text ``x`` is (start, middle, end)."""
        look = f' text-anchor="{anchor}"' if anchor != "start" else ""
        look += f' font-size="{size}"' if size != 12 else ""
        look += ' font-weight="bold"' if bold else ""
        self._lines.append(f'<text x="{_px(x)}" y="{_px(y)}" fill="{fill}"{look}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = GRID) -> None:
        place = f'x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"'
        self._lines.append(f'<line {place} stroke="{colour}"/>')

    def curve(self, points: Iterable[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        """A line through all points."""
        path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
        style = ' stroke-dasharray="6 4"' if dashed else ""
        self._lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{style} points="{path}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._lines.append(f'<circle cx="{_px(x)}" cy="{_px(y)}" r="3" fill="{colour}"/>')

    def __str__(self) -> str:
        width, height = _px(self.width), _px(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        )
        return "\n".join([*head, *self._lines, "</svg>", ""])


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")
