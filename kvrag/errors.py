"""The exception tree: every error that a user can see.

::

    KVRagError
    ├── ParameterError            a caller gave a value that is not allowed (also a ValueError)
    ├── PromptTooLongError        prompt and answer exceed the model's context window
    ├── DocumentError             a document cannot be read
    ├── ParserError               the process that parses documents cannot be started
    ├── PMLError                  prompt markup is wrong: file, line, column
    ├── ModelLoadError            the model cannot be loaded
    ├── UnsupportedModelError     the model lacks something that fusion needs
    ├── IndexNotFoundError        there is no index in the folder
    ├── IndexFormatError          the index is damaged or of another version
    ├── IndexMismatchError        the index was made with another model, tokenizer or embedding
    ├── IndexLockedError          another process writes to the index
    ├── IndexClosedError          the index was closed
    ├── ProcessError              an index or engine was copied, or taken to a forked process
    ├── RecordError               stored bytes are not a valid record
    ├── StoreError                a store cannot be used
    │   └── StoreUnreachableError     it does not answer, but may later
    ├── ProfileError              a codec profile is missing, damaged or of another model
    ├── LinksError                link tokens are missing, damaged or of another model
    ├── ClusterError              a cluster of Ray cannot be used, or ended a run
    ├── EngineVersionError        a serving engine is missing or of an untested version
    └── EngineError               a serving engine refused, or does not answer

Each message says what went wrong, where, what was expected, what was found, and how to fix it.
Errors about stored bytes never reach a user at question time: kvrag counts them and prefills
that span instead.
"""

from __future__ import annotations


class KVRagError(Exception):
    """Root of all errors raised by kvrag."""


class ParameterError(KVRagError, ValueError):
    """The caller gave a value that is not allowed (a ratio of 1.5, an unknown policy)."""


class UnsupportedModelError(KVRagError):
    """The model lacks something that fusion needs; the message names what is missing."""


class ModelLoadError(KVRagError):
    """The model or its tokenizer could not be loaded from the given path or name."""


class PromptTooLongError(KVRagError):
    """The prompt plus the requested answer exceed the model's context window."""


class DocumentError(KVRagError):
    """A document cannot be read: it is missing, empty, of an unknown type or wrongly encoded."""


class ParserError(KVRagError):
    """The process that parses documents cannot be started."""


class RecordError(KVRagError):
    """Stored bytes are not a valid record: foreign, truncated, corrupt, oversized or too new."""


class StoreError(KVRagError):
    """A store cannot be used: it is unreachable, read-only or full."""


class StoreUnreachableError(StoreError):
    """A store does not answer in time; it may recover later."""


class ProfileError(KVRagError):
    """A codec profile is missing, damaged, or was fitted to another model."""


class LinksError(KVRagError):
    """Link tokens are missing, damaged, or were trained for another model."""


class PMLError(KVRagError):
    """Prompt markup is wrong; the message begins with file, line and column.

    Attributes
    ----------
    file, line, column
        Where the problem is; line and column are counted from 1.
    """

    def __init__(self, message: str, file: str, line: int, column: int) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.column = column


class IndexNotFoundError(KVRagError):
    """There is no index in the given folder."""


class IndexFormatError(KVRagError):
    """The folder holds a damaged index, one of another version, or no index at all."""


class IndexMismatchError(KVRagError):
    """The index was made with a different model, tokenizer, embedding or key."""


class IndexClosedError(KVRagError):
    """The index was closed; open it again to use it."""


class ProcessError(KVRagError, TypeError):
    """An index or engine was copied, pickled, or used in a process that was forked."""


class IndexLockedError(KVRagError):
    """Another process is writing to the index."""


class ClusterError(KVRagError):
    """A cluster of Ray cannot be reached, or gave up a run; finished work is kept."""


class EngineVersionError(KVRagError):
    """A serving engine is missing, or kvrag was not tested with its version."""


class EngineError(KVRagError):
    """A serving engine refused a request, does not answer, or has an unsuitable setup."""
