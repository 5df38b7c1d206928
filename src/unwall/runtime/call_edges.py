"""The edges of a module's call: what happens before and after its forward.

[Note: short calls]
torch walks through all hooks of a module at each call, ours among them, and inside a quiet pass ([Note: quiet passes] in
runtime/forward.py) or a call that covers others ([Note: covered calls] in runtime/covered.py) ours have next to nothing to do.
A module with no hooks but ours is therefore called without that walk there: its ``_call_impl`` is a ``Short``. Everywhere else,
and where anyone else has hooks, the call is torch's own.
"""

import functools
from threading import get_ident
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as modules

from unwall.native import interrupts
from unwall.runtime.casts import Casts
from unwall.runtime.engine import Engine


def refuse_copy() -> NoReturn:
    raise RuntimeError(
        "a sharded model cannot be deep-copied where tensor parallelism has spread its parameters: they are only shards. "
        "Copy the model before unwall.shard, or build a new one and load model.state_dict() into it. For an average of its "
        "parameters: unwall.ema(model, decay)."
    )


def refuse_pickle() -> NoReturn:
    raise RuntimeError("a sharded model cannot be pickled: its parameters are only shards. Save model.state_dict() instead.")


class Hook:
    """A callable that ties one module to its engine. Copying a sharded model would share its state: it is refused."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()


class Enter(Hook):
    """Before a module's forward."""

    def __init__(self, engine: Engine, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...], casts: Casts | None) -> None:
        super().__init__(engine)
        self._forward, self._covered, self._saved = engine.forward, engine.forward.covered, engine.forward.saved
        self._places = engine.places
        self.cover: tuple[int, ...] = ()
        """The groups of all that is below it, where it covers that. See [Note: covered calls] in runtime/covered.py."""
        self.aim(groups, reads, casts)

    def aim(self, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...], casts: Casts | None) -> None:
        """What the module reads. Again where it was given other parameters."""
        self.groups = groups
        self.reads = reads
        self.casts = casts
        self.within: frozenset[int] | None = None
        """The groups that were covered when the module's own were last found among them."""

    def is_covered(self, covered: frozenset[int]) -> bool:
        """Whether these groups are all that the module reads."""
        if self.reads or not covered.issuperset(self.groups):
            return False
        self.within = covered
        return True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        forward = self._forward
        if forward.quiet and forward.thread == get_ident() and module is not forward.outermost:
            for param in self.reads:
                forward.touched(param, self._places[id(param)])
        elif (
            (covering := self._covered.frame) is not None
            and module is not covering.module
            and module is not forward.outermost  # it is called anew: the call that covered others was interrupted
            and forward.thread == get_ident()
            and self._covered.groups.issuperset(self.groups)
        ):
            if self._saved.watching:
                self._saved.cover()
            for param in self.reads:
                forward.touched(param, self._places[id(param)])
        else:
            with interrupts.deferred:
                forward.enter(module, self.groups, self.reads, self.cover)
        return None if self.casts is None else self.casts.inputs(args, kwargs)


class Leave(Hook):
    """After a module's forward, also when it raised."""

    def __init__(self, engine: Engine, casts: Casts | None) -> None:
        super().__init__(engine)
        self._forward = engine.forward
        self.casts = casts

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> Any:
        if self.casts is not None:
            output = self.casts.outputs(output)
        forward = self._forward
        if forward.quiet and forward.thread == get_ident() and module is not forward.outermost:
            return output
        # Inside a call that covers it a module has no frame, unless it reads more.
        if forward.covered.frame is None or forward.thread != get_ident() or forward.frames[-1].module is module:
            with interrupts.deferred:
                forward.leave(module, output)
        return output


def is_plain_call(module: nn.Module) -> bool:
    """Whether a call of it is torch's own: neither its class nor anyone else has changed what that is."""
    return type(module)._call_impl is _call_of_torch and "_call_impl" not in module.__dict__


class Short(Hook):
    """Calls a module without the walk through its hooks where ours have nothing to do. See [Note: short calls]."""

    def __init__(self, module: nn.Module, enter: Enter, leave: Leave, handles: tuple[int, int]) -> None:
        super().__init__(enter.engine)
        self._module = module
        self._enter, self._leave = enter, leave
        self._before, self._after = handles
        """Under which numbers torch has them."""
        self._forward, self._covered, self._saved = (
            enter.engine.forward,
            enter.engine.forward.covered,
            enter.engine.forward.saved,
        )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``_call_impl``. As long as it is for the sake of few Python calls."""
        if _is_dynamo_compiling():
            return type(self._module)._call_impl(self._module, *args, **kwargs)
        module, forward, covered, enter = self._module, self._forward, self._covered, self._enter
        quiet, covering = forward.quiet, covered.frame
        own = module.__dict__  # a module's attributes, without asking its ``__getattr__`` for each
        before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
        if (
            forward.thread != get_ident()
            or module is forward.outermost
            or not (
                (quiet and not enter.reads)
                or (
                    covering is not None
                    and module is not covering.module
                    and (covered.groups is enter.within or enter.is_covered(covered.groups))
                )
            )
            or self._before not in before
            or self._after not in after
            or len(before) + len(after) != 2
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or _before_all
            or _after_all
            or _backward_all
            or _before_backward_all
            or _is_traced()
        ):
            return type(module)._call_impl(module, *args, **kwargs)
        saved = self._saved
        if (look := saved.look) is not None and (top := look(True)) is not None and top[0] is not saved.pushed:
            saved.cover()
        casts = enter.casts
        if casts is not None and (
            kwargs or len(args) != 1 or type(args[0]) is not _TENSOR or args[0].dtype is casts.outside  # not as most are called
        ):
            args, kwargs = casts.inputs(args, kwargs)
        output = module.forward(*args, **kwargs)
        if forward.quiet is not quiet or covered.frame is not covering:  # the pass has ended meanwhile
            return self._leave(module, args, kwargs, output)
        return output if casts is None or not casts.of_outputs else casts.outputs(output)


_before_all, _after_all = modules._global_forward_pre_hooks, modules._global_forward_hooks
_before_backward_all, _backward_all = modules._global_backward_pre_hooks, modules._global_backward_hooks
"""Hooks for the calls of all modules there are."""
_TENSOR = torch.Tensor
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_traced = torch._C._get_tracing_state
_call_of_torch = nn.Module._call_impl

AnyHook = TypeVar("AnyHook", bound=Hook)


@functools.cache
def opaque(kind: type[AnyHook]) -> type[AnyHook]:
    """The same hook for a compiled module: dynamo runs it, and all that it calls, as it is instead of tracing into it."""
    import torch._dynamo  # heavy, and there already where something is compiled

    call: Any = kind.__call__
    return type(kind.__name__, (kind,), {"__call__": torch._dynamo.disable(call)})
