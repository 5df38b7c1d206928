"""What the ``safetensors`` format calls torch's dtypes."""

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}


def name_of(dtype: torch.dtype, what: str) -> str:
    """The format's name of a dtype. TypeError, naming ``what``, for one that it does not have."""
    if dtype not in NAMES:
        raise TypeError(f"{what} is {dtype}, which safetensors files do not hold: convert it first")
    return NAMES[dtype]
