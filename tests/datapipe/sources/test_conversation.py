"""Conversations of the usual layouts in one form, and their media."""

from __future__ import annotations

import json

import pytest

from datapipe.errors import DecodeError
from datapipe.sources import FieldMap
from datapipe.sources.arrange import arrange
from datapipe.sources.conversation import Medium, messages_text, read_messages


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def image(index: int) -> dict[str, object]:
    return {"type": "image", "index": index}


def pictures(*names: str) -> list[Medium]:
    return [Medium(kind="image", value=name) for name in names]


def test_llava() -> None:
    found, media = read_messages(
        [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}],
        pictures("a.jpg"),
    )
    assert found == [
        {"role": "user", "content": [image(0), text("\nWhat is it?")]},
        {"role": "assistant", "content": [text("A cat.")]},
    ]
    assert media == pictures("a.jpg")


def test_messages_with_parts_inline_and_beside() -> None:
    content = [
        {"type": "text", "text": "Compare <image>"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image"},
        {"type": "image", "image": "c.jpg"},
    ]
    found, media = read_messages([{"role": "user", "content": content, "name": "ann"}], pictures("b.jpg"))
    assert found == [
        {"role": "user", "content": [text("Compare <image>"), image(0), image(1), image(2)], "name": "ann"}
    ]
    assert [medium.value for medium in media] == ["data:image/png;base64,AA==", "b.jpg", "c.jpg"]


def test_videos_and_pictures_are_numbered_in_the_order_of_the_text() -> None:
    beside = [*pictures("a.jpg", "b.jpg"), Medium(kind="video", value="v.mp4")]
    found, media = read_messages([{"role": "user", "content": "<image><video><image>"}], beside)
    assert found[0]["content"] == [image(0), {"type": "video", "index": 1}, image(2)]
    assert [medium.value for medium in media] == ["a.jpg", "v.mp4", "b.jpg"]


def test_sharegpt_with_system_tools_and_json_text() -> None:
    dialog = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": "f()"},
        {"from": "gpt", "value": "A"},
    ]
    found, _ = read_messages(json.dumps(dialog), [], system="Be brief.")
    assert [message["role"] for message in found] == ["system", "user", "assistant", "assistant"]
    assert found[2] == {"role": "assistant", "content": [text("f()")], "from": "function_call"}
    again, _ = read_messages(messages_text(found), [])
    assert again == found


@pytest.mark.parametrize(
    ("found", "num_images", "reason", "detail"),
    [
        ([{"from": "human", "value": "<image><image>"}], 1, "image_count", "2 image placeholders, but 1"),
        ([{"from": "human", "value": "none"}], 2, "image_count", "0 image placeholders, but 2"),
        ([{"from": "human", "value": "<video>"}], 0, "video_count", "1 video placeholders, but 0"),
        ([], 0, "messages_empty", "no message"),
        ("[{", 0, "bad_messages", "no JSON"),
        ({"role": "user"}, 0, "bad_messages", "dict"),
        (["hello"], 0, "bad_messages", "'hello'"),
        ([{"role": "narrator", "content": "x"}], 0, "unknown_role", "'narrator'"),
        ([{"role": "user"}], 0, "bad_messages", "no content"),
        ([{"role": "user", "content": 7}], 0, "bad_messages", "int"),
        ([{"role": "user", "content": [{"type": "audio"}]}], 0, "bad_messages", "'audio'"),
        ([{"role": "user", "content": " "}], 0, "message_empty", "without any character"),
        ([{"role": "user", "content": "a\0b"}], 0, "nul_byte", "NUL"),
        ([{"role": "user", "content": "\ud800"}], 0, "not_utf8", "not text"),
    ],
)
def test_what_is_refused(found: object, num_images: int, reason: str, detail: str) -> None:
    with pytest.raises(DecodeError, match=detail) as caught:
        read_messages(found, pictures(*["x.jpg"] * num_images))
    assert caught.value.reason == reason


def test_a_row_with_several_pictures() -> None:
    values = {
        "id": "7",
        "image": ["a.jpg", "b.jpg"],
        "conversations": [{"from": "human", "value": "<image> <image>"}],
    }
    arranged = arrange(values, FieldMap())
    assert [medium.value for medium in arranged.media] == ["a.jpg", "b.jpg"]
    assert arranged.columns["id"] == "7" and arranged.columns["num_media"] == 2
    assert arranged.optional == {"caption"}


def test_text_pairs() -> None:
    arranged = arrange({"prompt": "Q", "chosen": "good", "rejected": "bad", "score": 2}, FieldMap())
    assert arranged.columns == {"prompt": "Q", "chosen": "good", "rejected": "bad", "score": 2}
    assert arranged.optional == {"image", "caption"} and arranged.media == ()
    dialog = "\n\nHuman: Q\n\nAssistant: A\n\nHuman: R\n\nAssistant:"
    shared = arrange({"chosen": dialog + " good", "rejected": dialog + " gold"}, FieldMap()).columns
    assert shared == {"prompt": dialog, "chosen": " good", "rejected": " gold"}


def test_message_pairs() -> None:
    asked = {"role": "user", "content": "Q"}
    values = {
        "chosen": [asked, {"role": "assistant", "content": "good"}],
        "rejected": [asked, {"role": "assistant", "content": "bad"}],
    }
    columns = arrange(values, FieldMap()).columns
    assert json.loads(str(columns["prompt"])) == [{"role": "user", "content": [text("Q")]}]
    assert json.loads(str(columns["rejected"])) == [{"role": "assistant", "content": [text("bad")]}]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt": "Q", "chosen": "same", "rejected": "same"}, "identical_pair"),
        (
            {"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "x"}]},
            "identical_pair",
        ),
        ({"chosen": "one", "rejected": "two"}, "prompt_missing"),
        ({"prompt": "Q", "chosen": "one", "rejected": [{"role": "assistant", "content": "x"}]}, "mixed_pair"),
        ({"prompt": "Q", "chosen": None, "rejected": "two"}, "chosen_none"),
        ({"prompt": "", "chosen": "one", "rejected": "two"}, "prompt_empty"),
        ({"prompt": "Q", "chosen": b"x", "rejected": b"x"}, "identical_pair"),
    ],
)
def test_pairs_that_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        arrange(values, FieldMap())
    assert caught.value.reason == reason


def test_picture_pairs() -> None:
    arranged = arrange(
        {"prompt": "a cat", "chosen": b"A", "rejected": {"bytes": b"B", "path": None}}, FieldMap()
    )
    assert arranged.is_pair and arranged.caption == "a cat" and len(arranged.media) == 2


def test_user_columns_of_our_names_are_moved_aside() -> None:
    values = {"messages": [{"role": "user", "content": "x"}], "num_media": 9, "pair": 3}
    columns = arrange(values, FieldMap()).columns
    assert (columns["user_num_media"], columns["num_media"], columns["user_pair"]) == (9, 0, 3)
