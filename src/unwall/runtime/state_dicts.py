"""``state_dict`` and ``load_state_dict`` of a sharded model.

[Note: loading]
torch loads module by module: what is wrong in the last module shows when all others have been changed. So the first hook of a
load looks at everything below its module before anything is written, and raises what torch would have raised at the end. The
ranks compare what they were given, by checksums: tensors that only rank 0 has are taken from there (``state_dict`` gives them
to rank 0 only), anything else that differs is an error on every rank.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime.early_writes import refuse_early_write
from unwall.runtime.engine import Engine
from unwall.runtime.given_copies import GivenCopies
from unwall.runtime.load_check import Given, compare, outline_of, unreadable, wanted_by
from unwall.runtime.whole import WholeParams, lay_out, put_whole, show_again, whole_dtype
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import same_model
from unwall.shards.local import distributed_like, is_distributed, local, local_part_of


class StateDictHooks:
    """``state_dict`` and ``load_state_dict`` of one model's modules: whole tensors, one module at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reader = WholeParams(engine)
        self._strict: bool | None = None  # None: some module outside called, nobody knows what it wants
        self._calls = 0
        self._outermost: nn.Module | None = None
        self._missing_elsewhere: list[tuple[Ranks, dict[str, Given]]] = []
        """What some rank was not given, of each set of ranks that compare what they were given, in their order."""
        self._copies = GivenCopies(lambda: engine.version)
        self._laid_out: dict[int, int] = {}
        """Parameters that are being loaded, and what counts the writes to them."""
        self._saving = False
        engine.checks.append(self._look_at_copies)

    def saved(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """After ``state_dict`` has put placeholders there: the whole values on rank 0, nothing on the others."""
        for name, param in module._parameters.items():
            if param is None or prefix + name not in state_dict or id(param) not in self.engine.places:
                continue
            if state_dict[prefix + name] is param:
                continue  # keep_vars
            self._saving = True
            try:
                value = self._reader.get(param)
            finally:
                self._saving = False
            if value is None:
                del state_dict[prefix + name]
            else:
                state_dict[prefix + name] = value
                self._copies.add(prefix + name, value)
        if prefix == "":
            self._reader.forget()

    def _look_at_copies(self) -> None:
        """An edge: nobody has written to what ``state_dict`` gave. Not where only an optimizer's states are loaded or saved: a
        loop that fills what both gave (``torch.distributed.checkpoint``) may load them first."""
        written = [] if self._saving else self._copies.written()
        if written:
            error = RuntimeError(
                f"{', '.join(written[:5])} was written in model.state_dict(), whose tensors are copies here: the model has not "
                "changed. Call model.load_state_dict(...) with them, or write to the parameters under torch.no_grad(). For "
                "values of your own take copies first: copy.deepcopy(model.state_dict())"
            )
            if self.engine.ranks.size > 1:
                self.engine.executor.agreement.fail(error, spoilt=False)
            raise error

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """``load_state_dict`` of a module of the model, or of one that holds it."""
        if options.get("assign", args[2] if len(args) > 2 else False):
            refuse_assign()
        with self.engine.turn.held("load_state_dict"):
            self.engine.forward.forget_interrupted()  # or a part that is called next would not look at its groups
            return self._load(original, *args, **options)

    def _load(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before, self._strict = self._strict, bool(options.get("strict", args[1] if len(args) > 1 else True))
        self._calls += 1
        try:
            return original(*args, **options)
        finally:
            self._calls -= 1
            self._strict = before
            if not self._calls:
                self._end()

    @interrupts.defers
    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Real memory for the module's own parameters, so that torch's own loading can write and check them."""
        if metadata.get("assign_to_params_buffers"):
            refuse_assign()
        root = self.engine.root() if self.engine.root is not None else None
        if self._outermost is None or (not self._calls and module is root):
            self._end()
            self._begin(module, state_dict, prefix)
        self._take_from_rank_0(module, state_dict, prefix)
        for name in module._buffers if self.engine.unwritten else ():
            if prefix + name in state_dict:
                self.engine.unwritten.pop((id(module), name), None)
        for name, param in module._parameters.items():
            if param is None or id(param) not in self.engine.places:
                continue
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor):  # otherwise it is missing
                dtype = whole_dtype(self.engine, param)
                lay_out(param, torch.empty(local(param).shape, dtype=dtype, device=self.engine.device.device))
                if is_distributed(param) and not is_distributed(given):
                    state_dict[prefix + name] = distributed_like(param, local_part_of(param, given))
                self.engine.loading.add(id(param))
                if not is_distributed(param) and not param.is_inference():  # they do not count what is copied to them
                    self._laid_out[id(param)] = param._version

    @interrupts.defers
    def after_load(self, module: nn.Module, _: Any) -> None:
        """What was loaded goes into the shards."""
        for param in module._parameters.values():
            if param is None or id(param) not in self.engine.loading:
                continue
            self.engine.loading.discard(id(param))
            try:
                if self._is_written(param):
                    put_whole(self.engine, param, local(param).detach())
            except BaseException as error:
                self.engine.executor.agreement.fail(error, spoilt=False)
                raise
            show_again(self.engine, param)
        if module is self._outermost:
            self._end()

    def _is_written(self, param: nn.Parameter) -> bool:
        """Otherwise torch could not copy what was given, and will say so: the parameter stays as it was."""
        seen = self._laid_out.pop(id(param), None)
        return seen is None or param._version != seen

    def _begin(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """See [Note: loading]."""
        self._copies.clear()  # what was written there is loaded now, or need not be in the model
        refuse_early_write(self.engine, module.parameters(), "load_state_dict()")
        self.engine.executor.together("load_state_dict")
        wanted = wanted_by(module, prefix, self.engine.places)
        sets = same_model(self.engine.ranks, self.engine.others) or [self.engine.ranks]
        outline = outline_of(state_dict, prefix, wanted, digests=any(ranks.size > 1 for ranks in sets))
        problems = unreadable(state_dict, prefix, wanted)
        missing = []
        for ranks in sets:  # where one set has found problems the others are told, so that all raise
            every, told = zip(*ranks.every((outline, problems)), strict=True)
            strict = self._strict if ranks is sets[-1] else None
            problems = next((known for known in told if known), problems) or compare(every, wanted, strict)
            lacking = {key: it for key, it in every[0].tensors.items() if any(key not in other.tensors for other in every[1:])}
            missing.append((ranks, lacking))
            outline = every[0]
        if problems:
            listed = "\n\t".join(problems)
            raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}, nothing was changed:\n\t{listed}")
        self._missing_elsewhere = [(ranks, lacking) for ranks, lacking in missing if lacking]
        self._outermost = module

    def _end(self) -> None:
        """The load is over, well or not: parameters that it was about to write show what they did before."""
        self._outermost = None
        self._missing_elsewhere = []
        self._laid_out.clear()
        if not self.engine.loading:
            return
        for group in self.engine.groups:
            for param in group.params:
                if id(param) in self.engine.loading:
                    self.engine.loading.discard(id(param))
                    show_again(self.engine, param)

    def _take_from_rank_0(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """What some other rank was not given comes from rank 0."""
        device = self.engine.device.device
        listed = [(ranks, lacking, name) for ranks, lacking in self._missing_elsewhere for name in _names(module)]
        for ranks, lacking, name in listed:
            given = lacking.get(prefix + name)
            if given is None:
                continue
            if ranks.rank == 0:
                whole = state_dict[prefix + name].detach().to(device).contiguous()
                if whole.numel() == 1:  # contiguous with any stride, but a view as bytes wants 1
                    whole = whole.clone(memory_format=torch.contiguous_format)
            else:
                whole = torch.empty(given.shape, dtype=given.dtype, device=device)
            if whole.numel():
                ranks.broadcast(whole.reshape(-1).view(torch.uint8))
            state_dict[prefix + name] = whole


def _names(module: nn.Module) -> Iterator[str]:
    yield from module._parameters
    yield from module._buffers


def refuse_assign() -> NoReturn:
    raise RuntimeError("load_state_dict(assign=True) would replace sharded parameters: load without assign")
