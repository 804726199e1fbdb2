"""Prompts of modules from LangChain's and LlamaIndex's chains."""

import copy
import pickle
from pathlib import Path

import pytest
from langchain_core.output_parsers import StrOutputParser

from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.llms.langchain import KVRagLLM
from kvrag.llms.langchain_pml import PMLPromptTemplate
from kvrag.llms.llamaindex import KVRagLLM as LlamaIndexLLM
from kvrag.llms.llamaindex_pml import PMLPromptTemplate as LlamaIndexTemplate
from kvrag.models.kv_model import KVModel
from kvrag.pml.engine import PMLEngine
from kvrag.pml.parser import fill, variables
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer

SCHEMA = (
    f"<schema name='tale'><module name='a'>{TEXTS[0]}</module>\n"
    "<module name='b'>By <parameter name='who' length='40'/>.</module></schema>"
)
MARKUP = "<prompt schema='tale'><a/><b who='{who}'/> {question}</prompt>"


@pytest.fixture
def index(tmp_path: Path):
    model = KVModel(make_model(), make_tokenizer())
    with Index.create(tmp_path / "index", model=model, embedding="hashing") as index:
        yield index


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    (tmp_path / "tale.xml").write_text(SCHEMA)
    return tmp_path / "tale.xml"


HOSTILE = 'O\'Neil "<a/>" & co.'


def test_values_stay_text() -> None:
    filled = fill("<p x='{v}'>{v} {{}}</p>", {"v": HOSTILE, "other": 1})
    escaped = "O&apos;Neil &quot;&lt;a/&gt;&quot; &amp; co."
    assert filled == f"<p x='{escaped}'>{escaped} {{}}</p>"
    assert variables("{b} {a} {b}") == ["b", "a"]


@pytest.mark.parametrize("markup", ["{", "}", "{0}", "{a.b}", "{a!r}", "{a:3}", "{}"])
def test_other_braces_are_refused(markup: str) -> None:
    with pytest.raises(ParameterError, match="prompt template"):
        variables(markup)


def test_missing_values_and_control_characters_are_refused() -> None:
    with pytest.raises(ParameterError, match="no value for 'a'"):
        fill("{a}", {})
    with pytest.raises(ParameterError, match="control character"):
        fill("{a}", {"a": "x\0"})


def test_a_langchain_chain_is_answered_from_modules(index: Index, schema: Path) -> None:
    template = PMLPromptTemplate(markup=MARKUP, partial_variables={"question": "Why?"})
    assert template.input_variables == ["who"]
    llm = KVRagLLM(index=index, schemas=[schema], max_tokens=5, policy="none")
    pml = PMLEngine(llm.engine())
    pml.encode(schema)
    found = (template | llm | StrOutputParser()).invoke({"who": HOSTILE})
    prompt = template.format(who=HOSTILE)
    expected = pml.generate(prompt, policy="none", max_tokens=5)
    assert found == expected.text
    (generation,) = llm.generate([prompt]).generations[0]
    assert generation.generation_info is not None
    assert llm.answers([prompt], {})[0].report.num_cached > 30
    assert "".join(llm.stream(prompt)) == found


def test_llamaindex_answers_from_modules(index: Index, schema: Path) -> None:
    template = LlamaIndexTemplate(MARKUP)
    llm = LlamaIndexLLM(index=index, schemas=str(schema), max_tokens=5, policy="none")
    PMLEngine(llm.engine()).encode(schema)
    prompt = template.format(llm=llm, who=HOSTILE, question="Why?")
    assert prompt == PMLPromptTemplate(markup=MARKUP).format(who=HOSTILE, question="Why?")
    assert llm.predict(template, who=HOSTILE, question="Why?") == llm.complete(prompt).text
    assert llm.answers([prompt], {})[0].report.num_cached > 30
    assert llm.answers([template.partial_format(who="I").format(question="?")], {})[0].text


def test_without_schemas_markup_is_text(index: Index) -> None:
    llm = KVRagLLM(index=index, max_tokens=2)
    assert llm.answers(["<prompt schema='tale'/>"], {})[0].report.num_cached == 0


def test_schemas_count_for_caches_and_survive_copies(index: Index, schema: Path) -> None:
    llm = KVRagLLM(index=index, schemas=schema, max_tokens=2)
    llm.answers(["<prompt schema='tale'>x</prompt>"], {})
    before = llm.identity()["schemas"]
    copied = copy.deepcopy(llm)
    assert copied.answers(["<prompt schema='tale'>x</prompt>"], {})[0].text
    assert pickle.loads(pickle.dumps(llm)).schemas == [str(schema)]
    schema.write_text(SCHEMA.replace("By", "From"))
    assert llm.identity()["schemas"] != before
