"""The tables of `docs/models.md`, written from the code: ``python -m tools.models``."""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrag.models.compiled import _KINDS
from kvrag.models.families import _WHY_NOT, FAMILIES
from kvrag.weights.named import NAMED_MODELS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
_MARK = "<!-- {}: written by `python -m tools.models` -->\n"


def with_tables(page: str) -> str:
    """Return the page with its tables as the code has them."""
    for name, rows in (("named", _named()), ("families", _families()), ("others", _others())):
        begin, end = _MARK.format(name), f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        after = rest.split(end)[1]
        page = before + begin + "\n".join(["", *rows, "", end]) + after
    return page


def _named() -> list[str]:
    rows = ["| name | weights | context | answers | license |", "|---|---:|---:|---|---|"]
    for one in NAMED_MODELS:
        answers = "as a chat model" if one.is_chat else "as a base model: one line"
        rows.append(
            f"| `{one.name}` | {one.num_parameters / 1e6:,.0f} million | {one.context_tokens:,} | "
            f"{answers} | {one.license} |"
        )
    return rows


def _families() -> list[str]:
    rows = [
        "| `model_type` | class | positions | tokens of answers on the CPU | remarks |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
        rotary = "bias (ALiBi), or rotary" if name == "falcon" else "bias (ALiBi)"
        positions = (
            "learned"
            if family.position_embedding
            else rotary
            if family.attends_itself
            else "rotary"
        )
        stem = model.removesuffix("ForCausalLM")
        remarks = []
        if family.position_embedding:
            remarks.append("a chunk's KV is valid at one place")
        if family.attends_itself:
            remarks.append("`--compress drop` and `anchors` are refused")
        if family.windowed:
            remarks.append("sliding windows, if the model has them")
        one_call = "one call of kernels" if stem in _KINDS else "its modules"
        rows.append(f"| `{name}` | `{model}` | {positions} | {one_call} | {'; '.join(remarks)} |")
    return rows


def _others() -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in _WHY_NOT.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows = ["| `model_type` | why not |", "|---|---|"]
    return rows + [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
