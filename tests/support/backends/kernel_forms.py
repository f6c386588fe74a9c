"""Forms of packed weights that the CUDA kernels are tested with: each stored format's, and odd ones."""

from __future__ import annotations

from edgepipe_torch.cuda.kernels.forms import FloatKind, KernelForm

_HALF, _BF16, _FLOAT = FloatKind(), FloatKind(base="uint16"), FloatKind(base="float32")
_UNSIGNED, _SIGNED = FloatKind(factor="uint8"), FloatKind(factor="int8")


def _form(
    bits: int,
    group: int,
    offset: str = "none",
    scale: FloatKind = _HALF,
    added: FloatKind = _HALF,
    *,
    span: int = 0,
    codebook: str = "",
) -> KernelForm:
    assert offset in ("none", "zero", "zeros", "added")
    return KernelForm(bits=bits, group=group, span=span, offset=offset, codebook=codebook, scale=scale, added=added)


FORMS = {
    "Q4_0": _form(4, 32, "zero"),
    "Q4_1": _form(4, 32, "added"),
    "Q5_0": _form(5, 32, "zero"),
    "Q8_0": _form(8, 32, "zero"),
    "Q2_K": _form(4, 16, "added", _UNSIGNED, _UNSIGNED, span=256),
    "Q4_K": _form(4, 32, "added", _UNSIGNED, _UNSIGNED, span=256),
    "Q5_K": _form(5, 32, "added", _UNSIGNED, _UNSIGNED, span=256),
    "Q6_K": _form(6, 16, "zero", _SIGNED, span=256),
    "IQ4_XS": _form(4, 32, scale=_SIGNED, span=256, codebook="iq4"),
    "MXFP4": _form(4, 32, scale=_BF16, codebook="e2m1"),
    "NF4": _form(4, 64, scale=_FLOAT, codebook="nf4"),
    "FP8": _form(8, 128, scale=_FLOAT, codebook="e4m3"),
    "AWQ": _form(4, 128, "zeros"),
    "W8A16 by row": _form(8, 0, scale=_BF16),
    "MLX 6 bit": _form(6, 64, "added", _BF16, _BF16),
    "8 bit, groups of 16": _form(8, 16, "zeros", _FLOAT),
    "5 bit, groups of 256": _form(5, 256, "added", _FLOAT, _FLOAT),
}
