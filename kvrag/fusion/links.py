"""Link tokens: a few trained rows behind each reused chunk that look at all before them.

Source: KVLink (arXiv 2502.16002) §3.3. A chunk's stored KV has seen no other chunk; the rows of
its link tokens are computed at question time, see every earlier row, and give what the question
then reads. They are no tokens of the tokenizer: the token ids of a prompt stay those of the plain
pipeline, the links stand between them. The n-th chunk of a prompt always has the same links
(``(n - 1) K .. n K - 1`` of the table), one row opens the chunks and one closes them.

Deviation: the paper trains the whole model. Here a base model may also stay as it is (mode
``frozen``): then embeddings, per-layer keys and values, or low-rank additions to link, question
and answer rows are trained, and every chunk stored with the base stays valid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvrag.errors import LinksError
from kvrag.fusion.layout import LINK, Layout, LinkRow, ReusedSpan
from kvrag.kvcache import FusedKV
from kvrag.models.adapter import RowAdapter, linear_layers, without_adapters
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import all_finite
from kvrag.positions.rotary import RotaryTable

FILE_NAME = "links.safetensors"
"""Under this name links are looked for in a model's folder."""

MAX_DOCUMENTS = 40
"""Chunks of a prompt that can have links (KVLink §3.3); further ones go without."""

MODES = ("tuned", "frozen")
WAYS = ("embeddings", "kv", "adapter")
FORMAT_VERSION = 1

_METADATA = "kvrag-links"
_DOWN, _UP = "adapter.down.", "adapter.up."
_MAX_LINKS = 256
_MAX_DOCUMENTS = 4096
_MAX_SCALE = 1000


@dataclass(frozen=True)
class LinksHeader:
    """What a file of links says about itself.

    Attributes
    ----------
    mode
        ``"tuned"``: the whole model was trained with them. ``"frozen"``: the model is as it was.
    way
        What holds them: ``"embeddings"``, ``"kv"`` (each layer's keys and values) or
        ``"adapter"`` (embeddings, and an adapter for link, question and answer rows).
    num_links
        K, links behind each chunk.
    max_documents
        M, chunks that have links.
    model_fingerprint
        Of the model that they work with.
    scale
        Of the adapter; 0 where there is none.
    version
        Of the file's format.
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
        """Rows of the table: M * K links, then the row before all chunks and the one behind."""
        return self.max_documents * self.num_links + 2

    @property
    def start_row(self) -> int:
        """The row that stands before the first chunk."""
        return self.max_documents * self.num_links

    @property
    def end_row(self) -> int:
        """The row that stands behind the last chunk and its links."""
        return self.start_row + 1


@dataclass(frozen=True, eq=False)
class LinkTokens:
    """Trained link tokens of one model.

    Attributes
    ----------
    header
        What they are.
    embeddings
        ``[rows, hidden]``: first layer's inputs; None in way ``kv``.
    keys, values
        ``[L, rows, H, D]``, keys position-free, of way ``kv``; else None.
    adapter
        Of way ``adapter``; else None.
    """

    header: LinksHeader
    embeddings: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    adapter: RowAdapter | None = None

    @property
    def is_computed(self) -> bool:
        """Whether link rows run through the layers, as all fresh rows do."""
        return self.embeddings is not None

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name in ("embeddings", "keys", "values")
            if (tensor := getattr(self, name)) is not None
        }
        if self.adapter is not None:
            for prefix, weights in ((_DOWN, self.adapter.down), (_UP, self.adapter.up)):
                for name, tensor in weights.items():
                    tensors[prefix + name] = tensor.detach().cpu().contiguous()
        return tensors

    @cached_property
    def digest(self) -> str:
        """40 hexadecimal digits that tell these links from all others."""
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
    def load(cls, path: Path | str) -> LinkTokens:
        """Read what `save` wrote.

        Raises
        ------
        LinksError
            When the file is absent, damaged, too new, or no file of links.
        """
        # Not Path.expanduser, which raises where it knows no such user.
        place = Path(os.path.expanduser(path))  # noqa: PTH111
        if not place.is_file():
            raise LinksError(
                f"no links at {str(path)!r}: expected a {FILE_NAME} that 'kvrag train links' wrote"
            )
        try:
            with safe_open(str(place), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise LinksError(f"{place}: not a readable safetensors file: {error}") from error
        header = _checked_header(metadata.get(_METADATA), place)
        return cls(header, **_checked_tensors(header, tensors, place))

    def check(self, model: KVModel) -> None:
        """Raise LinksError unless these links are of `model`."""
        header, spec = self.header, model.spec
        if header.model_fingerprint != model.fingerprint:
            raise LinksError(
                f"links of another model: expected those of {model.name} (fingerprint "
                f"{model.fingerprint}), found fingerprint {header.model_fingerprint}; train them "
                "with 'kvrag train links' (element type counts: the same weights in another type "
                "are another model), or pass links='off'"
            )
        wanted: dict[str, tuple[int, ...]] = {
            "embeddings": (header.num_rows, model.hf.config.hidden_size),
            "keys": (spec.num_layers, header.num_rows, spec.num_kv_heads, spec.head_dim),
        }
        wanted["values"] = wanted["keys"]
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise LinksError(
                    f"links: {name} of shape {tuple(tensor.shape)}, expected {shape} for "
                    f"{model.name}; train them anew"
                )
        if self.adapter is not None:
            layers = linear_layers(model.hf)
            for name, down in self.adapter.down.items():
                layer = layers.get(name)
                up = self.adapter.up[name]
                if layer is None or (layer.in_features, layer.out_features) != (
                    down.shape[1],
                    up.shape[0],
                ):
                    raise LinksError(
                        f"links: adapter for {name!r} of shapes {tuple(down.shape)} and "
                        f"{tuple(up.shape)} fits no linear layer of {model.name}; train it anew"
                    )

    def on(self, model: KVModel) -> LinkTokens:
        """Return these links where `model` is, in its element type; the adapter in float32.

        Raises LinksError as `check` does.
        """
        self.check(model)
        place = {"device": model.device, "dtype": model.spec.dtype}
        moved = {
            name: tensor.to(**place)
            for name in ("embeddings", "keys", "values")
            if (tensor := getattr(self, name)) is not None
        }
        adapter = self.adapter
        if adapter is not None:
            adapter = replace(
                adapter,
                down={name: tensor.to(model.device) for name, tensor in adapter.down.items()},
                up={name: tensor.to(model.device) for name, tensor in adapter.up.items()},
            )
        return LinkTokens(self.header, **moved, adapter=adapter)

    @contextmanager
    def answering(self, model: KVModel) -> Iterator[None]:
        """Let the adapter, if there is one, act on every row: those of an answer.

        Only on rows that the caller forwards: what is indexed, fused or answered meanwhile by
        kvrag itself is what it is outside.
        """
        acting = (
            without_adapters(model.hf) if self.adapter is None else self.adapter.acting(model.hf)
        )
        with model.lock, acting:
            yield


def find_links(folder: Path | str) -> LinkTokens | None:
    """Return the links that lie in a model's folder, or None. Raises as `LinkTokens.load` does."""
    path = Path(folder) / FILE_NAME
    return LinkTokens.load(path) if path.is_file() else None


def insert_links(layout: Layout, header: LinksHeader) -> Layout:
    """Put link rows behind every reused span, and the two rows around them all.

    Everything behind a row shifts, so positions are those of the longer sequence. A layout
    without spans, or K = 0, is returned as it is. Spans past M get none and are counted.
    """
    if not layout.spans or not header.num_links or layout.links:
        return layout
    token_ids: list[int] = []
    links: list[LinkRow] = []
    spans: list[ReusedSpan] = []

    def put(row: int) -> None:
        links.append(LinkRow(len(token_ids), row))
        token_ids.append(LINK)

    copied = layout.spans[0].prompt_start
    token_ids += layout.token_ids[:copied]
    put(header.start_row)
    for number, span in enumerate(layout.spans):
        token_ids += layout.token_ids[copied : span.prompt_start]
        spans.append(replace(span, prompt_start=len(token_ids)))
        token_ids += layout.token_ids[span.prompt_start : span.prompt_end]
        copied = span.prompt_end
        if number < header.max_documents:
            for row in range(number * header.num_links, (number + 1) * header.num_links):
                put(row)
    put(header.end_row)
    token_ids += layout.token_ids[copied:]
    return replace(
        layout,
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        links=tuple(links),
        num_unlinked=max(0, len(layout.spans) - header.max_documents),
    )


class LinkedRows:
    """The rows of one prompt: where its links are, and how each row enters the first layer.

    Parameters
    ----------
    model
        The model.
    layout
        The prompt, with links inserted or without.
    links
        `LinkTokens.on` the model; needed where the layout holds any.

    Attributes
    ----------
    links
        Those, or None where the layout holds none.
    """

    def __init__(self, model: KVModel, layout: Layout, links: LinkTokens | None) -> None:
        assert links is not None or not layout.links, "links were laid out, and none are given"
        self._model = model
        self.links = links if layout.links else None
        device = model.device
        self._token_ids = torch.tensor(layout.token_ids, device=device)
        self._row_positions = (
            torch.arange(len(layout.token_ids), device=device)
            if layout.positions is None
            else torch.tensor(layout.positions, device=device)
        )
        self._positions, self._table_rows = (
            torch.tensor([getattr(link, name) for link in layout.links], dtype=torch.long).to(
                device
            )
            for name in ("position", "row")
        )

    @property
    def adapter(self) -> RowAdapter | None:
        """What acts on this prompt's fresh rows."""
        return None if self.links is None else self.links.adapter

    def without_stored(self, fresh: torch.Tensor) -> torch.Tensor:
        """Return the positions of `fresh` that have to be computed: links with KV do not."""
        if self.links is None or self.links.is_computed:
            return fresh
        return fresh[~torch.isin(fresh, self._positions)]

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the first layer's inputs ``[n, hidden]`` of positions ``[n]``."""
        token_ids = self._token_ids[rows]
        if self.links is None:
            return self._model.embed(token_ids, self._row_positions[rows])
        hidden = self._model.embed(token_ids.clamp(min=0), self._row_positions[rows])
        if self.links.embeddings is not None:
            which = (token_ids == LINK).nonzero()[:, 0]
            place = torch.searchsorted(self._positions, rows[which])
            hidden[which] = self.links.embeddings[self._table_rows[place]]
        return hidden

    def write_kv(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """Place the links' own keys and values of one layer, where they have any."""
        if self.links is None or self.links.keys is None:
            return
        assert self.links.values is not None
        keys = self.links.keys[layer_index, self._table_rows].transpose(0, 1)
        values = self.links.values[layer_index, self._table_rows].transpose(0, 1)
        placed = torch.empty_like(keys, memory_format=torch.contiguous_format)
        table.place(keys, self._positions, placed)
        fused.keys[layer_index][0].index_copy_(1, self._positions, placed)
        fused.values[layer_index][0].index_copy_(1, self._positions, values.contiguous())


def _checked_header(text: str | None, place: Path) -> LinksHeader:
    if text is None:
        raise LinksError(f"{place}: no file of links: its metadata has no {_METADATA!r}")
    try:
        fields: Any = json.loads(text)
        version = fields["version"]
        if version != FORMAT_VERSION:
            raise LinksError(
                f"{place}: links of format {version}, expected {FORMAT_VERSION}: use the kvrag "
                "that wrote them, or train them anew"
            )
        header = LinksHeader(**fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LinksError(f"{place}: damaged header of links: {error}") from error
    for name, holds, expected in (
        ("mode", header.mode in MODES, f"one of {', '.join(MODES)}"),
        ("way", header.way in WAYS, f"one of {', '.join(WAYS)}"),
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
            raise LinksError(f"{place}: {name} {getattr(header, name)!r}: expected {expected}")
    return header


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_scale(value: Any) -> bool:
    # Not-a-number is no less than anything.
    return type(value) in (int, float) and abs(value) <= _MAX_SCALE


def _checked_tensors(
    header: LinksHeader, tensors: Mapping[str, torch.Tensor], place: Path
) -> dict[str, Any]:
    """Return the fields of `LinkTokens` that the tensors of a file make up."""
    wanted = {"kv": {"keys", "values"}}.get(header.way, {"embeddings"})
    down = {name.removeprefix(_DOWN): t for name, t in tensors.items() if name.startswith(_DOWN)}
    up = {name.removeprefix(_UP): t for name, t in tensors.items() if name.startswith(_UP)}
    found = {name for name in tensors if not name.startswith((_DOWN, _UP))}
    if found != wanted:
        raise LinksError(
            f"{place}: links of way {header.way!r}: expected the tensors {sorted(wanted)}, found "
            f"{sorted(found)}"
        )
    if bool(down) != (header.way == "adapter") or down.keys() != up.keys():
        raise LinksError(f"{place}: the adapter's tensors are not those of way {header.way!r}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not all_finite(tensor):
            raise LinksError(f"{place}: {name}: expected finite floating-point numbers")
    for name in down:
        shapes = down[name].shape, up[name].shape
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
            raise LinksError(f"{place}: adapter of {name!r} has shapes {shapes} that do not fit")
    fields: dict[str, Any] = {name: tensors[name] for name in wanted}
    if down:
        fields["adapter"] = RowAdapter(down, up, header.scale)
    return fields
