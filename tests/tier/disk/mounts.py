"""Real file systems for tests: small, their own, and gone at the end. A test that this machine forbids is skipped loudly."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_PACKAGES = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
_SHUTDOWN = 0x8004587D  # of ext4 and xfs: the file system behaves as if its device had gone


class Mount:
    """A mounted file system of `size_mb`. `backing`: the image of it, None for a tmpfs."""

    def __init__(self, kind: str, folder: Path, size_mb: int, *, image_folder: Path | None = None) -> None:
        self.kind = kind
        self.place = folder / "mount"
        self.place.mkdir()
        self.image = (image_folder or folder) / f"{kind}.img"
        self._size_mb = size_mb
        self._devices: list[str] = []
        self._others: list[Path] = []

    @property
    def device(self) -> str:
        return self._devices[-1]

    def make(self) -> None:
        if self.kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", f"size={self._size_mb}m", "tmpfs", str(self.place))
            return
        with self.image.open("wb") as file:
            file.truncate(self._size_mb << 20)
        if self.kind == "ext4":
            run("mkfs.ext4", "-q", "-F", "-m", "1", str(self.image))
        else:
            run("mkfs.xfs", "-q", "-f", str(self.image))
        self._devices.append(run("losetup", "--find", "--show", str(self.image)).strip())
        self.mount()

    def mount(self) -> None:
        # A copy of an xfs has its identity, and the old one may still be in use.
        options = ["-o", {"ext4": "errors=remount-ro", "xfs": "nouuid"}[self.kind]]
        run("mount", "-t", self.kind, *options, self.device, str(self.place))

    def turn_read_only(self) -> None:
        """Let an ext4 find something wrong with itself: the one way that a file system turns read-only under open files."""
        Path("/sys/fs/ext4", Path(self.device).name, "trigger_fs_error").write_text("a test")

    def unmount(self) -> None:
        """Unmount it under whoever uses it."""
        run("umount", "--lazy", str(self.place))

    def replace(self) -> None:
        """Mount another device with what the old one held in its place; whoever has files of the old one keeps those."""
        self.unmount()
        copy = self.image.with_suffix(".copy")
        shutil.copyfile(self.image, copy)
        self._others.append(copy)
        self._devices.append(run("losetup", "--find", "--show", str(copy)).strip())
        self.mount()

    def shut_down(self) -> None:
        """From now on everything on it fails, as if the device had been pulled."""
        descriptor = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", 2))
        finally:
            os.close(descriptor)

    def free_bytes(self) -> int:
        found = os.statvfs(self.place)
        return found.f_bavail * found.f_frsize

    def used_bytes(self) -> int:
        """What is taken of the file system, by whatever: exact at one moment."""
        found = os.statvfs(self.place)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def remove(self) -> None:
        while str(self.place) in Path("/proc/self/mounts").read_text():
            subprocess.run(["umount", "--lazy", str(self.place)], capture_output=True)
        for device in self._devices:
            for _ in range(50):  # a lazy unmount lets go when the last file on it is closed
                if subprocess.run(["losetup", "--detach", device], capture_output=True).returncode == 0:
                    break
                time.sleep(0.05)
        for path in (self.image, *self._others):
            with suppress(FileNotFoundError):
                path.unlink()


@contextmanager
def mounted(kind: str, folder: Path, size_mb: int, *, image_folder: Path | None = None) -> Iterator[Mount]:
    if os.geteuid() != 0:
        pytest.skip(f"NOT TESTED: a real {kind}: only root may mount one")
    if kind != "tmpfs":
        _require(f"mkfs.{kind}")
    mount = Mount(kind, folder, size_mb, image_folder=image_folder)
    try:
        try:
            mount.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT TESTED: a real {kind}; this machine forbids mounting it: {error.stderr.strip()}")
        yield mount
    finally:
        mount.remove()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _require(tool: str) -> None:
    if shutil.which(tool) is None:
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", _PACKAGES[tool]]
        with suppress(OSError):
            subprocess.run(install, capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, timeout=120)
    if shutil.which(tool) is None:
        pytest.skip(f"NOT TESTED: {tool} is not here and could not be installed ({_PACKAGES[tool]})")
