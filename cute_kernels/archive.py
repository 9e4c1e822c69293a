"""A bundle as one file, to be copied from the machine that built it to others. Needs neither the DSL nor a GPU.

The file is a tar of the bundle's manifest and the files that it names, compressed by xz. NVIDIA's licence of the
DSL's runtime library applies to the file, too."""

import hashlib
import lzma
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from . import bundle, manifest

PRESET = 2  # for xz: a fifth of the default's time, files 3 % larger
BLOCK = 1 << 16  # bytes that are read at once
MEMORY = 256 << 20  # bytes that the decompressor may take: presets up to 9 need 65 MiB
MANIFEST_LIMIT = 16 << 20  # bytes; that of 179 kernels has 0.2 MB
LIMIT = 1 << 30  # bytes of all files together; the bundle of sm_90a has 53 MB


def pack(folder: Path, arch: str, file: Path) -> int:
    """Write a bundle to `file` and return its bytes. Raise BuildError if the bundle is not complete."""
    problems = bundle.verify(folder, arch)
    if problems:
        raise bundle.BuildError("\n".join(problems))
    held = manifest.read(folder)
    size = sum((folder / name).stat().st_size for name in names(held))
    if size > LIMIT:
        raise bundle.BuildError(f"{folder} has {size} bytes, must have at most {LIMIT} to be packed")
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


def unpack(file: Path, folder: Path, arch: str, sha256: str | None = None) -> manifest.Manifest:
    """Make `folder` hold the bundle of a file, in one step: a bundle that was there is valid until then.

    sha256: the hash that the file must have, in hex. Raise BuildError, and change nothing, if `pack` did not write the
    file, if it is damaged, or if it is for another architecture or host."""
    if sha256 is not None:
        found = digest_of(file)
        if found != sha256.lower():
            raise bundle.BuildError(f"{file} has the hash {found}, must have {sha256.lower()}; nothing was read of it")
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


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    found = hashlib.sha256()
    with open(file, "rb") as data:
        while block := data.read(BLOCK):
            found.update(block)
    return found.hexdigest()


class Content:
    """The decompressed content of a packed file, as a stream of at most `left` bytes. Its user raises `left`."""

    def __init__(self, file: IO[bytes], left: int):
        self.file, self.left, self.held = file, left, b""
        self.decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)

    def read(self, size: int) -> bytes:
        """Return the next bytes, `size` unless the content ends."""
        while len(self.held) < size and not self.decompressor.eof:
            data = self.file.read(BLOCK) if self.decompressor.needs_input else b""
            if not data and self.decompressor.needs_input:
                raise EOFError("the file ends too early")
            self.held += self.decompressor.decompress(data, BLOCK)
        found, self.held = self.held[:size], self.held[size:]
        self.left -= len(found)
        if self.left < 0:
            raise ValueError("the content is larger than that of any bundle")
        return found


def extracted(file: Path, into: Path, arch: str) -> manifest.Manifest:
    """Extract the manifest and then the files that it names. The archive must hold these in this order, and no others.

    The limits hold whatever the file says of its sizes: of memory, of the manifest, of all files together."""
    try:
        with open(file, "rb") as packed:
            content = Content(packed, MANIFEST_LIMIT)
            with tarfile.open(fileobj=content, mode="r|") as tar:  # type: ignore[call-overload]
                first = tar.next()
                if first is None or first.name != manifest.FILE:
                    raise bundle.BuildError(f"{file} is not a packed bundle: its first file must be {manifest.FILE}")
                write(tar, first, into / manifest.FILE)
                held = manifest.parse((into / manifest.FILE).read_bytes())
                problem = held.problem(arch)
                if problem:
                    raise bundle.BuildError(f"{file} {problem}")
                content.left = LIMIT
                for name in names(held)[1:]:
                    member = tar.next()
                    if member is None:
                        raise ValueError(f"it lacks {name}")
                    if member.name != name:
                        raise ValueError(f"it holds {member.name!r}, must hold {name!r} there")
                    write(tar, member, into / name)
                last = tar.next()
                if last is not None:
                    raise ValueError(f"it holds {last.name!r}, which its manifest does not name")
            while content.read(BLOCK):  # to the checksum at the end
                pass
            if content.decompressor.unused_data or packed.read(1):
                raise ValueError("bytes follow its end")
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise bundle.BuildError(f"{file} is not a packed bundle, or it is damaged: {error}") from None
    return held


def write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write the content of a member, whatever its mode and owner."""
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise ValueError(f"{member.name} must be a regular file, and no sparse one")
    with open(path, "xb") as out:
        shutil.copyfileobj(content, out, BLOCK)
    path.chmod(0o755 if path.suffix == ".so" else 0o644)
