"""Models whose prompts are computed as wholes: chunks have no KV, beginnings have.

A layer with a state (state space, linear attention, convolution) has read all tokens before it, and
no two chunks' states add up to that of both. But the state and the KV after a prompt's first tokens
are those of every prompt that begins with them. Transformers' own classes and cache compute all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvrag.errors import UnsupportedModelError
from kvrag.kvcache import KVSpec
from kvrag.models.adapter import without_adapters
from kvrag.models.decoders import Model
from kvrag.models.families import WHOLE, Family, no_chunks
from kvrag.models.kv_model import KVModel
from kvrag.models.linears import fast_modules
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.process import working

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvrag.models.proof import Check

_PROVEN_TOKENS, _CONTINUED_FROM = 29, 13


class State:
    """What a model has after some tokens: Transformers' cache, and these tokens."""

    def __init__(self, cache: Any = None, token_ids: Sequence[int] = ()) -> None:
        self.cache = cache
        self.token_ids = list(token_ids)

    def copy(self) -> State:
        """Return another one that shares nothing with this."""
        return State(copy.deepcopy(self.cache), self.token_ids)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that its tensors take."""
        storages = [one.untyped_storage() for one in _tensors(self.cache)]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, whatever its layers call them."""
    if isinstance(held, torch.Tensor):
        yield held
        return
    if not isinstance(held, list | tuple | dict):
        held = getattr(held, "__dict__", {})
    for one in held.values() if isinstance(held, dict) else held:
        yield from _tensors(one)


class WholeModel(KVModel):
    """A model of a type of `kvrag.models.families.WHOLE`.

    Parameters, attributes and errors are those of `KVModel`, as far as they concern no chunk's KV:
    what needs that raises UnsupportedModelError.
    """

    def __init__(
        self,
        hf: Model,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        *,
        name: str = "",
        compute: str | None = None,
        chunk_dtype: torch.dtype | None = None,
        proves: bool = True,
    ) -> None:
        self.family = Family()
        self._begin(hf, tokenizer, name, compute)
        config: Any = hf.config
        self.why_whole = f"{config.model_type}: {WHOLE[config.model_type]}"
        # The counted layers, and a shape that nothing is stored in.
        self.chunk_spec = KVSpec(config.num_hidden_layers, 1, 1, chunk_dtype or hf.dtype)
        if proves:
            self._require_proof()

    @property
    def spec(self) -> KVSpec:  # type: ignore[override]  # what needs it cannot be done
        """No shape: raises UnsupportedModelError."""
        raise UnsupportedModelError(no_chunks(self.decoder.config.model_type))

    @torch.no_grad()
    def read(
        self, state: State, token_ids: Sequence[int], *, compute: str | None = None
    ) -> torch.Tensor:
        """Continue a state by tokens; return the logits ``[vocabulary]`` after the last.

        An error leaves the state of no use.

        Parameters
        ----------
        state
            What the model has after the tokens before; changed in place.
        token_ids
            The tokens, at least one.
        compute
            What linear layers compute in; None means the model's own `compute`.
        """
        hf: Any = self.decoder
        precision = compute or self.compute
        with working(), self.lock, without_adapters(hf), fast_modules(hf, precision):
            output = hf(
                input_ids=torch.tensor([token_ids], device=self.device),
                **{CACHE_ARGUMENT: state.cache},
                use_cache=True,
                logits_to_keep=1,
            )
        state.cache = getattr(output, CACHE_ARGUMENT)
        state.token_ids += token_ids
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def prove(self) -> tuple[list[Check], str]:
        """Compare a prompt that continues a copied state with the whole prompt.

        Both compute in the weights' own type: what is proven counts for every `compute`, whose
        rounding would hide a state that is lost.
        """
        from kvrag.models.proof import Check, bound_of, mostly_apart

        drawn = torch.Generator().manual_seed(0)
        vocabulary = int(self.decoder.config.vocab_size)
        ids = torch.randint(0, vocabulary, (_PROVEN_TOKENS,), generator=drawn).tolist()
        state, own = State(), str(self.decoder.dtype).removeprefix("torch.")
        self.read(state, ids[:_CONTINUED_FROM], compute=own)
        continued = self.read(state.copy(), ids[_CONTINUED_FROM:], compute=own)
        with working(), self.lock, torch.no_grad():
            plain: Any = self.hf
            expected = plain(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
        figure = mostly_apart(continued, expected)
        return [Check("loaded", "a prompt after a kept beginning", figure, bound_of(self.hf))], ""
