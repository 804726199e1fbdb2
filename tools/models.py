"""The tables of `docs/models.md`, written from the code: ``python -m tools.models``."""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrag.models.elements import KINDS
from kvrag.models.families import CORE, SEES, TESTED, WHOLE, WHY_NOT
from kvrag.models.quantised import FORMATS
from kvrag.weights.architectures import ARCHITECTURES
from kvrag.weights.named import NAMED_MODELS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
_MARK = "<!-- {}: written by `python -m tools.models` -->\n"


def with_tables(page: str) -> str:
    """Return the page with its tables as the code has them."""
    tables = {
        **{"named": _named, "families": _families, "whole": lambda: _reasons("chunks", WHOLE)},
        **{"others": lambda: _reasons("", WHY_NOT), "quantised": _quantised},
    }
    for name, make in tables.items():
        rows = make()
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
    compiled, modules, core = [], [], []
    for name in TESTED:
        stem = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name].removesuffix("ForCausalLM")
        (compiled if stem in KINDS else core if name in CORE else modules).append(name)
    rows = [
        "| `model_type` | tokens of answers on the CPU | vLLM, tensor parallel |",
        "|---|---|---|",
    ]
    for names, way, elsewhere in (
        (compiled, "one call of kernels", "yes"),
        (core, "its modules", "yes, where vLLM has it"),
        (modules, "its modules", "no"),
    ):
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {way} | {elsewhere} |")
    rows.append(
        f"| as GGUF: {', '.join(f'`{one}`' for one in ARCHITECTURES)} | as that type | no |"
    )
    rows.append(f"| the text part of {', '.join(f'`{one}`' for one in SEES)} | as that type | no |")
    return rows


def _reasons(of: str, table: dict[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in table.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| `model_type` | {f'why not {of}'.strip()} |", "|---|---|"]
    return rows + [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]


def _quantised() -> list[str]:
    ways: dict[bool, list[str]] = {}
    for name, one in FORMATS.items():
        ways.setdefault(one.widens, []).append(f"`{name}`")
    rows = ["| `quant_method` | on the CPU |", "|---|---|"]
    names = {widens: ", ".join(some) for widens, some in ways.items()}
    return [*rows, f"| {names[False]} | its modules |", f"| {names[True]} | in 16 bits |"]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
