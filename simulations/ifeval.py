"""Check answers against IFEval's instructions (Zhou et al. 2023, arXiv 2311.07911), by our code.

The 25 kinds of instructions are the names in the ``instruction_id_list`` of IFEval's prompts, each
with its arguments. A language is recognised by its script, and a language in Latin script by its
commonest words. Other languages that share a script (Hindi, Marathi and Nepali; Arabic, Persian and
Urdu; Russian and Bulgarian) are not told apart. A sentence ends at a mark followed by a blank. An
empty answer follows no instruction.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

SCRIPTS = {
    "DEVANAGARI": "hi mr ne", "TELUGU": "te", "THAI": "th", "GURMUKHI": "pa", "ARABIC": "ar fa ur",
    "GUJARATI": "gu", "HANGUL": "ko", "BENGALI": "bn", "KANNADA": "kn", "TAMIL": "ta",
    "CYRILLIC": "ru bg",
}  # fmt: skip
COMMON = {
    "en": "the and of to in is that it for with are this you",
    "pt": "de que e o a do da em um para com não uma os",
    "it": "di che e la il un per è non una sono con del le",
    "fi": "ja on ei että se oli hän mutta joka ovat tai kun myös kuin",
    "vi": "và là của có không được cho một các trong người với này",
    "de": "der die und das ist nicht ein zu den mit von auf für sie",
    "sw": "na ya wa kwa ni katika za la kuwa yake hii kama watu",
}
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
Check = Callable[..., bool]


def follows(instruction: str, arguments: Mapping[str, Any], answer: str) -> bool:
    """Return whether an answer follows an instruction; ValueError for an unknown instruction."""
    if instruction not in CHECKS:
        known = ", ".join(CHECKS)
        raise ValueError(f"instruction_id_list: must hold some of {known}; got {instruction!r}")
    named = {name: value for name, value in arguments.items() if value is not None}
    return bool(answer.strip()) and CHECKS[instruction](answer.strip(), **named)


def follows_all(columns: Mapping[str, Any], answer: str) -> bool:
    """Return whether an answer follows all instructions of a line of IFEval's prompts."""
    pairs = zip(columns["instruction_id_list"], columns["kwargs"], strict=True)
    return all(follows(name, arguments, answer) for name, arguments in pairs)


def _compared(count: int, relation: str, most: int) -> bool:
    return count >= most if relation == "at least" else count < most


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _times(word: str, text: str, whole: bool = False) -> int:
    edge = r"\b" if whole else ""
    return len(re.findall(f"{edge}{re.escape(word)}{edge}", text, re.IGNORECASE))


def _sentences(text: str) -> int:
    parts = re.split(r"[.!?…]+[\"'”’)*]*(?:\s+|$)", text)
    return sum(bool(_words(part)) for part in parts)


def _parts(text: str, mark: str) -> list[str]:
    """Return the parts between marks, without an empty part at either end."""
    parts = [part.strip() for part in re.split(mark, text)]
    return parts[not parts[0] : len(parts) - (not parts[-1])]


def _nth_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    first = _words(parts[nth_paragraph - 1])[:1]
    return [word.lower() for word in first] == [first_word.lower()]


def _json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text, flags=re.IGNORECASE)
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _two(text: str) -> bool:
    parts = _parts(text, r"\*{6}")
    return len(set(parts)) == len(parts) == 2 and all(parts)


def _language(text: str, language: str) -> bool:
    letters = [letter for letter in text if letter.isalpha()]
    for script, languages in SCRIPTS.items():
        if language in languages.split():
            inside = sum(unicodedata.name(letter, "").startswith(script) for letter in letters)
            return 2 * inside > len(letters)
    words = [word.lower() for word in _words(text)]
    counts = {name: sum(map(words.count, own.split())) for name, own in COMMON.items()}
    return counts[language] > 0 and counts[language] == max(counts.values())


def _repeats(text: str, prompt_to_repeat: str) -> bool:
    return text.lower().startswith(prompt_to_repeat.strip().lower())


def _ends(text: str, end_phrase: str) -> bool:
    return text.strip(' "').lower().endswith(end_phrase.strip(' "').lower())


CHECKS: Mapping[str, Check] = {
    "change_case:capital_word_frequency": lambda text, capital_relation, capital_frequency: (
        _compared(sum(word.isupper() for word in _words(text)), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "combination:repeat_prompt": _repeats,
    "combination:two_responses": _two,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: bool(
        re.search(
            re.escape(postscript_marker.strip(".")).replace(r"\.", r"\.\s*"), text, re.IGNORECASE
        )
    ),
    "detectable_format:constrained_response": lambda text: any(own in text for own in ANSWERS),
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\b{re.escape(section_spliter)}\s+\d+", text)) >= num_sections
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^\s*(?:\*(?!\*)|-)\s*\S", text, re.M)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        len(re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)) >= num_highlights
    ),
    "detectable_format:title": lambda text: bool(re.search(r"<<[^\n<>]*\w[^\n<>]*>>", text)),
    "keywords:existence": lambda text, keywords: all(_times(word, text) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_times(word, text, whole=True) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, relation, keyword, frequency: _compared(
        _times(keyword, text), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, let_relation, letter, let_frequency: _compared(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": _language,
    "length_constraints:nth_paragraph_first_word": _nth_word,
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(parts := _parts(text, r"\s?\*\*\*\s?")) == num_paragraphs and all(parts)
    ),
    "length_constraints:number_sentences": lambda text, relation, num_sentences: _compared(
        _sentences(text), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, relation, num_words: _compared(
        len(_words(text)), relation, num_words
    ),
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": _ends,
    "startend:quotation": lambda text: len(text) > 1 and text[0] == text[-1] == '"',
}
