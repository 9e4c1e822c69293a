"""The records of latent attention: how the row of a token lies in a cache. Plain Python: the only statement of it.

A row has a latent, of which the first columns may be all of K and V, and a rotated part. A new record is a row of
`RECORDS`; the kernels that write and read it change only if it has codes, factors or a rotated part of a new type.
docs/extending.md lists what else it touches.
"""

from typing import Any, NamedTuple


class LatentRecord(NamedTuple):
    """A record, in bytes.

    latent, rotated: values of both parts; 0 for any number. codes: the type of the latent's values: "e4m3", "e2m1" in
    pairs of which the first is in the low bits, or "" for the type of the rows. vec: values that share a factor; 0:
    none. factor: its type, "fp32", "ue8m0" (2^(byte - 127)) or "e4m3". rotated_as: the type of the rotated part: "" for
    that of the rows; "e4m3", multiplied by nothing; or "codes": it is quantised with the latent, as its last values.
    factors_at, rotated_at: where they begin in the row, or, if the record is planar, the factors in a row of their own:
    a page has the rows of its tokens, then the rows of their factors. row: bytes of a row; factor_row: of a row of
    factors with its padding, 0 unless planar.
    """

    latent: int = 0
    rotated: int = 0
    codes: str = ""
    vec: int = 0
    factor: str = ""
    rotated_as: str = ""
    factors_at: int = 0
    rotated_at: int = 0
    row: int = 0
    factor_row: int = 0

    @property
    def packed(self) -> bool:
        """Whether a row is one record of bytes, with factors of its own."""
        return self.vec > 0

    @property
    def columns(self) -> int:
        """Values of a row, of both parts; 0 for any number."""
        return self.latent + (self.rotated if self.rotated_as != "codes" else 0) if self.packed else 0

    @property
    def planar(self) -> bool:
        """Whether the factors of a page lie behind its rows."""
        return self.factor_row > 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, factors and padding included; 0 if they depend on the call."""
        return self.row + self.factor_row

    @property
    def unit(self) -> int:
        """Bytes of which the addresses of rows, and the strides of pages and rows, are multiples: those of the widest
        number in a row."""
        return 4 if self.factor == "fp32" else 1 if self.codes and self.rotated_as else 2

    @property
    def permuted(self) -> bool:
        """Whether factor s of a row is at 8 * (s % 4) + s // 4, as FlashMLA's MMAs of Blackwell read them."""
        return self.factor == "e4m3" and self.rotated_as == "e4m3"

    @property
    def factors(self) -> int:
        """Factors of a row."""
        return self.latent // self.vec if self.packed else 0

    def factor_index(self, box: Any, quarter: Any) -> Any:
        """Return which factor of a row, as they are stored, columns [64 box + 16 quarter, + 16) have. Plain arithmetic:
        on ints, or traced."""
        return 8 * quarter + box if self.permuted else (64 * box + 16 * quarter) // self.vec


ROWS, INDEX = "rows", "132"  # 16-bit rows as they are; the keys of an indexer
BYTES = "bytes"  # rows of any record that are read as they are
RECORDS = {
    ROWS: LatentRecord(),
    "e4m3": LatentRecord(codes="e4m3", rotated_as="e4m3"),  # one scale for all values of all rows
    "656": LatentRecord(512, 64, "e4m3", 128, "fp32", "", 512, 528, 656),
    "528_fp32": LatentRecord(512, 0, "e4m3", 128, "fp32", "", 512, 0, 528),
    "528": LatentRecord(512, 64, "e4m3", 32, "ue8m0", "codes", 512, 0, 528),
    "528_planar": LatentRecord(512, 64, "e4m3", 32, "ue8m0", "codes", 0, 0, 512, 16),
    "584": LatentRecord(448, 64, "e4m3", 64, "ue8m0", "", 0, 448, 576, 8),
    "352": LatentRecord(512, 64, "e2m1", 16, "e4m3", "e4m3", 320, 256, 352),
    "288": LatentRecord(512, 64, "e2m1", 16, "e4m3", "codes", 256, 0, 288),
    INDEX: LatentRecord(128, 64, "e4m3", 128, "fp32", "codes", 0, 0, 128, 4),
}
