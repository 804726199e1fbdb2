"""One training run of links, with or without their model: steps, loss, what is kept."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch.nn import functional

from kvrag.errors import ParameterError
from kvrag.fusion.links import FILE_NAME, WRITER, LinksHeader
from kvrag.ingest.chunker import MIN_CHUNK_TOKENS
from kvrag.ingest.contexts import check_filler
from kvrag.ingest.profiles import WRITER_NAME
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer, model_fingerprint
from kvrag.models.pretrained import load_weights
from kvrag.regularfile import replace_file
from kvrag_bench.quality.retrieved import similar_to
from kvrag_train.batches import IGNORED
from kvrag_train.links.batch import LinkBatch, Packer
from kvrag_train.links.checkpoint import load_checkpoint, save_checkpoint
from kvrag_train.links.data import FileSource, LinkItem, Source, open_source
from kvrag_train.links.memory import chosen_precision, computing_in
from kvrag_train.links.optimizer import average_and_clip, new_optimizer, rate_factor
from kvrag_train.links.options import LinkTrainingOptions
from kvrag_train.links.parameters import LinkParameters
from kvrag_train.links.processes import ALONE, Processes
from kvrag_train.links.scoring import divergence, kl, right, score
from kvrag_train.links.sharding import whole_state
from kvrag_train.links.student import KV, distance, training_mode
from kvrag_train.links.teaching import make_students

CHECKPOINT = "checkpoint.safetensors"
LOG = "log.jsonl"
_SCALES = {"adapter": 1.0, WRITER: 2.0}
# How much the distance of keys and values counts beside the KL divergence a token.
_KV_WEIGHT = 0.5


class _Counts(NamedTuple):
    """Results of some items: their summed loss, their counts, and a writer's distance of KV."""

    lost: float = 0.0
    tokens: float = 0
    right: float = 0
    asked: float = 0
    links: float = 0
    apart: float = 0


class LinkTrainer:
    """Trains links of one model.

    Parameters
    ----------
    options
        What to train; a folder that holds a checkpoint of the same run is continued.
    model, source
        Replace those that `options` name. A model given is trained itself in mode ``tuned``.
    processes
        Those that train together, each with a trainer of the same options (`launched`).

    Raises
    ------
    ParameterError
        When data cannot be read, a folder holds another run, or a process has no work.
    ModelLoadError, UnsupportedModelError
    """

    def __init__(
        self,
        options: LinkTrainingOptions,
        model: KVModel | None = None,
        source: Source | None = None,
        processes: Processes = ALONE,
    ) -> None:
        if options.rows < processes.count:
            raise ParameterError(
                f"training: {options.rows} rows a step for {processes.count} processes: "
                "expected at least one for each; give --rows, or launch fewer"
            )
        self.options = options
        self.processes = processes
        self.step = 0
        is_tuned = options.mode == "tuned"
        self.model = model or _load(options, processes)
        self.source = source or open_source(
            options.data,
            self.model.tokenizer,
            keep_order=options.keep_order,
            answer_prefix=options.answer_prefix,
        )
        if self.model.tokenizer.eos_token_id is None:
            raise ParameterError(f"{self.model.name}: its tokenizer names no end token")
        if options.is_writer and processes.is_sharded:
            raise ParameterError("training: a writer is not trained with FSDP; launch without it")
        scale = _SCALES.get(options.way, 0.0)
        base_fingerprint = self._base_fingerprint()
        self.header = LinksHeader(
            mode=options.mode,
            way=options.way,
            num_links=0 if options.is_writer else options.num_links,
            max_documents=0 if options.is_writer else options.max_documents,
            model_fingerprint="" if is_tuned else base_fingerprint,
            scale=scale,
        )
        self.parameters = LinkParameters(self.model, self.header, options.rank, options.seed)
        device = processes.device or self.model.device
        self.parameters.to(device)
        if processes.is_sharded:
            for parameter in self.parameters.parameters():
                parameter.data = processes.tensor_of_main(parameter.data)
        self.precision = chosen_precision(options.precision, device)
        similar = None
        room = self.model.max_positions - len(self.model.default_prefix_ids())
        check_filler(options.chunk_context, self.model.tokenizer, room, MIN_CHUNK_TOKENS)
        if options.num_similar:
            if not isinstance(self.source, FileSource):
                raise ParameterError(
                    f"training: context {options.context}: data 'generated' is new in each step, "
                    "and nothing is near it; give real, a file or a folder"
                )
            similar = similar_to(self.source.texts, self.model.tokenizer, options.num_similar)
        self.packer = Packer(self.model, self.header, options.num_filler, similar)
        self.student, self.teacher = make_students(
            self.model, self.parameters, self.packer, options, processes, self.precision
        )
        self._trained = {
            f"links/{name}": weight
            for name, weight in self.parameters.named_parameters()
            if weight.requires_grad
        }
        if is_tuned:
            named = self.model.hf.named_parameters()
            self._trained |= {f"model/{name}": weight for name, weight in named}
        self.optimizer = new_optimizer(self._trained, options)
        self.checkpoint = options.out / CHECKPOINT
        # By what they are, not only by what they are called: files change under their names.
        self._run: dict[str, object] = {
            **options.identity(),
            "model_fingerprint": base_fingerprint,
            "data_digest": self.source.digest,
        }
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParameterError(f"--out {options.out}: no folder can be made ({error})") from error
        processes.check_same({**vars(options), **self._run})
        if self.checkpoint.exists():
            self.step = load_checkpoint(self.checkpoint, self._run, self._trained, self.optimizer)
        if self.step > options.steps:
            raise ParameterError(
                f"{self.checkpoint} has {self.step:,} steps, asked for {options.steps:,}: give at "
                "least as many, or name another --out"
            )
        processes.check_same({"step": self.step})

    def run(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """Train until the last step, and write what was trained into the folder.

        Parameters
        ----------
        on_progress
            Receives a line after each step.
        """
        options = self.options
        self._cut_log()
        with training_mode(
            self.model, options.mode == "tuned", checkpointing=options.gradient_checkpointing
        ):
            while self.step < options.steps:
                started = time.perf_counter()
                record = self.advance()
                record["seconds"] = round(time.perf_counter() - started, 3)
                is_last = self.step == options.steps
                if is_last or self.step % options.evaluate_every == 0:
                    record.update(self.evaluate())
                self._log(record)
                on_progress(_line(record, options.steps))
                if is_last or self.step % options.save_every == 0:
                    self._save_checkpoint()
        self.export()

    def advance(self) -> dict[str, float]:
        """Take one optimizer step and return its record. Call inside `training_mode`."""
        options = self.options
        rng = Random(f"links {options.seed} {self.step}")
        items = self.source.draw(rng, options.rows, options.questions)
        num_plain = options.num_plain_rows
        factor = rate_factor(self.step, options.steps, options.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * factor
        record: dict[str, float] = {"step": self.step, "rate": options.rate * factor}
        parts = [
            (name, part, linked)
            for name, part, linked in (
                ("linked", items[num_plain:], True),
                ("plain", items[:num_plain], False),
            )
            if part
        ]
        learned = [self._learn(part, linked) for _, part, linked in parts]
        counts = self._totals([found for _, found in learned])
        for (name, _, _), found in zip(parts, counts, strict=True):
            record[f"loss/{name}"] = round(found.lost / found.tokens, 5)
            if options.is_writer:
                record["apart"] = round(found.apart / found.tokens, 5)
            record[f"accuracy/{name}"] = round(found.right / found.asked, 4)
        if options.mode == "frozen" and not any(found.links for found in counts):
            raise ParameterError(
                f"training: step {self.step} has nothing to learn from: none of its "
                f"{options.rows} sets of documents holds one that is found in its prompts, so no "
                "link is in them; give longer documents, or more rows a step"
            )
        lost = sum(found.lost for found in counts)
        if not math.isfinite(lost):
            raise ParameterError(
                f"training: the loss of step {self.step} is {lost}: the "
                "training has diverged; start a new run with a lower learning rate"
            )
        # Gradients are averaged, and the loss is one over all tokens, whichever process has them.
        num_tokens = sum(found.tokens for found in counts)
        total = torch.stack([loss for loss, _ in learned]).sum() * self.processes.count / num_tokens
        total.backward()  # type: ignore[no-untyped-call]
        average_and_clip(list(self._trained.values()), self.processes, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return record

    def _learn(self, items: Sequence[LinkItem], linked: bool) -> tuple[torch.Tensor, _Counts]:
        """Return the loss of this process's share of some items, summed, and what came of it."""
        own, counts = self.processes.share(items)
        answers = None
        if self.options.teacher_answers:
            assert self.teacher is not None
            answers = self.teacher.answers(own)
        batch = self.packer.pack(own, linked=linked, answers=answers)
        kept: list[KV] | None = [] if self.options.is_writer else None
        with computing_in(self.precision, self.model.device):
            logits = self.student.logits(batch, kept)
        loss, apart = self._loss(logits, batch, own, answers, kept)
        if not counts:
            return 0.0 * loss, _Counts()
        results = right(logits, batch)
        found = _Counts(
            lost=float(loss.detach()),
            tokens=len(logits),
            right=int(results.sum()),
            asked=len(results),
            links=int(batch.is_written.sum() if kept else (batch.link_rows >= 0).sum()),
            apart=apart * len(logits),
        )
        return loss, found

    def _totals(self, counts: Sequence[_Counts]) -> list[_Counts]:
        """Return counts over all processes."""
        flat = self.processes.total(value for found in counts for value in found)
        width = len(_Counts._fields)
        return [_Counts(*flat[at : at + width]) for at in range(0, len(flat), width)]

    def _loss(
        self,
        logits: torch.Tensor,
        batch: LinkBatch,
        items: Sequence[LinkItem],
        answers: Sequence[Sequence[int]] | None,
        kept: list[KV] | None,
    ) -> tuple[torch.Tensor, float]:
        """Return the loss, summed over answer tokens, and a writer's distance of KV."""
        targets = batch.targets[batch.targets != IGNORED].to(logits.device)
        if self.teacher is None:
            return functional.cross_entropy(logits.float(), targets, reduction="sum"), 0.0
        full: list[KV] | None = None if kept is None else []
        with computing_in(self.precision, self.model.device):
            taught = self.teacher.logits(items, answers, full)
        loss = kl(logits, taught)
        if kept is None or full is None or not batch.is_written.any():
            return loss, 0.0
        apart = distance(kept, full, batch.to(self.model.device))
        return loss + _KV_WEIGHT * len(logits) * apart, float(apart.detach())

    def evaluate(self) -> dict[str, float]:
        """Return exact match on questions held out (see `score`), or a writer's KL."""
        items = self.source.held_out(self.options.evaluate_questions)
        with computing_in(self.precision, self.model.device):
            if self.options.is_writer and self.teacher is not None:
                return divergence(
                    self.student,
                    self.teacher,
                    self.packer,
                    items,
                    self.processes,
                    not self.options.teacher_answers,
                )
            return score(self.student, self.packer, items, self.processes)

    def export(self) -> Path:
        """Write the links, and in mode ``tuned`` the model's folder; return the file of links."""
        state = None
        if self.processes.is_sharded and self.options.mode == "tuned":
            state = whole_state(self.model.hf, self.processes.is_main)
        if self.processes.is_main:
            self._write(state)
        self.processes.wait()
        return self.result_path

    def _write(self, state: dict[str, torch.Tensor] | None) -> None:
        out, header = self.options.out, self.header
        if self.options.mode == "tuned":
            self.model.hf.save_pretrained(str(out), state_dict=state)
            self.model.tokenizer.save_pretrained(str(out))
            # As it will be loaded: what saving changes is part of the fingerprint.
            written = KVModel(load_weights(out, None, None), load_tokenizer(out))
            header = LinksHeader(**{**vars(header), "model_fingerprint": written.fingerprint})
        self.parameters.links(header).save(self.result_path)

    @property
    def result_path(self) -> Path:
        """The file of links, or of a writer."""
        return self.options.out / (WRITER_NAME if self.options.is_writer else FILE_NAME)

    @property
    def _has_weights(self) -> bool:
        """Whether the model's weights are here: one that is shared may be loaded by one process."""
        return self.processes.is_main or not self.processes.is_sharded

    def _base_fingerprint(self) -> str:
        if not self._has_weights:
            own = ""
        elif self.options.mode == "tuned":
            # Not the model's own property, which would outlive what training changes.
            own = model_fingerprint(self.model.hf)
        else:
            own = self.model.fingerprint
        return self.processes.of_main(own) if self.processes.is_sharded else own

    def _log(self, record: dict[str, float]) -> None:
        if not self.processes.is_main:
            return
        with (self.options.out / LOG).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _cut_log(self) -> None:
        """Remove the steps of a killed run that its checkpoint lacks: they are taken again."""
        path = self.options.out / LOG
        if not (self.processes.is_main and path.is_file()):
            return
        kept: dict[int, str] = {}
        for line in path.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the last may be torn
                kept[json.loads(line)["step"]] = line
        lines = (f"{kept[step]}\n" for step in sorted(kept) if step < self.step)
        replace_file(path, "".join(lines).encode())

    def _save_checkpoint(self) -> None:
        save_checkpoint(
            self.checkpoint,
            self._run,
            self.step,
            self._trained,
            self.optimizer,
            is_main=self.processes.is_main,
        )


def _load(options: LinkTrainingOptions, processes: Processes) -> KVModel:
    """Load a separate model: its weights change, so no one else may share them."""
    dtype = torch.float32 if options.mode == "tuned" else None
    device = options.device if processes.device is None else str(processes.device)
    # One that is shared may have no room on one device; its parts go there.
    return KVModel.load(
        options.model,
        tokenizer=load_tokenizer(options.model),  # so that it is not shared
        dtype=dtype,
        device=None if processes.is_sharded else device,
    )


def _line(record: dict[str, float], steps: int) -> str:
    line = f"step {record['step'] + 1:,.0f} of {steps:,}, loss {record['loss/linked']:.3f}"
    if "KL/plain" in record:
        line += f", KL {record['KL/written']:.4f}, without a writer {record['KL/plain']:.4f}"
    if "plain/overall" in record:
        shares = [
            f"{record[name]:.1%} {name.removesuffix('/overall').replace('/', ' ')}"
            for name in record
            if name.endswith("linked/overall")
        ]
        line += f", exact match {', '.join(shares)}, {record['plain/overall']:.1%} of plain prompts"
    return line


def train_links(
    options: LinkTrainingOptions,
    on_progress: Callable[[str], None] = lambda _: None,
    processes: Processes = ALONE,
) -> LinkTrainer:
    """Train as `options` say and return the trainer, its folder written."""
    trainer = LinkTrainer(options, processes=processes)
    trainer.run(on_progress)
    return trainer
