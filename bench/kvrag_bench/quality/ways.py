"""What could close the gap to full prefill: bounds and trials, on the same questions.

``python -m kvrag_bench.quality.ways --model smollm2-135m --out FILE``. This is research: it says
why policies and contexts are what they are. Rows of full prefill that replace stored rows bound
what computing these rows again can reach, and a chunk encoded after the prompt's own other chunks
bounds what text before it can.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvrag.errors import KVRagError, ParameterError
from kvrag.fusion.policies.base import highest, share_of
from kvrag.ingest.contexts import SEPARATOR, filler_ids, join_passages
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.tokens import encode
from kvrag.tune.bootstrap import ratio_interval
from kvrag_bench.judge.judging import prompts_that_fit
from kvrag_bench.judge.questions import JudgedQuestion
from kvrag_bench.quality.datasets import load_suite
from kvrag_bench.quality.trial import MAX_TOKENS, Filled, Trial

ALONE = "encoded alone"
"""The gap that ways are measured by: nothing computed again over chunks encoded alone."""

_SETS = ("biography:4", "carried", "bridge", "code", "needle:2k")
_CONTEXT_TOKENS = 512
_RATIO = 0.15
_NOTHING = torch.empty(0, dtype=torch.long)
# Questions that no trial asks: texts for contexts, and prompts to fit a correction on.
_OTHERS = 8
_FITTED_ON = 2


class Texts:
    """Texts to encode chunks after, each as long as the context.

    Parameters
    ----------
    model
        Its tokenizer cuts them.
    others
        Questions of all sets that no trial asks.
    asked
        The questions that are asked: their chunks are in no text.
    """

    def __init__(
        self, model: KVModel, others: Sequence[JudgedQuestion], asked: Sequence[JudgedQuestion]
    ) -> None:
        self._tokenizer = model.tokenizer
        self.filler = filler_ids(model.tokenizer)
        is_asked = {text for question in asked for text in question.texts}
        by_set: dict[str, dict[str, None]] = {}
        for question in others:
            new = dict.fromkeys(text for text in question.texts if text not in is_asked)
            by_set.setdefault(question.type, {}).update(new)
        self._by_set = {
            name: Random(3).sample(list(texts), len(texts)) for name, texts in by_set.items()
        }

    def passages(self, *names: str) -> tuple[int, ...]:
        """Return passages of sets, in turn one of each."""
        in_turn = chain.from_iterable(zip_longest(*(self._by_set[name] for name in names)))
        return self._ids(join_passages(filter(None, in_turn), _CONTEXT_TOKENS))

    def passages_without(self, name: str) -> tuple[int, ...]:
        """Return passages of all sets but one."""
        return self.passages(*(one for one in self._by_set if one != name))

    def passages_of_all(self) -> tuple[int, ...]:
        """Return passages of all sets."""
        return self.passages(*self._by_set)

    def code(self) -> tuple[int, ...]:
        """Return program code."""
        source = Path(argparse.__file__).read_text("utf-8")
        return self._ids(source[20_000:24_000])

    def own_prompt(self, trial: Trial) -> list[tuple[int, ...]]:
        """Return, for each chunk, the prompt's other chunks in an order of chance."""
        token_ids = [trial.token_ids(rows) for rows in trial.chunks]
        blank = self._ids("")
        found = []
        for at in range(len(token_ids)):
            others = [ids for number, ids in enumerate(token_ids) if number != at]
            Random(at).shuffle(others)
            joined = chain.from_iterable((*ids, *blank) for ids in others)
            found.append(tuple(joined)[-_CONTEXT_TOKENS:])
        return found

    def _ids(self, text: str) -> tuple[int, ...]:
        (tokens,) = encode(self._tokenizer, [text + SEPARATOR], add_special_tokens=False)
        return tokens.token_ids[-_CONTEXT_TOKENS:]


class Correction:
    """A linear map from stored to fresh KV for each layer and head, fitted by ridge regression.

    Keys are position-free. Fitted on prompts of other questions, in closed form.
    """

    def __init__(self) -> None:
        self._squares: torch.Tensor | None = None
        self._products: torch.Tensor | None = None

    def fit(self, trial: Trial, kv: FusedKV) -> None:
        """Take in one prompt: its stored KV, and full prefill's."""
        free = trial.free(kv).float()
        stored = _with_ones(free)
        squares = stored.mT @ stored
        products = stored.mT @ (trial.free(trial.full).float() - free)
        self._squares = squares if self._squares is None else self._squares + squares
        self._products = products if self._products is None else self._products + products

    def apply(self, trial: Trial, kv: FusedKV) -> FusedKV:
        """Return KV with each row moved to where fresh KV is expected."""
        assert self._squares is not None
        assert self._products is not None
        width = self._squares.shape[-1]
        scale = self._squares.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
        ridge = 1e-2 * scale * torch.eye(width)
        weights = torch.linalg.solve(self._squares + ridge, self._products)
        free = trial.free(kv).float()
        moved = free + _with_ones(free) @ weights
        return trial.with_free(moved.to(kv.keys[0].dtype))


def _with_ones(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)


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


def ways(
    trial: Trial, name: str, texts: Texts, corrections: Mapping[str, Correction]
) -> Iterator[tuple[str, Filled]]:
    """Yield each way with what it makes of a prompt.

    Parameters
    ----------
    trial
        The prompt.
    name
        The set that its question is of.
    texts
        Texts to encode chunks after.
    corrections
        Fitted over chunks encoded alone, and after the filler.
    """
    filler = texts.filler
    piece = filler[-_CONTEXT_TOKENS:]
    pieces = [filler[-end : len(filler) - end + _CONTEXT_TOKENS] for end in range(512, 2049, 512)]
    alone, after = trial.encoded_after(()), trial.encoded_after(piece)
    same = trial.encoded_after(texts.passages(name))
    yield ALONE, trial.answered(alone)
    stored = {
        "512 tokens of filler": after,
        **{
            f"{length:,} tokens of filler": trial.encoded_after(filler[-length:])
            for length in (128, 2048)
        },
        "four fillers, their mean": trial.encoded_after(*pieces),
        "program code": trial.encoded_after(texts.code()),
        "passages of the same set": same,
        "passages of all sets": trial.encoded_after(texts.passages_of_all()),
        "passages of the other sets": trial.encoded_after(texts.passages_without(name)),
        "the prompt's other chunks": trial.each_encoded_after(texts.own_prompt(trial)),
    }
    for label, kv in stored.items():
        yield f"after {label}", trial.answered(kv)
        yield f"after {label}: question", trial.recomputed(kv, _by_question(trial, kv))
    for label, kv in (("alone", alone), ("filler", after)):
        corrected = corrections[label].apply(trial, kv)
        yield f"{label}, corrected", trial.answered(corrected)
        yield (
            f"{label}, corrected: question",
            trial.recomputed(corrected, _by_question(trial, corrected)),
        )
    everything = [trial.rows] * len(trial.layers)
    for label, kv in (("alone", alone), ("filler", after), ("same set", same)):
        yield f"{label}: all keys exact", trial.replaced(kv, everything, "k")
        yield f"{label}: all values exact", trial.replaced(kv, everything, "v")
        yield from _choices(trial, kv, label)
    chosen, start = _by_question(trial, after)[0], len(trial.layers) * 2 // 5
    yield "filler: question, from hidden states", trial.continued(after, piece, chosen, start)


def _choices(trial: Trial, kv: FusedKV, name: str) -> Iterator[tuple[str, Filled]]:
    """Yield ways to choose a share of the tokens, over one stored KV."""
    layers, count = trial.layers, share_of(_RATIO, len(trial.rows))
    by_layer = trial.relevance(kv)
    relevance = by_layer.mean(dim=0)
    chosen = _chosen(trial, relevance)
    filled = trial.recomputed(kv, [chosen] * len(layers))
    if name == "alone":
        yield f"{name}: question", filled
    yield f"{name}: question, shifted", trial.spread(kv, filled[0], chosen)
    yield f"{name}: question, exact rows", trial.replaced(kv, [chosen] * len(layers))
    each = [_chosen(trial, by_layer[layer]) for layer in layers]
    yield f"{name}: question, each layer, exact rows", trial.replaced(kv, each)
    depth = nested(by_layer, count * len(layers))
    yield (
        f"{name}: question, depth by token",
        trial.recomputed(kv, [trial.rows[depth > layer] for layer in layers]),
    )
    half = _chosen(trial, relevance, _RATIO / 2)
    again = trial.relevance(trial.recomputed(kv, [half] * len(layers))[0]).mean(dim=0)
    again[torch.isin(trial.rows, half)] = again.max() + 1
    yield (
        f"{name}: question, two looks",
        trial.recomputed(kv, [_chosen(trial, again)] * len(layers)),
    )
    for share in (0.5, 1.0):
        first = _first(trial, share * count)
        mixed = relevance.clone()
        mixed[torch.isin(trial.rows, first)] = mixed.max() + 1
        label = "chunk starts" if share == 1.0 else "half chunk starts, half question"
        yield (
            f"{name}: {label}",
            trial.recomputed(kv, [_chosen(trial, mixed)] * len(layers)),
        )


def _by_question(trial: Trial, kv: FusedKV) -> list[torch.Tensor]:
    """Return the rows that the question gathers most from, the same in each layer."""
    return [_chosen(trial, trial.relevance(kv).mean(dim=0))] * len(trial.layers)


def _chosen(trial: Trial, score: torch.Tensor, ratio: float = _RATIO) -> torch.Tensor:
    return trial.rows[highest(score, share_of(ratio, len(trial.rows)))]


def _first(trial: Trial, count: float) -> torch.Tensor:
    """Return the first tokens of all chunks, the same number of each."""
    of_each = int(count / len(trial.chunks))
    return torch.cat([chunk[:of_each] for chunk in trial.chunks])


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
    try:
        _run(options)
    except KVRagError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> None:
    model = KVModel.load(options.model)
    sets = options.suite.split(",")
    settings = {
        "model": model.fingerprint,
        "suite": options.suite,
        "questions": options.questions,
        "seed": options.seed,
    }
    done = _read(options.out, settings)
    questions = load_suite(sets, seed=options.seed, num_questions_per_set=options.questions)
    others = load_suite(sets, seed=options.seed + 1, num_questions_per_set=_OTHERS)
    asked = prompts_that_fit(model, questions, MAX_TOKENS, use_chat_template=True)
    texts = Texts(model, others, questions)
    corrections = _fitted(model, others, texts) if len(done) < len(asked) else {}
    with options.out.open("a", encoding="utf-8") as file:
        for number, one in enumerate(asked[len(done) :], len(done) + 1):
            trial = Trial(model, one)
            tried = ways(trial, one.question.type, texts, corrections)
            found = {way: trial.kl(filled) for way, filled in tried}
            file.write(json.dumps({"settings": settings, "kl": found}) + "\n")
            file.flush()
            done.append(found)
            print(f"question {number} of {len(asked)}", flush=True)
    _print_table(done)


def _read(path: Path, settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the trials in a file, without half a line at its end; make it if there is none."""
    found = []
    try:
        with path.open("ab+") as file:
            file.seek(0)
            *whole, half = file.read().split(b"\n")
            for number, line in enumerate(whole, start=1):
                try:
                    trial = json.loads(line)
                    is_ours = trial["settings"] == settings and ALONE in trial["kl"]
                except (ValueError, KeyError, TypeError):
                    is_ours = False
                if not is_ours:
                    raise ParameterError(
                        f"{path}, line {number}: expected a trial of this model, suite, seed and "
                        "number of questions; name another file"
                    )
                found.append(trial["kl"])
            file.truncate(file.tell() - len(half))
    except OSError as error:
        raise ParameterError(f"{path} cannot be used: {error.strerror}") from error
    return found


def _fitted(
    model: KVModel, others: Sequence[JudgedQuestion], texts: Texts
) -> dict[str, Correction]:
    by_set: dict[str, list[JudgedQuestion]] = {}
    for question in others:
        by_set.setdefault(question.type, []).append(question)
    few = [question for one in by_set.values() for question in one[:_FITTED_ON]]
    found = {"alone": Correction(), "filler": Correction()}
    for asked in prompts_that_fit(model, few, MAX_TOKENS, use_chat_template=True):
        trial = Trial(model, asked)
        found["alone"].fit(trial, trial.encoded_after(()))
        found["filler"].fit(trial, trial.encoded_after(texts.filler[-_CONTEXT_TOKENS:]))
    return found


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
