"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: damaged, incomplete, or of another model. Nothing was changed."""
