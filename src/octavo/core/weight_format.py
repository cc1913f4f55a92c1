"""Number formats of weights: what `quantization` means, and how many bytes it makes of a matrix.

    int8       one scale per output (float32):                           value = scale * code, code -127..127
    int4[:G]   groups of G inputs (32), float16 scale, a byte of zero:   value = scale * (code - zero / 16), code 0..15
    gguf       the blocks of a GGUF file as they are: their own integers and scales, only in another order
    fp8        one scale per output, e4m3 numbers (GPU)

Matrices of products and the embedding (also as output head) are quantised; norms and biases stay as they are.
This module knows no tensors; what the numbers mean in torch is `kernels/quantized_weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

GROUP_SIZES = (32, 64, 128, 256)
FORMATS = ("auto", "int8", "int4", "int4:64", "int4:128", "gguf", "fp8")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """kind: int8, int4, gguf or fp8. group_size: inputs per scale; None where a scale serves a whole output."""

    kind: str
    group_size: int | None = None

    def __str__(self) -> str:
        return self.kind if self.group_size in (None, 32) else f"{self.kind}:{self.group_size}"

    def matrix_bytes(self, rows: int, columns: int) -> int | None:
        """Bytes of a weight [rows, columns]; None where that is the file's business."""
        if self.kind == "gguf":
            return None
        if self.group_size is None:
            return rows * (columns + 4)
        units, groups = -(-columns // 32), -(-columns // self.group_size)
        return rows * (units * 16 + groups * 3)


def parse_weight_format(text: str | None) -> WeightFormat | None:
    """`EngineConfig.quantization` -> format; None for None and "auto": as the file is. Raises ConfigError."""
    if text is None or text == "auto":
        return None
    name, _, group = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name == "int4" and (not group or (group.isdecimal() and int(group) in GROUP_SIZES)):
        return WeightFormat("int4", int(group or 32))
    if name in ("int8", "gguf", "fp8") and ":" not in text:
        return WeightFormat(name)
    raise ConfigError(
        f"quantization={text!r}: must be auto, int8, int4, int4:G with G one of {', '.join(map(str, GROUP_SIZES))}, "
        "gguf, or fp8"
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
