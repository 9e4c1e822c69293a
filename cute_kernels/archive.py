"""A bundle as one file, to be copied from the machine that built it to others. Needs neither the DSL nor a GPU.

The file is a tar of the bundle's manifest and the files that it names, compressed by xz. NVIDIA's licence of the
DSL's runtime library applies to the file, too."""

import io
import lzma
import os
import tarfile
import tempfile
from pathlib import Path

from . import bundle, manifest

PRESET = 2  # for xz: a fifth of the default's time, files 3 % larger


def pack(folder: Path, arch: str, file: Path) -> int:
    """Write a bundle to `file` and return its bytes. Raise BuildError if the bundle is not complete."""
    problems = bundle.verify(folder, arch)
    if problems:
        raise bundle.BuildError("\n".join(problems))
    held = manifest.read(folder)
    bundle.say(bundle.LICENCE.format(source=folder / held.runtime["file"]))
    temporary = file.with_name(f".tmp-{file.name}")
    try:
        with lzma.open(temporary, "wb", preset=PRESET) as out, tarfile.open(fileobj=out, mode="w") as tar:
            for name in names(held):
                tar.add(folder / name, name)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file.stat().st_size


def names(held: manifest.Manifest) -> list[str]:
    """Return the files of a bundle. The manifest comes first: a reader learns from it which others to expect."""
    return [manifest.FILE, held.runtime["file"], *(lib["file"] for lib in held.libraries.values())]


def unpack(file: Path, folder: Path, arch: str) -> manifest.Manifest:
    """Make `folder` hold the bundle of a file, in one step: a bundle that was there is valid until then.

    Raise BuildError, and change nothing, if `pack` did not write the file, if it is damaged, or if it is for
    another architecture or host."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as name:
        fresh = Path(name)
        held = extracted(file, fresh, arch)
        problems = bundle.verify(fresh, arch)
        if problems:
            raise bundle.BuildError(f"{file}: {'; '.join(problems)}")
        folder.mkdir(exist_ok=True)
        with manifest.locked(folder / ".lock", lambda: bundle.say("waiting for a build of this bundle")):
            for part in (*names(held)[1:], manifest.FILE):
                os.replace(fresh / part, folder / part)
            bundle.prune_folder(folder, held)
    return held


def extracted(file: Path, into: Path, arch: str) -> manifest.Manifest:
    """Extract the files that the manifest names, and no others, whatever the archive holds."""
    try:
        with tarfile.open(file, "r:xz") as tar:
            first = tar.next()
            if first is None or first.name != manifest.FILE:
                raise bundle.BuildError(f"{file} is not a packed bundle: its first file must be {manifest.FILE}")
            write(tar, first, into / manifest.FILE)
            held = manifest.read(into)
            problem = held.problem(arch)
            if problem:
                raise bundle.BuildError(f"{file} {problem}")
            for name in names(held)[1:]:
                if Path(name).name != name:
                    raise bundle.BuildError(f"{file}: {name!r}, must be the name of a file in the bundle's folder")
                write(tar, tar.getmember(name), into / name)
    except (tarfile.TarError, KeyError, EOFError, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise bundle.BuildError(f"{file} is not a packed bundle, or it is damaged: {error}") from None
    return held


def write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write the content of a member, whatever its type and mode."""
    content = tar.extractfile(member)
    path.write_bytes((content or io.BytesIO()).read())
    path.chmod(0o755 if path.suffix == ".so" else 0o644)
