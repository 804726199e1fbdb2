"""The exception tree. Every error that a user can meet is one of these::

    KVRagError
    ├── ParameterError            a value is outside what it may be (also a ValueError)
    ├── PromptTooLongError        prompt and answer exceed the model's context window
    ├── DocumentError             a document cannot be read
    ├── PMLError                  prompt markup is wrong: file, line, column
    ├── ModelLoadError            the model cannot be loaded
    ├── UnsupportedModelError     the model lacks something that fusion needs
    ├── IndexNotFoundError        there is no index in the folder
    ├── IndexFormatError          the index is damaged or of another version
    ├── IndexMismatchError        the index was made with another model, tokenizer or embedding
    ├── IndexLockedError          another process writes to the index
    ├── RecordError               stored bytes are no valid record
    ├── StoreError                a store cannot be used
    │   └── StoreUnreachableError     it does not answer, but may later
    ├── ProfileError              a codec profile is missing, damaged or foreign
    ├── LinksError                link tokens are missing, damaged or foreign
    ├── AnchorsError              anchors are missing, damaged or foreign
    ├── EngineVersionError        a serving engine is missing or of an untested version
    └── EngineError               a serving engine refused, or does not answer

Each message says what went wrong, where, what was expected, what was found, and how to mend it.
Errors about stored bytes never reach a user at question time: kvrag counts them and prefills
that span instead.
"""

from __future__ import annotations


class KVRagError(Exception):
    """Root of all errors raised by kvrag."""


class ParameterError(KVRagError, ValueError):
    """A value given by the caller is outside what it may be (a ratio of 1.5, a policy unknown)."""


class UnsupportedModelError(KVRagError):
    """The model lacks something fusion needs; the message names what is missing."""


class ModelLoadError(KVRagError):
    """The model or its tokenizer could not be loaded from the place given."""


class PromptTooLongError(KVRagError):
    """The prompt plus the tokens asked for exceed the model's context window."""


class DocumentError(KVRagError):
    """A document cannot be read: missing, empty, of an unknown kind, wrongly encoded."""


class ParserError(KVRagError):
    """The process that parses documents cannot be started."""


class RecordError(KVRagError):
    """Stored bytes are no valid record: foreign, truncated, flipped, oversized, too new."""


class StoreError(KVRagError):
    """A store cannot be used: unreachable, read-only, full."""


class StoreUnreachableError(StoreError):
    """A store does not answer, or not in time; it may do so again later."""


class ProfileError(KVRagError):
    """A codec profile is missing, damaged, or of another model than the one it is used with."""


class LinksError(KVRagError):
    """Link tokens are missing, damaged, or of another model than the one they are used with."""


class AnchorsError(KVRagError):
    """Anchors are missing, damaged, or of another model or compression than asked for."""


class PMLError(KVRagError):
    """Prompt markup is wrong; the message begins with the place.

    Attributes
    ----------
    file, line, column
        Where, both counted from 1.
    """

    def __init__(self, message: str, file: str, line: int, column: int) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.column = column


class IndexNotFoundError(KVRagError):
    """There is no index in the folder given."""


class IndexFormatError(KVRagError):
    """The folder holds an index of another version, or something that is not an index."""


class IndexMismatchError(KVRagError):
    """The index was made with another model, tokenizer, embedding or key than the one given."""


class IndexClosedError(KVRagError):
    """The index was closed; open it again to use it."""


class IndexLockedError(KVRagError):
    """Another process is writing to the index."""


class EngineVersionError(KVRagError):
    """A serving engine is missing, or of a version that kvrag was not tested with."""


class EngineError(KVRagError):
    """A serving engine refused a request, does not answer, or is set up for something else."""
