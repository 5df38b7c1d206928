"""The public ``load_weights``, and weights that wait for ``shard``."""

import os

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.weak import WeakIdKeyDictionary

from unwall.checkpoint.inventory import owner_of
from unwall.checkpoint.weights_in import match_weights, stream_in
from unwall.runtime.init import is_paged

_waiting = WeakIdKeyDictionary()  # model -> (path, strict)


def load_weights(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> _IncompatibleKeys:
    """Streams weights from files into a model, by name, as ``model.load_state_dict(..., strict)`` would with all in memory.

    ``path``: a ``safetensors`` file, a directory with one or with several and an index, or a file of ``torch.save``. Each rank
    reads only what it owns, through a small buffer, and no tensor is ever whole. All names, shapes and dtypes are checked
    before anything changes. Names of older files, experts and packed projections are converted as ``transformers`` does it.

    The model is sharded; or it is on the meta device or built in ``unwall.init``: then everything is checked now, and loaded
    when ``unwall.shard`` gives it memory. Optimizer states are left alone. All ranks call it together.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwall.load_weights takes an nn.Module, got {type(model).__name__}")
    if owner_of(model) is None and any(param.is_meta or is_paged(param) for param in model.parameters()):
        matched = match_weights(model, path, strict)
        matched.files.close()
        _waiting[model] = (os.path.abspath(path), strict)
        return matched.keys
    return stream_in(model, path, strict)


def load_waiting(model: nn.Module) -> None:
    """What ``shard`` does at its end: weights that were asked for while the model had no memory."""
    waiting = _waiting.pop(model, None)
    if waiting is not None:
        stream_in(model, *waiting)
