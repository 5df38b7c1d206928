"""As much of Triton as the kernels of shards/compress_triton.py and optim/triton_lean.py need, with tensors of the host: their
arithmetic can be compared where there is no accelerator. Whether Triton compiles them is for the gpu tests."""

import importlib.util
import sys
import types
from pathlib import Path

import torch

import unwall

COMPRESS = Path(unwall.__file__).parent / "shards/compress_triton.py"
LEAN = Path(unwall.__file__).parent / "optim/triton_lean.py"
WRAPS = 1 << 32
state = {"program": (0, 0)}


class Value:
    """A tensor of a kernel. ``uint32`` lies in int64, always below 2^32."""

    def __init__(self, data, kind=None):
        self.data, self.kind = torch.as_tensor(data), kind or torch.as_tensor(data).dtype

    @property
    def dtype(self):
        return self.kind

    def to(self, kind, bitcast=False):
        if kind == "uint32":
            return Value(self.data.long() % WRAPS, kind)
        if self.kind == "uint32" and kind is torch.int32:
            return Value(torch.where(self.data >= WRAPS // 2, self.data - WRAPS, self.data).int())
        return Value(self.data.view(kind) if bitcast else self.data.to(kind))

    def __getitem__(self, index):
        return Value(self.data[index], self.kind)

    def __lt__(self, other):
        return Value(self.data < plain(other))

    def __gt__(self, other):
        return Value(self.data > plain(other))

    def __ge__(self, other):
        return Value(self.data >= plain(other))

    def __eq__(self, other):
        return Value(self.data == plain(other))

    __hash__ = None


def plain(thing):
    return thing.data if isinstance(thing, Value) else thing


def operation(name, flipped=False):
    def apply(self, other):
        pair = (plain(other), self.data) if flipped else (self.data, plain(other))
        data = getattr(torch.as_tensor(pair[0]), name)(pair[1])
        return Value(data % WRAPS, "uint32") if self.kind == "uint32" else Value(data)

    return apply


for symbol in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift", "floordiv"):
    setattr(Value, f"__{symbol}__", operation(f"__{symbol}__"))
    setattr(Value, f"__r{symbol}__", operation(f"__{symbol}__", flipped=True))


class Pointer:
    def __init__(self, flat, at=0):
        self.flat, self.at = flat.view(-1), at
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, other):
        return Pointer(self.flat, self.at + plain(other))


def load(pointer, mask=True, other=0):
    at, inside = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(plain(mask)))
    return Value(
        torch.where(inside, pointer.flat[torch.where(inside, at, 0)], torch.as_tensor(other, dtype=pointer.flat.dtype))
    )


def store(pointer, value, mask):
    at, inside, data = torch.broadcast_tensors(pointer.at, plain(mask), plain(value))
    assert data.dtype is pointer.flat.dtype
    pointer.flat[at[inside]] = data[inside]


def where(condition, first, second):
    kinds = [torch.as_tensor(plain(each)) for each in (first, second)]
    wide = torch.float32 if any(each.is_floating_point() for each in kinds) else torch.int32
    return Value(torch.where(plain(condition), *(each.to(wide) for each in kinds)))


class Kernel:
    def __init__(self, body):
        self.body = body

    def __call__(self, *arguments):
        return self.body(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion, **constants):
            assert not enable_fp_fusion
            assert num_warps
            given = [Pointer(each) if isinstance(each, torch.Tensor) else Value(each) if isinstance(each, int) else each
                     for each in arguments]  # fmt: skip
            given = [int(each.data) if name == "pieces" else each for each, name in zip(given, names(self.body), strict=False)]
            columns, rows = (*grid, 1)[:2]
            for state["program"] in [(x, y) for y in range(rows) for x in range(columns)]:
                self.body(*given, **constants)

        return launch


def names(body):
    return body.__code__.co_varnames


def jit(body=None, **options):
    return (lambda later: Kernel(later)) if body is None else Kernel(body)


def language():
    made = types.ModuleType("triton.language")
    made.constexpr, made.load, made.store, made.where = plain, load, store, where
    made.float32, made.int32, made.int64, made.int8, made.uint32 = torch.float32, torch.int32, torch.int64, torch.int8, "uint32"
    made.int16, made.bfloat16 = torch.int16, torch.bfloat16
    made.program_id = lambda axis: Value(state["program"][axis])
    made.arange = lambda first, end: Value(torch.arange(first, end, dtype=torch.int32))
    made.full = lambda shape, value, dtype: Value(torch.full(shape, value, dtype=dtype))
    made.zeros = lambda shape, dtype: Value(torch.zeros(shape, dtype=dtype))
    made.floor = lambda value: Value(value.data.floor())
    made.max = lambda value, axis: Value(value.data.amax(axis))
    made.sum = lambda value, axis: Value(value.data.sum(axis, dtype=value.data.dtype))
    made.maximum = lambda first, second: Value(first.data.clamp(min=plain(second)))
    made.minimum = lambda first, second: Value(first.data.clamp(max=plain(second)))
    made.div_rn = lambda first, second: Value(first.data / second.data)
    made.sqrt_rn = lambda value: Value(value.data.double().sqrt().float())
    return made


def kernels(monkeypatch, path=COMPRESS):
    """A module of kernels, imported with this in the place of Triton."""
    made = types.ModuleType("triton")
    made.jit, made.language, made.cdiv = jit, language(), lambda first, second: -(-first // second)
    monkeypatch.setitem(sys.modules, "triton", made)
    monkeypatch.setitem(sys.modules, "triton.language", made.language)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_tried", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
