"""Records of published data sets: from local files or the Hugging Face hub; JSON lines, JSON, or Parquet."""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet", ".zip")


class RecordError(ValueError):
    """A record or file is not as its data set is published; the message names file and line."""


@dataclass(frozen=True)
class Record:
    """One record and where it was read."""

    fields: Mapping[str, Any]
    source: str
    """Path of the file; for a member of an archive, the archive's path and the member's."""
    line: int
    """Line in a file of JSON lines, number of the record in any other file; from 1 on."""

    def error(self, message: str) -> RecordError:
        """An error that says where the record is."""
        return RecordError(f"{self.source}:{self.line}: {message}")

    def value(self, name: str) -> Any:
        """A field's value.

        Raises:
            RecordError: the field is missing.
        """
        if name not in self.fields:
            raise self.error(
                f"no field {name!r}; the record has {', '.join(map(repr, self.fields)) or 'none'}"
            )
        return self.fields[name]

    def text(self, name: str) -> str:
        """A field that is a string.

        Raises:
            RecordError: the field is missing or is something else.
        """
        value = self.value(name)
        if not isinstance(value, str):
            raise self.error(f"field {name!r} is not a string but {type(value).__name__}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a string or a number, or a list of them, as strings.

        Raises:
            RecordError: the field is missing, empty, or something else.
        """
        value = self.value(name)
        items = value if isinstance(value, list | tuple) else [value]
        if not items:
            raise self.error(f"field {name!r} is an empty list")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                raise self.error(f"field {name!r} has {type(item).__name__} where a string or number belongs")
        return tuple(str(item) for item in items)

    def parts(self, name: str) -> list[Record]:
        """A field that is a list of records.

        Raises:
            RecordError: the field is missing, empty, or something else.
        """
        value = self.value(name)
        if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
            raise self.error(f"field {name!r} is not a list of objects")
        return [Record(part, self.source, self.line) for part in value]


def load_records(path_or_repo: str | Path, patterns: Sequence[str]) -> list[Record]:
    """All records of the files that match the first pattern that any file matches.

    Args:
        path_or_repo: a file, a folder, or (where there is no such path) a data set ``owner/name`` on the hub.
        patterns: of paths relative to the folder or repository, best first; ``*`` also matches slashes.

    Raises:
        FileNotFoundError: there is no such path, or no file that matches.
        ImportError: a file needs a package that is not installed; the message names it.
        RecordError: a file cannot be read as records.
    """
    return [record for name, path in _files(path_or_repo, patterns) for record in read_records(path, name)]


def read_records(path: Path, source: str | None = None) -> Iterator[Record]:
    """The records of one file.

    Raises:
        ImportError: the file is Parquet and pyarrow is not installed.
        RecordError: the file is not of a known kind, or malformed.
    """
    source = source or str(path)
    if path.suffix == ".jsonl":
        yield from _lines(path.read_bytes(), source)
    elif path.suffix == ".json":
        yield from _array(path.read_bytes(), source)
    elif path.suffix == ".parquet":
        yield from _parquet(path, source)
    else:
        raise RecordError(f"{source}: not one of {', '.join(SUFFIXES)}")


def read_archive(path: Path, member: str) -> list[Record]:
    """The records of a JSON lines file in a zip archive.

    Raises:
        FileNotFoundError: there is no such member.
        RecordError: the archive or the member is malformed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return list(_lines(archive.read(member), f"{path}/{member}"))
    except KeyError:
        raise FileNotFoundError(f"{path} has no member {member}") from None
    except zipfile.BadZipFile as error:
        raise RecordError(f"{path}: {error}") from error


def find_file(path_or_repo: str | Path, pattern: str) -> Path | None:
    """The first file that matches, fetched from the hub if need be; None if there is none.

    Raises:
        FileNotFoundError: there is no such path, and it is no name of a repository either.
        ImportError: the hub is needed and huggingface_hub is not installed.
    """
    try:
        return _files(path_or_repo, [pattern])[0][1]
    except NoMatchError:
        return None


class NoMatchError(FileNotFoundError):
    """A folder or repository has no file that matches."""


def _files(path_or_repo: str | Path, patterns: Sequence[str]) -> list[tuple[str, Path]]:
    root = Path(path_or_repo)
    if root.is_file():
        return [(str(root), root)]
    if root.is_dir():
        known = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in SUFFIXES)
        return [(str(root / name), root / name) for name in _select(known, patterns, str(root))]
    repo = str(path_or_repo)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise FileNotFoundError(f"{repo} is no file, no folder, and no owner/name of a data set on the hub")
    return _hub_files(repo, patterns)


def _hub_files(repo: str, patterns: Sequence[str]) -> list[tuple[str, Path]]:
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise ImportError(
            f"{repo} is no local path, and the hub needs: pip install huggingface_hub"
        ) from error
    known = sorted(HfApi().list_repo_files(repo, repo_type="dataset"))
    names = _select(known, patterns, repo)
    return [(f"{repo}/{name}", Path(hf_hub_download(repo, name, repo_type="dataset"))) for name in names]


def _select(known: Iterable[str], patterns: Sequence[str], where: str) -> list[str]:
    known = list(known)
    for pattern in patterns:
        if matching := [name for name in known if fnmatch.fnmatchcase(name, pattern)]:
            return matching
    some = ", ".join(known[:10]) or "none"
    raise NoMatchError(f"{where} has no file that matches {' or '.join(patterns)}; its files: {some}")


def _lines(data: bytes, source: str) -> Iterator[Record]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _record(_parse(line, source, number), source, number)


def _array(data: bytes, source: str) -> Iterator[Record]:
    parsed = _parse(data, source, None)
    if not isinstance(parsed, list):
        raise RecordError(f"{source}: not a list of records but {type(parsed).__name__}")
    for number, fields in enumerate(parsed, start=1):
        yield _record(fields, source, number)


def _parquet(path: Path, source: str) -> Iterator[Record]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{source} is a Parquet file, which needs: pip install pyarrow") from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's own errors derive from these
        raise RecordError(f"{source}: {error}") from error
    for number, fields in enumerate(rows, start=1):
        yield _record(fields, source, number)


def _parse(data: bytes, source: str, line: int | None) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise RecordError(f"{source}:{line or error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{source}:{line or 1}: not UTF-8: {error.reason}") from error


def _record(fields: Any, source: str, line: int) -> Record:
    if not isinstance(fields, dict):
        raise RecordError(f"{source}:{line}: not an object but {type(fields).__name__}")
    return Record(fields, source, line)
