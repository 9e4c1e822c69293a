"""The table of element types. Every other list of them follows from it. No torch, no DSL.

A new element type is a row. A new type of K and V also needs a place in `attention.spec` and its conversion in
`attention.quant`.
"""

from typing import NamedTuple


class ElementType(NamedTuple):
    """One element type.

    name: in specs. bits: per element. torch: the name of the dtype in torch. cute: of the type in CuTe. Both are those
    of the stored bytes; NVFP4 is stored as two elements per byte. largest: of types that a row is divided by a scale
    for, the magnitude at which elements saturate; 0 for other types.
    """

    name: str
    bits: int
    torch: str
    cute: str
    largest: float = 0.0


TABLE = (
    ElementType("bf16", 16, "bfloat16", "BFloat16"),
    ElementType("fp16", 16, "float16", "Float16"),
    ElementType("fp32", 32, "float32", "Float32"),
    ElementType("e4m3", 8, "float8_e4m3fn", "Float8E4M3FN", 448.0),
    ElementType("e5m2", 8, "float8_e5m2", "Float8E5M2", 57344.0),
    ElementType("int8", 8, "int8", "Int8", 127.0),
    ElementType("nvfp4", 4, "uint8", "Uint8"),
    ElementType("int32", 32, "int32", "Int32"),
    ElementType("int64", 64, "int64", "Int64"),
    ElementType("uint8", 8, "uint8", "Uint8"),
)
BITS = {row.name: row.bits for row in TABLE}
TORCH = {row.name: row.torch for row in TABLE}
LARGEST = {row.name: row.largest for row in TABLE if row.largest}
CUTE = {row.name: row.cute for row in TABLE}
