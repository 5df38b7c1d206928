"""The directory of a run: whose it is, who writes to it, and what run.json says."""

import datetime
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

from unwall.json_files import read_json
from unwall.train.errors import TrainError
from unwall.train.options import FREE, IDENTITY, Options

VERSION = 1
_LOCK = ".lock"
_OWN = (_LOCK, "index")
"""What is there before run.json is."""


class RunFolder:
    """``OUT``, for rank 0. See [Note: what a run directory holds] in ``unwall.train``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.index = self.path / "index"
        self.log = self.path / "log.jsonl"
        self._lock: int | None = None
        self._said: dict[str, Any] = {}
        self._begun = False

    def claim(self, options: Options) -> list[str]:
        """Makes the directory, or takes the run up that is in it. Gives what is worth a word.

        TrainError where it holds something else, or where another process is at work in it."""
        before = self._before()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TrainError(f"--out {self.path}: cannot be written: {error.strerror}; choose another directory") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"--out {self.path}: another process trains there now; wait for it, or choose another") from None
        if before is None:
            return []
        self._said = before
        differ = options.differences(before.get("options", {}))
        for name in IDENTITY:
            if name in differ:
                was, now = differ[name]
                raise TrainError(
                    f"--out {self.path}: holds another run ({_flag(name)} was {_shown(was)}, is {_shown(now)}); give the same "
                    "options to go on with it, or another --out"
                )
        return [f"{_flag(name)} {_shown(now)} (was {_shown(was)})" for name, (was, now) in differ.items() if name not in FREE]

    @property
    def began_before(self) -> bool:
        """Whether an earlier start came to its first step here."""
        return "started" in self._said and not self._begun

    def release(self) -> None:
        """Another process may write to it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _before(self) -> dict[str, Any] | None:
        """What run.json says. None for a directory that is new or empty."""
        if self.path.exists() and not self.path.is_dir():
            raise TrainError(f"--out {self.path}: is a file; give a directory")
        if (self.path / "run.json").is_file():
            found = read_json(self.path / "run.json", TrainError)
            if not isinstance(found, dict) or found.get("version") != VERSION:
                raise TrainError(f"--out {self.path}: its run.json is of another version of unwall; choose another")
            return found
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in _OWN) if self.path.is_dir() else []
        if others:
            raise TrainError(
                f"--out {self.path}: holds files that are not of a run ({', '.join(others[:3])}); choose a new directory, or "
                "empty this one"
            )
        return None

    def write(self, **fields: Any) -> None:
        """Puts fields into run.json."""
        self._said |= {"version": VERSION, **fields}
        if "options" not in self._said:
            return  # it has not begun
        partial = self.path / "run.json.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self._said, indent=1, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a power cut leaves the old one or the new one
        partial.replace(self.path / "run.json")

    def fail(self, status: str) -> None:
        """Notes that this run came to no end. A start that was refused leaves what an earlier one wrote as it is."""
        if self._begun:
            self.write(status=status)

    def begin(self, options: Options, **fields: Any) -> None:
        """What is known before the first step."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        command = ["unwall", *sys.argv[1:]]
        self._begun = True
        self.write(status="running", command=command, started=now, options=options.to_dict(), **fields)

    def same_data(self, data: list[dict[str, Any]]) -> None:
        """TrainError where the data changed since the last start: positions in it would mean other samples."""
        path = self.path / "run.json"
        before = read_json(path, TrainError).get("data") if path.is_file() else None
        if before is not None and _placed(before) != _placed(data):
            pairs = zip(before, _placed(before), _placed(data), strict=False)
            other = next((old["path"] for old, was, now in pairs if was != now), "the list of files")
            raise TrainError(
                f"--data: {other} changed since this run began, so it cannot go on at the same sample; restore it, or start "
                "again with another --out"
            )


def _placed(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files by where they are, however their paths are written."""
    return [file | {"path": os.path.abspath(file["path"])} for file in data]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def finished(options: Options) -> bool:
    """Whether the very same run has come to its end in ``OUT`` already."""
    path = Path(options.out) / "run.json"
    if not path.is_file():
        return False
    found = read_json(path, TrainError)
    return (
        isinstance(found, dict)
        and found.get("status") == "finished"
        and not set(options.differences(found.get("options", {}))) - set(FREE)
    )
