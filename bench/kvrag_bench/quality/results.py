"""Judgements in a file of JSON lines, so that a run continues where an earlier one stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvrag.errors import ParameterError
from kvrag.regularfile import open_regular
from kvrag_bench.judge.judgements import Asked, Contestant, Judgement, Reply
from kvrag_bench.judge.questions import JudgedQuestion


class Results:
    """What has been judged so far.

    Parameters
    ----------
    path
        The file, which need not exist. None keeps judgements in memory only.
    settings
        What besides question and contestant a judgement depends on, as JSON values.
    text_before
        Returns the text that a contestant's chunks of a question are encoded after, where the name
        of its context leaves it open; "" elsewhere.

    Raises
    ------
    ParameterError
        When the file holds something else; names the line.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        text_before: Callable[[JudgedQuestion, Contestant], str] = lambda *_: "",
    ) -> None:
        self._path = path
        self._settings = settings
        self._text_before = text_before
        self._records: dict[str, dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            with open_regular(self._path) as file:
                written = file.read()
        except OSError as error:
            raise ParameterError(f"{self._path} cannot be read: {error.strerror}") from error
        # A run may have been stopped in the middle of a line: its question is judged again.
        *whole, _ = written.split(b"\n")
        for number, line in enumerate(whole, start=1):
            try:
                record = json.loads(line)
                self._records[record["key"]] = record["judgement"]
            except (ValueError, KeyError, TypeError) as error:
                raise ParameterError(
                    f"{self._path}, line {number}: not a judgement of 'kvrag bench quality': name "
                    "another file"
                ) from error

    def mend(self) -> None:
        """Cut off half a line at the end of the file."""
        if self._path is not None and self._path.exists():
            with self._path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def find(self, question: JudgedQuestion, contestant: Contestant) -> Judgement | None:
        """Return a judgement; None if there is none yet."""
        record = self._records.get(self._key(question, contestant))
        return None if record is None else _judgement(question, record)

    def add(self, asked: Asked, judgements: Mapping[Contestant, Judgement]) -> None:
        """Keep the judgements on one question; write them in one go."""
        lines = []
        for contestant, judgement in judgements.items():
            record = asdict(judgement)
            del record["question"]
            key = self._key(asked.question, contestant)
            self._records[key] = record
            line = {
                "key": key,
                "question": asked.question.place,
                "type": asked.question.type,
                "contestant": asdict(contestant),
                "judgement": record,
            }
            lines.append(json.dumps(line, ensure_ascii=False))
        if self._path is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())

    def _key(self, question: JudgedQuestion, contestant: Contestant) -> str:
        named = asdict(contestant)
        if not named["written"]:  # so that what was judged before there were writers keeps its key
            del named["written"]
        about: list[Any] = [self._settings, asdict(question), named]
        before = self._text_before(question, contestant)
        if before:  # so that what was judged without any keeps its key
            about.append(before)
        written = json.dumps(about, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()


def _judgement(question: JudgedQuestion, record: Mapping[str, Any]) -> Judgement:
    fields = dict(record)
    given, reference = (_reply(fields.pop(name)) for name in ("given", "reference"))
    kl, agrees = (tuple(fields.pop(name)) for name in ("kl", "agrees"))
    return Judgement(
        question=question, given=given, reference=reference, kl=kl, agrees=agrees, **fields
    )


def _reply(record: Mapping[str, Any]) -> Reply:
    return Reply(record["text"], record["gold"], tuple(record["choices"]))
