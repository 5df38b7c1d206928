"""Ranges of a model's tensors, read from files of weights."""

import torch

from unwall.checkpoint.match import Match, cut, far_pieces
from unwall.checkpoint.weight_files import WeightFiles

SCRATCH_BYTES = 32 << 20
"""What is read at once where elements have to be put into another order."""
ROW_BYTES = 4096
"""Rows of at least so many bytes are read one by one. Of shorter ones (columns of a tensor rank) what is between them, too."""


class Source:
    """One tensor of the model as the files hold it: ``matches`` lead from its elements to theirs."""

    def __init__(self, files: WeightFiles, matches: list[Match], numel: int, given: torch.dtype) -> None:
        self.files = files
        self.numel = numel
        kinds = {files.entries[match.far].dtype for match in matches}
        self._read_dtype = kinds.pop() if len(kinds) == 1 else given
        exact = torch.promote_types(self._read_dtype, given) == given if given.is_floating_point else False
        self.dtype = self._read_dtype if exact else given
        """What ``read`` gives: what is in the file, where the tensor's own dtype holds its values exactly."""
        self._matches = [(match.near_start, match.near_start + match.near_span, match) for match in matches]

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.numel * self._read_dtype.itemsize

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements ``low`` to ``high`` of the flattened tensor, on the host."""
        values = torch.empty(high - low, dtype=self._read_dtype)
        for first, last, match in self._matches:
            if first < high and low < last:
                for part in cut(match, low, high):
                    self._read_part(part, low, values)
        return values.to(self.dtype)

    def _read_part(self, part: Match, low: int, values: torch.Tensor) -> None:
        dtype = self.files.entries[part.far].dtype
        if part.is_run and dtype is values.dtype:
            start = part.near_start - low
            self.files.read(part.far, part.far_start, values[start : start + part.numel])
            return
        row = part.extents[-1] if part.extents and part.near_strides[-1] == part.far_strides[-1] == 1 else 1
        if dtype is values.dtype and row * dtype.itemsize >= ROW_BYTES:
            for number in range(part.extents[0]):
                self._read_part(part.narrow(0, number, 1).simplified(), low, values)
            return
        for piece in far_pieces(part, SCRATCH_BYTES // dtype.itemsize):
            scratch = torch.empty(piece.far_span, dtype=dtype)
            self.files.read(piece.far, piece.far_start, scratch)
            goal = values.as_strided(piece.extents, piece.near_strides, piece.near_start - low)
            goal.copy_(scratch.as_strided(piece.extents, piece.far_strides, 0))
