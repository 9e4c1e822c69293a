"""Bundles: what a process without the DSL loads, what it refuses, and builds that are interrupted or run at once."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels import archive, bundle, cubin, device_code, manifest
from cute_kernels import build as compiler
from cute_kernels.attention import dispatch
from cute_kernels.merge_states import args as merge_states
from tests.conftest import ARCH, BLOCK_DSL, ROOT, build_bundle, finish, run_python, start_python
from tests.support.kernels import LATER, SHIPPED

pytestmark = pytest.mark.kernels
OP = "attention.decode"  # whose kernels have every argument
SPEC = next(spec for op, spec in dispatch.shipped(ARCH) if op == OP)
OTHER = [spec for label, (op, spec) in SHIPPED.items() if op == OP and label not in LATER][1]
OBJECTS = ROOT / "build" / "obj"

# A process without the DSL, which forks for each program that it is sent: all programs find torch and the runtime
# imported, and nothing that another one left.
WITHOUT_DSL = (
    BLOCK_DSL
    + """
import json, os, traceback
from cute_kernels.attention import dispatch
from wrappers import runtime
op, spec = next(kernel for kernel in dispatch.shipped("sm_90a") if kernel[0] == "attention.decode")
for line in sys.stdin:
    program = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in ((1, program["out"]), (2, program["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        os.environ.update(program["env"])
        status = 1
        try:
            exec(program["code"], {"__name__": "__main__", **globals()})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)


@pytest.fixture(scope="module")
def server():
    process = start_python("-c", WITHOUT_DSL, CUDA_VISIBLE_DEVICES="")
    yield process
    finish(process)


@pytest.fixture
def load(server, tmp_path):
    """Run `code` in a process without the DSL; `op` and `spec` are OP and SPEC."""

    def run(code: str, bundle: Path | str, **env: str) -> subprocess.CompletedProcess[str]:
        out, err = tmp_path / "out", tmp_path / "err"
        program = {"code": code, "env": env | {"CUTE_KERNELS_BUNDLE": str(bundle)}, "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(program) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess([], status, out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A bundle of SPEC and OTHER."""
    only = [argument for spec in (SPEC, OTHER) for argument in ("--only", f"{OP}/{spec.name}")]
    return build_bundle(ARCH, tmp_path_factory.mktemp("bundle") / ARCH, *only)


def build(*arguments: str, out: Path, objects: Path) -> list[str]:
    place = ("--out", str(out), "--objects", str(objects))
    return ["-m", "cute_kernels", "build", "--arch", ARCH, "--jobs", "1", *place, *arguments]


def compiled(done: subprocess.CompletedProcess[str]) -> int:
    """How many kernels a build compiled, from what it printed."""
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) compiled", done.stdout)
    assert found, done.stdout
    return int(found[1])


@pytest.fixture
def copy(small, tmp_path) -> Path:
    """A bundle to spoil. Links, because the tool replaces files and never writes into them."""
    return shutil.copytree(small, tmp_path / "bundle", copy_function=lambda a, b: Path(b).hardlink_to(a))


@pytest.fixture
def edit(copy):
    """Rewrite the manifest of `copy`."""

    def write(change) -> Path:
        data = json.loads((copy / manifest.FILE).read_text())
        change(data)
        manifest.write_atomic(copy / manifest.FILE, json.dumps(data).encode())
        return copy

    return write


# ---- what a process without the DSL can do


CHECKS = """
import re
import torch
from cute_kernels.attention import args
from tests.support.fake_cuda import tensor as T
fn = runtime.kernel(op, spec, "sm_90a")
dt = {"bf16": "bfloat16", "fp16": "float16"}[spec.q]
qk, vo = spec.head_dim_qk, spec.head_dim_vo
tensors = dict(
    q=T((7, 8, qk), dt), k=T((4, 2, 16, qk), dt), v=T((4, 2, 16, vo), dt), o=T((7, 8, vo), dt),
    lse=T((0, 8), "float32"), cu_seqlens_q=T((3,), "int32"), kv_lens=T((2,), "int32"),
    page_table=T((2, 2, 3), "int32"), kv_starts=T((0,), "int32"), sink=T((0,), "float32"),
    softmax_scale_ptr=T((0,), "float32"), out_scale_ptr=T((0,), "float32"),
    o_fp8=T((0, 8, vo), "uint8"), o_fp4=T((0, 8, vo // 2), "uint8"), o_sf=T((0,), "uint8"),
    tree_mask=T((0, 1), "int32"), counters=T((8,), "int32"),
    o_partial=T((0, 1, vo + 4), "float32"),
)
numbers = dict(
    softmax_scale_log2=1.0, out_scale=1.0, soft_cap=0.0, skip_threshold=0.0, window_left=0, causal=1, grid=132,
    counter_base=0, enable_pdl=0, blocks_per_split=0, whole_ctas=0, whole_tiles=0, o_sf_start=0, o_sf_scale=1.0,
)
good = {name: (tensors | numbers)[name] for name in args.fields(spec)}
cases = {
    "good": {},
    "dtype": {"q": T((7, 8, qk), "float32")},
    "rank": {"k": T((4, 16, qk), dt)},
    "head_dim": {"v": T((4, 2, 16, vo + 8), dt)},
    "alignment": {"q": T((7, 8, qk), dt, offset=2)},
    "stride": {"o": T((7, 8, vo), dt, strides=(8 * vo + 4, vo, 1))},
    "contiguous": {"k": T((4, 2, 16, qk), dt, strides=(64 * qk, 32 * qk, 2 * qk, 2))},
    "scalar": {"window_left": 1.5},
    "device": {"sink": torch.zeros(8)},
}
for name, change in cases.items():
    try:
        fn(*(good | change).values())
    except Exception as error:
        print(name, "|", re.sub(r"#(\\d+)", lambda found: list(good)[int(found[1])], str(error)))
assert "cutlass" not in sys.modules
"""


def test_arguments_are_checked_without_the_dsl(load, small):
    done = load(CHECKS, small, CUTE_KERNELS_JIT="0")
    assert done.returncode == 0, done.stderr
    errors = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    expected = {
        "good": r"Got Cuda Runtime Error",  # every check passed: the launch finds no GPU
        "dtype": r"argument q .*expected dtype=",
        "rank": r"argument k .*expected ndim=4",
        "head_dim": r"Mismatched v\.shape\[3\] .*expected to be \d+",
        "alignment": r"Misaligned Tensor data on argument q .*expected data alignment=16 bytes",
        "stride": r"Invalid o\.strides\[0\] .*divisible by 8",
        "contiguous": r"Mismatched k\.strides\[3\] .*expected to be 1",
        "scalar": r"argument window_left .*expected int",
        "device": r"argument sink .*expected device_type=cuda",
    }
    assert errors.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, errors[name]), errors[name]


PROGRAMS = {
    "a kernel is found once": """
from dataclasses import replace
first = runtime.kernel(op, spec, "sm_90a")
import os
os.environ["CUTE_KERNELS_BUNDLE"] = "/nowhere"
assert runtime.kernel(op, spec, "sm_90a") is first, "by identity"
assert runtime.kernel(op, replace(spec), "sm_90a") is first, "by value"
""",
    "device code is in memory before a call": """
import ctypes, pathlib
from cute_kernels import device_code, manifest
folder = pathlib.Path(os.environ["CUTE_KERNELS_BUNDLE"])
held = manifest.read(folder)
library = folder / held.libraries["attention"]["file"]
runtime.kernel(op, spec, "sm_90a")
loaded = ctypes.CDLL(str(library))
for entry in held.kernels:
    memory = (ctypes.c_char * entry["code"]["size"]).in_dll(loaded, device_code.symbol(entry["symbol"])).raw
    wanted = entry["key"] == held.find(op, spec)["key"]
    assert memory == (device_code.read(library, entry) if wanted else bytes(len(memory))), entry["name"]
""",
    "threads get one function": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    found = list(pool.map(lambda _: runtime.kernel(op, spec, "sm_90a"), range(64)))
assert len(set(map(id, found))) == 1
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_without_the_dsl(load, small, name):
    done = load(PROGRAMS[name], small)
    assert done.returncode == 0, done.stderr


FIND = 'runtime.kernel(op, spec, "sm_90a")'


def test_missing_kernel_names_the_command(load, tmp_path):
    done = load(FIND, tmp_path, CUTE_KERNELS_JIT="0")
    assert f"KernelNotFound: no compiled kernel {OP}/{SPEC.name} for {ARCH}" in done.stderr
    assert f"no bundle in {tmp_path / ARCH}" in done.stderr
    assert "JIT: forbidden by CUTE_KERNELS_JIT=0" in done.stderr
    assert f"python -m cute_kernels build --arch {ARCH} --only {OP}/{SPEC.name}" in done.stderr


# ---- what a bundle is refused for


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: [k.update(key="0" * 64) for k in d["kernels"]], "key does not match"),
        (lambda d: d["toolchain"].update(dsl="9.9.9"), "key does not match"),
        (lambda d: d.update(arch="sm_100a"), "is for sm_100a"),
        (lambda d: d.update(host="linux-aarch64"), "is for linux-aarch64 hosts"),
        (lambda d: d.update(schema=0), "schema 0"),
        (lambda d: d.update(kernels=[]), "does not hold"),
        (lambda d: d["libraries"]["attention"].update(file="attention-0.so"), "lacks attention-0.so"),
    ],
    ids=["key", "toolchain", "arch", "host", "schema", "kernels", "library"],
)
def test_refused(load, edit, change, reason):
    done = load(FIND, edit(change), CUTE_KERNELS_JIT="0")
    assert "KernelNotFound" in done.stderr and reason in done.stderr


def test_verify_tells_a_damaged_file(copy):
    arguments = ("-m", "cute_kernels", "verify", "--arch", ARCH, "--out", str(copy))
    assert run_python(*arguments).returncode == 0
    library = next(copy.glob("attention-*.so"))
    data = library.read_bytes()
    library.unlink()
    assert f"{library.name} is missing" in run_python(*arguments).stderr
    library.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = run_python(*arguments)
    assert done.returncode == 1 and f"{library.name} does not have the hash" in done.stderr


def test_kernels_are_disassembled_together_as_alone(small):
    if cubin.disassembler() is None:
        pytest.skip(f"nothing can disassemble: {cubin.INSTALL}")
    held = manifest.read(small).kernels
    codes = [(OBJECTS / f"{entry['key']}.cubin").read_bytes() for entry in held]
    for entry, code, together in zip(held, codes, cubin.counts(codes, ARCH), strict=True):
        alone = cubin.instructions(cubin.sass(code))
        assert entry["instructions"] == together == alone and alone["HMMA"] > 0


def test_device_code_of_a_kernel_lies_compressed_in_its_library(small):
    held = manifest.read(small)
    for entry in held.kernels:
        library = small / held.libraries[entry["library"]]["file"]
        code, cubin_file = device_code.read(library, entry), OBJECTS / f"{entry['key']}.cubin"
        assert cubin_file.read_bytes() in code and cubin_file.read_bytes() not in library.read_bytes()
        assert 3 * entry["code"]["packed"] < entry["code"]["size"] == len(code)
    assert {path.name for path in small.iterdir()} == {*archive.names(held), ".lock"}


# ---- one file


def symbols(library: Path, kind: str) -> set[str]:
    """Names that a library defines or leaves undefined, without their versions."""
    done = subprocess.run(["nm", "-D", f"--{kind}-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}


@pytest.fixture(scope="module")
def light(small, tmp_path_factory) -> Path:
    """`small`, with a library that does nothing in the place of the runtime library, which has 44 MB: compressing that
    takes seconds."""
    folder = tmp_path_factory.mktemp("light") / ARCH
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns(bundle.RUNTIME))
    needed = set().union(*(symbols(library, "undefined") for library in small.glob("*-*.so")))
    needed &= symbols(small / bundle.RUNTIME, "defined")
    code = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(needed))
    out = folder / bundle.RUNTIME
    command = ["cc", "-w", "-shared", "-fPIC", "-x", "c", "-o", str(out), "-"]
    subprocess.run(command, input=code, text=True, check=True)
    data = json.loads((folder / manifest.FILE).read_text())
    data["runtime"]["sha256"] = manifest.digest(out.read_bytes())
    manifest.write_atomic(folder / manifest.FILE, json.dumps(data).encode())
    return folder


@pytest.fixture(scope="module")
def packed(light, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("packed") / "bundle.tar.xz"
    done = run_python("-m", "cute_kernels", "pack", str(file), "--arch", ARCH, "--out", str(light))
    assert done.returncode == 0 and "NVIDIA software under the licence" in done.stderr
    assert float(re.search(r": ([\d.]+) MiB", done.stdout)[1]) == pytest.approx(file.stat().st_size / 2**20, abs=0.1)
    return file


def unpack(file: Path, out: Path, arch: str = ARCH) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "cute_kernels", "unpack", str(file), "--arch", arch, "--out", str(out))


def test_a_packed_bundle_is_the_bundle(packed, light, load, tmp_path):
    out = tmp_path / "there" / ARCH
    done = unpack(packed, out)
    assert done.returncode == 0 and "2 kernels of sm_90a" in done.stdout
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in light.iterdir()}
    done = load('print(runtime.kernel(op, spec, "sm_90a"))', out)
    assert done.returncode == 0, done.stderr
    older = next(out.glob("attention-*.so"))
    older.rename(out / "attention-0123456789ab.so")
    assert unpack(packed, out).returncode == 0 and not (out / "attention-0123456789ab.so").exists()


def test_a_damaged_bundle_is_not_packed(copy, tmp_path):
    next(copy.glob("attention-*.so")).unlink()
    file = tmp_path / "bundle.tar.xz"
    done = run_python("-m", "cute_kernels", "pack", str(file), "--arch", ARCH, "--out", str(copy))
    assert done.returncode == 1 and "is missing" in done.stderr and not list(tmp_path.glob("*.xz"))


# ---- builds


def test_rebuild_compiles_nothing(copy):
    before = (copy / manifest.FILE).read_bytes()
    assert compiled(run_python(*build("--only", SPEC.name, out=copy, objects=OBJECTS))) == 0
    assert (copy / manifest.FILE).read_bytes() == before


# Replaces a bundle of one kernel by a bundle of another, and dies at the nth file that is put in place or deleted.
CRASH = """
import os, shutil, sys
from pathlib import Path
from cute_kernels import bundle, manifest
from cute_kernels.attention import dispatch
work, objects, *names = sys.argv[1:]
work, objects, arch = Path(work), Path(objects), "sm_90a"
old, new = (next(x for x in dispatch.shipped(arch) if x[1].name == name) for name in names)
place = bundle.BundlePaths(work / "old", objects)
bundle.build_bundle([old], arch, place, 1)
class Crash(BaseException): pass
real_replace, real_unlink, steps = os.replace, Path.unlink, 0
def step():
    global steps
    steps += 1
    if steps > limit: raise Crash
def replace(*a): step(); return real_replace(*a)
def unlink(*a, **k): step(); return real_unlink(*a, **k)
limit, seen = -1, []
while True:
    limit, steps = limit + 1, 0
    out = work / f"crash{limit}"
    shutil.copytree(work / "old", out, copy_function=os.link)
    os.replace, Path.unlink = replace, unlink
    try:
        bundle.build_bundle([new], arch, bundle.BundlePaths(out, objects), 1)
        crashed = False
    except Crash:
        crashed = True
    finally:
        os.replace, Path.unlink = real_replace, real_unlink
    problems = bundle.verify(out, arch)
    assert not problems, (limit, problems)
    held = manifest.read(out)
    seen.append([held.find(*old) is not None, held.find(*new) is not None])
    assert seen[-1].count(True) == 1, seen
    if not crashed:
        break
    bundle.build_bundle([new], arch, bundle.BundlePaths(out, objects), 1)
    assert not bundle.verify(out, arch) and not list(out.glob(".tmp-*")), "the next build repairs"
    assert len(list(out.glob("attention-*.so"))) == 1, "and cleans up"
print(seen)
"""


def test_interrupted_build_leaves_a_valid_bundle(small, tmp_path):
    done = run_python("-c", CRASH, str(tmp_path), str(OBJECTS), SPEC.name, OTHER.name)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1].lower())
    assert seen[0] == [True, False] and seen[-1] == [False, True] and len(seen) >= 4


def test_two_builds_at_once_make_one_bundle(small, tmp_path):
    """Both want SPEC, one OTHER too: the bundle holds both."""
    out = tmp_path / ARCH
    commands = [build("--only", f"{OP}/{spec.name}", out=out, objects=OBJECTS) for spec in (SPEC, OTHER)]
    commands[1] += ["--only", f"{OP}/{SPEC.name}"]
    done = [finish(process) for process in [start_python(*command) for command in commands]]
    assert sum(map(compiled, done)) == 0, "the objects were there"
    held = manifest.read(out)
    assert held.find(OP, SPEC) and held.find(OP, OTHER) and len(held.kernels) == 2
    assert bundle.verify(out, ARCH) == []


QUICK = "merge_states.rows/bf16_states"  # a kernel that compiles in a second


def test_jit_in_two_processes_compiles_once(tmp_path):
    """Folders, that of temporary files among them, have a space in their names."""
    code = f"""
import logging, sys
from cute_kernels import build, catalog, manifest
from wrappers import runtime
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
logging.getLogger("cute_kernels").setLevel("INFO")
real, calls = build.build, []
def counted(*a):
    calls.append(a)
    return real(*a)
build.build = counted
op, spec = next(kernel for kernel in catalog.shipped("{ARCH}") if manifest.label(*kernel) == "{QUICK}")
fn = runtime.kernel(op, spec, "{ARCH}")
assert runtime.kernel(op, spec, "{ARCH}") is fn
try:
    fn()
except TypeError as error:
    assert "Expects {len(merge_states.fields(SHIPPED[QUICK][1]))} parameters" in str(error)
print(len(calls))
"""
    cache, temporary = tmp_path / "a b", tmp_path / "c d"
    temporary.mkdir()
    env = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary), "CUTE_KERNELS_BUNDLE": "/nowhere"}
    env["CUTE_DSL_ARCH"] = ARCH
    done = [finish(process) for process in [start_python("-c", code, **env) for _ in range(2)]]
    assert [d.returncode for d in done] == [0, 0], done
    said = sorted(d.stdout.splitlines() for d in done)
    assert [lines.pop() for lines in said] in (["0", "1"], ["1", "0"])
    (path,) = (cache / "cute_kernels" / "obj").glob("*.o")
    for (line,) in said:  # one each, of a kernel that was there or that it waited for or compiled
        how = rf"(compiled into|loaded from) {path}"
        assert re.fullmatch(rf"INFO cute_kernels {QUICK} for {ARCH}: {how}, \d+\.\d{{4}} s", line)
    assert any("compiled into" in line for (line,) in said)


@pytest.mark.full
def test_a_kernel_compiles_where_temporary_files_have_a_space_in_their_name(tmp_path):
    (tmp_path / "a b").mkdir()
    done = run_python(
        *build("--only", QUICK, out=tmp_path / "c d" / ARCH, objects=tmp_path / "e f"),
        TMPDIR=str(tmp_path / "a b"),
    )
    assert compiled(done) == 1 and bundle.verify(tmp_path / "c d" / ARCH, ARCH) == []


def test_other_architecture_is_refused(monkeypatch):
    """Before the DSL is imported, which cannot change the architecture later."""
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    with pytest.raises(compiler.ArchMismatch, match="cannot compile for sm_90a: CUTE_DSL_ARCH is sm_100a"):
        compiler.build(OP, SPEC, ARCH)
    assert "cutlass" not in sys.modules
