"""From a configuration to a plan and its account."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unwall.deepspeed.account import Account, TranslatedKey, short
from unwall.deepspeed.keys import Outcome
from unwall.deepspeed.readers import (
    read_attention,
    read_batch,
    read_clipping,
    read_compression,
    read_loss_scale,
    read_optimizer,
    read_places,
    read_precision,
    read_reduction,
    read_stage,
)
from unwall.json_files import read_json
from unwall.plans import Plan, PlanError

_TO_DO = (Outcome.UNKNOWN, Outcome.MISSING, Outcome.OPTIMIZER, Outcome.SCRIPT)


@dataclass(frozen=True)
class Translation:
    """A plan and how it came about. ``print`` shows it as a table."""

    plan: Plan
    entries: tuple[TranslatedKey, ...]
    """One for each leaf of the configuration, in its order."""
    notes: tuple[str, ...]
    """What follows from keys that are not there, or from several together."""
    attention: Any = None
    """The pattern of the ``sparse_attention`` section, for ``unwall.sparse.use(model, pattern)``. None without one."""

    def to_do(self) -> list[str]:
        """What the plan does not carry, one line each: keys without a counterpart, unknown keys, what the script must do."""
        return [str(entry) for outcome in _TO_DO for entry in self.entries if entry.outcome is outcome] + list(self.notes)

    def __str__(self) -> str:
        rows = [("key", "value", "became")]
        rows += [(entry.key, short(entry.value), f"{entry.outcome}: {entry.became}") for entry in self.entries]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{key:<{wide[0]}}  {value:<{wide[1]}}  {became}" for key, value, became in rows]
        return "\n".join([str(self.plan), *lines, *self.notes])


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a dict: from a JSON file, or the dict itself. PlanError for a file that cannot be read."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise PlanError(f"a DeepSpeed config is the path of a JSON file or a dict, got {type(config).__name__}")
    try:
        found = read_json(Path(config), PlanError, pairs=_without_duplicates)
    except PlanError as error:
        named = error if str(config) in str(error) else f"{config}: {error}"
        raise PlanError(f"the DeepSpeed config {named}") from error
    if not isinstance(found, dict):
        raise PlanError(f"the DeepSpeed config {config} must hold a JSON object, got {type(found).__name__}")
    return found


def translate(config: Mapping[str, Any]) -> Translation:
    """What a DeepSpeed configuration means here. Changes and prints nothing; PlanError for one that contradicts itself."""
    account = Account(config)
    stage = read_stage(account)
    fields: dict[str, Any] = {"stage": stage, **read_places(account, stage)}
    dtype = fields["compute_dtype"] = read_precision(account)
    fields |= read_compression(account, stage, dtype, read_reduction(account))
    attention = read_attention(account, config.get("sparse_attention"))
    read_loss_scale(account, dtype)
    read_optimizer(account)
    read_clipping(account)
    read_batch(account)
    entries = tuple(account.entry(path) for path in account.leaves)
    return Translation(Plan(**fields), entries, tuple(account.notes), attention)


def plan_of(config: str | Path | Mapping[str, Any]) -> Plan:
    """For ``Plan.from_deepspeed``: the plan, and one warning that lists all that it does not carry."""
    translation = translate(read(config))
    to_do = translation.to_do()
    if to_do:
        lines = "\n  ".join(["this Plan does not carry everything in the DeepSpeed config:", *to_do])
        warnings.warn(f"{lines}\nAll keys: unwall.deepspeed.translate", UserWarning, stacklevel=3)
    return translation.plan


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"the key {key} is there twice in one object")
        found[key] = value
    return found
