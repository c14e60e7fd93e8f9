"""Every instruction of IFEval has an answer that follows it and near misses that do not."""

import pytest

from simulations.ifeval import CHECKS, follows, follows_all

# instruction, arguments, answers that follow, answers that do not
CASES = [
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2},
     ["NASA and ESA fly.", "I AM"], ["NASA flies.", "Nasa and Esa fly."]),
    ("change_case:capital_word_frequency",
     {"capital_relation": "less than", "capital_frequency": 2}, ["One NASA."], ["NASA, ESA."]),
    ("change_case:english_capital", {}, ["ALL OF IT, 100 %."], ["ALL BUT oNE."]),
    ("change_case:english_lowercase", {}, ["all of it, 100 %."], ["all but One."]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem. "},
     ["Write a poem.\n\nRoses", "WRITE a poem. Roses"], ["Here: Write a poem.", "Roses"]),
    ("combination:two_responses", {}, ["one\n******\ntwo", "******one******two******"],
     ["one", "one ****** one", "one ****** two ****** three", "one ****** ", "******"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["Dear [name], at [address]."], ["Dear [name].", "Dear [], [name]", "Dear name, address"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Bye.\nP.S. more", "bye p. s. more"], ["Bye.", "tops"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["Bye. P.P.S. more"], ["Bye. P.S. more"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "So: My answer is maybe."], ["My answer is", "Yes.", "my answer: no"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1, 2]\n```', "```\n{}\n```"],
     ["{a: 1}", 'Here: {"a": 1}']),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb"], ["Section 1\na", "Section a Section b", "SECTION 1 2"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n  - b"],
     ["* a", "* a\n* b\n* c", "a * b\n* c", "**a**\n**b**"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*one* and *two*", "**one** then *two*"], ["*one* two", "* a\n* b", "** **"]),
    ("detectable_format:title", {}, ["<<A day>>\ntext"], ["<A day>", "<<>>", "<< \n>>"]),
    ("keywords:existence", {"keywords": ["mom", "mother"]}, ["Mom is a mother."], ["My mom."]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["A rocket."], ["I Rock!"]),
    ("keywords:frequency", {"relation": "at least", "keyword": "war", "frequency": 2},
     ["War and war."], ["One war."]),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "t", "let_frequency": 2},
     ["To us."], ["To Tom."]),
    ("keywords:letter_frequency", {"let_relation": "at least", "letter": "!", "let_frequency": 2},
     ["Oh! No!"], ["Oh!"]),
    ("language:response_language", {"language": "hi"}, ["यह एक वाक्य है।"], ["This is it.", "这是"]),
    ("language:response_language", {"language": "ko"}, ["안녕하세요 여러분"], ["Hello"]),
    ("language:response_language", {"language": "de"}, ["Das ist nicht der Weg und die Welt."],
     ["That is not the way.", "Non è la via di casa.", "xyz"]),
    ("language:response_language", {"language": "pt"}, ["O gato não está com os amigos de Ana."],
     ["The cat is not with the friends."]),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
     ["One.\n\nWeekend, then."], ["Weekend.\n\nOne.", "One.\n\nTwo.\n\nweekend", "weekend"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***\na *** b"],
     ["a\n\nb", "a *** b *** c", "a *** *** b"]),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 3},
     ["One. Two!", 'He said "No." Then 3.5 more…'], ["One. Two? Three."]),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2},
     ["One. Two."], ["One, two.", "Of 2.5"]),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3},
     ["one, two three"], ["one two"]),
    ("punctuation:no_comma", {}, ["no comma; none"], ["a, b"]),
    ("startend:end_checker", {"end_phrase": "Anything else?"},
     ["Yes. Anything else?", 'Yes. "anything else?"'], ["Anything else? No."]),
    ("startend:quotation", {}, ['"all of it"'], ['"half of it', "none", '"']),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_an_instruction_is_told_from_near_misses(name, arguments, right, wrong) -> None:
    for answers, expected in ((right, True), (wrong, False)):
        for answer in answers:
            assert follows(name, arguments, answer) is expected, answer
    assert not follows(name, arguments, " \n")


def test_every_instruction_has_a_case_and_all_of_a_prompt_must_be_followed() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS)
    columns = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
               "kwargs": [{"num_words": None}, {}]}  # fmt: skip
    assert follows_all(columns, '"both"') and not follows_all(columns, '"one, not both"')
    with pytest.raises(ValueError, match="must hold some of .*; got 'poems:rhyme'"):
        follows("poems:rhyme", {}, "text")


def test_arguments_of_a_file_are_words_and_no_patterns():
    """A pattern of a file could take for ever, or be none."""
    for name, marked in (
        ("detectable_content:postscript", "postscript_marker"),
        ("detectable_format:multiple_sections", "section_spliter"),
    ):
        for text in ("(a+)+$", "[", "*"):
            assert not follows(name, {marked: text, "num_sections": 1} if "sections" in name
                               else {marked: text}, "a" * 40 + "!")  # fmt: skip
    assert follows("detectable_content:postscript", {"postscript_marker": "[x]"}, "so. [x] too")
