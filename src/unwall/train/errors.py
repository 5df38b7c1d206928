"""What a user can mend: one sentence that says what was got and what to do."""


class TrainError(ValueError):
    """A run that cannot start or go on. The command prints it without a stack trace and ends with 2."""


def missing(package: str, what: str) -> TrainError:
    """A package that only some runs need."""
    return TrainError(f"{what} needs the package {package}, which is not installed: pip install {package}")
