"""The header of a ``safetensors`` file, written before its tensors are read."""

import json
from collections.abc import Sequence

from unwall.checkpoint.dtypes import name_of
from unwall.checkpoint.manifest import Piece, Tensor
from unwall.tiers.sizes import ALIGNMENT, align_up


def header_of(pieces: Sequence[tuple[Tensor, Piece]]) -> bytes:
    """The header of a file with these pieces, one after the other; their ``offset`` does not count. Spaces at its end make the
    first tensor begin at a page, where direct writes want it."""
    entries, offset = {}, 0
    for tensor, piece in pieces:
        end = offset + tensor.nbytes(piece)
        entries[tensor.key(piece)] = {
            "dtype": name_of(tensor.dtype, tensor.label),
            "shape": list(tensor.piece_shape(piece)),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = align_up(len(text) + 8, ALIGNMENT) - 8
    return length.to_bytes(8, "little") + text.ljust(length)
