"""Damage and shortage, without a GPU: bundles that were cut, full disks, folders that cannot be written, forked and
spawned processes. `test_bundle.py` has interrupted builds and builds at once, of real kernels."""

import errno
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from cute_kernels import archive, build, bundle, catalog, cli, manifest, paths
from tests.conftest import ARCH
from tests.support import children, fake_bundle
from wrappers.host import runtime

FIRST, SECOND = catalog.shipped(ARCH)[:2]
LIBRARY = "attention-0123456789ab.so"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def nothing_loaded(monkeypatch):
    for name in ("_KERNELS", "_HOT", "_MODULES", "_BROKEN"):
        monkeypatch.setattr(runtime, name, {})


@pytest.fixture
def made(monkeypatch, tmp_path, nothing_loaded) -> Path:
    """A bundle that this process finds, and nothing else: it may not compile."""
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "bundle"))
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")
    return fake_bundle.make(tmp_path / "bundle" / ARCH)


def lookup(kernel: manifest.Kernel = FIRST) -> str:
    try:
        return f"found {callable(runtime.kernel(*kernel, ARCH))}"
    except runtime.KernelNotFound as error:
        return str(error)


# ---- bundles that were cut


def test_a_whole_bundle_serves(made):
    assert children.run(lookup) == "found True"


@pytest.mark.parametrize("name", [LIBRARY, bundle.RUNTIME])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_library_kills_no_process(made, name, part):
    """The loader maps a library that is too short, and a page that its file lacks ends the process (SIGBUS)."""
    size = int(part * (made / name).stat().st_size)
    os.truncate(made / name, size)
    said = children.run(lookup)
    assert f"bundle {made}: {LIBRARY} does not load: {name} does not have the hash in the manifest" in said
    assert f"its {size} bytes are truncated or changed" in said
    assert f"python -m cute_kernels build --arch {ARCH} --only {manifest.label(*FIRST)}" in said


def test_a_library_with_another_byte_is_not_loaded(made):
    data = bytearray((made / LIBRARY).read_bytes())
    data[len(data) // 2] ^= 1
    (made / LIBRARY).write_bytes(data)
    assert f"{LIBRARY} does not have the hash in the manifest" in children.run(lookup)


def test_a_truncated_manifest_is_no_bundle(made):
    whole = (made / manifest.FILE).read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        (made / manifest.FILE).write_bytes(whole[:size])
        (found,) = paths.bundles(ARCH)
        assert found.manifest is None and found.problem.startswith("cannot be read: ")
        assert f"bundle {made}: cannot be read: " in lookup()
        assert bundle.verify(made, ARCH)[0].startswith(f"no bundle at {made}: ")


@pytest.mark.parametrize(
    "text", ["[]", "null", "1", '{"schema": 3}', "[" * 100_000, "\x00", '{"schema": 3, "kernels": {}}', "\udcff"]
)
def test_json_that_is_no_manifest(made, text):
    (made / manifest.FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert "cannot be read: " in lookup()
    assert cli.main(["list", "--out", str(made)]) == 1


def test_a_hash_is_computed_once(made, monkeypatch):
    """A kernel of a library that was loaded costs no second look at its bytes, nor does another library of the bundle
    at the bytes of the runtime library."""
    held = manifest.read(made)
    shutil.copy(made / LIBRARY, made / "topk-0123456789ab.so")
    held.libraries["topk"] = held.libraries["attention"] | {"file": "topk-0123456789ab.so"}
    held.kernels[1]["library"] = "topk"
    manifest.write(made, held)
    seen = []
    real = manifest.file_problem
    monkeypatch.setattr(
        manifest, "file_problem", lambda folder, file: (seen.append(file["file"]), real(folder, file))[1]
    )
    for kernel in (FIRST, SECOND, FIRST):
        assert lookup(kernel) == "found True"
        runtime._KERNELS.clear()
        runtime._HOT.clear()
    assert seen == [bundle.RUNTIME, LIBRARY, "topk-0123456789ab.so"]


# ---- bundles after others


@pytest.fixture
def second(made, monkeypatch, tmp_path) -> Path:
    """A bundle of two kernels behind one that holds the first of them alone."""
    shutil.rmtree(made)
    fake_bundle.make(made, kernels=[FIRST])
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", os.pathsep.join([str(tmp_path / "bundle"), str(tmp_path / "second")]))
    return fake_bundle.make(tmp_path / "second" / ARCH)


def origin(kernel: manifest.Kernel) -> str:
    found = runtime._from_bundles(*kernel, ARCH)
    return found[1] if found else runtime._missing(*kernel, ARCH)


def test_a_second_bundle_serves_what_the_first_lacks(made, second, monkeypatch):
    """In one process, in any order; also when the path of search changes in between."""
    holders = {FIRST[1]: made, SECOND[1]: second}
    for order in ((SECOND, FIRST, SECOND), (FIRST, SECOND, FIRST)):
        for kernel in order:
            assert origin(kernel) == f"loaded from the bundle {holders[kernel[1]]}" and lookup(kernel) == "found True"
        runtime._KERNELS.clear()
        runtime._MODULES.clear()
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(second))
    assert origin(FIRST) == f"loaded from the bundle {second}"
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(made))
    assert f"bundle {made}: " in origin(SECOND) and str(second) not in origin(SECOND)


@pytest.mark.parametrize("name", [LIBRARY, bundle.RUNTIME, manifest.FILE])
def test_a_truncated_file_in_the_second_bundle(made, second, name):
    """The first bundle still serves what it holds, after a look at the second one, too."""
    os.truncate(second / name, 7)
    said = children.run(lambda: "\f".join(map(lookup, (FIRST, SECOND, FIRST)))).split("\f")
    assert said[0] == said[2] == "found True"
    why = "cannot be read: " if name == manifest.FILE else f"{LIBRARY} does not load: {name} does not have the hash"
    assert f"bundle {second}: {why}" in said[1] and f"bundle {made}: " in said[1]


def test_a_build_over_a_bundle_that_was_loaded(made, tmp_path):
    """A process finds the new kernels in the new library, and is told that the old ones are gone."""
    assert origin(FIRST) == origin(SECOND) == f"loaded from the bundle {made}"
    new = fake_bundle.make(tmp_path / "new", kernels=[SECOND])
    os.rename(new / LIBRARY, made / (name := "attention-fedcba987654.so"))
    held = manifest.read(new)
    held.libraries["attention"]["file"] = name
    manifest.write(made, held)
    old, loaded = runtime._MODULES[made / LIBRARY], origin(SECOND)
    assert loaded == f"loaded from the bundle {made}" and runtime._MODULES[made / name] is not old
    assert f"bundle {made}: " in origin(FIRST) and "loaded" not in origin(FIRST)
    os.truncate(made / name, 7)
    assert f"{name} does not load: {name} does not have the hash" in children.run(reloaded)


def reloaded() -> str:
    """Look a kernel up as a process that has loaded nothing yet."""
    runtime._MODULES.clear()
    return lookup(SECOND)


# ---- full disks


def test_a_file_that_does_not_fit_leaves_the_old_one(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.write_atomic(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_build_on_a_full_disk_says_what_to_do(monkeypatch, capsys, number):
    def build_bundle(*_):
        raise OSError(number, os.strerror(number), "/cache/obj/x.o")

    monkeypatch.setattr(bundle, "build_bundle", build_bundle)
    monkeypatch.setattr(paths, "has_dsl", lambda: True)
    assert cli.main(["build"]) == 1
    said = capsys.readouterr().err
    assert os.strerror(number) in said and "/cache/obj/x.o" in said and said.endswith(f"\n{bundle.FULL_DISK}\n")


def test_a_linker_on_a_full_disk_leaves_nothing(monkeypatch, tmp_path):
    def linker(command, **_):
        out = Path(command[command.index("-o") + 1])
        out.write_bytes(b"half")
        return subprocess.CompletedProcess(command, 1, "", f"ld: final link failed: {os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(subprocess, "run", linker)
    with pytest.raises(bundle.BuildError, match=re.escape(bundle.FULL_DISK)):
        bundle.link([bundle.Item(*FIRST, "0" * 64, "symbol")], bundle.BundlePaths(tmp_path, tmp_path), [])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_no_damaged_file(made, monkeypatch, tmp_path, capsys):
    """`unpack` names the disk, not the file, and leaves the bundle that was there; so does `pack`."""
    file = fake_bundle.pack(tmp_path / "file", fake_bundle.members(made))
    before, beside = sorted(made.iterdir()), sorted(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert cli.main(["unpack", str(file), "--arch", ARCH, "--out", str(made)]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and bundle.FULL_DISK in said and "damaged" not in said
    assert sorted(made.iterdir()) == before and sorted(tmp_path.iterdir()) == beside
    assert bundle.verify(made, ARCH) == []
    monkeypatch.setattr(os, "replace", full)
    assert cli.main(["pack", str(tmp_path / "again"), "--arch", ARCH, "--out", str(made)]) == 1
    assert bundle.FULL_DISK in capsys.readouterr().err and sorted(tmp_path.iterdir()) == beside


def compile_only(monkeypatch, tmp_path, object_file) -> None:
    """This process finds no bundle, and compiles by `object_file`."""
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "none"))
    monkeypatch.setenv("CUTE_KERNELS_JIT", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "has_dsl", lambda: True)
    monkeypatch.setattr(build, "object_file", object_file)


def test_a_call_that_compiles_on_a_full_disk_names_the_disk(monkeypatch, tmp_path, nothing_loaded):
    compile_only(monkeypatch, tmp_path, full)
    folder = tmp_path / "cache" / "cute_kernels" / "obj"
    said = lookup()
    assert said.startswith(f"{manifest.label(*FIRST)} for {ARCH} cannot be compiled into {folder}: No space left")
    assert "set XDG_CACHE_HOME and TMPDIR to folders on another disk" in said


# ---- folders that cannot be written


@pytest.fixture
def scratch(monkeypatch):
    """Folders that hold compiled kernels of one process; they are gone with it."""
    runtime._scratch.cache_clear()
    yield
    runtime._scratch.cache_clear()


@pytest.mark.parametrize("kind", ["a folder of root", "a file", "a broken link"])
def test_a_cache_that_cannot_be_written_is_left_alone(monkeypatch, nothing_loaded, scratch, kind):
    """A user without rights compiles into a folder of the process alone."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o755)
    cache, free = top / "cache", top / "free"
    free.mkdir()
    free.chmod(0o777)  # TMPDIR may be a folder that other users cannot write
    monkeypatch.setattr(tempfile, "tempdir", str(free))
    {
        "a folder of root": cache.mkdir,
        "a file": cache.touch,
        "a broken link": lambda: cache.symlink_to("/proc/none"),
    }[kind]()
    if kind == "a folder of root":
        cache.chmod(0o555)
    asked = []

    def object_file(op, spec, arch, folder):
        (folder / "x.o").write_bytes(b"code")
        asked.append(folder)
        return folder / "x.o"

    compile_only(monkeypatch, top, object_file)
    monkeypatch.setattr(build, "load_object", lambda path, symbol: len)

    def call() -> str:
        return f"{lookup()} {asked[0].parent == Path(tempfile.gettempdir())} {'cute_kernels-' in asked[0].name}"

    try:
        assert children.run(call, children.NOBODY) == "found True True True"
        assert not cache.is_dir() or not list(cache.iterdir())
    finally:
        shutil.rmtree(top)


# ---- processes


def test_forked_processes_find_kernels(made):
    """One that the parent has loaded, and another one of the same library."""
    assert lookup(FIRST) == "found True"
    found = [children.start(lambda: f"{lookup(FIRST)}, {lookup(SECOND)}") for _ in range(2)]
    assert [child.result() for child in found] == ["found True, found True"] * 2


def test_a_fork_while_a_thread_loads_does_not_wait_for_it(made):
    """The child has no such thread, which would free the lock."""
    held, go = threading.Event(), threading.Event()

    def load() -> None:
        with runtime._LOCK:
            held.set()
            go.wait()

    thread = threading.Thread(target=load)
    thread.start()
    held.wait()

    def child() -> str:
        return lookup() if runtime._LOCK.acquire(blocking=False) and not runtime._LOCK.release() else "waits for ever"

    try:
        assert children.run(child) == "found True"
        assert not runtime._LOCK.acquire(blocking=False), "the parent's thread still has its lock"
    finally:
        go.set()
        thread.join()


@pytest.mark.slow
def test_a_spawned_process_finds_kernels(made):
    """It imports everything anew and takes specs and folders as pickles."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(runtime.where, (*FIRST, ARCH)) == f"bundle {made}"
        assert pool.apply(bundle.verify, (made, ARCH)) == []
        (fresh,) = pool.starmap(archive.pack, [(made, ARCH, made.parent / "packed")])
    assert fresh == (made.parent / "packed").stat().st_size
