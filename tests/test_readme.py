"""README: its example runs, its tables are those that the code and the results give, its figures have rows."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch

from bench.readme import README, measured, measured_decode, measured_topk
from bench.results import ROOT, read_all
from tools import matrix

TEXT = README.read_text()


def section(name: str) -> str:
    return TEXT.split(f"<!-- {name}:begin -->\n")[1].split(f"\n<!-- {name}:end -->")[0]


def test_support_table_is_up_to_date():
    assert section("support") == matrix.markdown(), "run: python -m tools.matrix readme"


def test_measured_tables_are_up_to_date():
    assert section("measured") == measured(read_all()), "run: python -m bench readme"
    assert section("measured-decode") == measured_decode(read_all()), "run: python -m bench readme"
    assert section("measured-topk") == measured_topk(read_all()), "run: python -m bench readme"


def test_example_runs_and_is_right():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    out, q, cache = (names[n].float() for n in ("out", "q", "cache"))
    assert out.shape == q.shape
    # request 1: one new token that sees all of its 20 keys, in pages 1 and 3
    k, v = (cache[[1, 3], side].transpose(0, 1).flatten(1, 2)[:, :20] for side in (0, 1))
    want = torch.nn.functional.scaled_dot_product_attention(q[5:].transpose(0, 1), k, v, enable_gqa=True)
    torch.testing.assert_close(out[5:].transpose(0, 1), want, rtol=1e-2, atol=1e-2)


def test_commands_and_files_named_in_readme_exist():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make ([a-z]+)", TEXT)) <= set(targets)
    for module in set(re.findall(r"python -m ((?:tools|bench)[\w.]*)", TEXT)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for path in set(re.findall(r"`((?:bench|tests|tools|wrappers|cute_kernels)/[\w/.]+)`", TEXT)):
        assert (ROOT / path).exists(), path


def test_matrix_tells_run_from_compiled_and_refused():
    ran = {("sm_90a", "bf16"): {"gpu": "nvidia-h200", "commit": "0123456789abcdef"}}
    by = {f.name: f for f in matrix.FEATURES}
    assert matrix.cell(by["bf16"], "sm_90a", ran) == "run (nvidia-h200, 012345678)"
    assert matrix.cell(by["fp16"], "sm_90a", ran) == "compiled"
    assert matrix.cell(by["bf16"], "sm_100a", ran) == "no"
    # a record of an architecture that refuses the feature today says nothing
    assert (
        matrix.cell(by["prefill, NVFP4 KV"], "sm_90a", {("sm_90a", "prefill, NVFP4 KV"): ran["sm_90a", "bf16"]}) == "no"
    )


@pytest.fixture
def report(tmp_path):
    """A junit report: a passed, a skipped and a failed GPU test, and a CPU test."""
    suite = ET.Element("testsuite")
    tests = {"bf16_d64_causal": "", "fp16_full": "skipped", "cap": "failure", "cap_window": "", "window": ""}
    for name, child in tests.items():
        case = ET.SubElement(suite, "testcase", classname="tests.test_gpu_prefill", name=f"test[{name}]")
        if child:
            ET.SubElement(case, child)
    ET.SubElement(suite, "testcase", classname="tests.test_wrappers", name="test_sink")
    path = tmp_path / "report.xml"
    ET.ElementTree(suite).write(path)
    return path


def test_record_counts_passed_gpu_tests_only(report, tmp_path):
    path = tmp_path / "hardware.csv"
    counts = matrix.add([report], "sm_90a", "nvidia-h200", "abc", path)
    assert counts == {"bf16": 1, "head_dim 64": 1, "causal mask": 1, "sliding window": 2}
    rows = matrix.record(path)
    assert rows["sm_90a", "sliding window"]["passed"] == "2" and ("sm_90a", "soft cap") not in rows
    assert matrix.add([report], "sm_90a", "nvidia-h200", "def", path) and len(matrix.record(path)) == 4


def test_a_record_of_one_suite_leaves_the_others(report, tmp_path):
    path, other = tmp_path / "hardware.csv", tmp_path / "other.xml"
    matrix.add([report], "sm_90a", "nvidia-h200", "abc", path)
    suite = ET.Element("testsuite")
    ET.SubElement(suite, "testcase", classname="tests.test_gpu_topk", name="test_replay[bf16]")
    ET.ElementTree(suite).write(other)
    counts = matrix.add([other], "sm_90a", "nvidia-h200", "def", path)
    assert counts == {"top-k under CUDA graph replay": 1} and len(matrix.record(path)) == 5
