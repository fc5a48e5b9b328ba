"""The tokenizer: decoding restores the text, digits are single tokens, and splitting a text changes
nothing.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.errors import InvalidInput, InvalidWeights
from memstore.model.landmark.landmark_model import SHIPPED
from memstore.model.tokenizer import SEGMENT_CHARACTERS, Tokenizer

TEXT = (
    "The red fox sat by the river, and the river ran to the sea. It was 1847; nobody “knew” why.\n"
    * 40
)
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 320)


@given(text=unicode_text, size=st.integers(1, 5))
def test_decoding_restores_the_text_whole_and_in_parts(tokenizer, text, size):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.characters(ids) == len(text)
    starts = range(0, len(ids), size)
    parts = [tokenizer.whole_characters(ids[n : n + size], ids[n + size :][:3]) for n in starts]
    assert "".join(parts) == text
    assert [len(part) for part in parts] == [
        tokenizer.characters(ids[n : n + size]) for n in starts
    ]


def test_every_digit_is_a_token_of_its_own(tokenizer):
    for number in ("1847", "8806", "00", "3.75"):
        ids = tokenizer.encode(f"It was {number}")
        pieces = [tokenizer.decode([token]) for token in ids]
        assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == [
            c for c in number if c.isdigit()
        ]


def test_text_never_encodes_to_landmark_or_cmt(tokenizer):
    assert tokenizer.landmark_id == tokenizer.vocab_size - 2
    ids = tokenizer.encode(TEXT + "<landmark> <cmt> <|endoftext|> [LMK]")
    assert max(ids) < tokenizer.landmark_id
    special = [tokenizer.landmark_id, tokenizer.vocab_size - 1]
    assert tokenizer.decode([ids[0], *special, *ids[1:5]]) == tokenizer.decode(ids[:5])


LONG_TEXTS = {
    "lines": TEXT * 40,
    "no newline": (TEXT * 40).replace("\n", " "),
    "no white space": "x1y" * 50_000,
    "exactly one segment": "ab c\n" * (SEGMENT_CHARACTERS // 5) + "z" * (SEGMENT_CHARACTERS % 5),
    "spaces only": " " * 140_000,
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_a_long_text_is_encoded_segment_by_segment(tokenizer, text):
    segments = list(tokenizer.segments(text))
    assert "".join(segments) == text
    ids = tokenizer.encode(text)
    assert ids == [token for segment in segments for token in tokenizer.encode(segment)]
    assert tokenizer.decode(ids) == text


def test_segments_end_after_a_newline_and_else_before_a_space():
    lines = list(Tokenizer.segments(LONG_TEXTS["lines"]))
    assert all(segment.endswith("\n") and len(segment) <= SEGMENT_CHARACTERS for segment in lines)
    words = list(Tokenizer.segments(LONG_TEXTS["no newline"]))
    assert all(segment.startswith(" ") for segment in words[1:])
    lengths = [len(segment) for segment in Tokenizer.segments("x" * 140_000)]
    assert lengths == [65_536, 65_536, 140_000 - 2 * 65_536]
    assert list(Tokenizer.segments("")) == []


def test_saving_and_loading_keeps_ids_and_fingerprint(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert Tokenizer.train([TEXT], 300).fingerprint != tokenizer.fingerprint


def test_text_with_lone_surrogates_is_refused(tokenizer):
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(InvalidInput, match="surrogate"):
            encode("half \ud83d of a pair")


def test_a_damaged_tokenizer_file_is_refused(tmp_path):
    with pytest.raises(InvalidWeights, match="cannot read"):
        Tokenizer.load(tmp_path / "absent.json")
    for content in (
        b"not json",
        b"[]",
        b"{}",
        b"\xff\xfe",
        json.dumps({"model": {"type": "Unigram"}}).encode(),
    ):
        file = tmp_path / "tokenizer.json"
        file.write_bytes(content)
        with pytest.raises(InvalidWeights, match=r"tokenizer\.json"):
            Tokenizer.load(file)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(InvalidInput, match="at least 258"):
        Tokenizer.train([TEXT], 257)


def test_the_shipped_tokenizer_has_2048_ids_and_loses_nothing():
    shipped = Tokenizer.load(SHIPPED / "tokenizer.json")
    assert shipped.vocab_size == 2048
    assert shipped.decode(shipped.encode(TEXT)) == TEXT
    assert len(shipped.encode(TEXT)) < len(TEXT) / 2
