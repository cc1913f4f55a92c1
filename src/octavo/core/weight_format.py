"""Number formats of weights: what `quantization` means, and how many bytes it makes of a matrix.

    int8             one scale per output (float32):                      value = scale * code, code -127..127
    int4[:G]:pure    groups of G inputs (32), float16 scale, a byte of zero:
                                                                          value = scale * (code - zero / 16), code 0..15
    int4[:G]         the same, but the matrices that lose most by it in int8 (core/weight_recipe.py)
    gguf             the blocks of a GGUF file as they are: their own integers and scales, only in another order
    fp8              one scale per output, e4m3 numbers (GPU)

Matrices of products and the embedding (also as output head) are quantised; norms and biases stay as they are.
This module knows no tensors; what the numbers mean in torch is `kernels/quantized_weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

GROUP_SIZES = (32, 64, 128, 256)
FIXED_SPAN = 128  # inputs that share a step (csrc/fixed_point.h)
SCREENED_FROM = 1 << 24  # weights of an output head
PURE = "pure"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """kind: int8, int4, gguf, fp8, or that of `FIXED`. group_size: inputs per scale; None: a scale serves an output.

    mixed: of a model, some matrices are to be int8 (`core/weight_recipe.py`). Of one matrix it says nothing.
    """

    kind: str
    group_size: int | None = None
    mixed: bool = False

    def __str__(self) -> str:
        group = [] if self.group_size in (None, 32) else [str(self.group_size)]
        pure = [PURE] if self.kind == "int4" and not self.mixed else []
        return ":".join((self.kind, *group, *pure))

    def matrix_bytes(self, rows: int, columns: int) -> int | None:
        """Bytes of one weight [rows, columns] in this format; None where that is the file's business."""
        if self.kind == "gguf":
            return None
        if self.group_size is None:
            return rows * (columns + 4)
        units, groups = -(-columns // 32), -(-columns // self.group_size)
        return rows * (units * 64 + groups * 4 if self.kind == FIXED.kind else units * 16 + groups * 3)


#: How the native CPU kernels may hold bfloat16 matrices of layers: nobody asks for it by name (docs/fixed-point.md).
FIXED = WeightFormat("fixed", FIXED_SPAN)


def worth_screening(rows: int, columns: int) -> bool:
    """Is an output head [rows, columns] so large that a copy to screen it is worth the copy's memory?"""
    return rows * columns >= SCREENED_FROM


def screen_bytes(rows: int, columns: int, *, on_tiles: bool) -> int:
    """Bytes of the copy that screens an output head [rows, columns]: in eight bits for the tiles of AMX
    (csrc/screen_amx.h), else in six (csrc/screen_panels.h)."""
    panel = -(-columns // 128) * 128 * 16 if on_tiles else -(-columns // 32) * 2 * 208
    return -(-rows // 16) * (64 + panel)


def parse_weight_format(text: str | None) -> WeightFormat | None:
    """`EngineConfig.quantization` -> format; None for None and "auto": as the file is. Raises ConfigError."""
    if text is None or text == "auto":
        return None
    name, *rest = text.split(":") if isinstance(text, str) else [""]
    if name == "int4":
        mixed = rest[-1:] != [PURE]
        group = rest if mixed else rest[:-1]
        if not group or (len(group) == 1 and group[0].isdecimal() and int(group[0]) in GROUP_SIZES):
            return WeightFormat("int4", int(group[0]) if group else 32, mixed)
    if name in ("int8", "gguf", "fp8") and not rest:
        return WeightFormat(name)
    raise ConfigError(
        f"quantization={text!r}: must be auto, int8, int4, int4:G with G one of {', '.join(map(str, GROUP_SIZES))}, "
        "int4:pure or int4:G:pure (no matrix in 8 bits), gguf, or fp8"
    )


def check_weight_format(text: str | None, device: str) -> WeightFormat | None:
    """`parse_weight_format`, and whether the device can compute with it."""
    format = parse_weight_format(text)
    if format is not None and format.kind == "fp8" and device == "cpu":
        raise ConfigError(
            "quantization='fp8' needs a GPU: a CPU has no arithmetic for eight-bit floats, and int8 takes the same "
            "bytes with a smaller error; use quantization='int8'"
        )
    if format is not None and format.kind == "fp8" and device == "npu":
        raise ConfigError(
            "quantization='fp8' needs a GPU: eight-bit floats are not used on npu; use quantization='int8'"
        )
    if format is not None and format.kind == "gguf" and device != "cpu":
        raise ConfigError(
            f"quantization='gguf' on {device}: only the CPU kernels compute from the blocks of a GGUF file; "
            "use quantization='int8', 'int4' or 'fp8', or device='cpu'"
        )
    return format
