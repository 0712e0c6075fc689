from __future__ import annotations

from unirl.explore.provenance import recorded_facts, repeating_commands

HEADER = {
    "recipe": "shapes",
    "seed": 4,
    "commit": "0123abc",
    "versions": {"python": "3.11.7", "unirl": "0.1.0", "torch": "2.13.0+cpu"},
    "assignments": ["text.steps=2", "text.prompts=split = 'rl'"],
    "snapshot": 3,
    "reward": {"version": 2, "identity": "ab12"},
}


def test_the_commands_make_the_run_again() -> None:
    assert repeating_commands(HEADER) == [
        "git checkout 0123abc",
        "pip install -e . torch==2.13.0",
        "unirl train shapes --run runs/again --seed 4 --set text.steps=2 "
        "--set 'text.prompts=split = '\"'\"'rl'\"'\"''",
    ]


def test_without_a_recipe_there_is_nothing_to_repeat() -> None:
    assert repeating_commands({"commit": "0123abc"}) == []


def test_facts_that_are_not_recorded_are_left_out() -> None:
    facts = dict(recorded_facts(HEADER))
    assert facts["reward"] == "version 2, ab12"
    assert facts["versions"] == "python 3.11.7, unirl 0.1.0, torch 2.13.0+cpu"
    assert facts["seed"] == "4" and facts["snapshot"] == "3"
    assert "data" not in facts and "started" not in facts
