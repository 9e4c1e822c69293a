"""Every shipped kernel compiles without a GPU and holds the instructions it should. Reads the bundle's manifest."""

import pytest

from cute_kernels import manifest
from tests.conftest import ARCH
from tools import aot, inspect

SHIPPED = aot.shipped(ARCH)
SHARED_LIMIT = 227 * 1024  # bytes a CTA of Hopper can have


@pytest.fixture(scope="session")
def held(bundle) -> manifest.Manifest:
    return manifest.read(bundle)


def test_a_bundle_holds_what_is_shipped(held):
    assert len(held.kernels) == len(SHIPPED)
    for field in ("name", "symbol", "key"):
        assert len({entry[field] for entry in held.kernels}) == len(SHIPPED), field


@pytest.mark.parametrize(("op", "spec"), SHIPPED, ids=[spec.name for _, spec in SHIPPED])
def test_shipped(held, op, spec):
    entry = held.find(op, spec)
    assert entry is not None, held.refusal(op, spec)
    assert 0 < entry["shared"] <= SHARED_LIMIT
    if entry["instructions"] is None:
        pytest.skip(f"nothing can disassemble: {inspect.INSTALL}")
    counts = entry["instructions"]
    assert entry["stack"] == 0 and "LDL" not in counts and "STL" not in counts, "spills"
    if op.startswith("attention."):
        assert counts["HGMMA"] > 0 and counts["UTMALDG"] > 0
        assert counts["WARPGROUP"] < counts["HGMMA"], "the compiler fences and waits around every single WGMMA"


def test_opcodes_are_counted_with_and_without_predicates():
    text = """
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*0010*/              @!P0 UTMALDG.4D [UR8], [UR4] ;
        /*0020*/              @UP1 UTMALDG.4D [UR8], [UR4] ;
        /*0030*/                   STL.64 [R1], R2 ;
        /*0040*/                   LDG.E R1, [R2] ;
        /*0050*/              @P1  BRA 0x40 ;
    """
    assert inspect.instructions(text) == {"HGMMA": 1, "UTMALDG": 2, "STL": 1, "total": 6}
