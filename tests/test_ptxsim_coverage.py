"""The share of a kernel's PTX that no case executes may not grow."""

from ptxsim.coverage import Missing

from tests.sim import coverage


def test_the_share_of_a_kernel_may_not_grow(tmp_path):
    file = tmp_path / "baseline.csv"
    coverage.write({"op/old": Missing(10, 100, {}), "op/other": Missing(1, 100, {})}, file)
    coverage.write({"op/old": Missing(5, 100, {})}, file)
    assert file.read_text() == "op,kernel,share,instructions\nop,old,0.0500,5\nop,other,0.0100,1\n"
    share = [Missing(count, 10000, {}) for count in (505, 200, 520, 300)]
    assert not coverage.grown({"op/old": share[0], "op/new": share[1]}, file)
    assert not coverage.grown({"op/old": Missing(5, 90, {})}, file), "other instructions went"
    assert coverage.grown({"op/old": share[2], "op/new": share[3]}, file) == [
        "op/old: 5.20% of its PTX never ran, 5.00% before",
        "op/new: 3.0% of its PTX never ran, a new kernel may have 2%",
    ]
