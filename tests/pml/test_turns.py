"""Turns in modules, modules that are not cached, modules without a name: text, KV and refusals."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrag.engine.engine import KVEngine
from kvrag.errors import PMLError
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.pml.batch import generate_batch
from kvrag.pml.engine import PMLEngine, place_prompt
from kvrag.pml.layout import lay_out_schema
from kvrag.pml.parser import parse_prompt, parse_schema
from kvrag_testing.bench_top import relative_difference
from tests.pml.schemas import schemas
from tests.pml.test_layout import prompts
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import trials

SHOTS = """<schema name='s'>
  <system>Be kind. <module name='rules' cache='false'>Today is Friday.</module></system>
  <module name='shots'>
    <union>
      <module name='one'><user>Add 1 and 2.</user><assistant>3</assistant></module>
      <module name='two'>
        <user>Add <parameter name='a' length='4'/> and 1.</user>
        <assistant>So many.</assistant>
        <module name='more'><user>And again.</user><assistant>More.</assistant></module>
      </module>
    </union>
  </module>
  <user>Read: <union><module name='x'>the ledger</module><module name='y'>the clock</module></union>
  </user>
  <assistant>Read.</assistant>
</schema>"""

ALTERNATING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set first = '<<' + messages[0]['content'] + '>>' %}"
    "{% else %}{% set rest = messages %}{% set first = '' %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[I]{{ first if loop.first else '' }}{{ m['content'] }}[/I]"
    "{% else %}{{ m['content'] }}<eos>{% endif %}{% endfor %}"
)


def text_of(schema: str, prompt: str, template: str | None = None) -> str:
    tokenizer = make_tokenizer()
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    parsed = parse_schema(schema)
    layout = lay_out_schema(parsed, tokenizer, (0,))
    pieces = place_prompt(layout, parse_prompt(prompt, parsed), tokenizer)
    ids = [*layout.prefix_ids, *(token for piece in pieces for token in piece.token_ids)]
    return str(tokenizer.decode(ids))


ASKED = {
    "": [],
    "<shots/>": [],
    "<shots><one/></shots>": [("user", "Add 1 and 2."), ("assistant", "3")],
    "<shots><two a='x'/></shots>": [("user", "Add x and 1."), ("assistant", "So many.")],
    "<shots><two a='x'><more/></two></shots>": [
        ("user", "Add x and 1."),
        ("assistant", "So many."),
        ("user", "And again."),
        ("assistant", "More."),
    ],
}


@pytest.mark.parametrize("template", [None, ALTERNATING])
@pytest.mark.parametrize("shots", ASKED)
def test_turns_of_modules_are_turns_where_they_are_imported(
    shots: str, template: str | None
) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = template or tokenizer.chat_template
    turns = [
        ("system", "Be kind. Today is Friday."),
        *ASKED[shots],
        ("user", "Read: the clock"),
        ("assistant", "Read."),
        ("user", "Who?"),
    ]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False,
        add_generation_prompt=True,
    )
    prompt = f"<prompt schema='s'><rules/>{shots}<y/>Who?</prompt>"
    if template is not None and not ASKED[shots]:
        # It puts what the system says into whatever user's turn is the first.
        with pytest.raises(PMLError, match="differently in this prompt"):
            text_of(SHOTS, prompt, template)
    else:
        assert text_of(SHOTS, prompt, template) == expected


def test_a_template_that_begins_with_the_first_turn_needs_one() -> None:
    schema = "<schema name='s'>{}<module name='a'><user>A.</user><assistant>B.</assistant></module>"
    schema += "<module name='b'><user>C.</user><assistant>D.</assistant></module></schema>"
    both = "<prompt schema='s'><a/><b/>Who?</prompt>"
    second = "<prompt schema='s'><b/>Who?</prompt>"
    none = "<prompt schema='s'>Who?</prompt>"
    plain = schema.format("")
    assert text_of(plain, both, ALTERNATING) == "<bos>[I]A.[/I]B.<eos>[I]C.[/I]D.<eos>[I]Who?[/I]"
    assert text_of(plain, second, ALTERNATING) == "<bos>[I]C.[/I]D.<eos>[I]Who?[/I]"
    assert text_of(plain, none, ALTERNATING) == "<bos>[I]Who?[/I]"
    kind = schema.format("<system>Be kind.</system>")
    assert "<<Be kind.>>A." in text_of(kind, both, ALTERNATING)
    with pytest.raises(PMLError, match=r"^<string>:1:1: .* differently in this prompt") as raised:
        text_of(kind, second, ALTERNATING)
    assert "begin the schema with a turn that is always there" in str(raised.value)


def test_members_that_cannot_follow_one_another_are_rendered_apart() -> None:
    schema = (
        "<schema name='s'><system>S.</system><user>Q.</user><union>"
        "<module name='a'><assistant>A.</assistant></module>"
        "<module name='b'><assistant>B.</assistant></module></union>"
        "<module name='c'><assistant>C.</assistant></module></schema>"
    )
    for name in "abc":
        found = text_of(schema, f"<prompt schema='s'><{name}/>Who?</prompt>", ALTERNATING)
        assert found == f"<bos>[I]<<S.>>Q.[/I]{name.upper()}.<eos>[I]Who?[/I]"
    with pytest.raises(PMLError, match="roles must alternate"):
        text_of(schema, "<prompt schema='s'><a/><c/>Who?</prompt>", ALTERNATING)


def test_a_prompt_has_a_turn() -> None:
    schema = "<schema name='s'><module name='a'><user>A.</user></module></schema>"
    with pytest.raises(PMLError, match="a prompt without a turn; import a module with one"):
        text_of(schema, "<prompt schema='s'/>")
    assert (
        text_of(schema, "<prompt schema='s'><a/></prompt>") == "<bos><|user|>\nA.\n<|assistant|>\n"
    )


# -- KV -------------------------------------------------------------------------------------------


def check_logits(pml: PMLEngine, prompt: str) -> None:
    """Compare a prompt, all of it computed again, with a plain forward at its positions."""
    placed = pml.place(prompt)
    rows = range(len(placed.layout.token_ids))
    fused = pml.engine.fuse(placed, policy="deviation", ratio=1.0)
    with torch.no_grad():
        expected = pml.engine.index.model.hf(
            torch.tensor([placed.layout.token_ids]),
            attention_mask=torch.ones(1, len(rows), dtype=torch.long),
            position_ids=torch.tensor([[placed.layout.position(row) for row in rows]]),
        ).logits[0, -1]
    assert relative_difference(fused.logits, expected) < 1e-4
    assert not fused.report.misses


RANDOM_MODEL = KVModel(make_model("llama"), make_tokenizer())


def check_random(data: st.DataObject, folder: Path) -> None:
    markup = data.draw(schemas(turns=data.draw(st.booleans())))
    prompt = data.draw(prompts(parse_schema(markup)))
    with Index.create(folder, model=RANDOM_MODEL, embedding="hashing") as index:
        pml = PMLEngine(KVEngine(index))
        report = pml.encode(markup)
        layout = pml.add(markup).layout
        cached = [one for one in layout.stretches if one.is_cached]
        assert report.num_tokens == sum(len(one.token_ids) for one in cached)
        check_logits(pml, prompt)
        fused = pml.engine.fuse(pml.place(prompt), policy="none")
        assert not fused.report.misses


@settings(max_examples=trials(200, 6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_schemas_equal_plain_prefill(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_random(data, tmp_path_factory.mktemp("random") / "index")


CACHED = "<schema name='s'><module name='a'>Ines keeps the ledger.</module>{}</schema>"


@pytest.mark.parametrize(
    ("inside", "num_passages"),
    [
        ("<module name='b' cache='true'>Today is Friday.</module>", 2),
        ("<module name='b' cache='false'>Today is Friday.</module>", 1),
        ("<module name='b' cache='false'>Today <module name='c'>is Friday.</module></module>", 1),
        (
            "<module name='b' cache='false'>Today <module name='c' cache='true'>is Friday.</module>"
            "</module>",
            2,
        ),
        ("<module cache='false'>Today is Friday.</module>", 1),
        ("<module>Today is Friday.</module>", 2),
        ("<union><module name='b' cache='false'>Friday.</module><module name='c'/></union>", 1),
    ],
)
def test_what_is_not_cached_is_computed_and_never_stored(
    pml: PMLEngine, inside: str, num_passages: int
) -> None:
    schema = CACHED.format(inside)
    report = pml.encode(schema)
    assert report.num_passages == report.num_records == num_passages
    imports = "<a/>" + "<b/>" * ("'b'" in inside)
    prompt = f"<prompt schema='s'>{imports} Who?</prompt>"
    answer = pml.generate(prompt, policy="none", max_tokens=2)
    # Not as a miss: nothing was looked for.
    assert not answer.report.misses
    stretches = [
        one for one in pml.add(schema).layout.stretches if one.path in ((), ("a",), ("b",))
    ]
    assert answer.report.num_cached == sum(len(s.token_ids) for s in stretches if s.is_cached)
    # Nor does an answer store it.
    assert pml.engine.index.stats().num_records in (0, num_passages)
    (text,) = generate_batch(pml, [prompt], max_tokens=2).texts
    assert text == answer.text


def test_anonymous_modules_are_always_there() -> None:
    schema = (
        "<schema name='s'>One.<module> Two. <module name='a'>Three.</module>"
        "<module><parameter name='p' length='4'/></module></module> Four.</schema>"
    )
    parsed = parse_schema(schema)
    assert list(parsed.modules) == [("a",)]
    assert list(parsed.parameters(())) == ["p"]
    assert text_of(schema, "<prompt schema='s' p='x'><a/> Who?</prompt>") == (
        "<bos>One.Two. Three.x Four. Who?"
    )
