"""The account of a configuration: what became of every key.

[Note: account]
A leaf is a value of the configuration that is not itself a non-empty object. Every leaf gets exactly one entry that says what
it became. The readers (readers.py) speak first, for keys that decide something together; whatever they leave unsaid gets the
words of its row in ``RULES``, of its section in ``SECTIONS``, or counts as unknown. A key can be useless here, never ignored.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unwall.deepspeed.keys import OBJECT, RULES, SECTIONS, ZERO, KeyPath, Outcome
from unwall.plans import PlanError


@dataclass(frozen=True)
class TranslatedKey:
    """What one key became."""

    key: str
    """With the sections it is in: ``zero_optimization.offload_optimizer.device``."""
    value: object
    outcome: Outcome
    became: str
    """In words."""

    def __str__(self) -> str:
        return f"{self.key} = {short(self.value)} -> {self.outcome}: {self.became}"


class Account:
    """The leaves of a configuration and what was said of them. [Note: account]"""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise PlanError(f"a DeepSpeed config is a dict here, got {type(config).__name__}")
        self.leaves: dict[KeyPath, Any] = dict(_leaves(config, ()))
        self.notes: list[str] = []
        self._said: dict[KeyPath, tuple[Outcome, str]] = {}
        for path, value in self.leaves.items():
            _check(path, value)

    def get(self, key: str) -> Any:
        """The value of a key; None if it is absent, null or ``"auto"``."""
        value = self.leaves.get(path_of(key))
        return None if _is_auto(value) else value

    def is_open(self, key: str) -> bool:
        return _is_auto(self.leaves.get(path_of(key)))

    def say(self, key: str, outcome: Outcome, words: str) -> None:
        """Says, once per key, what it became; it may be absent. (Of null and ``"auto"`` only the outcome counts.)"""
        assert path_of(key) not in self._said, key
        self._said[path_of(key)] = outcome, words

    def under(self, section: str) -> list[KeyPath]:
        """The leaves inside a section."""
        prefix = path_of(section)
        return [path for path in self.leaves if path[: len(prefix)] == prefix and path != prefix]

    def entry(self, path: KeyPath) -> TranslatedKey:
        outcome, words = self._became(path, self.leaves[path])
        return TranslatedKey(".".join(path), self.leaves[path], outcome, words)

    def _became(self, path: KeyPath, value: Any) -> tuple[Outcome, str]:
        rule, section, said = RULES.get(path), SECTIONS.get(path[0]), self._said.get(path)
        default = said or ((rule.outcome, rule.words) if rule is not None else section)
        if default is None:
            return Outcome.UNKNOWN, _nearest(path)
        if value is None:
            return Outcome.NOT_NEEDED, "null, as if it were not there"
        if _is_auto(value):
            return Outcome.OPEN, "your script decides" if default[0] in (
                Outcome.OPTIMIZER,
                Outcome.SCRIPT,
            ) else "unwall decides"
        if said is None and rule is not None and rule.outcome is Outcome.MISSING and value == rule.off:
            return Outcome.NOT_NEEDED, "asks for nothing special"
        if rule is None and section is not None and self.get(f"{path[0]}.enabled") is False:
            return Outcome.NOT_NEEDED, "switched off"
        return default


def _leaves(value: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, inner in value.items():
        if not isinstance(key, str):
            raise PlanError(f"keys of a DeepSpeed config are strings, got {key!r} in {'.'.join(path) or 'the config'}")
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, (*path, key))
        else:
            yield (*path, key), inner


def _check(path: KeyPath, value: Any) -> None:
    """Refuses a value of the wrong type, and an object where a plain value belongs."""
    for end in range(1, len(path)):
        rule = RULES.get(path[:end])
        if rule is not None and rule.takes not in (OBJECT, ZERO):
            raise PlanError(f"{'.'.join(path[:end])} is {rule.takes.words} in a DeepSpeed config, got an object")
    rule = RULES.get(path)
    if rule is not None and value is not None and not _is_auto(value) and not rule.takes.test(value):
        raise PlanError(f"{'.'.join(path)} is {rule.takes.words} in a DeepSpeed config, got {value!r}")


def _nearest(path: KeyPath) -> str:
    """What an unknown key may have been meant to be."""
    known = {rule[:end] for rule in RULES for end in range(1, len(rule) + 1)}
    strange = next((path[:end] for end in range(1, len(path) + 1) if path[:end] not in known), path)
    siblings = sorted(rule[-1] for rule in known if rule[:-1] == strange[:-1])
    close = difflib.get_close_matches(strange[-1], siblings, n=1)
    return f"has no effect; did you mean {'.'.join((*strange[:-1], close[0]))}?" if close else "has no effect"


def path_of(key: str) -> KeyPath:
    return tuple(key.split("."))


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def short(value: object, limit: int = 40) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
