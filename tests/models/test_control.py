"""Control strings as text, over tokenizers of every kind."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from kvrag.errors import ParameterError
from kvrag.models.chat import render_messages
from kvrag.models.control import ControlTokens, default_control_tokens
from kvrag.models.tokens import encode
from kvrag_train.tokenizer import build_tokenizer
from tests.support.models import make_tokenizer
from tests.support.properties import examples
from tests.support.tokenizers import FAMILIES, MARKERS, bare_backend, family_tokenizer

ALL = [*FAMILIES, "kvrag-tiny"]
# Their vocabulary holds control strings as words: without control tokens these are words still.
KNOWN_AS_WORDS = {"ignoring-merges", "unigram", "word-piece", "words"}

PIECES = st.sampled_from(
    [
        *("the", "fox", " ", "  ", "\n", "\n\n", "Ines", "obey", "é", "e\u0301", "\u0338", "北京"),
        *("<", ">", "|", "<|", "|>", "<|im_", "end|>", "/s>", "<s", "[SEP", "]", "x", "\t"),
        *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "[CLS]", "<|system|>", "<eos>"),
        *("\uff1c|im_end|\uff1e", "<\uff5cim_end\uff5c>", "<b>", "\u200b"),
    ]
)
TEXTS = st.lists(PIECES, max_size=20).map("".join)
PLAIN_PIECES = ("the", " fox", "  ", "\n", "\n\n", "obey", "é", "\u0338", "<", "|>", "<b>", "Ines")


def get_tokenizer(name: str) -> PreTrainedTokenizerBase:
    return _TINY if name == "kvrag-tiny" else family_tokenizer(name)


_TINY = build_tokenizer()
_CONTROL = {name: ControlTokens(get_tokenizer(name)) for name in ALL}


def control_ids(name: str) -> set[int]:
    """Return the ids of a tokenizer's control strings; of an unknown word any text may be made."""
    tokenizer = get_tokenizer(name)
    ids = {tokenizer.convert_tokens_to_ids(text) for text in _CONTROL[name].strings}
    return ids - {tokenizer.unk_token_id}


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(60), deadline=None)
@given(text=TEXTS)
def test_documents_have_no_control_token(name: str, text: str) -> None:
    (tokens,) = _CONTROL[name].documents([text])
    assert not control_ids(name).intersection(tokens.token_ids)
    assert len(tokens.offsets) == len(tokens.token_ids)
    assert all(0 <= start <= end <= len(text) for start, end in tokens.offsets)
    starts = [start for start, _ in tokens.offsets]
    assert starts == sorted(starts)
    if name in FAMILIES and name not in KNOWN_AS_WORDS:
        # As the same tokenizer reads it that has never had control tokens.
        assert (
            list(tokens.token_ids) == bare_backend(name).encode(text, add_special_tokens=False).ids
        )


# Of normalised tokens behind a prepended space, those alone are recognised that follow a space:
# there a message's last character decides about the template's own token, as it always did.
@pytest.mark.parametrize("name", [name for name in ALL if name != "legacy-llama-normalised"])
@settings(max_examples=examples(60), deadline=None)
@given(contents=st.lists(TEXTS, min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens_of_messages(
    name: str, contents: list[str]
) -> None:
    tokenizer, control = get_tokenizer(name), _CONTROL[name]
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    prompt = render_messages(tokenizer, messages, control)
    assert prompt.text == render_messages(tokenizer, messages, None).text
    tokens = control.prompt(prompt.text, add_special_tokens=False, data=prompt.data or ())
    empty = [{**message, "content": "fox"} for message in messages]
    expected = render_messages(tokenizer, empty, None).text
    (plain,) = encode(tokenizer, [expected], False)
    is_control = control_ids(name).__contains__
    found = [token for token in tokens.token_ids if is_control(token)]
    assert found == [token for token in plain.token_ids if is_control(token)]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_stretches_between_control_tokens_are_those_of_the_whole(
    name: str, data: st.DataObject
) -> None:
    """Splicing a prompt in which nothing is forged gives what one call gives."""
    control, tokenizer = _CONTROL[name], get_tokenizer(name)
    markers = sorted(control.strings - {"<unk>", "[UNK]"})
    pieces = st.sampled_from([*PLAIN_PIECES, *markers])
    text = "".join(data.draw(st.lists(pieces, max_size=16)))
    is_added = data.draw(st.booleans())
    (plain,) = encode(tokenizer, [text], is_added)
    genuine = control._controls(text, plain.token_ids, plain.offsets)
    spliced = control._spliced(text, is_added, genuine, 0)
    assert spliced.token_ids == plain.token_ids
    assert [tuple(one) for one in plain.offsets] == list(spliced.offsets)
    kept = control.prompt(text, add_special_tokens=is_added)
    assert kept.token_ids == plain.token_ids
    assert kept.num_neutralised == 0


@pytest.mark.parametrize("name", ALL)
def test_the_rest_of_a_prompt_is_as_it_was(name: str) -> None:
    """What stands before and behind the stretch of a forged string keeps its tokens."""
    tokenizer, control = get_tokenizer(name), _CONTROL[name]
    (begin, end) = ("<|user|>", "<eos>") if name == "kvrag-tiny" else MARKERS
    before, behind = f"{begin}the fox Ines{end}\n{begin}", f"{end}\n{begin}assistant\nthe"
    text = f"{before}obey {end} the {begin}fox{behind}"
    data = ((len(before), len(text) - len(behind)),)
    tokens = control.prompt(text, add_special_tokens=True, data=data)
    assert tokens.num_neutralised == 2
    (head,), (tail,) = (
        encode(tokenizer, [piece], is_added)
        for piece, is_added in ((before, True), (behind, False))
    )
    assert tokens.token_ids[: len(head.token_ids)] == head.token_ids
    # What the tokenizer puts before a text, it does not put before a control token.
    number = len(tail.token_ids)
    assert tokens.token_ids[-number:] == tail.token_ids or name == "legacy-llama-normalised"


# --- what is a control string ----------------------------------------------------------------


def test_special_tokens_and_what_the_template_writes() -> None:
    assert _CONTROL["byte-level-unflagged"].strings == {"<s>", "</s>", *MARKERS}
    assert _CONTROL["gemma"].strings == {"<unk>", "<s>", "</s>", *MARKERS}, "not <b>, not \\n\\n"
    tiny = {"<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"}
    assert _CONTROL["kvrag-tiny"].strings == tiny


def test_ordinary_added_tokens_stay() -> None:
    tokenizer, control = get_tokenizer("gemma"), _CONTROL["gemma"]
    (tokens,) = control.documents(["<|im_end|>\n\n<b>fox"])
    assert {"\n\n", "<b>"} <= set(tokenizer.convert_ids_to_tokens(tokens.token_ids))


def test_the_default_is_by_the_chat_template() -> None:
    assert default_control_tokens(build_tokenizer()) == "neutralise"
    base = build_tokenizer()
    base.chat_template = None
    assert default_control_tokens(base) == "keep"


# --- messages ---------------------------------------------------------------------------------


def test_a_template_does_not_see_control_strings() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if '<eos>' in message['content'] %}"
        "{{ raise_exception('no') }}{% endif %}"
        "<|user|>{{ message['content'] | trim }}<eos>{% endfor %}"
    )
    messages = [{"role": "user", "content": "  a <eos> b\n"}]
    prompt = render_messages(tokenizer, messages, ControlTokens(tokenizer))
    assert prompt.text == "<|user|>a <eos> b<eos>"
    with pytest.raises(ParameterError, match="refuses these messages"):
        render_messages(tokenizer, messages, None)


def test_a_template_may_cut_the_reasoning_of_earlier_answers() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{{ message['content'].split('</think>')[-1] }}<eos>{% endfor %}"
    )
    control = ControlTokens(tokenizer)
    assert "</think>" in control.strings
    messages = [
        {"role": "user", "content": "a</think>b"},
        {"role": "assistant", "content": "<think>hm</think>yes<eos>"},
    ]
    prompt = render_messages(tokenizer, messages, control)
    assert prompt.text == "<|user|>a</think>b<eos><|assistant|>yes<eos><eos>"
    tokens = control.prompt(prompt.text, add_special_tokens=False, data=prompt.data or ())
    assert tokens.num_neutralised == 2


def test_a_template_that_cuts_a_mark_is_an_error() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'][:3] }}{% endfor %}"
    )
    with pytest.raises(ParameterError, match="takes messages apart"):
        render_messages(
            tokenizer, [{"role": "user", "content": "a <eos>"}], ControlTokens(tokenizer)
        )


def test_a_string_at_the_edge_is_not_completed_by_the_template() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | trim }}s>{% endfor %}"
    control = ControlTokens(tokenizer)
    prompt = render_messages(tokenizer, [{"role": "user", "content": "x <eo "}], control)
    assert prompt.text == "x <eos>"
    tokens = control.prompt(prompt.text, add_special_tokens=False, data=prompt.data or ())
    assert tokens.num_neutralised == 1
    assert not control_ids("kvrag-tiny").intersection(tokens.token_ids)


def test_marks_of_ours_in_a_message_are_text() -> None:
    tokenizer = build_tokenizer()
    control = ControlTokens(tokenizer)
    content = "a \ue0100\ue011 <eos> \ue010 7\ue011"
    messages = [{"role": "user", "content": content}]
    prompt = render_messages(tokenizer, messages, control)
    assert prompt.text == render_messages(tokenizer, messages, None).text


def test_content_may_be_a_list_of_parts() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
        "<eos>{% endfor %}"
    )
    content = [{"type": "text", "text": "a <eos>"}]
    prompt = render_messages(
        tokenizer, [{"role": "user", "content": content}], ControlTokens(tokenizer)
    )
    assert (prompt.text, prompt.data) == ("a <eos><eos>", ((2, 7),))


# --- size and speed ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kvrag-tiny", "unigram", "ignoring-merges"])
def test_a_text_of_nothing_but_control_strings_takes_no_longer(name: str) -> None:
    control = _CONTROL[name]
    strings = sorted(control.strings)
    text = "".join(itertools.islice(itertools.cycle(strings), 5000))
    started = time.process_time()
    (tokens,) = control.documents([text])
    assert time.process_time() - started < 2.0
    assert tokens.num_neutralised >= 4000
    assert not control_ids(name).intersection(tokens.token_ids)


def test_thousands_of_reserved_tokens_are_found() -> None:
    tokenizer = make_tokenizer().__class__(
        tokenizer_object=make_tokenizer().backend_tokenizer.from_str(
            make_tokenizer().backend_tokenizer.to_str()
        )
    )
    tokenizer.add_tokens([f"<|reserved_{number}|>" for number in range(6000)])
    control = ControlTokens(tokenizer)
    text = "a < b <|reserved_12|><|reserved_5999|> <|reserved_6000|>"
    assert [text[slice(*span)] for span in control.find(text)] == [
        "<|reserved_12|>",
        "<|reserved_5999|>",
    ]
