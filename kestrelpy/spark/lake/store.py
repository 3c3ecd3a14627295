"""A folder on any file system that pyarrow knows, by its URI. Lakes are written there; archives are read from there.

Rules:
1. A file is stored as a whole: written to a temporary file and renamed, or in one upload if the file system has no
   renames. So there is the old file or the new one.
2. Files are on disk when ``sync`` returns for them. In an object store they are on disk when their upload ends.
3. A store can be pickled, because executors get it from the driver.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from kestrelpy.spark.locations import local_folder

_UPLOADS = ("s3", "gcs", "abfs")
"""File systems without renames and without folders. A file appears there when its upload is complete."""
_SECONDS_LEFT = 86_400
"""A temporary file that is older, in seconds, was left behind by a process that was killed."""


class FileStore:
    """A folder and all below it. Names are relative to the folder, with ``/``. All methods raise ``OSError``.

    ``place`` is a path of this machine (``file:/path`` is one) or a URI; with ``filesystem`` it is a path on that file
    system. ``beside``: the folder inside for temporary files, which are then renamed.
    """

    def __init__(self, place: str | os.PathLike[str], filesystem: Any = None, *, beside: str = "") -> None:
        self._beside = beside
        name = os.fspath(place)
        if filesystem is not None:
            self._fs, self._root = filesystem, name.rstrip("/")
        elif "://" in name:
            uri = f"s3{name[3:]}" if name.startswith(("s3a:", "s3n:")) else name  # Hadoop's names for S3
            self._fs, root = pafs.FileSystem.from_uri(uri)
            self._root = root.rstrip("/")
        else:
            self._fs, self._root = pafs.LocalFileSystem(), local_folder(name)
        scheme, separator, _ = name.partition("://")
        self.name = f"{scheme}{separator}{self._root}" if separator else name.rstrip("/")  # a URI may have a password
        self._uploads = _base(self._fs)[0].type_name in _UPLOADS

    def path(self, name: str) -> str:
        """The path on the file system."""
        return posixpath.join(self._root, name)

    def names(self, folder: str = "", *, recursive: bool = False) -> list[str]:
        """The files in ``folder``, sorted. A missing folder has none, but a missing store raises."""
        selector = pafs.FileSelector(self.path(folder), allow_not_found=bool(folder), recursive=recursive)
        infos = self._fs.get_file_info(selector)
        return sorted(posixpath.relpath(each.path, self._root) for each in infos if each.type == pafs.FileType.File)

    def folders(self) -> list[str]:
        """The folders directly in the store, sorted."""
        infos = self._fs.get_file_info(pafs.FileSelector(self._root))
        return sorted(posixpath.basename(each.path) for each in infos if each.type == pafs.FileType.Directory)

    def open(self, name: str) -> Any:
        """Open a file for reading at any offset."""
        return self._fs.open_input_file(self.path(name))

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            data: bytes = file.read()
            return data

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write ``data`` to the file ``name``, and replace an existing file as a whole."""
        if self._uploads:
            self._write(self.path(name), data)
            return
        beside = self.path(f"{self._beside}/.{uuid.uuid4().hex}".lstrip("/"))
        for path in (beside, self.path(name)):
            self._fs.create_dir(posixpath.dirname(path), recursive=True)
        try:
            self._write(beside, data)
            self._replace(beside, self.path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.delete_file(beside)
            raise

    def _write(self, path: str, data: bytes | pa.Buffer) -> None:
        with self._fs.open_output_stream(path) as out:
            out.write(data)

    def _replace(self, beside: str, path: str) -> None:
        try:
            self._fs.move(beside, path)
        except OSError:  # Hadoop's file systems do not rename onto an existing file
            if self._fs.get_file_info(path).type != pafs.FileType.File:
                raise
            self._fs.delete_file(path)
            self._fs.move(beside, path)

    def sync(self, names: Iterable[str]) -> None:
        """Sync these files and their folders; they are on disk when this returns."""
        fs, prefix = _base(self._fs)
        if fs.type_name != "local":
            return
        folders: dict[str, None] = {}
        for name in names:
            path = prefix + self.path(name)
            _sync(path)
            root = os.path.dirname(prefix + self._root)
            while len(path := os.path.dirname(path)) >= len(root):
                folders[path] = None
        for folder in folders:
            _sync(folder)

    def delete(self, name: str) -> bool:
        """Delete a file. Returns false if it was not there."""
        try:
            self._fs.delete_file(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def tidy(self, now: float) -> None:
        """Delete temporary files that were left more than a day before ``now``, in seconds since the epoch."""
        selector = pafs.FileSelector(self.path(self._beside), allow_not_found=True)
        for each in self._fs.get_file_info(selector):
            if each.mtime_ns is not None and each.mtime_ns / 1e9 < now - _SECONDS_LEFT:
                self.delete(f"{self._beside}/{posixpath.basename(each.path)}")


def _base(fs: Any) -> tuple[Any, str]:
    """The real file system below any subtree file systems, and the path of the subtree on it."""
    prefix = ""
    while fs.type_name == "subtree":
        prefix = fs.base_path + prefix
        fs = fs.base_fs
    return fs, prefix


def _sync(path: str) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
