"""What could close the gap to full prefill: bounds and trials, on the same questions.

``python -m kvrag_bench.quality.ways --model smollm2-135m --out FILE``. This is research: it says
why policies and contexts are what they are. Rows of full prefill that replace stored rows bound
what computing these rows again can reach.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvrag.codec.registry import get_codec
from kvrag.fusion.policies.base import highest, share_of
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.question import QuestionAttention
from kvrag.ingest.contexts import filler_ids
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending
from kvrag.tune.answers import Answerer, compare
from kvrag.tune.bank import ChunkBank
from kvrag.tune.bootstrap import ratio_interval
from kvrag.tune.continuing import FullContinuation
from kvrag.tune.judgements import Asked
from kvrag.tune.judging import prompts_that_fit
from kvrag_bench.quality.datasets import load_suite
from kvrag_bench.quality.oracle import fill

ALONE = "encoded alone"
"""The gap that ways are measured by: nothing computed again over chunks encoded alone."""

_SETS = ("biography:4", "carried", "bridge", "code")
_MAX_TOKENS = 16
_FILLER_TOKENS = 512
_NOTHING = torch.empty(0, dtype=torch.long)

# A prompt's KV, and the logits of its first answer token.
_Filled = tuple[FusedKV, torch.Tensor]


class Trial:
    """One question: full prefill's KV, and ways to replace it.

    Attributes
    ----------
    full
        Full prefill's KV of the prompt.
    chunks
        For each chunk that does not stand first, the positions of its tokens.
    rows
        ``[n]``: the positions of all of them, ascending.
    """

    def __init__(self, model: KVModel, asked: Asked) -> None:
        bank = ChunkBank(model, asked.question.passages, [get_codec("raw")])
        opener = bank.opener("raw")
        layout = bank.lay_out(asked.prompt, asked.question.passages)
        token_ids = asked.prompt.token_ids(model.tokenizer)
        alone = fill(model, layout, opener, NonePolicy())
        self._model = model
        self._token_ids = torch.tensor(token_ids)
        self._tables = model.tables(len(token_ids))
        self._reference = Answerer(model, _MAX_TOKENS).reference(token_ids)
        self._alone = alone.kv
        self._fresh = alone.fresh
        self._prefix_ids = bank.prefix_ids
        self._question_start = max(span.prompt_end for span in layout.spans)
        self.full = fill(model, replace(layout, spans=()), opener, NonePolicy()).kv
        self.chunks = [
            torch.arange(span.prompt_start, span.prompt_end)
            for span in layout.spans
            if span.prompt_start > len(bank.prefix_ids)
        ]
        self.rows = torch.cat(self.chunks)

    @property
    def layers(self) -> range:
        """The model's layers."""
        return range(self._model.spec.num_layers)

    def kl(self, filled: _Filled) -> float:
        """Return KL(full prefill || way) in nats, the mean along full prefill's answer."""
        kv, logits = filled
        kept = self._copy(kv, room=len(self._reference.token_ids))
        found = compare(FullContinuation(self._model, kept), logits, self._reference)
        return sum(found.kl) / len(found.kl)

    def encoded_after(self, *contexts: Sequence[int]) -> FusedKV:
        """Return KV with chunks encoded after a text, as the mean over several texts."""
        token_ids = [self._token_ids[rows].tolist() for rows in self.chunks]
        encoded = [
            self._model.prefill((*self._prefix_ids, *context), token_ids) for context in contexts
        ]
        kv = self._copy(self._alone)
        for rows, *records in zip(self.chunks, *encoded, strict=True):
            keys = torch.stack([record.keys for record in records]).mean(dim=0)
            values = torch.stack([record.values for record in records]).mean(dim=0)
            for layer in self.layers:
                self._place(kv, layer, rows, keys[layer])
                kv.values[layer][0][:, rows] = values[layer]
        return kv

    def relevance(self, kv: FusedKV) -> torch.Tensor:
        """Return ``[L, n]``: how much the question gathers from each of `rows` in each layer."""
        look = QuestionAttention(self.rows, self._question_start, self.layers)
        self._forward(self._copy(kv), [_NOTHING] * len(self.layers), look)
        return look.relevance

    def recomputed(self, kv: FusedKV, rows: Sequence[torch.Tensor]) -> _Filled:
        """Compute rows of chunks again, and all fresh rows.

        Parameters
        ----------
        kv
            The stored KV; it stays as it is.
        rows
            For each layer the positions; each layer's are among those of the layer before.
        """
        filled = self._copy(kv)
        return filled, self._forward(filled, rows)

    def answered(self, kv: FusedKV) -> _Filled:
        """Compute the fresh rows alone."""
        return self.recomputed(kv, [_NOTHING] * len(self.layers))

    def replaced(self, kv: FusedKV, rows: Sequence[torch.Tensor], which: str = "kv") -> _Filled:
        """Put full prefill's keys (``k``), values (``v``) or both in for each layer's rows."""
        filled = self._copy(kv)
        for layer in self.layers:
            if "k" in which:
                filled.keys[layer][:, :, rows[layer]] = self.full.keys[layer][:, :, rows[layer]]
            if "v" in which:
                filled.values[layer][:, :, rows[layer]] = self.full.values[layer][:, :, rows[layer]]
        return self.answered(filled)

    def spread(self, stored: FusedKV, repaired: FusedKV, rows: torch.Tensor) -> _Filled:
        """Add to a chunk's other rows half of the mean change of its recomputed rows.

        The change of a key is that of the position-free key. A chunk of few recomputed rows gets
        less: the mean of m rows counts ``m / (m + 3)``.
        """
        filled = self._copy(repaired)
        for chunk in self.chunks:
            is_new = torch.isin(chunk, rows)
            new, old = chunk[is_new], chunk[~is_new]
            if not len(new) or not len(old):
                continue
            weight = 0.5 * len(new) / (len(new) + 3)
            for layer in self.layers:
                change = self._strip(repaired, layer, new) - self._strip(stored, layer, new)
                moved = self._strip(stored, layer, old) + weight * change.mean(1, keepdim=True)
                self._place(filled, layer, old, moved)
                values, before = repaired.values[layer][0], stored.values[layer][0]
                change = (values[:, new] - before[:, new]).mean(1, keepdim=True)
                filled.values[layer][0][:, old] = before[:, old] + weight * change
        return self.answered(filled)

    def continued(
        self, kv: FusedKV, context: Sequence[int], rows: torch.Tensor, start: int
    ) -> _Filled:
        """Compute rows again from layer `start` on, from the hidden states they were encoded with.

        Parameters
        ----------
        kv
            The stored KV; it stays as it is.
        context
            The text that the chunks were encoded after.
        rows
            Positions of the rows, ascending.
        """
        before = [*self._prefix_ids, *context]
        states = []
        for chunk in self.chunks:
            fed = torch.tensor([[*before, *self._token_ids[chunk].tolist()]])
            output = self._model.hf(
                input_ids=fed, output_hidden_states=True, use_cache=False, logits_to_keep=1
            )
            states.append(output.hidden_states[start][0][len(before) :])
        entering = torch.cat(states)[torch.isin(self.rows, rows)]
        filled = self._copy(kv)
        with self._model.computing_rows():
            computed = self._fresh
            hidden = self._model.embed(self._token_ids[computed], computed)
            for layer in self.layers:
                if layer == start:
                    order = torch.cat([computed, rows]).argsort()
                    computed = torch.cat([computed, rows])[order]
                    hidden = torch.cat([hidden, entering])[order].contiguous()
                self._model.forward_rows(layer, hidden, computed, filled, self._tables[layer])
            return filled, self._model.logits(hidden[-1:])[0]

    def _forward(
        self, kv: FusedKV, rows: Sequence[torch.Tensor], look: QuestionAttention | None = None
    ) -> torch.Tensor:
        with self._model.computing_rows():
            computed = torch.cat([self._fresh, rows[0]]).sort().values
            hidden = self._model.embed(self._token_ids[computed], computed)
            for layer in self.layers:
                kept = torch.isin(computed, torch.cat([self._fresh, rows[layer]]))
                hidden, computed = hidden[kept].contiguous(), computed[kept]
                attending = Attending(observer=look.observer_of(layer) if look else None)
                self._model.forward_rows(
                    layer, hidden, computed, kv, self._tables[layer], attending=attending
                )
            return self._model.logits(hidden[-1:])[0]

    def _copy(self, kv: FusedKV, room: int = 0) -> FusedKV:
        copied = FusedKV(self._model.spec, kv.num_tokens, kv.num_tokens + room)
        for to, given in zip(copied.keys + copied.values, kv.keys + kv.values, strict=True):
            to[:, :, : kv.num_tokens] = given[:, :, : kv.num_tokens]
        return copied

    def _strip(self, kv: FusedKV, layer: int, rows: torch.Tensor) -> torch.Tensor:
        keys = kv.keys[layer][0][:, rows]
        free = torch.empty_like(keys)
        self._tables[layer].strip(keys, rows, free)
        return free

    def _place(self, kv: FusedKV, layer: int, rows: torch.Tensor, keys: torch.Tensor) -> None:
        placed = torch.empty_like(keys)
        self._tables[layer].place(keys.contiguous(), rows, placed)
        kv.keys[layer][0][:, rows] = placed


def nested(relevance: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return to which depth to compute each token, so that most relevance is gathered.

    A token that is computed to depth d gathers the relevance of its first d layers. Each layer has
    the same price, found by bisection.

    Parameters
    ----------
    relevance
        ``[L, n]``.
    num_rows
        Largest sum of the depths.

    Returns
    -------
    tensor
        ``[n]``: depths from 0 to L.
    """
    gathered = torch.cat([torch.zeros(1, relevance.shape[1]), relevance.cumsum(dim=0)])
    depths = torch.arange(len(gathered))[:, None]
    low, high = 0.0, float(relevance.max())
    for _ in range(40):
        price = (low + high) / 2
        is_dear = int((gathered - price * depths).argmax(dim=0).sum()) <= num_rows
        low, high = (low, price) if is_dear else (price, high)
    return (gathered - high * depths).argmax(dim=0)


def ways(trial: Trial, texts: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, _Filled]]:
    """Yield each way with what it makes of a prompt.

    Parameters
    ----------
    trial
        The prompt.
    texts
        Token ids of texts by name: ``filler``, from which pieces are cut, and others of the same
        length as one piece.
    """
    everything = [trial.rows] * len(trial.layers)
    filler = texts["filler"]
    piece = filler[-_FILLER_TOKENS:]
    pieces = [filler[-end : len(filler) - end + _FILLER_TOKENS] for end in range(512, 2049, 512)]
    alone = trial.encoded_after(())
    after = trial.encoded_after(piece)
    yield ALONE, trial.answered(alone)
    yield "after 512 tokens of filler", trial.answered(after)
    for length in (128, 256, 1024, 2048):
        kv = trial.encoded_after(filler[-length:])
        yield f"after {length:,} tokens of filler", trial.answered(kv)
    yield "after another 512 tokens", trial.answered(trial.encoded_after(pieces[1]))
    yield "mean of four fillers", trial.answered(trial.encoded_after(*pieces))
    for name, text in texts.items():
        if name != "filler":
            yield f"after 512 tokens of {name}", trial.answered(trial.encoded_after(text))
    for name, kv in (("alone", alone), ("filler", after)):
        yield f"{name}: all keys exact", trial.replaced(kv, everything, "k")
        yield f"{name}: all values exact", trial.replaced(kv, everything, "v")
        for ratio in (0.05, 0.15, 0.3):
            yield from _choices(trial, kv, f"{name}, {ratio:.0%}", ratio)
    context, start = piece, len(trial.layers) * 2 // 5
    chosen = _chosen(trial, trial.relevance(after).mean(dim=0), 0.15)
    yield "filler, 15%: from stored hidden states", trial.continued(after, context, chosen, start)
    yield (
        "filler: all from stored hidden states",
        trial.continued(after, context, trial.rows, start),
    )


def _choices(trial: Trial, kv: FusedKV, name: str, ratio: float) -> Iterator[tuple[str, _Filled]]:
    """Yield ways to choose a share of the tokens, over one stored KV."""
    layers, count = trial.layers, share_of(ratio, len(trial.rows))
    by_layer = trial.relevance(kv)
    relevance = by_layer.mean(dim=0)
    chosen = _chosen(trial, relevance, ratio)
    filled = trial.recomputed(kv, [chosen] * len(layers))
    yield f"{name}: question", filled
    yield f"{name}: question, spread to neighbours", trial.spread(kv, filled[0], chosen)
    yield f"{name}: question, exact rows", trial.replaced(kv, [chosen] * len(layers))
    each = [_chosen(trial, by_layer[layer], ratio) for layer in layers]
    yield f"{name}: question, each layer, exact rows", trial.replaced(kv, each)
    upper = [chosen if layer >= len(layers) // 2 else _NOTHING for layer in layers]
    yield f"{name}: question, upper half, exact rows", trial.replaced(kv, upper)
    depth = nested(by_layer, count * len(layers))
    yield (
        f"{name}: question, depth by token",
        trial.recomputed(kv, [trial.rows[depth > layer] for layer in layers]),
    )
    half = _chosen(trial, relevance, ratio / 2)
    again = trial.relevance(trial.recomputed(kv, [half] * len(layers))[0]).mean(dim=0)
    again[torch.isin(trial.rows, half)] = again.max() + 1
    yield (
        f"{name}: question, two looks",
        trial.recomputed(kv, [_chosen(trial, again, ratio)] * len(layers)),
    )
    for share in (0.5, 1.0):
        first = _first(trial, share * count)
        mixed = relevance.clone()
        mixed[torch.isin(trial.rows, first)] = mixed.max() + 1
        label = "chunk starts" if share == 1.0 else "half chunk starts, half question"
        yield (
            f"{name}: {label}",
            trial.recomputed(kv, [_chosen(trial, mixed, ratio)] * len(layers)),
        )


def _chosen(trial: Trial, score: torch.Tensor, ratio: float) -> torch.Tensor:
    return trial.rows[highest(score, share_of(ratio, len(trial.rows)))]


def _first(trial: Trial, count: float) -> torch.Tensor:
    """Return the first tokens of all chunks, the same number of each."""
    of_each = int(count / len(trial.chunks))
    return torch.cat([chunk[:of_each] for chunk in trial.chunks])


def _texts(model: KVModel) -> dict[str, Sequence[int]]:
    code = Path(argparse.__file__).read_text("utf-8")
    (coded,) = model.tokenizer([code], add_special_tokens=False)["input_ids"]
    return {
        "filler": filler_ids(model.tokenizer),
        "program code": tuple(coded[_FILLER_TOKENS : 2 * _FILLER_TOKENS]),
    }


@torch.inference_mode()
def main() -> None:
    """Run the trials and print a table; a file of trials continues where it stopped."""
    parser = argparse.ArgumentParser(prog="python -m kvrag_bench.quality.ways", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a folder or a name")
    parser.add_argument("--suite", default=",".join(_SETS), help="sets of the real suite")
    parser.add_argument("--questions", type=int, default=3, help="questions of each set")
    parser.add_argument("--seed", type=int, default=7, help="seed of the questions")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    options = parser.parse_args()
    model = KVModel.load(options.model)
    questions = load_suite(
        options.suite.split(","), seed=options.seed, num_questions_per_set=options.questions
    )
    asked = prompts_that_fit(model, questions, _MAX_TOKENS, use_chat_template=True)
    texts = _texts(model)
    done = options.out.read_text("utf-8").splitlines() if options.out.exists() else []
    with options.out.open("a", encoding="utf-8") as file:
        for number, one in enumerate(asked[len(done) :], len(done) + 1):
            trial = Trial(model, one)
            line = json.dumps({way: trial.kl(filled) for way, filled in ways(trial, texts)})
            file.write(line + "\n")
            file.flush()
            done.append(line)
            print(f"question {number} of {len(asked)}", flush=True)
    _print_table([json.loads(line) for line in done])


def _print_table(trials: Sequence[Mapping[str, float]]) -> None:
    gaps = [trial[ALONE] for trial in trials]
    print(f"{len(trials)} questions, KL {sum(gaps) / len(gaps):.3f} over chunks encoded alone")
    for way in trials[0]:
        left = [trial[way] for trial in trials]
        low, high = ratio_interval(left, gaps)
        closed = 1 - sum(left) / sum(gaps)
        print(f"{way:50}  {closed:6.1%}  ({1 - high:.1%} to {1 - low:.1%})")


if __name__ == "__main__":
    main()
