import random
from pathlib import Path

import pytest
from epd_orchestrator.detokenizer import Detokenizer, StopStrings, TextStream
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "models/digits-vl/tokenizer.json"))
IM_END = 256  # a special token


def tokens(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", ["plain words", "naïve 中文 🙂 end", "🙂🙂", " two  spaces ", "👩‍👩‍👧"])
def test_pieces_join_to_the_text_and_hold_no_half_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in tokens(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in tokens("€")] == ["", "", "€"]  # one token a byte here


def test_incomplete_bytes_at_the_end_are_flushed_as_decode_shows_them() -> None:
    cut = tokens("ab€")[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(map(detokenizer.push, cut)) == "ab"
    assert detokenizer.flush() == "\ufffd"
    assert TOKENIZER.decode(cut) == "ab\ufffd"


def test_special_tokens_are_skipped() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in [*tokens("a"), IM_END, *tokens("b")]] == ["a", "", "b"]


def test_any_bytes_join_to_what_decode_gives() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(260) for _ in range(rng.randrange(1, 30))]
        detokenizer = Detokenizer(TOKENIZER)
        joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert joined == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END"])
    assert [stops.push(piece) for piece in ["abE", "N", "E", "ND", "xyz"]] == ["ab", "", "EN", "", ""]
    assert stops.matched
    assert stops.flush() == ""


def test_text_held_back_comes_at_the_end_if_no_stop_string_followed() -> None:
    stops = StopStrings(["END"])
    assert stops.push("abEN") == "ab"
    assert stops.flush() == "EN"
    assert not stops.matched


def test_a_stop_string_cuts_at_the_same_place_however_the_text_arrives() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(20))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(3)]
        results = set()
        for size in (1, 2, 3, 20):
            matcher = StopStrings(stops)
            out = "".join(matcher.push(text[at : at + size]) for at in range(0, len(text), size)) + matcher.flush()
            results.add((out, matcher.matched))
        assert len(results) == 1, (text, stops, results)
        out, matched = results.pop()
        assert not any(stop in out for stop in stops)
        assert matched == any(stop in text for stop in stops)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = TextStream(TOKENIZER, ["b"], min_tokens=2)
    shown = ""
    for token in tokens("abcb"):
        shown += stream.push(token)
    assert shown + stream.flush() == "abc"
    assert stream.stopped
