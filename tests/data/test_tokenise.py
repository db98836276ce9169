"""Where prompts end, what is trained, what closes a response, and what the length limit does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from kleash.data.batches import collate_examples, collate_pairs
from kleash.data.sources import Rows, read_rows
from kleash.data.tokenise import (
    Example,
    Pair,
    pad_id,
    tokenise_demonstrations,
    tokenise_preferences,
    tokenise_prompts,
)
from kleash.errors import UsageError

Make = Callable[..., Any]
CONVERSATION = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "second"},
]


def demonstration(prompt: Any, completion: Any) -> Rows:
    return read_rows([{"prompt": prompt, "completion": completion}], "demonstrations")


def conversation(*messages: dict) -> Rows:
    return read_rows([{"messages": list(messages or CONVERSATION)}], "demonstrations")


def pair(prompt: Any, chosen: Any, rejected: Any) -> Rows:
    return read_rows([{"prompt": prompt, "chosen": chosen, "rejected": rejected}], "preferences")


def one(rows: Rows, tokenizer: Any, **options: Any) -> Example:
    (item,) = tokenise_demonstrations(rows, tokenizer, **{"max_length": None, **options}).items
    return item


def one_pair(rows: Rows, tokenizer: Any, **options: Any) -> Pair:
    (item,) = tokenise_preferences(rows, tokenizer, **{"max_length": None, **options}).items
    return item


def trained_text(example: Example, tokenizer: Any) -> str:
    ids = [i for i, flag in zip(example.response_ids, example.trained, strict=True) if flag]
    return tokenizer.decode(ids, skip_special_tokens=False)


def whole(example: Example) -> list[int]:
    return example.prompt_ids + example.response_ids


# ---- strings ----


def test_plain_strings_are_prompt_completion_end(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    example = one(demonstration("2+2=", "4"), tokenizer)
    assert tokenizer.decode(example.prompt_ids) == "2+2="
    assert tokenizer.decode(example.response_ids) == "4</s>"
    assert example.trained == [True, True]


def test_report_10_the_end_token_is_trained_where_it_is_also_the_padding(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(pad="</s>")
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    rows = read_rows([{"prompt": "a", "completion": c} for c in ("b", "bcde")], "demonstrations")
    batch = collate_examples(
        tokenise_demonstrations(rows, tokenizer, max_length=None).items, pad_id(tokenizer)
    )
    for i in range(2):
        assert batch.tokens[i][batch.response_mask[i]][-1] == tokenizer.eos_token_id
    assert batch.response_lengths.tolist() == [2, 5]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_report_13_bos_once_at_the_front_if_the_tokenizer_adds_it(
    make_tokenizer: Make, adds_bos: bool
) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    example = one(demonstration("ab", "cd"), tokenizer)
    item = one_pair(pair("ab", "cd", "ef"), tokenizer)
    for ids in (whole(example), item.prompt_ids + item.chosen_ids, item.prompt_ids + item.rejected_ids):
        assert ids.count(tokenizer.bos_token_id) == int(adds_bos)
        assert (ids[0] == tokenizer.bos_token_id) == adds_bos
    (prompt,) = tokenise_prompts(read_rows([{"prompt": "ab"}], "prompts"), tokenizer, max_length=None).items
    assert prompt.prompt_ids == example.prompt_ids


def test_report_13_a_bos_written_in_the_text_is_not_doubled(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    assert whole(one(demonstration("<s>ab", "cd"), tokenizer)) == whole(
        one(demonstration("ab", "cd"), tokenizer)
    )


def test_report_12_an_end_token_written_in_the_text_is_not_doubled(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    assert one(demonstration("ab", "cd</s>"), tokenizer) == one(demonstration("ab", "cd"), tokenizer)
    hand_made = one(demonstration("<|im_start|>user\nab<|im_end|>", "cd<|im_end|>"), tokenizer)
    assert tokenizer.decode(hand_made.response_ids) == "cd<|im_end|>"


def test_report_14_no_bos_no_pad(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=None, pad=None)
    example = one(demonstration("ab", "cd"), tokenizer)
    assert None not in whole(example)
    assert pad_id(tokenizer) == tokenizer.eos_token_id


def test_report_14_no_end_token_is_named(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(eos=None)
    with pytest.raises(UsageError, match="row 1: the tokenizer has no end token"):
        one(demonstration("ab", "cd"), tokenizer)
    assert pad_id(tokenizer) == 0
    tokenizer = make_tokenizer(eos=None, template="chatml")  # this template closes its turns itself
    assert trained_text(one(conversation(*CONVERSATION[:2]), tokenizer), tokenizer) == "first<|im_end|>"


def test_an_empty_prompt_starts_from_bos_or_is_an_error(make_tokenizer: Make) -> None:
    for adds_bos in (True, False):
        tokenizer = make_tokenizer(adds_bos=adds_bos)
        example = one(demonstration("", "cd"), tokenizer)
        assert example.prompt_ids == [tokenizer.bos_token_id]
        assert tokenizer.decode(example.response_ids) == "cd</s>"
    with pytest.raises(UsageError, match="the prompt is empty"):
        one(demonstration("", "cd"), make_tokenizer(bos=None))


def test_report_16_boundary_merge_keeps_the_first_response_token(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(merges=[(".", "m")])
    assert tokenizer.convert_ids_to_tokens(tokenizer("a.mem")["input_ids"]) == ["a", ".m", "e", "m"]
    example = one(demonstration("a.", "mem"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(whole(example)) == ["a", ".", "m", "e", "m", "</s>"]
    assert (example.prompt_ids, example.trained) == (tokenizer("a.")["input_ids"], [True] * 4)


def test_report_16_apart_does_not_put_a_space_before_the_response(make_tokenizer: Make) -> None:
    """SentencePiece-like tokenizers open every text with a space; a response is no beginning."""
    tokenizer = make_tokenizer("metaspace")
    merged = one(demonstration("is: ", "yes"), tokenizer)  # "▁yes" would reach over the boundary
    assert tokenizer.decode(whole(merged), skip_special_tokens=True) == "is: yes"
    spaced = one(demonstration("is:", " yes"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(spaced.response_ids)[0] == "▁y"


def test_report_17_22_both_sides_follow_the_same_prompt_ids_where_one_merges(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(merges=[(".", "m")])
    item = one_pair(pair("a.", "mem", "xe"), tokenizer)
    assert item.prompt_ids == tokenizer("a.")["input_ids"]
    assert tokenizer.decode(item.prompt_ids + item.chosen_ids) == "a.mem</s>"
    assert tokenizer.decode(item.prompt_ids + item.rejected_ids) == "a.xe</s>"


@given(prompt=st.text(min_size=1, max_size=20), completion=st.text(min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_prompt_ids_and_response_ids_rebuild_any_row(
    make_tokenizer: Make, prompt: str, completion: str
) -> None:
    tokenizer = BYTES.setdefault(
        "it", make_tokenizer(merges=[(".", "m"), ("a", "b"), ("ab", "c")], adds_bos=True)
    )
    if not completion.strip():
        return
    example = one(demonstration(prompt, completion), tokenizer)
    assert tokenizer.decode(whole(example)) == f"<s>{prompt}{completion}</s>"
    assert tokenizer.decode(example.prompt_ids) == f"<s>{prompt}"
    assert all(example.trained)


BYTES: dict[str, Any] = {}


# ---- messages ----


@pytest.mark.parametrize("template", ["chatml", "llama", "inst"])
def test_report_12_exactly_one_terminator_and_the_templates_own_rendering(
    make_tokenizer: Make, template: str
) -> None:
    tokenizer = make_tokenizer(template=template)
    example = one(conversation(*CONVERSATION[:2]), tokenizer)
    rendered = tokenizer.apply_chat_template(CONVERSATION[:2], return_dict=False)
    assert whole(example) == rendered[: len(whole(example))]
    assert (
        tokenizer.decode(rendered[len(whole(example)) :]).strip() == ""
    )  # nothing but the template's line break
    end = tokenizer.eos_token_id if template == "inst" else tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert example.response_ids.count(end) == 1 and example.response_ids[-1] == end and example.trained[-1]


@pytest.mark.parametrize("template", ["chatml", "llama", "inst"])
def test_report_13_bos_once_through_a_template(make_tokenizer: Make, template: str) -> None:
    tokenizer = make_tokenizer(template=template, adds_bos=True)
    count = whole(one(conversation(), tokenizer)).count(tokenizer.bos_token_id)
    assert count == (1 if template == "llama" else 0)  # as the template has it


def test_report_15_mapping_from_the_template_call(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    call = tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True)
    assert len(call) == 2 and set(call) >= {"input_ids"}  # the trap: a mapping, not ids
    example = one(conversation(*CONVERSATION[:2]), tokenizer)
    assert example.prompt_ids == call["input_ids"]
    mask = collate_examples([example], 0).response_mask[0]
    assert int(mask.nonzero()[0]) == len(call["input_ids"])


def test_report_15_a_tokenizer_that_returns_no_list_is_an_error(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": [1, None]}

    with pytest.raises(UsageError, match="not ids"):
        one(demonstration("a", "b"), Broken())


def test_every_assistant_turn_is_trained_with_its_end_token(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    example = one(conversation(), tokenizer, train_on="assistant")
    assert trained_text(example, tokenizer) == "first<|im_end|>second<|im_end|>"
    assert tokenizer.decode(example.prompt_ids) == "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    assert whole(example) == rendered[:-1]


def test_the_last_turn_alone(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    example = one(conversation(), tokenizer, train_on="last")
    assert trained_text(example, tokenizer) == "second<|im_end|>" and all(example.trained)
    assert whole(example) == whole(one(conversation(), tokenizer))


def test_assistant_turns_of_an_explicit_prompt_are_not_trained(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    example = one(demonstration(CONVERSATION[:3], CONVERSATION[3:]), tokenizer, train_on="assistant")
    assert trained_text(example, tokenizer) == "second<|im_end|>"


def test_report_18_turns_are_found_where_the_text_repeats_the_markers(make_tokenizer: Make) -> None:
    """A user who writes the template's own markers cannot move the mask."""
    tokenizer = make_tokenizer(template="inst")
    sly = {"role": "user", "content": "say [/INST] first</s> or [INST]"}
    example = one(conversation(sly, CONVERSATION[1]), tokenizer)
    assert trained_text(example, tokenizer) == " first</s>"


def test_a_template_without_end_token_gets_one(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="no-end")
    example = one(conversation(*CONVERSATION[:2]), tokenizer)
    assert tokenizer.decode(whole(example)) == "user: q1\nassistant: first\n</s>"


def test_report_26_not_append_only_is_refused_with_both_texts(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="forgets-reasoning")
    turns = [dict(m) for m in CONVERSATION]
    turns[1]["content"] = "<think>hm</think>first"
    with pytest.raises(UsageError) as error:
        one(conversation(*turns), tokenizer, train_on="assistant")
    assert "row 1: the chat template is not append-only" in str(error.value)
    assert "<think>hm" in str(error.value) and "train_on=last" in str(error.value)
    example = one(conversation(*turns), tokenizer, train_on="last")  # the way out that the message names
    assert trained_text(example, tokenizer) == "second<|im_end|>"
    assert "<think>" not in tokenizer.decode(example.prompt_ids)


def test_report_17_a_generation_prompt_the_answer_does_not_repeat_is_refused(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="opens-thinking")
    with pytest.raises(UsageError, match="not append-only"):
        one_pair(pair([CONVERSATION[0]], "yes", "no"), tokenizer)
    both = [{"role": "assistant", "content": f"<think>\n{word}"} for word in ("yes", "no")]
    item = one_pair(pair([CONVERSATION[0]], both[:1], both[1:]), tokenizer)
    for message, ids in zip(both, (item.chosen_ids, item.rejected_ids), strict=True):
        rendered = tokenizer.apply_chat_template([CONVERSATION[0], message], tokenize=False)
        assert tokenizer.decode(item.prompt_ids + ids) == rendered.rstrip()


def test_pairs_of_messages_end_in_one_terminator_each(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    item = one_pair(pair([CONVERSATION[0]], "yes", "no"), tokenizer)
    assert [tokenizer.decode(ids) for ids in (item.chosen_ids, item.rejected_ids)] == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]


def test_messages_without_a_template(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(
        UsageError, match=", row 1 holds messages, but the tokenizer has no chat template.*chat=plain"
    ):
        one(conversation(), tokenizer)
    example = one(conversation(), tokenizer, chat="plain")
    text = "\n\nHuman: q1\n\nAssistant: first\n\nHuman: q2\n\nAssistant: second</s>"
    assert tokenizer.decode(whole(example)) == text
    assert trained_text(example, tokenizer) == " first second</s>"


def test_template_mode_makes_turns_of_strings_and_transcripts(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    wrapped = one(demonstration("q1", " first"), tokenizer, chat="template")
    assert wrapped == one(conversation(*CONVERSATION[:2]), tokenizer)
    transcript = "\n\nHuman: q1\n\nAssistant: first\n\nHuman: q2\n\nAssistant:"
    example = one(demonstration(transcript, " second"), tokenizer, chat="template")
    assert example == one(conversation(), tokenizer, train_on="last")
    assert (
        tokenizer.decode(whole(one(demonstration(transcript, " second"), tokenizer)))
        == transcript + " second</s>"
    )


def test_a_template_that_refuses_a_role_is_named(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="inst")
    system = {"role": "system", "content": "s"}
    with pytest.raises(
        UsageError, match="row 1: the chat template refuses .*'system'.*only user and assistant"
    ):
        one(conversation(system, *CONVERSATION), tokenizer)
    with pytest.raises(UsageError, match="chat='chatml' must be"):
        one(conversation(), tokenizer, chat="chatml")


@pytest.mark.parametrize("role", ["tool", "critic"])
def test_a_transcript_has_no_speaker_for_other_roles(role: str, make_tokenizer: Make) -> None:
    """Rather than a turn that no reader of transcripts knows ("Critic: …"); a template may know it."""
    other = {"role": role, "content": "5"}
    with pytest.raises(UsageError, match=f"row 1: turn 2 is by '{role}', and chat=plain .*Mend the role"):
        one(conversation(CONVERSATION[0], other, *CONVERSATION[1:]), make_tokenizer(), chat="plain")
    tokenizer = make_tokenizer(template="chatml")
    assert role in tokenizer.decode(
        whole(one(conversation(CONVERSATION[0], other, *CONVERSATION[1:]), tokenizer))
    )


def test_a_transcript_has_a_system_message_at_its_head_alone(make_tokenizer: Make) -> None:
    tokenizer, system = make_tokenizer(), {"role": "system", "content": "be kind"}
    example = one(conversation(system, *CONVERSATION[:2]), tokenizer, chat="plain")
    assert tokenizer.decode(whole(example)) == "be kind\n\nHuman: q1\n\nAssistant: first</s>"
    with pytest.raises(UsageError, match="turn 3 is by 'system'"):
        one(conversation(*CONVERSATION[:2], system, *CONVERSATION[2:]), tokenizer, chat="plain")


def test_prompts_carry_ids_text_and_columns(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    rows = read_rows([{"prompt": "q1", "answer": "4"}, {"prompt": CONVERSATION[:1]}], "prompts")
    plain, chat = tokenise_prompts(rows, tokenizer, max_length=None).items
    assert (tokenizer.decode(plain.prompt_ids), plain.text, plain.columns) == ("q1", "q1", {"answer": "4"})
    assert chat.prompt_ids == one(conversation(*CONVERSATION[:2]), tokenizer).prompt_ids
    assert chat.text == tokenizer.decode(chat.prompt_ids)
    assert (chat.columns, chat.number) == ({"messages": CONVERSATION[:1]}, 2)
    wrapped = tokenise_prompts(rows, tokenizer, max_length=None, chat="template").items[0]
    assert (wrapped.prompt_ids, wrapped.text) == (chat.prompt_ids, "q1")


def test_unknown_words_do_not_count_as_an_end(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("words", words="a b")
    example = one(demonstration("a", "b zzz"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(example.response_ids) == ["b", "[UNK]", "</s>"]


# ---- the length limit ----


def test_drop_is_the_default_and_counted(make_tokenizer: Make) -> None:
    rows = read_rows([{"prompt": "a" * n, "completion": "b"} for n in (2, 8, 9, 20)], "demonstrations")
    result = tokenise_demonstrations(rows, make_tokenizer(), max_length=10)
    assert [item.number for item in result.items] == [1, 2] and result.lengths == [4, 10]
    assert (result.dropped, result.truncated) == ({"longer than max_length": 2}, 0)


def test_report_04_nothing_left_to_train_is_refused(make_tokenizer: Make) -> None:
    rows = demonstration("a" * 40, "b")
    for truncation in ("drop", "response-right"):
        with pytest.raises(UsageError, match="no row is left .*max_length=32.*Raise max_length"):
            one(rows, make_tokenizer(), max_length=32, truncation=truncation)
    example = one(rows, make_tokenizer(), max_length=32, truncation="prompt-left")
    assert len(whole(example)) == 32 and all(example.trained)


def test_prompt_left_keeps_the_end_of_the_prompt_and_the_bos(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    example = one(demonstration("abcdefgh", "xy"), tokenizer, max_length=7, truncation="prompt-left")
    assert tokenizer.decode(whole(example)) == "<s>fghxy</s>"
    rows = read_rows([{"prompt": "a", "completion": c} for c in ("x", "x" * 20)], "demonstrations")
    result = tokenise_demonstrations(rows, tokenizer, max_length=7, truncation="prompt-left")
    assert result.dropped == {"response longer than max_length": 1} and result.truncated == 0


def test_report_22_the_limit_holds_for_both_sides_and_the_prompt_is_shared(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    rows = pair("abcdefghijkl", "ABC", "R" * 10)
    for truncation in ("prompt-left", "response-right"):
        item = one_pair(rows, tokenizer, max_length=16, truncation=truncation)
        assert item.length <= 16
        batch = collate_pairs([item], pad_id(tokenizer))
        shared = len(item.prompt_ids)
        assert batch.tokens[0, :shared].tolist() == batch.tokens[1, :shared].tolist() == item.prompt_ids
    cut = one_pair(rows, tokenizer, max_length=16, truncation="prompt-left")
    assert (
        tokenizer.decode(cut.prompt_ids) == "hijkl"
        and tokenizer.decode(cut.rejected_ids) == "R" * 10 + "</s>"
    )
    with pytest.raises(UsageError, match="1 response longer than max_length"):
        one_pair(pair("abcdefghijkl", "ABC", "R" * 20), tokenizer, max_length=16, truncation="prompt-left")


def test_report_23_a_prompt_that_fills_the_window_is_dropped_and_counted(make_tokenizer: Make) -> None:
    records = [{"prompt": "p" * n, "chosen": "yes", "rejected": "no"} for n in (512, 511, 20)]
    rows = read_rows(records, "preferences")
    result = tokenise_preferences(rows, make_tokenizer(), max_length=512, truncation="response-right")
    assert [item.number for item in result.items] == [2, 3]
    assert (result.dropped, result.truncated) == ({"prompt fills max_length": 1}, 1)
    dropped = tokenise_preferences(rows, make_tokenizer(), max_length=512)
    assert dropped.dropped == {"longer than max_length": 2}


def test_cc_02_pairs_identical_after_truncation_are_dropped_and_counted(make_tokenizer: Make) -> None:
    records = [{"prompt": "pp", "chosen": "same start, a", "rejected": "same start, b"}] * 2
    records[1] = {"prompt": "pp", "chosen": "x", "rejected": "y"}
    result = tokenise_preferences(
        read_rows(records, "preferences"), make_tokenizer(), max_length=8, truncation="response-right"
    )
    assert [item.number for item in result.items] == [2]
    assert result.dropped == {"chosen and rejected have the same ids after truncation": 1}


def test_pairs_with_the_same_ids_are_dropped(make_tokenizer: Make) -> None:
    records = [{"prompt": "a", "chosen": c, "rejected": "zzz"} for c in ("yyy", "b")]
    result = tokenise_preferences(
        read_rows(records, "preferences"), make_tokenizer("words", words="a b"), max_length=None
    )
    assert result.dropped == {"chosen and rejected have the same ids": 1} and len(result.items) == 1


def test_response_right_never_leaves_a_row_without_trained_tokens(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template="chatml")
    prompt = len(one(conversation(), tokenizer).prompt_ids)
    example = one(conversation(), tokenizer, max_length=prompt + 3, truncation="response-right")
    assert trained_text(example, tokenizer) == "fir"
    longer = one(conversation(), tokenizer, max_length=prompt + 9, truncation="response-right")
    assert trained_text(longer, tokenizer) == "first<|im_end|>" and longer.trained == [True] * 6 + [False] * 3
    assert len(whole(longer)) == prompt + 9


def test_a_first_turn_without_tokens_leaves_no_row_without_trained_tokens(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" first", "")
    rows = read_rows([{"messages": CONVERSATION}, {"messages": CONVERSATION[:2]}], "demonstrations")
    options = {"max_length": 29, "truncation": "response-right", "chat": "plain"}
    result = tokenise_demonstrations(rows, tokenizer, **options)
    assert result.dropped == {"no trained token left after truncation": 1}
    assert [item.number for item in result.items] == [2]


def test_a_template_that_prints_nothing_for_the_answer_is_refused(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UsageError, match="row 1: the chat template prints nothing for turn 2"):
        one(conversation(), tokenizer)


def test_long_prompts_are_cut_or_dropped(make_tokenizer: Make) -> None:
    rows = read_rows([{"prompt": "abcdefgh"}, {"prompt": "ab"}], "prompts")
    tokenizer = make_tokenizer()
    cut = tokenise_prompts(rows, tokenizer, max_length=4, truncation="prompt-left")
    assert [tokenizer.decode(item.prompt_ids) for item in cut.items] == ["efgh", "ab"] and cut.truncated == 1
    for truncation in ("drop", "response-right"):
        result = tokenise_prompts(rows, tokenizer, max_length=4, truncation=truncation)
        assert (len(result.items), result.dropped) == (1, {"longer than max_length": 1})


def test_tokens_of_the_response_are_taken_off_the_limit_and_said(make_tokenizer: Make) -> None:
    rows = read_rows([{"prompt": "abcdefgh"}, {"prompt": "ab"}], "prompts")
    options = {"max_length": 10, "max_new_tokens": 6}
    assert len(tokenise_prompts(rows, make_tokenizer(), **options).items) == 1
    with pytest.raises(UsageError, match=r"max_length=10 \(of which max_new_tokens=6 are the response's\)"):
        tokenise_prompts(read_rows([{"prompt": "abcdefgh"}], "prompts"), make_tokenizer(), **options)


def test_options_are_checked(make_tokenizer: Make) -> None:
    with pytest.raises(UsageError, match="max_length=1 must leave at least 2"):
        one(demonstration("a", "b"), make_tokenizer(), max_length=1)
    with pytest.raises(UsageError, match="truncation='left' must be"):
        one(demonstration("a", "b"), make_tokenizer(), truncation="left")
    with pytest.raises(UsageError, match="train_on='all' must be"):
        one(demonstration("a", "b"), make_tokenizer(), train_on="all")


def test_hh_pairs_tokenise_whole(make_tokenizer: Make, hh: Path) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    rows = read_rows(hh, "preferences", limit=150)
    result = tokenise_preferences(rows, tokenizer, max_length=None)
    assert (len(result.items), result.dropped) == (150, {})
    for row, item in zip(rows.rows, result.items, strict=True):
        assert tokenizer.decode(item.prompt_ids + item.chosen_ids) == f"<s>{row.prompt}{row.chosen}</s>"
        assert tokenizer.decode(item.prompt_ids + item.rejected_ids) == f"<s>{row.prompt}{row.rejected}</s>"
