"""One run: links, and with them a model or not, from first step to last."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional

from kvrag.errors import ParameterError
from kvrag.fusion.compression.anchors import FILE_NAME as ANCHORS_NAME
from kvrag.fusion.compression.anchors import Anchors, num_slots
from kvrag.fusion.compression.spec import ANCHORS, Compression
from kvrag.fusion.links import FILE_NAME, LinksHeader
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer, load_weights, model_fingerprint
from kvrag.training.batches import IGNORED
from kvrag.training.links.batch import LinkBatch, Packer
from kvrag.training.links.checkpoint import load_checkpoint, save_checkpoint
from kvrag.training.links.data import LinkItem, Source, open_source
from kvrag.training.links.memory import chosen_precision, computing_in
from kvrag.training.links.options import LinkTrainingOptions
from kvrag.training.links.student import LinkParameters, Student, training_mode
from kvrag.training.model import questions_right

CHECKPOINT = "checkpoint.safetensors"
LOG = "log.jsonl"


class LinkTrainer:
    """Trains links of one model.

    Parameters
    ----------
    options
        What to train; a folder that holds a checkpoint of the same run is continued.
    model, source
        To use instead of what `options` name. A model given is trained itself in mode ``tuned``.

    Raises
    ------
    ParameterError
        For data that cannot be read, or a folder that holds another run.
    ModelLoadError, UnsupportedModelError
    """

    def __init__(
        self,
        options: LinkTrainingOptions,
        model: KVModel | None = None,
        source: Source | None = None,
    ) -> None:
        self.options = options
        self.step = 0
        is_tuned = options.mode == "tuned"
        self.model = model or _load(options)
        self.source = source or open_source(
            options.data,
            self.model.tokenizer,
            keep_order=options.keep_order,
            answer_prefix=options.answer_prefix,
        )
        if self.model.tokenizer.eos_token_id is None:
            raise ParameterError(f"{self.model.name}: its tokenizer names no end token")
        scale = 1.0 if options.way == "adapter" else 0.0
        self.header = LinksHeader(
            mode=options.mode,
            way=options.way,
            num_links=options.num_links,
            max_documents=options.max_documents,
            model_fingerprint="" if is_tuned else self.model.fingerprint,
            scale=scale,
        )
        # Not the model's own property, which would outlive what training changes.
        base_fingerprint = model_fingerprint(self.model.hf)
        first_anchors = self._first_anchors()
        self.parameters = LinkParameters(
            self.model, self.header, options.rank, options.seed, first_anchors
        )
        self.parameters.to(self.model.device)
        self.packer = Packer(self.model, self.header, options.anchor_rates)
        self.student = Student(self.model, self.parameters, is_tuned)
        self.teacher: Student | None = None
        if options.loss == "distill":
            teacher = self.model
            if is_tuned:
                teacher = KVModel(copy.deepcopy(self.model.hf), self.model.tokenizer)
            self.teacher = Student(teacher, self.parameters, False)
        weights = {
            name: weight
            for name, weight in self.parameters.named_parameters()
            if weight.requires_grad
        }
        own = {"embeddings", "keys", "values", "anchors"}
        self._trained = {f"links/{name}": weight for name, weight in weights.items()}
        if is_tuned:
            named = self.model.hf.named_parameters()
            self._trained |= {f"model/{name}": weight for name, weight in named}
        groups = [
            {"params": [weights[name] for name in weights if name in own], "rate": 0.0},
            {
                "params": [
                    weight
                    for name, weight in self._trained.items()
                    if name.removeprefix("links/") not in own
                ],
                "rate": 0.0,
            },
        ]
        groups[0]["rate"], groups[1]["rate"] = options.link_learning_rate, options.rate
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.rate,
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )
        self.precision = chosen_precision(options.precision, self.model.device)
        self.checkpoint = options.out / CHECKPOINT
        # By what they are, not only by what they are called: files change under their names.
        self._run: dict[str, object] = {
            **options.identity(),
            "model_fingerprint": base_fingerprint,
            "data_digest": self.source.digest,
            "anchors_digest": None if first_anchors is None else first_anchors.digest,
        }
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParameterError(f"--out {options.out}: no folder can be made ({error})") from error
        if self.checkpoint.exists():
            self.step = load_checkpoint(self.checkpoint, self._run, self._trained, self.optimizer)

    def run(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """Train until the last step, and write what was trained into the folder.

        Parameters
        ----------
        on_progress
            Receives a line after each step.
        """
        options = self.options
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
        compression = None
        if options.anchor_rates:
            compression = Compression(ANCHORS, rng.choice(options.anchor_rates))
        num_plain = options.num_plain_rows
        factor = _factor(self.step, options.steps, options.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * factor
        record: dict[str, float] = {"step": self.step, "rate": options.rate * factor}
        parts = (("linked", items[num_plain:], True), ("plain", items[:num_plain], False))
        num_tokens = 0
        losses = []
        for name, part, linked in parts:
            if not part:
                continue
            answers = self.answers_of_teacher(part) if options.teacher_answers else None
            batch = self.packer.pack(
                part,
                linked=linked,
                answers=answers,
                compression=compression if linked else None,
            )
            with computing_in(self.precision, self.model.device):
                logits = self.student.logits(batch)
            loss = self._loss(logits, batch, part, answers)
            losses.append(loss)
            num_tokens += len(logits)
            record[f"loss/{name}"] = round(float(loss.detach()) / len(logits), 5)
            record[f"accuracy/{name}"] = round(float(_right(logits, batch).float().mean()), 4)
        total = torch.stack(losses).sum() / num_tokens
        if not total.requires_grad:
            raise ParameterError(
                f"train links: step {self.step} has nothing to learn from: none of its "
                f"{options.rows} sets of documents holds one that is found in its prompts, so no "
                "link stands in them; give longer documents, or more rows a step"
            )
        if not total.isfinite():
            raise ParameterError(
                f"train links: the loss of step {self.step} is {float(total.detach())}: the "
                "training has diverged; begin anew with a lower learning rate"
            )
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(list(self._trained.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return record

    @torch.no_grad()
    def answers_of_teacher(self, items: Sequence[LinkItem]) -> list[list[int]]:
        """Return what the teacher answers greedily to plain prompts, ends included."""
        assert self.teacher is not None
        end = int(self.model.tokenizer.eos_token_id)
        num_questions = sum(len(item.prompts) for item in items)
        answers: list[list[int]] = [[] for _ in range(num_questions)]
        for _ in range(self.options.answer_tokens - 1):
            # What stands last is what is predicted; it is fed to nobody.
            asked = [answer if answer[-1:] == [end] else [*answer, end] for answer in answers]
            batch = self.packer.pack(items, linked=False, answers=asked)
            likeliest = self.teacher.logits(batch).argmax(-1).tolist()
            numbers = batch.question_ids[batch.targets != IGNORED].tolist()
            last = dict(zip(numbers, likeliest, strict=True))
            open_ones = [i for i, answer in enumerate(answers) if answer[-1:] != [end]]
            if not open_ones:
                break
            for number in open_ones:
                answers[number].append(last[number])
        return [answer if answer[-1:] == [end] else [*answer, end] for answer in answers]

    def _loss(
        self,
        logits: torch.Tensor,
        batch: LinkBatch,
        items: Sequence[LinkItem],
        answers: Sequence[Sequence[int]] | None,
    ) -> torch.Tensor:
        """Return the loss, summed over answer tokens."""
        targets = batch.targets[batch.targets != IGNORED].to(logits.device)
        if self.teacher is None:
            return functional.cross_entropy(logits.float(), targets, reduction="sum")
        with torch.no_grad():
            taught = self.teacher.logits(self.packer.pack(items, linked=False, answers=answers))
        return functional.kl_div(
            logits.float().log_softmax(-1),
            taught.float().log_softmax(-1),
            reduction="sum",
            log_target=True,
        )

    @torch.no_grad()
    def evaluate(self, rows_per_batch: int = 16) -> dict[str, float]:
        """Return exact match on questions held out, by type: linked, and of plain prompts; where
        documents are stored as anchors, linked for each rate.

        Each answer token is predicted behind the right ones, which is exact match of greedy
        decoding.
        """
        items = self.source.held_out(self.options.evaluate_questions)
        found: dict[str, float] = {}
        rates = self.options.anchor_rates
        ways: list[tuple[str, bool, Compression | None]] = [
            (f"{ANCHORS}:{rate:g}/linked", True, Compression(ANCHORS, rate)) for rate in rates
        ] or [("linked", True, None)]
        for name, linked, compression in (*ways, ("plain", False, None)):
            right: dict[str, list[bool]] = {}
            for start in range(0, len(items), rows_per_batch):
                batch = self.packer.pack(
                    items[start : start + rows_per_batch], linked=linked, compression=compression
                )
                results = _right(self.student.logits(batch), batch).tolist()
                for kind, result in zip(batch.types, results, strict=True):
                    for label in {kind, "overall"} - {""}:
                        right.setdefault(label, []).append(result)
            for label, results in sorted(right.items()):
                found[f"{name}/{label}"] = round(sum(results) / len(results), 4)
        return found

    def export(self) -> Path:
        """Write the links or anchors, and of mode ``tuned`` the model's folder, and return the
        file of links, or of anchors where there are no links.
        """
        out, header = self.options.out, self.header
        if self.options.mode == "tuned":
            self.model.hf.save_pretrained(str(out))
            self.model.tokenizer.save_pretrained(str(out))
            # As it will be loaded: what saving changes is part of the fingerprint.
            written = KVModel(load_weights(out, None, None), load_tokenizer(out))
            header = LinksHeader(**{**vars(header), "model_fingerprint": written.fingerprint})
        if header.num_links:
            self.parameters.links(header).save(out / FILE_NAME)
        anchors = self.parameters.anchors
        if anchors is not None and self.options.mode == "tuned":
            rates = self.options.anchor_rates
            Anchors(rates, header.model_fingerprint, anchors.detach()).save(out / ANCHORS_NAME)
        return self.result_path

    @property
    def result_path(self) -> Path:
        """The file of links, or of anchors where there are no links."""
        return self.options.out / (FILE_NAME if self.header.num_links else ANCHORS_NAME)

    def _first_anchors(self) -> Anchors | None:
        """Return the anchors to begin with: those in the model's folder, or rows of zero, which
        make an anchor the token at which it stands.
        """
        rates = self.options.anchor_rates
        if not rates:
            return None
        folder = Path(getattr(self.model.hf, "name_or_path", ""))
        if not folder.is_absolute() or not (folder / ANCHORS_NAME).exists():
            width = self.model.hf.config.hidden_size
            return Anchors(rates, "", torch.zeros(num_slots(rates), width))
        found = Anchors.load(folder / ANCHORS_NAME)
        for rate in rates:
            found.check(self.model, Compression(ANCHORS, rate))
        if found.rates != rates:
            raise ParameterError(
                f"{folder / ANCHORS_NAME} holds anchors of the rates {found.rates}: train with all "
                f"of them, found {rates}"
            )
        return found

    def _log(self, record: dict[str, float]) -> None:
        with (self.options.out / LOG).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _save_checkpoint(self) -> None:
        save_checkpoint(self.checkpoint, self._run, self.step, self._trained, self.optimizer)


def _load(options: LinkTrainingOptions) -> KVModel:
    """Load a model of its own: weights that change must not be anyone else's."""
    dtype = torch.float32 if options.mode == "tuned" else None
    weights = load_weights(options.model, dtype, options.device)
    return KVModel(weights, load_tokenizer(options.model), name=options.model)


def _factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak rate: a linear rise, then half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _right(logits: torch.Tensor, batch: LinkBatch) -> torch.Tensor:
    wanted = batch.targets != IGNORED
    return questions_right(logits.cpu(), batch.targets[wanted], batch.question_ids[wanted])


def _line(record: dict[str, float], steps: int) -> str:
    line = f"step {record['step'] + 1:,.0f} of {steps:,}, loss {record['loss/linked']:.3f}"
    if "plain/overall" in record:
        shares = [
            f"{record[name]:.1%} {name.removesuffix('/overall').replace('/', ' ')}"
            for name in record
            if name.endswith("linked/overall")
        ]
        line += f", exact match {', '.join(shares)}, {record['plain/overall']:.1%} of plain prompts"
    return line


def train_links(
    options: LinkTrainingOptions, on_progress: Callable[[str], None] = lambda _: None
) -> LinkTrainer:
    """Train as `options` say and return the trainer, its folder written."""
    trainer = LinkTrainer(options)
    trainer.run(on_progress)
    return trainer
