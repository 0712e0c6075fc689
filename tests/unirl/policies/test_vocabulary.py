from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from unirl.errors import ConfigError
from unirl.policies.vocabulary import ImageGrid, JointVocabulary, word_tokenizer

CAPTIONS = ("a red circle, left", "a blue circle")
WORDS = (",", "a", "blue", "circle", "left", "red")


@pytest.fixture(scope="module")
def vocabulary() -> JointVocabulary:
    return JointVocabulary.from_captions(CAPTIONS, num_codes=5, rows=2, columns=3)


def test_specials_come_first_then_words_in_order_then_codes(vocabulary: JointVocabulary) -> None:
    specials = ["<pad>", "<unk>", "<bos>", "<eos>", "<boi>", "<eoi>"]
    ids = vocabulary.tokenizer.get_vocab()
    assert sorted(ids, key=ids.__getitem__) == [*specials, *WORDS]
    assert (vocabulary.pad, vocabulary.bos, vocabulary.eos) == (0, 2, 3)
    assert (vocabulary.begin_image, vocabulary.end_image) == (4, 5)
    assert vocabulary.grid == ImageGrid(offset=12, num_codes=5, rows=2, columns=3)
    assert vocabulary.grid.length == 6
    assert vocabulary.size == 17


def test_captions_go_to_ids_and_back(vocabulary: JointVocabulary) -> None:
    ids = vocabulary.words("a red circle")
    assert ids == [7, 11, 9]
    assert vocabulary.text([*ids, vocabulary.eos, 7, 7]) == "a red circle"
    assert vocabulary.text(ids) == "a red circle"
    assert vocabulary.text([]) == ""
    assert vocabulary.words("") == []


def test_a_word_that_was_never_seen_is_unknown(vocabulary: JointVocabulary) -> None:
    assert vocabulary.words("a zebra") == [7, 1]


@pytest.mark.parametrize("special", ["<pad>", "<bos>", "<eos>", "<boi>", "<eoi>"])
def test_specials_written_in_a_caption_stay_text(vocabulary: JointVocabulary, special: str) -> None:
    """Or a caption could open a picture, or end a prompt, inside its words."""
    written = vocabulary.words(f"a {special} circle")
    assert set(written) <= {1, 7, 9}
    assert written[0] == 7 and written[-1] == 9


def test_the_order_of_the_captions_does_not_matter() -> None:
    forward, backward = word_tokenizer(CAPTIONS), word_tokenizer(CAPTIONS[::-1])
    assert forward.get_vocab() == backward.get_vocab()


def test_a_picture_stands_between_its_marks(vocabulary: JointVocabulary) -> None:
    assert vocabulary.picture([0, 4, 1, 1, 2, 3]) == [4, 12, 16, 13, 13, 14, 15, 5]


@pytest.mark.parametrize("codes", [[0] * 5, [0] * 7, []])
def test_a_picture_of_another_size_is_refused(vocabulary: JointVocabulary, codes: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"a picture has 6 codes, found {len(codes)}"):
        vocabulary.picture(codes)


@pytest.mark.parametrize("code", [-1, 5])
def test_a_code_outside_the_codebook_is_refused(vocabulary: JointVocabulary, code: int) -> None:
    """Codes of another tokenizer would silently read as words, or past the end of the embedding."""
    with pytest.raises(ConfigError, match=f"code {code} .* 5 codes"):
        vocabulary.picture([0, 1, 2, 3, 4, code])


def test_text_may_hold_words_and_the_end_and_nothing_else(vocabulary: JointVocabulary) -> None:
    allowed = vocabulary.allowed("text")
    assert allowed.shape == (17,)
    assert allowed.nonzero().flatten().tolist() == [3, 6, 7, 8, 9, 10, 11]


def test_a_picture_may_hold_codes_and_nothing_else(vocabulary: JointVocabulary) -> None:
    assert vocabulary.allowed("image").nonzero().flatten().tolist() == [12, 13, 14, 15, 16]


def test_save_and_load_round_trip(vocabulary: JointVocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path)
    loaded = JointVocabulary.load(tmp_path)
    assert loaded.tokenizer.get_vocab() == vocabulary.tokenizer.get_vocab()
    assert loaded.grid == vocabulary.grid
    for direction in ("text", "image"):
        assert loaded.allowed(direction).equal(vocabulary.allowed(direction))
    assert loaded.words("a <boi> circle") == vocabulary.words("a <boi> circle")
    assert json.loads((tmp_path / "image_grid.json").read_text())["offset"] == 12


def test_transformers_loads_the_tokenizer(vocabulary: JointVocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a red circle", add_special_tokens=False).input_ids == [7, 11, 9]
    assert tokenizer.decode([7, 11, 9, 3], skip_special_tokens=True) == "a red circle"
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 3


def test_codes_never_overlap_the_words() -> None:
    with pytest.raises(ConfigError, match=r"start at id 11, inside the text vocabulary of 12 ids"):
        JointVocabulary(word_tokenizer(CAPTIONS), ImageGrid(offset=11, num_codes=5, rows=1, columns=1))


def test_room_between_words_and_codes_belongs_to_neither() -> None:
    vocabulary = JointVocabulary(
        word_tokenizer(CAPTIONS), ImageGrid(offset=20, num_codes=5, rows=1, columns=1)
    )
    assert vocabulary.size == 25
    for direction in ("text", "image"):
        assert not vocabulary.allowed(direction)[12:20].any()


def test_a_tokenizer_without_image_marks_is_refused() -> None:
    tokenizer = word_tokenizer(CAPTIONS)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer.__class__.from_str(
            tokenizer.backend_tokenizer.to_str().replace("<boi>", "<other>")
        ),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    with pytest.raises(ConfigError, match="the tokenizer has no <boi> token"):
        JointVocabulary(plain, ImageGrid(offset=50, num_codes=5, rows=1, columns=1))


def test_a_folder_without_a_grid_is_no_policy(tmp_path: Path, toy: SimpleNamespace) -> None:
    toy.make_vocabulary().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no image_grid\.json, so this is no joint-vocabulary policy"):
        JointVocabulary.load(tmp_path)
