"""The options of one training run of links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import ParameterError
from kvrag.fusion.links import MAX_DOCUMENTS, MODES, WAYS, WRITER
from kvrag.ingest.contexts import FILLER, NO_CONTEXT, SIMILAR, Context, parse_context
from kvrag.ingest.profiles import check_use
from kvrag_train.links.memory import AUTO, PRECISIONS

LOSSES = ("labels", "distill")

_RATES = {"tuned": 1e-3, "frozen": 2e-3, WRITER: 4e-4}


@dataclass(frozen=True)
class LinkTrainingOptions:
    """Options of one run; the defaults suit models of a few million parameters.

    The paper's (KVLink §4.1, models of 1 to 8 billion): rate 5e-6 for all weights, 6,000 steps of
    64 rows of up to 4,096 tokens, 600 of warm-up; AdamW with betas (0.9, 0.999), no weight decay,
    cosine, gradients clipped at 1: these last are fixed here.

    Attributes
    ----------
    out
        Folder of the run and of its results.
    model
        Folder or name of the model.
    data
        ``"generated"``, ``"real"`` or a file (`open_source`).
    num_links
        K.
    max_documents
        Most documents of a prompt that have links.
    mode
        ``"tuned"``: the whole model learns. ``"frozen"``: it stays as it is.
    way
        Trained by ``frozen``: ``"embeddings"``, ``"adapter"`` or `WRITER` (see `LinksHeader`). A
        writer has no links; its loss is ``"distill"``, and the distance of keys and values.
    loss
        ``"labels"``: cross-entropy of the answers. ``"distill"``: KL to the untouched model's full
        prefill of the same prompt without links, along the answers.
    teacher_answers
        Whether ``"distill"`` follows that model's own answers, so that no labels are needed.
    answer_tokens
        Most tokens in such an answer.
    rank
        Rank of the adapter.
    steps, warmup_steps
        Optimizer steps; the rate rises over the first. A run may continue with more steps: the
        rate then falls as if the run had begun with that number.
    rows, questions
        Rows of documents in each step, and most questions about each.
    plain_share
        Share of the rows that are plain prompts, so that a tuned model stays as good at them;
        frozen ones cannot change.
    learning_rate
        Peak rate of the model's weights or the adapter's; None: 1e-3 tuned, 2e-3 frozen, 4e-4 for
        a writer.
    link_learning_rate
        Peak rate of the links' own embeddings or keys and values.
    seed
        Seed of everything random.
    evaluate_every, evaluate_questions, save_every
        Steps between evaluations, held-out questions asked, and steps between checkpoints.
    keep_order
        Do not shuffle a file's documents.
    answer_prefix
        See `FileSource`.
    context
        ``"none"`` or ``"filler[:TOKENS]"``, for a writer also ``"similar[:TOKENS]"``: the text that
        documents are encoded after, as in the index that the links or the writer are for.
    device
        Device to train on; None means the CPU.
    precision
        Arithmetic: ``"float32"``, ``"bfloat16"``, or ``"auto"`` (bfloat16 on GPUs that have it).
        A tuned model's weights and the optimizer stay in float32.
    gradient_checkpointing
        Keep less for the backward pass and compute layers twice; not with way ``"adapter"``.
    """

    out: Path
    model: str = "kvrag-tiny"
    data: str = "generated"
    num_links: int = 5
    max_documents: int = MAX_DOCUMENTS
    mode: str = "tuned"
    way: str = "embeddings"
    loss: str = "labels"
    teacher_answers: bool = False
    answer_tokens: int = 16
    rank: int = 16
    steps: int = 400
    warmup_steps: int = 20
    rows: int = 10
    questions: int = 14
    plain_share: float = 0.3
    learning_rate: float | None = None
    link_learning_rate: float = 5e-3
    seed: int = 0
    evaluate_every: int = 100
    evaluate_questions: int = 300
    save_every: int = 50
    keep_order: bool = False
    answer_prefix: str | None = None
    context: str = NO_CONTEXT
    device: str | None = None
    precision: str = AUTO
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        counts = [
            *("num_links", "max_documents", "rank", "steps", "rows", "questions"),
            *("evaluate_every", "evaluate_questions", "save_every", "answer_tokens"),
        ]
        checks = [
            *((name, getattr(self, name) >= 1, "at least 1") for name in counts),
            ("mode", self.mode in MODES, f"one of {', '.join(MODES)}"),
            ("way", self.way in (*WAYS, WRITER), f"one of {', '.join((*WAYS, WRITER))}"),
            ("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
            ("loss", self.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
            ("plain_share", 0.0 <= self.plain_share < 1.0, "0 or more, less than 1"),
            ("learning_rate", 0.0 < self.rate < math.inf, "more than 0, and finite"),
            (
                "link_learning_rate",
                0.0 < self.link_learning_rate < math.inf,
                "more than 0, and finite",
            ),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
        ]
        for name, holds, expected in checks:
            if not holds:
                found = getattr(self, name)
                raise ParameterError(f"training: {name} {found!r}: expected {expected}")
        if self.num_plain_rows >= self.rows:
            raise ParameterError(
                f"training: plain_share {self.plain_share} of {self.rows} rows a step leaves "
                "none with links: expected less, or more rows"
            )
        if self.mode == "tuned" and self.way != "embeddings":
            raise ParameterError(
                f"training: way {self.way!r} is one of mode 'frozen'; 'tuned' trains the whole "
                "model with link embeddings"
            )
        if self.gradient_checkpointing and self.way != "embeddings":
            # An adapter acts during the forward; layers recomputed after it would lack the adapter.
            raise ParameterError(
                "training: gradient_checkpointing goes with modes and ways without an adapter; "
                "leave it out, or choose another way"
            )
        if self.is_writer:
            check_use(self.chunk_context)
            if self.loss != "distill":
                raise ParameterError(f"training: loss {self.loss!r}: a writer's is 'distill'")
        elif self.chunk_context.name not in (NO_CONTEXT, FILLER):
            raise ParameterError(
                f"training: context {self.context}: expected {NO_CONTEXT} or {FILLER}[:TOKENS]; "
                "documents of the data have no other text before them"
            )
        if self.teacher_answers and self.loss != "distill":
            raise ParameterError("training: teacher_answers is of loss 'distill'")

    @property
    def rate(self) -> float:
        """The learning rate of weights."""
        kind = WRITER if self.is_writer else self.mode
        return _RATES.get(kind, 1.0) if self.learning_rate is None else self.learning_rate

    @property
    def is_writer(self) -> bool:
        """Whether a writer is trained, not links."""
        return self.way == WRITER

    @property
    def num_plain_rows(self) -> int:
        """Number of plain prompts among a step's rows."""
        return round(self.plain_share * self.rows) if self.mode == "tuned" else 0

    @property
    def num_filler(self) -> int:
        """Tokens of filler that documents are encoded after."""
        return 0 if self.chunk_context.name == SIMILAR else self.chunk_context.num_tokens

    @property
    def num_similar(self) -> int:
        """Tokens of its nearest documents that each is encoded after."""
        return self.chunk_context.num_tokens if self.chunk_context.name == SIMILAR else 0

    @property
    def chunk_context(self) -> Context:
        """What documents are encoded after."""
        return parse_context(self.context)

    def identity(self) -> dict[str, object]:
        """Return the options that a run must share with the one that it continues."""
        names = [
            *("model", "data", "num_links", "max_documents", "mode", "way", "loss", "rank"),
            *("rows", "questions", "plain_share", "rate", "link_learning_rate", "seed"),
            *("teacher_answers", "answer_tokens", "keep_order", "answer_prefix"),
        ]
        found: dict[str, object] = {name: getattr(self, name) for name in names}
        if self.num_filler:
            found["num_filler"] = self.num_filler
        if self.num_similar:
            found["num_similar"] = self.num_similar
        return found
