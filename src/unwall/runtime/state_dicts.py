"""``state_dict`` and ``load_state_dict`` of a sharded model."""

from typing import Any

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.runtime.whole import WholeParams, put_whole, show_again


class StateDictHooks:
    """``state_dict`` and ``load_state_dict`` of one module: whole tensors for its own parameters, one module at a time."""

    def __init__(self, engine: Engine, reader: WholeParams) -> None:
        self._engine = engine
        self._reader = reader

    def saved(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """After ``state_dict`` has put placeholders there: the whole values on rank 0, nothing on the others."""
        for name, param in module._parameters.items():
            if param is None or prefix + name not in state_dict or id(param) not in self._engine.places:
                continue
            value = self._reader.get(param)
            if value is None:
                del state_dict[prefix + name]
            else:
                state_dict[prefix + name] = value
        if prefix == "":
            self._reader.forget()

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Real memory for the module's own parameters, so that torch's own loading can write and check them."""
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True) would replace sharded parameters: load without assign")
        for name, param in module._parameters.items():
            if param is None or id(param) not in self._engine.places:
                continue
            index, slot = self._engine.places[id(param)][0]
            group = self._engine.groups[index]
            shape, dtype = group.layout.slots[slot].shape, group.dtypes[slot]
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == shape:  # otherwise torch itself reports what is wrong
                param.data = torch.empty(shape, dtype=dtype, device=self._engine.device.device)
                self._engine.loading.add(id(param))

    def after_load(self, module: nn.Module, _: Any) -> None:
        """What was loaded goes into the shards."""
        for param in module._parameters.values():
            if param is None or id(param) not in self._engine.loading:
                continue
            self._engine.loading.discard(id(param))
            put_whole(self._engine, param, param.data)
            show_again(self._engine, param)
