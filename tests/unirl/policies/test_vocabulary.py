from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from unirl.errors import ConfigError, RolloutError
from unirl.policies.vocabulary import ImageGrid, JointVocabulary, word_tokenizer

CAPTIONS = ("a red circle, left", "a blue circle")
WORDS = ("##,", "a", "blue", "circle", "left", "red")


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


@pytest.mark.parametrize(
    "caption",
    [
        "A red circle, left.",
        "it's 3.5 m (about)",
        "一个红色的圆形。",
        "赤い T恤 を着る",
        "แมวดำ",
        "a#b ##c",
        "2*3",
        "naïve café",
    ],
)
def test_words_read_back_as_the_caption(caption: str) -> None:
    """Or a caption with a full stop could never be answered word for word."""
    vocabulary = JointVocabulary.from_captions([*CAPTIONS, caption], num_codes=5, rows=2, columns=3)
    ids = vocabulary.words(caption)
    assert vocabulary.tokenizer.unk_token_id not in ids
    assert vocabulary.text(ids) == caption


def test_a_script_without_spaces_has_an_id_a_character() -> None:
    """So that a policy can say what no caption says whole."""
    vocabulary = JointVocabulary.from_captions(
        ["一个红色的圆", "一个蓝色的方"], num_codes=5, rows=2, columns=3
    )
    ids = vocabulary.words("一个蓝色的圆")
    assert len(ids) == 6 and vocabulary.tokenizer.unk_token_id not in ids


def test_the_order_of_the_captions_does_not_matter() -> None:
    forward, backward = word_tokenizer(CAPTIONS), word_tokenizer(CAPTIONS[::-1])
    assert forward.get_vocab() == backward.get_vocab()


def test_a_picture_stands_between_its_marks(vocabulary: JointVocabulary) -> None:
    assert vocabulary.picture([0, 4, 1, 1, 2, 3]) == [4, 12, 16, 13, 13, 14, 15, 5]


@pytest.mark.parametrize("codes", [[0] * 5, [0] * 7, []])
def test_a_picture_of_another_size_is_refused(vocabulary: JointVocabulary, codes: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"a picture has 6 codes, found {len(codes)}"):
        vocabulary.picture(codes)


@pytest.mark.parametrize("caption", [None, 5, ["dark"], "\ud800 dark"])
def test_what_is_no_text_is_refused(vocabulary: JointVocabulary, caption: str) -> None:
    with pytest.raises(ConfigError, match="it needs text that UTF-8 can hold"):
        vocabulary.words(caption)


def test_one_number_is_no_picture(vocabulary: JointVocabulary) -> None:
    with pytest.raises(ConfigError, match="a picture has 6 codes, found 3"):
        vocabulary.picture(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [-1, 5, 1.5, 2.0, float("nan"), "1"])
def test_a_code_outside_the_codebook_is_refused(vocabulary: JointVocabulary, code: object) -> None:
    """Codes of another tokenizer would silently read as words, or past the end of the embedding."""
    with pytest.raises(ConfigError, match=f"code {code!r} .* 5 codes"):
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


@pytest.fixture(scope="module")
def emu() -> JointVocabulary:
    """2 x 3 codes with row ends, laid out as Emu3 does, the codes being tokens of the tokenizer."""
    tokenizer = word_tokenizer([*CAPTIONS, "2*3"])
    marks = ["<eol>", "<eof>", "<img>", "<start>", "<end>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    offset = len(tokenizer)
    behind = [*(f"<visual {code}>" for code in range(5)), "<behind>"]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in behind])
    grid = ImageGrid(
        offset=offset,
        num_codes=5,
        rows=2,
        columns=3,
        row_end="<eol>",
        begin_image="<start>",
        end_image="<end>",
        head="2*3<img>",
        tail="<eof>",
    )
    return JointVocabulary(tokenizer, grid)


def test_a_picture_with_row_ends(emu: JointVocabulary) -> None:
    ids = emu.picture([0, 4, 1, 1, 2, 3])
    names = emu.tokenizer.convert_ids_to_tokens(ids)
    assert " ".join(names) == (
        "<start> 2 ##* ##3 <img> <visual 0> <visual 4> <visual 1> <eol> "
        "<visual 1> <visual 2> <visual 3> <eol> <eof> <end>"
    )
    assert emu.start_of_picture == ids[:5] and emu.drawing([0, 4, 1, 1, 2, 3]) == ids[5:-2]
    assert emu.grid.length == 6 and emu.grid.response_length == 8


def test_a_row_end_is_the_only_id_at_its_place(emu: JointVocabulary) -> None:
    allowed = emu.allowed("image")
    assert allowed.shape == (8, emu.size)
    for place in range(8):
        ids = allowed[place].nonzero().flatten().tolist()
        codes = list(range(emu.grid.offset, emu.grid.offset + 5))
        assert ids == ([emu.row_end] if place in (3, 7) else codes)


def test_text_holds_no_code_although_the_tokenizer_knows_them(emu: JointVocabulary) -> None:
    allowed = emu.allowed("text")
    tokens = emu.tokenizer.convert_ids_to_tokens(allowed.nonzero().flatten().tolist())
    assert {"<eos>", "<behind>", "circle"} <= set(tokens) and emu.size == len(emu.tokenizer)
    assert not [token for token in tokens if token.startswith("<visual")]
    assert not {"<start>", "<end>", "<eol>", "<eof>", "<img>"} & set(tokens)
    with pytest.raises(ConfigError, match=r"caption 'a <visual 3> circle' holds '<visual 3>'"):
        emu.words("a <visual 3> circle")


def test_drawings_go_back_to_codes(vocabulary: JointVocabulary, emu: JointVocabulary) -> None:
    codes = torch.tensor([[0, 4, 1, 1, 2, 3], [4, 4, 4, 0, 0, 0]])
    for each in (vocabulary, emu):
        drawings = torch.tensor([each.drawing(row) for row in codes.tolist()])
        assert each.codes(drawings).equal(codes)


def test_a_wrong_number_of_image_tokens_is_refused(vocabulary: JointVocabulary, emu: JointVocabulary) -> None:
    with pytest.raises(RolloutError, match=r"a drawing has 6 ids \(2 x 3 codes\), found .* \(1, 5\)"):
        vocabulary.codes(torch.full((1, 5), 12))
    with pytest.raises(RolloutError, match=r"8 ids \(2 x 3 codes and a row end behind each row\), found .*6"):
        emu.codes(torch.full((1, 6), emu.grid.offset))


def test_a_drawing_with_a_wrong_id_is_refused(vocabulary: JointVocabulary, emu: JointVocabulary) -> None:
    drawing = torch.tensor([emu.drawing([0] * 6)] * 2)
    drawing[1, 7] = emu.grid.offset
    with pytest.raises(
        RolloutError, match=rf"row 1: line 1 .* ends with id {emu.grid.offset}, .* {emu.row_end}"
    ):
        emu.codes(drawing)
    plain = torch.tensor([vocabulary.drawing([0] * 6)])
    plain[0, 2] = 3
    with pytest.raises(
        RolloutError, match=r"row 0: id 3 at place 2 is no image code; codes have ids 12 to 16"
    ):
        vocabulary.codes(plain)


def test_the_whole_grid_goes_to_disk_and_an_old_file_still_loads(
    emu: JointVocabulary, vocabulary: JointVocabulary, tmp_path: Path
) -> None:
    emu.save(tmp_path)
    assert JointVocabulary.load(tmp_path).grid == emu.grid
    vocabulary.save(tmp_path)
    old = {"offset": 12, "num_codes": 5, "rows": 2, "columns": 3}
    (tmp_path / "image_grid.json").write_text(json.dumps(old))
    assert JointVocabulary.load(tmp_path).grid == vocabulary.grid


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
