"""Packed bundles from elsewhere: what `unpack` refuses, before it loads anything and without a change of what is there.
SECURITY.md says the same in words."""

import json
import lzma
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_kernels import archive, bundle, cli, manifest
from tests.conftest import ARCH
from tests.support import children, fake_bundle

LIBRARY = "attention-0123456789ab.so"
OLD = "attention-ba9876543210.so"  # of the bundle that was there


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return fake_bundle.make(tmp_path_factory.mktemp("good") / ARCH)


@pytest.fixture
def content(good) -> dict[str, bytes]:
    """Name -> content of the files of a good bundle."""
    return fake_bundle.members(good)


@pytest.fixture
def refused(tmp_path, good) -> Callable[..., str]:
    """Unpack a file into a folder that holds a bundle, which must stay as it is. Return the message."""
    there = tmp_path / "there" / ARCH
    there.mkdir(parents=True)
    for name, data in fake_bundle.members(good).items():
        (there / name).write_bytes(data + b"\n" if name == manifest.FILE else data)
    beside = sorted(tmp_path.rglob("*"))

    def check(file: Path, **options: str) -> str:
        before = {path.name: path.read_bytes() for path in there.iterdir()}
        with pytest.raises(bundle.BuildError) as error:
            archive.unpack(file, there, ARCH, **options)
        assert {path.name: path.read_bytes() for path in there.iterdir()} == before
        assert [path for path in sorted(tmp_path.rglob("*")) if path != file] == beside
        assert len(str(error.value).splitlines()) == 1 and str(file) in str(error.value)
        return str(error.value)

    return check


def test_a_good_file_replaces_what_was_there(content, tmp_path):
    there = tmp_path / ARCH
    there.mkdir()
    (there / OLD).touch()
    (there / "notes.txt").touch()
    modes = {LIBRARY: tarfile.TarInfo(LIBRARY)}
    modes[LIBRARY].size, modes[LIBRARY].mode, modes[LIBRARY].uid = len(content[LIBRARY]), 0o6777, 12345
    held = archive.unpack(fake_bundle.pack(tmp_path / "file", content, **modes), there, ARCH)
    assert held == manifest.read(there) and len(held.kernels) == 2
    assert {path.name for path in there.iterdir()} == {*content, ".lock", "notes.txt"}
    assert {name: (there / name).read_bytes() for name in content} == content
    assert (there / LIBRARY).stat().st_mode & 0o7777 == 0o755 and (there / LIBRARY).stat().st_uid == os.getuid()
    assert (there / manifest.FILE).stat().st_mode & 0o7777 == 0o644


def edited(content: dict[str, bytes], change: Callable) -> dict[str, bytes]:
    """The files of a bundle with another manifest."""
    data = json.loads(content[manifest.FILE])
    change(data)
    return content | {manifest.FILE: json.dumps(data).encode()}


NAMES = (
    "../outside.so", "/tmp/outside.so", "a/b.so", "..", ".", "", "manifest.json", ".lock", ".tmp-a.so", "a\\b.so\n",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_elsewhere_is_refused(content, refused, tmp_path, name):
    said = {name or "empty": b"x"} | edited(content, lambda data: data["runtime"].update(file=name))
    said = {manifest.FILE: said.pop(manifest.FILE)} | said  # which comes first
    assert "must be the name of a file in the bundle's folder" in refused(fake_bundle.pack(tmp_path / "file", said))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["runtime"].update(file=LIBRARY), "must be named once each"),
        (lambda d: d["runtime"].update(sha256="0"), "must be 64 hex digits"),
        (lambda d: d["runtime"].update(sha256="0" * 64), "does not have the hash in the manifest"),
        (lambda d: d["runtime"].clear(), "lacks 'file'"),
        (lambda d: d.update(libraries=[]), "is no manifest"),
        (lambda d: d.update(kernels=[{}]), "lacks 'op'"),
        (lambda d: d["kernels"][0].update(key=1), "must be strings"),
        (lambda d: d["kernels"][0].update(library="none"), "kernels of none, a library that is not in it"),
        (lambda d: d["kernels"][0].update(symbol="none"), f"{LIBRARY} lacks none"),
        (lambda d: d.update(toolchain={}), "lacks 'dsl'"),
        (lambda d: d.update(more=1), "is no manifest"),
        (lambda d: d["kernels"][0].pop("code"), "lacks 'code'"),
        (lambda d: d["kernels"][0]["code"].update(offset=-1), "must be sizes in bytes"),
        (lambda d: d["kernels"][0]["code"].update(size="9"), "must be sizes in bytes"),
        (lambda d: d["kernels"][0]["code"].update(size=9), "does not have the hash in the manifest"),
        (lambda d: d["kernels"][0]["code"].update(sha256="0" * 64), "does not have the hash in the manifest"),
        (lambda d: d["kernels"][0]["code"].update(offset=0), "cannot be unpacked"),
        (lambda d: d.update(schema=2), "schema 2, must be 3"),
        (lambda d: d.update(arch="sm_100a"), "is for sm_100a"),
        (lambda d: d.update(host="linux-riscv64"), "is for linux-riscv64 hosts, this is linux-"),
    ],
)
def test_a_manifest_that_fits_nothing_is_refused(content, refused, tmp_path, change, reason):
    assert reason in refused(fake_bundle.pack(tmp_path / "file", edited(content, change)))


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "FIFOTYPE", "CHRTYPE", "DIRTYPE"])
@pytest.mark.parametrize("name", [LIBRARY, manifest.FILE])
def test_only_regular_files_are_taken(content, refused, tmp_path, kind, name):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = getattr(tarfile, kind), "/etc/passwd"
    said = refused(fake_bundle.pack(tmp_path / "file", content, **{name: entry}))
    assert f"{name} must be a regular file, and no sparse one" in said


def test_a_sparse_file_is_refused(content, refused, tmp_path):
    """It may claim any size, and none of it need be in the file."""
    entry = tarfile.TarInfo(LIBRARY)
    entry.size = len(content[LIBRARY])
    entry.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 24)}
    entry.pax_headers["GNU.sparse.numblocks"] = "1"
    assert "no sparse one" in refused(fake_bundle.pack(tmp_path / "file", content, **{LIBRARY: entry}))


def test_files_that_the_manifest_does_not_name_are_refused(content, refused, tmp_path):
    items = list(content.items())
    for at in range(len(items) + 1):
        mixed = dict([*items[:at], ("sitecustomize.py", b"x"), *items[at:]])
        said = refused(fake_bundle.pack(tmp_path / "file", mixed))
        assert "sitecustomize.py" in said if at else "its first file must be manifest.json" in said
    for name in list(content)[1:]:
        lost = {other: data for other, data in items if other != name}
        assert name in refused(fake_bundle.pack(tmp_path / "file", lost))
    assert "its first file must be" in refused(fake_bundle.pack(tmp_path / "file", {}))


@pytest.mark.parametrize(("limit", "size"), [("MANIFEST_LIMIT", 100), ("LIMIT", 5000)])
def test_content_that_is_too_large_is_refused(content, refused, monkeypatch, tmp_path, limit, size):
    monkeypatch.setattr(archive, limit, size)
    assert "larger than that of any bundle" in refused(fake_bundle.pack(tmp_path / "file", content))


def test_a_bomb_ends_at_the_limit(content, refused, monkeypatch, tmp_path):
    """64 MiB of zeros in a member, or in the header of one, take 10 KB in the file and no memory."""
    monkeypatch.setattr(archive, "MANIFEST_LIMIT", 1 << 20)
    taken = []
    read = archive.Content.read
    monkeypatch.setattr(archive.Content, "read", lambda self, size: (taken.append(size), read(self, size))[1])
    zeros = bytes(64 << 20)
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, len(zeros)
    for name, changed in ((manifest.FILE, {}), ("header", {"header": header})):
        taken.clear()
        file = fake_bundle.pack(tmp_path / "file", {name: zeros}, **changed)
        assert file.stat().st_size < 20_000
        assert "larger than that of any bundle" in refused(file)
        assert sum(taken) < 2 << 20


def test_a_decompressor_that_wants_much_memory_is_refused(content, refused, monkeypatch, tmp_path):
    file = tmp_path / "file"
    with lzma.open(file, "wb", preset=6) as out:  # needs 9 MiB
        out.write(b"x")
    monkeypatch.setattr(archive, "MEMORY", 4 << 20)
    assert re.search("[Mm]emory", refused(file))


def test_a_truncated_or_changed_file_is_refused(content, refused, tmp_path):
    file = fake_bundle.pack(tmp_path / "file", content)
    whole = file.read_bytes()
    for size in (0, 1, 6, 12, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "is not a packed bundle, or it is damaged" in refused(file)
    for at in (0, 20, len(whole) // 2, len(whole) - 20):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(file)
    file.write_bytes(whole + b"x")
    assert "bytes follow its end" in refused(file)
    file.write_text("a page of a proxy")
    assert "is not a packed bundle" in refused(file)


def test_nothing_of_a_file_with_a_wrong_hash_is_loaded(refused, tmp_path):
    """A library runs code when it is loaded: not before all hashes were compared."""
    ran = tmp_path / "elsewhere" / "ran"
    code = '#include <stdio.h>\n__attribute__((constructor)) void run(void) { fclose(fopen("%s", "w")); }\n'
    spoiled = fake_bundle.members(fake_bundle.make(ran.parent / ARCH, more=code % ran))
    beside = sorted(path for path in tmp_path.rglob("*") if path.parent == ran.parent)
    file = tmp_path / "file"
    with pytest.raises(bundle.BuildError, match="libcute_dsl_runtime.so does not have the hash"):
        archive.unpack(fake_bundle.pack(file, spoiled | {bundle.RUNTIME: b"x"}), tmp_path / "new", ARCH)
    assert not ran.exists() and sorted(path for path in tmp_path.rglob("*") if path.parent == ran.parent) == beside
    archive.unpack(fake_bundle.pack(file, spoiled), tmp_path / "new", ARCH)
    assert ran.exists(), "the test sees that a library was loaded"


def test_the_hash_of_the_file_comes_first(content, refused, monkeypatch, tmp_path, capsys):
    file, there = fake_bundle.pack(tmp_path / "file", content), tmp_path / "new" / ARCH
    right = manifest.digest(file.read_bytes())
    monkeypatch.setattr(archive, "extracted", lambda *_: pytest.fail("was read"))
    assert f"has the hash {right}, must have {'0' * 64}" in refused(file, sha256="0" * 64)
    monkeypatch.undo()
    command = ["unpack", str(file), "--arch", ARCH, "--out", str(there), "--sha256"]
    assert cli.main([*command, "0" * 64]) == 1 and not there.parent.exists()
    assert cli.main([*command, right.upper()]) == 0 and manifest.read(there)
    capsys.readouterr()
    again = tmp_path / "again"
    assert cli.main(["pack", str(again), "--arch", ARCH, "--out", str(there)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"sha256 {manifest.digest(again.read_bytes())}"


def test_a_bundle_that_unpack_would_refuse_is_not_packed(good, monkeypatch, tmp_path):
    monkeypatch.setattr(archive, "LIMIT", 1000)
    with pytest.raises(bundle.BuildError, match="must have at most 1000 to be packed"):
        archive.pack(good, ARCH, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_two_processes_unpack_one_file(content, tmp_path):
    file, there = fake_bundle.pack(tmp_path / "file", content), tmp_path / "there" / ARCH
    unpack = [children.start(lambda: str(len(archive.unpack(file, there, ARCH).kernels))) for _ in range(2)]
    assert [child.result() for child in unpack] == ["2", "2"]
    assert bundle.verify(there, ARCH) == [] and {p.name for p in there.iterdir()} == {*content, ".lock"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
