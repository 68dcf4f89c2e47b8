"""Files of records, one after the other, each behind its length."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from outrider.cloud.learning.lesson_record import MAX_BYTES, LessonRecord
from outrider.proto.errors import InvalidArgument

_LENGTH = struct.Struct("<I")


def write_records(path: Path, records: Iterable[LessonRecord]) -> None:
    """Write a file, which is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        for record in records:
            encoded = record.encode()
            file.write(_LENGTH.pack(len(encoded)) + encoded)
    os.replace(unfinished, path)


def read_records(path: Path) -> list[LessonRecord]:
    """Return the records of a file.

    Raises:
        InvalidArgument: the file cannot be read, or holds something else.
    """
    records = []
    try:
        with path.open("rb") as file:
            while head := file.read(_LENGTH.size):
                size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MAX_BYTES + 1
                if size > MAX_BYTES:
                    raise InvalidArgument(f"{path} is no file of records", field="lessons")
                records.append(LessonRecord.decode(file.read(size)))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="lessons") from error
    return records
