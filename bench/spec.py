"""An engine as it is named on the command line: ``unwall-host:device_bytes=9GiB,clip=none``."""

from dataclasses import dataclass

from bench.engines import ENGINES, Engine

CLIP = 1.0
"""Where the name says nothing else."""


class SpecError(ValueError):
    """A name or an option that the suite does not know."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One engine with its options."""

    text: str
    name: str
    clip: float | None
    options: dict[str, str]

    @property
    def engine(self) -> Engine:
        return ENGINES[self.name]


def parse_spec(text: str) -> Spec:
    """``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``."""
    name, _, tail = text.partition(":")
    if name not in ENGINES:
        raise SpecError(f"no engine is named {name!r}; there are {', '.join(ENGINES)}")
    given: dict[str, str] = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise SpecError(f"{text}: {part!r} is no OPTION=VALUE")
        given[key] = value
    clip = _clip(text, given.pop("clip", str(CLIP)))
    engine = ENGINES[name]
    unknown = sorted(given.keys() - engine.accepts) if engine.accepts is not None else []
    if unknown:
        known = ", ".join(sorted({"clip"} | (engine.accepts or frozenset())))
        raise SpecError(f"{text}: {name} has no option {', '.join(unknown)}; it has {known}")
    return Spec(text=text, name=name, clip=clip, options={**engine.settings, **given})


def _clip(text: str, value: str) -> float | None:
    if value == "none":
        return None
    try:
        clip = float(value)
    except ValueError:
        clip = -1.0
    if not clip > 0:
        raise SpecError(f"{text}: clip is a positive number or none, got {value!r}")
    return clip
