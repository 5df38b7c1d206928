"""``print(unwall.stats(model))``: the numbers as plain text, in columns, at most 100 characters wide."""

from typing import TYPE_CHECKING

from unwall.tiers.sizes import format_bytes

if TYPE_CHECKING:
    from unwall.runtime.counts import ActivationStats
    from unwall.runtime.stats import Stats
    from unwall.tiers.meter import LinkStats

WIDTH = 100
WORST = 3
"""Groups shown per link: those that were waited for longest."""
SHOWN_SECONDS = 0.0005
"""A shorter wait would read as 0.000 s and is left out."""

Row = tuple[str, ...]


def stats_table(stats: "Stats") -> str:
    """All of ``stats``, for a person to read."""
    parts = [_columns(("tier", "live", "peak", "budget"), _tiers(stats))]
    if stats.links:
        parts.append(_columns(("link", "moved", "copies", "busy", "stalled"), _links(stats)))
    parts.append(_columns(("collective", "elements"), _collectives(stats)))
    if stats.activations is not None:
        parts.append(_columns(("activations of the last pass", ""), _activations(stats.activations)))
    parts.append(_columns(("since the last reset", ""), _counters(stats)))
    return "\n\n".join(parts)


def stats_line(stats: "Stats") -> str:
    """The same in one line: what each tier holds now."""
    live = ", ".join(f"{name} {format_bytes(tier.live_bytes)}" for name, tier in stats.tiers.items())
    return f"<Stats: {_count(stats.steps, 'step')}; live: {live}; print it for the table>"


def _tiers(stats: "Stats") -> list[Row]:
    return [
        (name, format_bytes(tier.live_bytes), format_bytes(tier.peak_bytes), _budget(tier.budget_bytes))
        for name, tier in stats.tiers.items()
    ]


def _links(stats: "Stats") -> list[Row]:
    rows: list[Row] = []
    for name, link in stats.links.items():
        moved = (format_bytes(link.moved_bytes), f"{link.copies:,}", _seconds(link.busy_seconds), _seconds(link.stall_seconds))
        rows.append((name, *moved))
        rows += [(f"  waited for {label}", "", "", "", _seconds(waited)) for label, waited in _worst(link)]
    return rows


def _worst(link: "LinkStats") -> list[tuple[str, float]]:
    longest = sorted(link.stalls.items(), key=lambda entry: entry[1], reverse=True)[:WORST]
    return [(label, waited) for label, waited in longest if waited >= SHOWN_SECONDS]


def _collectives(stats: "Stats") -> list[Row]:
    return [(name, f"{kind.elements:,}") for name, kind in stats.collectives.items()]


def _activations(found: "ActivationStats") -> list[Row]:
    rows: list[Row] = [
        ("kept on the device", format_bytes(found.kept_bytes)),
        ("moved to the host and back", format_bytes(found.moved_bytes)),
        ("computed again in backward", format_bytes(found.recomputed_bytes)),
    ]
    return rows + [("blocks run again, out of memory", f"{found.survived:,}")] * (found.survived > 0)


def _counters(stats: "Stats") -> list[Row]:
    ahead = stats.speculated
    return [
        ("optimizer steps", f"{stats.steps:,}"),
        ("written to disk per step", format_bytes(round(stats.disk_bytes_per_step))),
        ("updates ahead of the step: used", f"{ahead.committed:,}"),
        *([("updates ahead of the step: used, in place", f"{ahead.in_place:,}")] if ahead.in_place else []),
        ("updates ahead of the step: done again", f"{ahead.missed:,}"),
        *([("elements that escaped a journal", f"{ahead.escaped:,}")] if ahead.escaped else []),
        ("trace mismatches", f"{stats.trace_mismatches:,}"),
        ("control exchanges", f"{stats.control_exchanges:,}"),
    ]


def _columns(header: Row, rows: list[Row]) -> str:
    """The first column to the left, cut where it is too long; the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    widths[0] = min(widths[0], WIDTH - sum(width + 2 for width in widths[1:]))
    return "\n".join(_line(line, widths) for line in lines)


def _line(line: Row, widths: list[int]) -> str:
    cells = [_cut(line[0], widths[0]).ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()


def _cut(text: str, width: int) -> str:
    """``text`` in ``width`` characters. The end stays, too: it is where names of modules differ."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def _budget(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_bytes(nbytes)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
