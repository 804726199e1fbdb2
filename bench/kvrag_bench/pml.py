"""`kvrag bench pml`: a schema's encoding and its prompts' first token, against full prefill.

The whole path is timed: from the prompt's markup to the first token, and from the schema's markup
to records on disk. Full prefill gets the very same token ids, ready made.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.controller import make_choice, takes_ratio
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.pml.batch import generate_batch
from kvrag.pml.engine import PMLEngine
from kvrag_bench.floor import FloorMeter
from kvrag_bench.memory import peak_bytes
from kvrag_bench.shapes import chosen_model, random_text


@dataclass(frozen=True)
class PMLBenchOptions:
    """What to measure.

    Attributes
    ----------
    model, shape, repeats
        As in `kvrag_bench.ttft.TTFTOptions`.
    num_modules, module_tokens
        Modules imported, and tokens of each.
    text_tokens
        Tokens of the prompt's own text.
    policy, ratio
        How reused modules are repaired.
    batch
        Number of prompts of the same modules answered together, each with a different text.
    """

    model: str | None = None
    shape: str = "qwen2.5-0.5b"
    num_modules: int = 6
    module_tokens: int = 500
    text_tokens: int = 30
    policy: str = "none"
    ratio: float = 0.15
    batch: int = 8
    repeats: int = 3

    def __post_init__(self) -> None:
        counts = (self.num_modules, self.module_tokens, self.text_tokens, self.batch, self.repeats)
        if min(counts) < 1:
            raise ParameterError("bench pml: modules, tokens, batch and repeats must be 1 or more")
        make_choice(self.policy)


@dataclass(frozen=True)
class PMLBenchRow:
    """The results; seconds are medians.

    Attributes
    ----------
    speedup
        Plain time to first token over ours.
    floor_seconds, floor_ratio
        The least it could take here (`FloorMeter`), and ours over it.
    encode_tokens_per_second, prefill_tokens_per_second, encode_share
        Module tokens encoded and stored, the same modules merely prefilled by the model, and the
        ratio.
    batch, batch_peak_bytes, single_peak_bytes
        Prompts answered together, and by how much resident memory rose while they were, and while
        one prompt was.
    kv_bytes
        Bytes of one prompt's KV.
    """

    model: str
    policy: str
    num_modules: int
    module_tokens: int
    text_tokens: int
    num_tokens: int
    plain_ttft_seconds: float
    ttft_seconds: float
    speedup: float
    floor_seconds: float
    floor_ratio: float
    encode_tokens_per_second: float
    prefill_tokens_per_second: float
    encode_share: float
    batch: int
    batch_peak_bytes: int
    single_peak_bytes: int
    kv_bytes: int


def run_pml_bench(
    options: PMLBenchOptions, on_progress: Callable[[str], None] | None = None
) -> PMLBenchRow:
    """Measure one schema and one prompt of it.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        Before anything is timed.
    """
    say = on_progress or (lambda _: None)
    say("loading the model")
    model = chosen_model(options.model, options.shape)
    texts = [
        random_text(model, options.module_tokens, seed=number)
        for number in range(options.num_modules)
    ]
    schema, prompt = _markup(texts, random_text(model, options.text_tokens, seed=-1))
    say("encoding the schema, and prefilling it plainly")
    encoded, prefilled = _throughputs(model, schema, texts, options.repeats)
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder,
        Index.create(Path(folder) / "index", model=model, embedding="hashing") as index,
    ):
        engine = KVEngine(index)
        pml = PMLEngine(engine)
        pml.encode(schema)
        placed = pml.place(prompt)
        say(f"full prefill of {len(placed.layout.token_ids)} tokens")
        engine.plain_ttft_seconds(placed)
        plain = median(engine.plain_ttft_seconds(placed) for _ in range(options.repeats))
        say("the prompt, from its modules")
        ratio = options.ratio if takes_ratio(options.policy) else None
        times = []
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            fused = engine.fuse(pml.place(prompt), policy=options.policy, ratio=ratio, max_tokens=1)
            int(fused.logits.argmax())
            times.append(time.perf_counter() - started)
            # As generation does after an answer.
            engine.give_back(fused)
        ttft = median(times[1:])
        floor = FloorMeter(model).measure(fused.report).seconds
        say(f"{options.batch} prompts together")
        asked = [
            _markup(texts, random_text(model, options.text_tokens, seed=-2 - number))[1]
            for number in range(options.batch)
        ]
        # Another engine: the one that was timed keeps the buffer of its last prompt.
        fresh = PMLEngine(KVEngine(index))
        fresh.add(schema)
        single = peak_bytes(lambda: generate_batch(fresh, asked[:1], max_tokens=1))
        together = peak_bytes(lambda: generate_batch(fresh, asked, max_tokens=1))
    return PMLBenchRow(
        model=model.name,
        policy=options.policy,
        num_modules=options.num_modules,
        module_tokens=options.module_tokens,
        text_tokens=options.text_tokens,
        num_tokens=fused.report.num_tokens,
        plain_ttft_seconds=plain,
        ttft_seconds=ttft,
        speedup=plain / ttft,
        floor_seconds=floor,
        floor_ratio=ttft / floor,
        encode_tokens_per_second=encoded,
        prefill_tokens_per_second=prefilled,
        encode_share=encoded / prefilled,
        batch=options.batch,
        batch_peak_bytes=together,
        single_peak_bytes=single,
        kv_bytes=fused.report.num_tokens * model.spec.bytes_per_token,
    )


def _markup(texts: list[str], asked: str) -> tuple[str, str]:
    modules = "".join(f"<module name='m{n}'>{text}</module>" for n, text in enumerate(texts))
    imports = "".join(f"<m{n}/>" for n in range(len(texts)))
    return (
        f"<schema name='bench'>{modules}</schema>",
        f"<prompt schema='bench'>{imports}{asked}</prompt>",
    )


def _throughputs(
    model: KVModel, schema: str, texts: list[str], repeats: int
) -> tuple[float, float]:
    """Return tokens a second of encoding a schema, and of the model's own forwards over it."""
    encoding, prefilling = [], []
    ids = [model.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    num_tokens = 0
    # In turn, so that a machine that drifts drifts for both.
    for _ in range(repeats + 1):
        with (
            tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder,
            Index.create(Path(folder) / "index", model=model, embedding="hashing") as index,
        ):
            pml = PMLEngine(KVEngine(index))
            started = time.perf_counter()
            num_tokens = pml.encode(schema).num_tokens_computed
            encoding.append(time.perf_counter() - started)
        prefilling.append(_prefill_seconds(model, ids))
    return num_tokens / median(encoding[1:]), num_tokens / median(prefilling[1:])


def _prefill_seconds(model: KVModel, ids: list[torch.Tensor]) -> float:
    started = time.perf_counter()
    with torch.no_grad(), model.lock:
        for one in ids:
            model.hf.base_model(input_ids=one.to(model.device), use_cache=True)
    return time.perf_counter() - started
