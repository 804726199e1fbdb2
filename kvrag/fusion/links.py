"""Link tokens: a few trained rows after each reused chunk that attend to everything before them.

Source: KVLink (arXiv 2502.16002) §3.3. A chunk's stored KV has seen no other chunk. The rows of
its link tokens are computed at question time and see every earlier row; the question then reads
what they gathered. Link tokens are not in the tokenizer's vocabulary: the token ids of a prompt
stay those of the plain pipeline, with the links between them. The n-th chunk of a prompt always
has the same links (rows ``(n - 1) K .. n K - 1`` of the table). One more row precedes the first
chunk, and one follows the last.

Deviation: the paper trains the whole model. Here the base model may also stay unchanged (mode
``frozen``). Then only embeddings, per-layer keys and values, or low-rank additions to link,
question and answer rows are trained, and every chunk stored with the base model stays valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from kvrag import arguments
from kvrag.errors import LinksError
from kvrag.models.adapter import RowAdapter, linear_layers, without_adapters
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import all_finite
from kvrag.regularfile import read_regular

FILE_NAME = "links.safetensors"
"""Name of the links' file in a model's folder."""

MAX_DOCUMENTS = 40
"""Maximum number of a prompt's chunks that have links (KVLink §3.3); further ones have none."""

MODES = ("tuned", "frozen")
WAYS = ("embeddings", "adapter")
WRITER = "writer"
"""The way of a file without links, whose adapter acts while chunks are encoded."""
FORMAT_VERSION = 1

_METADATA = "kvrag-links"
_DOWN, _UP = "adapter.down.", "adapter.up."
_MAX_LINKS = 256
_MAX_DOCUMENTS = 4096
_MAX_SCALE = 1000


@dataclass(frozen=True)
class LinksHeader:
    """The header of a file of links.

    Attributes
    ----------
    mode
        ``"tuned"``: the whole model was trained with the links. ``"frozen"``: the model is
        unchanged.
    way
        The form of the links: ``"embeddings"``, ``"adapter"`` (embeddings, and an adapter for
        link, question and answer rows), or `WRITER`.
    num_links
        K, the number of links after each chunk.
    max_documents
        M, the number of chunks that have links.
    model_fingerprint
        Fingerprint of the model that the links work with.
    scale
        The adapter's scale; 0 without an adapter.
    version
        Version of the file format.
    """

    mode: str
    way: str
    num_links: int
    max_documents: int
    model_fingerprint: str
    scale: float = 0.0
    version: int = FORMAT_VERSION

    @property
    def num_rows(self) -> int:
        """Rows of the table: M * K links, then the row before all chunks and the one after them."""
        return self.max_documents * self.num_links + 2

    @property
    def start_row(self) -> int:
        """The row of the link before the first chunk."""
        return self.max_documents * self.num_links

    @property
    def end_row(self) -> int:
        """The row of the link after the last chunk and its links."""
        return self.start_row + 1


@dataclass(frozen=True, eq=False)
class LinkTokens:
    """Trained link tokens of one model.

    Attributes
    ----------
    header
        The header of their file.
    embeddings
        ``[rows, hidden]``: inputs of the first layer; None without links.
    adapter
        The adapter in way ``adapter``; otherwise None.
    """

    header: LinksHeader
    embeddings: torch.Tensor | None = None
    adapter: RowAdapter | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        if self.embeddings is not None:
            tensors["embeddings"] = self.embeddings.detach().cpu().contiguous()
        if self.adapter is not None:
            for prefix, weights in ((_DOWN, self.adapter.down), (_UP, self.adapter.up)):
                for name, tensor in weights.items():
                    tensors[prefix + name] = tensor.detach().cpu().contiguous()
        return tensors

    @cached_property
    def digest(self) -> str:
        """40 hexadecimal digits that identify these links."""
        digest = blake2b(json.dumps(asdict(self.header)).encode(), digest_size=20)
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(self, path: Path | str) -> None:
        """Write one safetensors file, atomically."""
        tensors = self._tensors()
        target = Path(path)
        partial = target.with_suffix(".partial")
        save_file(tensors, str(partial), metadata={_METADATA: json.dumps(asdict(self.header))})
        partial.replace(target)

    @classmethod
    def load(cls, path: Path | str, *, is_writer: bool = False) -> LinkTokens:
        """Read the links that `save` wrote; with `is_writer`, a writer instead.

        Raises
        ------
        LinksError
            If the file is missing, damaged, too new, or not a file of links.
        ParameterError
            If no file can have that path.
        """
        place = arguments.path(path, "links")
        if not place.is_file():
            raise LinksError(
                f"no links at {arguments.shown(str(path))}: expected a {FILE_NAME} that 'kvrag "
                "train links' wrote"
            )
        try:
            content = read_regular(place)
        except OSError as error:
            raise LinksError(f"{place}: not a readable safetensors file: {error}") from error
        return cls.from_bytes(content, place, is_writer=is_writer)

    @classmethod
    def from_bytes(cls, content: bytes, place: Path, *, is_writer: bool = False) -> LinkTokens:
        """Read the content of a file from `place`. Raises as `load` does."""
        try:
            tensors = load_tensors(content)
            size = int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
        except (SafetensorError, ValueError) as error:
            raise LinksError(f"{place}: not a readable safetensors file: {error}") from error
        header = _checked_header(metadata.get(_METADATA), place)
        if (header.way == WRITER) != is_writer:
            raise LinksError(
                f"{place}: links, where a writer is expected, which 'kvrag train writer' wrote"
                if is_writer
                else f"{place}: a writer, where links are expected; name it at 'kvrag ingest "
                "--writer'"
            )
        return cls(header, **_checked_tensors(header, tensors, place))

    def check(self, model: KVModel) -> None:
        """Raise LinksError unless these links belong to `model`."""
        header, embeddings = self.header, self.embeddings
        if header.model_fingerprint != model.fingerprint:
            what = "writer" if header.way == WRITER else "links"
            raise LinksError(
                f"{what} of another model: expected {what} of {model.name} (fingerprint "
                f"{model.fingerprint}), found fingerprint {header.model_fingerprint}; train it "
                f"with 'kvrag train {what}' (the element type counts: the same weights in another "
                "type are another model), or leave it out"
            )
        shape = (header.num_rows, model.decoder.config.hidden_size)
        if embeddings is not None and tuple(embeddings.shape) != shape:
            raise LinksError(
                f"links: embeddings of shape {tuple(embeddings.shape)}, expected {shape} for "
                f"{model.name}; train them again"
            )
        if self.adapter is not None:
            layers = linear_layers(model.decoder)
            for name, down in self.adapter.down.items():
                layer = layers.get(name)
                up = self.adapter.up[name]
                if layer is None or (layer.in_features, layer.out_features) != (
                    down.shape[1],
                    up.shape[0],
                ):
                    raise LinksError(
                        f"links: adapter for {name!r} of shapes {tuple(down.shape)} and "
                        f"{tuple(up.shape)} fits no linear layer of {model.name}; train it again"
                    )

    def on(self, model: KVModel) -> LinkTokens:
        """Return these links on the model's device, in its dtype; links' adapter stays in float32.

        Raises LinksError as `check` does.
        """
        self.check(model)
        embeddings, adapter = self.embeddings, self.adapter
        if embeddings is not None:
            embeddings = embeddings.to(model.device, model.spec.dtype)
        if adapter is not None:
            kind = model.decoder.dtype if self.header.way == WRITER else None
            adapter = replace(
                adapter,
                down={name: one.to(model.device, kind) for name, one in adapter.down.items()},
                up={name: one.to(model.device, kind) for name, one in adapter.up.items()},
            )
        return LinkTokens(self.header, embeddings, adapter)

    @contextmanager
    def answering(self, model: KVModel) -> Iterator[None]:
        """Let the adapter, if there is one, act on all rows, as is right for an answer.

        It acts only on rows that the caller forwards, not on what kvrag itself indexes, fuses or
        answers meanwhile.
        """
        adapter, decoder = self.adapter, model.decoder
        acting = without_adapters(decoder) if adapter is None else adapter.acting(decoder)
        with model.lock, acting:
            yield


def find_links(folder: Path | str) -> LinkTokens | None:
    """Return the links in a model's folder, or None. Raises as `LinkTokens.load` does."""
    path = Path(folder) / FILE_NAME
    return LinkTokens.load(path) if path.is_file() else None


def _checked_header(text: str | None, place: Path) -> LinksHeader:
    if text is None:
        raise LinksError(f"{place}: not a file of links: its metadata has no {_METADATA!r}")
    try:
        fields: Any = json.loads(text)
        version = fields["version"]
        if version != FORMAT_VERSION:
            raise LinksError(
                f"{place}: links of format {version}, expected {FORMAT_VERSION}: use the kvrag "
                "that wrote them, or train them again"
            )
        header = LinksHeader(**fields)
        if header.way == "kv":
            raise LinksError(
                f"{place}: links of way 'kv', which kvrag 0.2 had, are gone: others keep more of "
                "full prefill's answers. Train them again with --way adapter"
            )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LinksError(f"{place}: damaged header of links: {error}") from error
    for name, holds, expected in (
        ("mode", header.mode in MODES, f"one of {', '.join(MODES)}"),
        ("way", header.way in (*WAYS, WRITER), f"one of {', '.join((*WAYS, WRITER))}"),
        ("num_links", _is_count(header.num_links, _MAX_LINKS), f"0 to {_MAX_LINKS}"),
        (
            "max_documents",
            _is_count(header.max_documents, _MAX_DOCUMENTS),
            f"0 to {_MAX_DOCUMENTS}",
        ),
        ("model_fingerprint", isinstance(header.model_fingerprint, str), "text"),
        ("scale", _is_scale(header.scale), f"a number, at most {_MAX_SCALE:,} either way"),
    ):
        if not holds:
            raise LinksError(
                f"{place}: {name} {arguments.shown(getattr(header, name))}: expected {expected}"
            )
    return header


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_scale(value: Any) -> bool:
    # The comparison is false for NaN.
    return type(value) in (int, float) and abs(value) <= _MAX_SCALE


def _checked_tensors(
    header: LinksHeader, tensors: Mapping[str, torch.Tensor], place: Path
) -> dict[str, Any]:
    """Return the fields of `LinkTokens` that a file's tensors hold."""
    down = {name.removeprefix(_DOWN): t for name, t in tensors.items() if name.startswith(_DOWN)}
    up = {name.removeprefix(_UP): t for name, t in tensors.items() if name.startswith(_UP)}
    found = {name for name in tensors if not name.startswith((_DOWN, _UP))}
    expected = set() if header.way == WRITER else {"embeddings"}
    if found != expected:
        raise LinksError(
            f"{place}: expected the tensors {sorted(expected)} besides an adapter's, found "
            f"{sorted(found)}"
        )
    if bool(down) != (header.way in ("adapter", WRITER)) or down.keys() != up.keys():
        raise LinksError(
            f"{place}: the adapter's tensors are not those of way {arguments.shown(header.way)}"
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not all_finite(tensor):
            raise LinksError(f"{place}: {name}: expected finite floating-point numbers")
    for name in down:
        shapes = down[name].shape, up[name].shape
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
            raise LinksError(f"{place}: adapter of {name!r} has shapes {shapes} that do not fit")
    fields: dict[str, Any] = {"embeddings": tensors.get("embeddings")}
    if down:
        fields["adapter"] = RowAdapter(down, up, header.scale)
    return fields
