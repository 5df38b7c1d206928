"""Which functions of tensors say what of a parameter: about the object, its description, or its values. Tables only, for
runtime/absent.py."""

from typing import Any

import torch
from torch import nn

from unwall.nn.linear_cross_entropy import chunk_by_chunk

T = torch.Tensor


def _named(*names: str) -> set[Any]:
    """Methods of a tensor, and what gets, sets or deletes its attributes."""
    found: set[Any] = set()
    for name in names:
        what = getattr(T, name, None)
        if callable(what):
            found.add(what)
        elif what is not None:
            found |= {what.__get__, what.__set__, what.__delete__}
    return found


OBJECT = _named(
    *("requires_grad", "requires_grad_", "grad", "is_leaf", "grad_fn", "_version", "retains_grad", "retain_grad", "grad_dtype"),
    *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks", "name", "names"),
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "__hash__", "device", "is_cuda", "is_cpu"),
    *("is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "layout", "get_device", "backward"),
    *("output_nr", "is_inference", "_is_view", "_base", "_is_zerotensor", "is_conj", "is_neg", "is_xla", "is_sparse_csr"),
) | {torch.autograd.grad, torch.autograd.backward, torch.is_conj, torch.is_neg, torch.is_inference, torch.numel}
"""Answered by the parameter itself."""

SHAPED = _named("stride", "is_contiguous", "storage_offset", "is_non_overlapping_and_dense", "dim_order")
DESCRIBED = _named(
    *("dtype", "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_signed"),
    *("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"),
) | {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
DESCRIBED |= {torch.is_floating_point, torch.is_complex, torch.is_signed, torch.randint_like}
"""Answered by a stand-in: see ``_described``."""

GET_DTYPE = T.dtype.__get__  # type: ignore[attr-defined]

LIKE_ANOTHER = _named("type_as", "expand_as", "view_as", "reshape_as", "to")
"""Of what comes after the first argument only the description counts."""

POINTERS = _named("data_ptr", "numpy", "__array__", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "_cdata")
"""Their results share memory and are no tensors."""

PRODUCTS = {
    *_named("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "mv", "baddbmm"),
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.mv, torch.baddbmm, torch.einsum, torch.conv1d, torch.conv2d),
    *(nn.functional.linear, nn.functional.bilinear, nn.functional.layer_norm, nn.functional.group_norm, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, nn.functional.scaled_dot_product_attention),
    *(nn.functional.rms_norm, torch.layer_norm, torch.dot, torch.addmv, torch.addbmm, torch.inner, torch.tensordot),
    chunk_by_chunk,
}
"""Take operands of one dtype only. What a module returned is in the compute dtype: so is the parameter then."""

IN_PLACE_OPERATORS = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "imod", "iand", "ior")}
