"""The model, tokenizer and embedding of an index: loaded on first use, and checked against it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.codec.names import RAW
from kvrag.errors import IndexMismatchError, ModelLoadError, ParameterError
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.profiles import adapter_of, kept_in, read_kept
from kvrag.models.control import KEEP, ControlTokens
from kvrag.store.base import Store, capability, is_in_memory, tiers_of
from kvrag.store.limited import LimitedStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvrag.ingest.embedding import Embedding
    from kvrag.kvcache import ChunkKV
    from kvrag.models.adapter import RowAdapter
    from kvrag.models.known_text import KnownTexts
    from kvrag.models.kv_model import EncodedPrefix, KVModel

# -- checks --------------------------------------------------------------------------------------


def check_limit(store: Store, config: IndexConfig) -> None:
    """Close a store and raise ParameterError if one of its tiers cannot hold a single chunk."""
    if not config.profile:  # what is stored before there is enough to fit a codec is raw
        config = replace(config, codec=RAW)
    needed = config.chunk_tokens * config.expected_bytes_per_token
    for tier in tiers_of(store):
        limited = capability(tier, LimitedStore)
        if limited is not None and limited.limit_bytes < needed:
            store.close()
            raise ParameterError(
                f"{tier.url} holds no chunk of {config.chunk_tokens} tokens, which take about "
                f"{needed:,} bytes; raise its limit, or choose fewer chunk_tokens or another codec"
            )


def check_lasting(store: Store) -> None:
    """Raise ParameterError if a store's content ends with the process."""
    if is_in_memory(tiers_of(store)[-1]):
        raise ParameterError(
            f"{store.url} is gone when the process ends: choose a store that lasts; memory may be "
            "a tier before it"
        )


def check_device(device: str | None, model: KVModel | None = None) -> None:
    """Raise ParameterError if a device cannot be used here, or `model` is on another one."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ParameterError(f"device {shown(device)}: expected a name such as 'cpu' or 'cuda'")
    # Imported late: without a device, the model's library is not needed yet.
    from kvrag.models.references import usable_device

    wanted = usable_device(device)
    if model is not None and model.device != wanted:
        raise ParameterError(
            f"device {device} was asked for, but the model given is on {model.device}"
        )


def check_embedding(config: IndexConfig, folder: Path, embedding: Embedding) -> None:
    """Raise IndexMismatchError unless the index was made with `embedding`."""
    found = (embedding.name, embedding.dim)
    expected = (config.embedding, config.embedding_dim)
    if found != expected:
        raise IndexMismatchError(
            f"{folder} was made with the embedding {shown(expected[0])} of {expected[1]} "
            "dimensions, "
            f"found {shown(found[0])} of {found[1]}; use the one it was made with"
        )


# -- the encoders --------------------------------------------------------------------------------


class Encoders:
    """The models of one index, each checked against the one that the index was made with.

    Parameters
    ----------
    path
        The index folder.
    config
        The settings of the index.
    model, embedding
        The caller's own objects; None means the ones that `config` names.
    device
        Where a model that is loaded here runs; None means the CPU.
    compute
        What its linear layers compute in when prompts are answered (`KVModel.load`).

    Attributes
    ----------
    writer
        The content of the index's writer, set on a machine without its folder; b"" reads it there.
    """

    writer = b""

    def __init__(
        self,
        path: Path,
        config: IndexConfig,
        *,
        model: KVModel | PreTrainedModel | str | Path | None,
        embedding: Embedding | None,
        device: str | None,
        compute: str | None = None,
    ) -> None:
        self._path = path
        self._config = config
        self._given_model = model
        self._given_embedding = embedding
        self.device = device
        self._compute = compute
        self._loading = threading.RLock()

    @cached_property
    def model(self) -> KVModel:
        """The decoder. Raises as `Index.model` does."""
        from kvrag.models.kv_model import KVModel

        with self._loading:
            config = self._config
            model = KVModel.load(
                self._model_source(), dtype=config.dtype, device=self.device, compute=self._compute
            )
            check_device(self.device, model)
            if model.fingerprint != config.model_fingerprint:
                raise self._mismatch("model", model.name, model.fingerprint)
            if model.tokenizer_fingerprint != config.tokenizer_fingerprint:
                raise self._mismatch("tokenizer", model.name, model.tokenizer_fingerprint)
            return model

    def compare_given(self) -> None:
        """Check a loaded model that the caller gave, to report a mismatch early."""
        if self._given_model is not None and not isinstance(self._given_model, str | Path):
            _ = self.model

    @property
    def model_folder(self) -> Path | None:
        """The folder of the model's files; None for a hub's model, or one made in memory.

        Loads no weights. Raises ModelLoadError when the folder is gone.
        """
        from kvrag.models.references import resolve_model

        source = self._model_source()
        if self._has_model or not isinstance(source, str | Path):
            return self.model.folder
        path = Path(resolve_model(source, is_small=None))
        return path if path.is_absolute() else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded without the weights. Raises as `model` does."""
        if self._has_model:
            return self.model.tokenizer
        from kvrag.models.loading import load_tokenizer
        from kvrag.models.tokens import tokenizer_fingerprint

        with self._loading:
            source = self._model_source()
            if not isinstance(source, str | Path):
                return self.model.tokenizer
            tokenizer = load_tokenizer(source)
            found = tokenizer_fingerprint(tokenizer)
            if found != self._config.tokenizer_fingerprint:
                raise self._mismatch("tokenizer", str(source), found)
            return tokenizer

    @cached_property
    def control(self) -> ControlTokens | None:
        """The model's control strings, or None if they are kept. Raises as `tokenizer` does."""
        if self._config.control_tokens == KEEP:
            return None
        return ControlTokens(self.tokenizer)

    @cached_property
    def known_texts(self) -> KnownTexts:
        """Tokenises prompts around the index's own texts. Raises as `tokenizer` does."""
        from kvrag.models.known_text import KnownTexts

        control = self.control
        return KnownTexts(self.tokenizer, *([] if control is None else [control.find]))

    @cached_property
    def embedding(self) -> Embedding:
        """The embedding of texts. Raises IndexMismatchError."""
        if self._given_embedding is not None:
            return self._given_embedding
        from kvrag.ingest.embedding import recorded_embedding

        config = self._config
        with self._loading:
            try:
                embedding = recorded_embedding(config.embedding)
            except ParameterError as error:
                raise IndexMismatchError(
                    f"{self._path} was made with the embedding {shown(config.embedding)}, which "
                    "cannot be found by name: pass it, Index.open(path, embedding=...), or "
                    "--embedding MODULE:NAME"
                ) from error
            check_embedding(config, self._path, embedding)
            return embedding

    @property
    def reference(self) -> str:
        """Where another process loads the model from; "" for a model built in memory."""
        given = self._given_model
        return str(given) if isinstance(given, str | Path) else self._config.model

    def prefill(self, chunk: Chunk, check: Callable[[], None] | None = None) -> ChunkKV:
        """Return a chunk's KV from the model, computed after the first of its contexts.

        `check` is called in each layer, and ends the work by an error.
        """
        before = (*self._config.prefix_ids, *chunk.contexts[0])
        adapter = self._adapter if self._config.writes(chunk.contexts[0]) else None
        is_shared = self._config.chunk_context.is_shared
        prefix = self._encode_prefix(before, bool(adapter)) if is_shared and before else before
        return self.model.prefill(prefix, [chunk.token_ids], check=check, adapter=adapter)[0]

    def check_writer(self) -> None:
        """Raise IndexFormatError if the index has a writer that is missing or damaged."""
        if self._config.writer and not self.writer:
            read_kept(self._path, self._config.writer)

    @cached_property
    def _adapter(self) -> RowAdapter:
        fingerprint = self._config.writer
        content = self.writer or read_kept(self._path, fingerprint)
        return adapter_of(content, kept_in(self._path, fingerprint), self.model)

    @cached_property
    def _encode_prefix(self) -> Callable[[tuple[int, ...], bool], EncodedPrefix]:
        @functools.lru_cache(maxsize=2)
        def encode(before: tuple[int, ...], is_written: bool) -> EncodedPrefix:
            adapters = (self._adapter,) if is_written else ()
            return self.model.encode_prefix(before, *adapters)

        return encode

    @cached_property
    def room(self) -> int:
        """Tokens available to a chunk and its context: the window after the shared prefix."""
        return self._config.max_positions - len(self._config.prefix_ids)

    @property
    def _has_model(self) -> bool:
        return "model" in self.__dict__

    def _model_source(self) -> KVModel | PreTrainedModel | str | Path:
        if self._given_model is not None:
            return self._given_model
        if not self._config.model:
            raise ModelLoadError(
                f"{self._path} was made with a model object built in memory: pass it, "
                "Index.open(path, model=...)"
            )
        return self._config.model

    def _mismatch(self, what: str, name: str, found: str) -> IndexMismatchError:
        expected = getattr(self._config, f"{what}_fingerprint")
        remedy = "give the model it was made with, or ingest into a new folder"
        if name == self._config.model:
            remedy = (
                "its files changed, or this version of kvrag reads more of them, such as a GGUF "
                "file's scaled frequencies or how it cuts words: ingest into a new folder"
            )
        return IndexMismatchError(
            f"{self._path} was made with the {what} of {self._config.model or 'a model object'!r} "
            f"(fingerprint {expected}), but that of {shown(name)} has fingerprint {found}; "
            f"{remedy}"
        )
