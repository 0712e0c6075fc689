"""What people type wrong: each command is answered with one sentence and a way on, and never a traceback.

Codes: 2 where the command line itself is wrong, 1 where it names what is not there or cannot be.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.motion import motion
from recipes.own_data import own_data
from recipes.shapes import shapes
from storage import FeatureStore
from unirl.cli import main, runs

Wrong = Callable[[str], tuple[int, str]]

MODEL = "there is no such folder; models are read from folders of transformers"
NO_STORE = "this is not a feature store"

COMMAND_LINES = {
    # typos in names of commands and options
    "trian shapes": "No such command 'trian'. Did you mean 'train'?",
    "tokenizer trian store --out m": "No such command 'trian'. Did you mean 'train'?",
    "bench laoder store": "No such command 'laoder'. Did you mean 'loader'?",
    "train shapes --seeed 3": "No such option: --seeed (Possible options: --seed, --set)",
    "query store --jsno": "No such option: --jsno (Possible options: --json)",
    # what is missing
    "train": "Missing argument 'recipe'",
    "ingest pictures": "Missing argument",
    "tokenizer train store": "Missing option '--out'",
    "compare run": "name two runs or more",
    "tag store --remove": "give the name of the tag",
    "show store": "name a KEY to see one picture, or --sheet FILE.png for many",
    "score pictures": "name one of --reward FOLDER and --endpoint URL",
    "score pictures --endpoint http://127.0.0.1:1/v1": "say what to ask: --question",
    "reward train --out m": "name a store, for a yes/no reward, or --pairs, for a preference",
    # wrong types and values
    "train shapes --seed x": "Invalid value for '--seed': Input should be a valid integer",
    "train shapes --seed -1": "Invalid value for '--seed'",
    "query store --limit 0": "Invalid value for '--limit'",
    "gc store --keep-last 0": "Invalid value for '--keep-last'",
    "ingest pictures new --max-bad-fraction 2": "Invalid value for '--max-bad-fraction'",
    "ingest pictures new --engine rya": "'rya' is not one of 'local', 'ray'",
    "ingest pictures new --map caption": "--map 'caption': wanted OURS=THEIRS, such as caption=text",
    "export store out --format tfrecord": "'tfrecord' is not one of 'webdataset', 'parquet', 'hf'",
    "show store --sheet sheet.pgn": "wanted a name that ends in .png, .jpg, .jpeg or .webp",
    "score pictures --reward m --out scores.xls": "wanted a name that ends in .parquet, .csv or .jsonl",
    "score pictures --reward m --question q --sheet worst.txt": "--sheet worst.txt: wanted a name that ends",
    "compare run other --figure curves.xyz": "--figure curves.xyz: wanted a name that ends in .png, .svg or",
    "report run --port 8000": "--port is for --serve; add --serve",
    "reward serve m --port 99999": "Invalid value for '--port'",
    "rollout serve m --port 99999": "Invalid value for '--port'",
    "rollout serve m --dtype float8": "'float8' is not one of 'float32', 'bfloat16', 'float16'",
    "tag store v1 --snapshot x": "Invalid value for '--snapshot'",
    "bench loader store --side -1": "Invalid value for '--side'",
    "gc store --grace-hours -1": "Invalid value for '--grace-hours'",
    "compare run other --kind all": "--kind 'all': wanted eval or train",
    "reward mine run --out m --by luck": "'luck' is not one of 'group'",
    "train shapes --settings smal.txt": "--settings smal.txt: there is no such file",
    "train shapes --settings pictures": "--settings pictures: a folder, wanted a file of settings",
    "doctor --folder nowhere": "dir 'nowhere' does not exist",
    # combinations that cannot be
    "train shapes --store store": "recipe shapes makes its own data; --store is for recipes such as own_data",
    "train shapes --ranks 2": "--ranks is for --dry-run; to train on several processes: torchrun --nproc",
    "query store --json --csv": "give one of --json, --csv and --parquet",
    "show store toy/00 --where true": "--where and --order-by are for a --sheet; add --sheet FILE.png",
    "score pictures --reward m --endpoint http://x": "name one of --reward FOLDER and --endpoint URL",
    "compare run run": "a run stands twice",
    "reward train store --pairs p --out m": "name a store, for a yes/no reward, or --pairs",
    "reward train store --labels l --out m": "--labels and --from belong to --pairs",
    "reward label pairs --out m": "name one of --model and --endpoint",
    "query store ''": "the condition is empty; write one",
    "score pictures --endpoint ftp://x --question q": "--endpoint ftp://x: wanted a URL such as http",
    "reward label pairs --endpoint 127.0.0.1:8000 --out m": "--endpoint 127.0.0.1:8000: wanted a URL such as",
    "ingest pictures new --workers 0": "Invalid value for '--workers': Input should be greater than or equal",
    "compact store --part-mb 0": "Invalid value for '--part-mb'",
    "report run --port 99999": "Invalid value for '--port'",
    "eval run --num 0": "Invalid value for '--num'",
    "tokenizer train store --out t --num-codes 1": "Invalid value for '--num-codes'",
    "reward serve m --engine vlm": "'vlm' is not one of 'transformers', 'vllm'",
    "doctor --folder prompts.txt": "dir 'prompts.txt' is a file",
    "doctor --deeep": "No such option: --deeep (Possible options: --deep, --help)",
    "--verson": "No such option: --verson (Possible options: --version)",
    "train shapes --settings pictures/a.png": "pictures/a.png: no text, wanted a PATH=VALUE on each",
    f"train shapes --seed {1 << 63}": "Invalid value for '--seed': Input should be less than or equal to",
    "quarantine store --save prompts.txt": "--save prompts.txt: there is a file of this name; name a folder",
    "show store --sheet s.png --side 999999": "Invalid value for '--side'",
    "export store out --where row<0": "no row where row<0; `unirl info store` tells what is there",
    "show store --sheet s.png --where row<0": "no row where row<0; `unirl info store` tells what is there",
}
"""Ended with 2."""

NAMES = {
    # recipes and settings
    "train my_recipes/red.py": "type `python my_recipes/red.py --run RUN`",
    "train my_recipe.py:red": "type `python my_recipe.py --run RUN`",
    "train own_data --store store --set sft.model=pictures": "no config.json, so this is no model's folder",
    "train shaeps": "there is no recipe 'shaeps'; did you mean 'shapes'?",
    "train shapes --set text.setps=3": "text.setps: there is no setting 'setps'; did you mean 'steps'?",
    "train shapes --set txt.steps=3": "there is no setting 'txt'; did you mean 'text'?",
    "train shapes --set lora_rnk=3": "there is no setting 'lora_rnk'; did you mean 'lora_rank'?",
    "train shapes --set micro_prompts=4": "did you mean settings.micro_prompts?",
    "train shapes --set text.steps=many": "text.steps: found 'many', wanted a whole number",
    "train shapes --set text.algorithm=pop": "text.algorithm: found 'pop', wanted ppo or",
    "train shapes --set text.direction=sideways": "found 'sideways', wanted text or image or both",
    "train shapes --set sft.steps=0": "sft: steps is 0, wanted 1 or more",
    "train shapes --set tokenizer.batch_size=0": "tokenizer: batch_size is 0, wanted 1 or more",
    "train shapes --set reward.learning_rate=0": "reward: learning_rate is 0.0, wanted a number above 0",
    "train shapes --set sft.text_fraction=2": "sft: text_fraction is 2.0, wanted 0 to 1",
    "train shapes --set sft.config.width=0": "sft.config: width is 0; wanted 1 or more",
    "train shapes --set sft.config.num_heads=3": "3 heads share a width of 128; wanted an even number",
    "train shapes --set sft.config.num_layers=-1": "sft.config: num_layers is -1; wanted 1 or more",
    "train shapes --set tokenizer.config.fold=0": "tokenizer.config: fold is 0; wanted 1 or more",
    "train shapes --set tokenizer.config.channel_multiplier=0": "channel_multiplier is (0,); wanted 1",
    "train shapes --set reward.config.num_kv_heads=0": "reward.config: num_kv_heads is 0; wanted 1 or more",
    "train shapes --set lora_rank=-1": "lora_rank is -1, wanted 1 or more, or 0 for no adapters",
    "train shapes --set data.num_eval=0": "data: num_eval is 0; wanted 1 or more",
    "train own_data --set data.judge_bar=7": "data: judge_bar is 7.0, wanted 0 to 1",
    "train own_data --store store --set data.judge_model=nowhere": f"nowhere: {MODEL}",
    "train own_data --store store --set tokenizer.model=policy": "tokenizer.model: policy: holds a model of",
    "train own_data --store store --set reward.model=policy": "reward.model: policy: holds a model of",
    "train motion --set clip.fps=1": "a clip of 1.0 s at 1.0 frames a second is one picture",
    "train motion --set clip.fps=-1": "a clip of 1.0 s at -1.0 frames a second has no frame",
    "train motion --set data.num_held_out=30": "data: num_held_out is 30, wanted 0 to 24",
    "train motion --set data.num_sft_motions=0": "data: num_sft_motions is 0, wanted 1 to the 42",
    "train shapes --settings prompts.txt": "'a cat' is no setting; write path=value",
    "train shapes --set steps": "'steps' is no setting; write path=value, such as text.steps=20",
    "train shapes --rollout vlm": "settings.rollout: found 'vlm', wanted native or vllm",
    "train own_data": "which data? --store STORE names it; `unirl ingest FILES STORE` makes a store",
    "train own_data --store stroe": "there is no such folder; did you mean",
    "train own_data --store pictures": NO_STORE,
    "train own_data --store store --set sft.model=m": f"sft.model: m: {MODEL}",
    "train shapes --set settings.seed=x": "settings.seed: found 'x', wanted a whole number",
    "train shapes --tiny": "recipe shapes has no tiny form; it is made for a CPU as it is",
    "train shapes --run pictures": "pictures: holds other things and no run; name a new folder with --run",
    "train shapes --run prompts.txt": "prompts.txt: there is a file of this name; name a folder for the run",
    # runs
    "resume nothing": "nothing: no run.json, so there is no run to go on with",
    "resume prompts.txt": "prompts.txt: no run.json, so there is no run to go on with",
    "resume damaged": "damaged/run.json: cannot be read",
    "resume other": "other/run.json: does not say config, so it is no record of a run",
    "eval mine": "mine: was made by a recipe 'dots', which no installed package has",
    "resume mine": "if a script made it, start that again",
    "report nothing": "nothing: no such run directory; `runs/NAME` is made when a recipe starts",
    "eval nothing": "nothing: no run.json",
    "eval run": "run: its models are not prepared yet; `unirl resume run` goes on with it",
    "compare run nothing": "nothing: no run.json",
    "reward mine nothing --out m": "nothing: no such run directory",
    # stores, keys, queries, files
    "info stroe": "there is no such folder; did you mean",
    "verify prompts.txt": NO_STORE,
    "query store 'captoin > 3'": "there is no column 'captoin'; did you mean 'caption'?",
    "query store 'DROP TABLE samples'": "the query failed",
    "show store toy/0": "no key 'toy/0'; the nearest are 'toy/00'",
    "query store 'SELECT * FROM sample'": "Table with name sample does not exist",
    "query store 'width >'": "the query failed: Parser Error",
    "tag store 'a b'": "tag 'a b' cannot be used: a name has 1 to 128 letters",
    "tag store v1 --remove": "there is no tag 'v1'; there are none",
    "export store out --where 'nothing = 1'": "there is no column 'nothing'; columns: caption, split",
    "ingest pictures new --resize 12x": "resize is '12x'; wanted the larger side, such as 512",
    "ingest pictures new --tensor codes": "wanted NAME:DTYPE[3,HEIGHT,WIDTH], such as pixels:uint8",
    "ingest pictures store/blobs": "the folder holds other files",
    "gc nowhere": "there is no such folder; did you mean",
    "ingest store new": "store: this is a feature store, not a source",
    "export store store/out": "store/out: lies inside of the store",
    "ingest table.jsonl new --map split=splitt": "no row has 'splitt' (mapped to 'split')",
    "import nowhere new": "this is not an exported folder (no export.json in it)",
    "score pictures --reward nowhere --question q": f"nowhere: {MODEL}",
    "ingest '' new": "the name of a source is empty; name a folder, a tar or a table",
    "ingest picturse new": "picturse: no such file or folder; did you mean pictures?",
    "ingest pictures new --format foldr": "unknown format 'foldr'",
    "ingest pictures new --background purpel": "background is 'purpel'; wanted a name such as white",
    "ingest pictures prompts.txt": "there is a file of this name; give another path",
    "export store pictures": "there is something of this name already; give a new path",
    "import pictures new": "this is not an exported folder",
    "diff store 0 99": "there is no snapshot 99",
    "tag store v1 --snapshot 99": "there is no snapshot 99",
    "bench loader store --tensor pixles": "no tensor column 'pixles'",
    # models
    "score pictures --reward nowhere": f"nowhere: {MODEL}",
    "tokenizer encode store --tokenizer policy": "policy: holds a model of type 'llama', wanted an image",
    "reward serve policy": "holds a model of type 'llama', wanted a Qwen2.5-VL",
    "score pictures --reward policy --question q": "holds a model of type 'llama', wanted a Qwen2.5-VL",
    "rollout serve judge": "judge: holds a model of type 'qwen2_5_vl', which is no policy; name that of the",
    "join policy policy --out m": "policy: holds a model of type 'llama', wanted an image tokenizer",
    "join empty policy --out m": "empty/config.json: names no model_type",
    "tokenizer encode store --tokenizer nowhere": f"nowhere: {MODEL}",
    "sft store --tokenizer nowhere --out m": f"nowhere: {MODEL}",
    "reward serve nowhere": f"nowhere: {MODEL}",
    "rollout serve nowhere": f"nowhere: {MODEL}",
    "join nowhere nowhere --out m": f"nowhere: {MODEL}",
    "reward train --pairs nowhere --out m": "nowhere: cannot be read",
    "tokenizer train store --out pictures": "there is something in it; name a new folder for the model",
    "tokenizer train store --out m --image-size 30": "image_size 30 is not a multiple of 4",
}
"""Ended with 1."""


@pytest.fixture(scope="module")
def folder(toy_store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, pictures, texts, and folders that look like runs and models."""
    folder = tmp_path_factory.mktemp("wrong")
    shutil.copytree(toy_store.path, folder / "store")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(bytes(toy_store.blob(0)))
    (folder / "prompts.txt").write_text("a cat\n")
    (folder / "run").mkdir()
    record = {"recipe": "shapes", "seed": 0, "assignments": [], "config": {}}
    (folder / "run" / "run.json").write_text(json.dumps(record))
    (folder / "other").mkdir()
    (folder / "other" / "run.json").write_text('{"recipe": "shapes", "seed": 0}')
    (folder / "mine").mkdir()
    (folder / "mine" / "run.json").write_text(json.dumps(record | {"recipe": "dots"}))
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "judge").mkdir()
    (folder / "judge" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{}")
    (folder / "table.jsonl").write_text('{"caption": "a cat", "split": "rl"}\n')
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.json").write_text("{")
    return folder


@pytest.fixture
def wrong(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Wrong:
    """Type a command in the folder; returns the exit code and what stands on the error output."""
    monkeypatch.chdir(folder)
    known = [
        SimpleNamespace(name="shapes", load=lambda: shapes),
        SimpleNamespace(name="own_data", load=lambda: own_data),
        SimpleNamespace(name="motion", load=lambda: motion),
    ]
    monkeypatch.setattr(runs, "entry_points", lambda group: known)

    def call(command: str) -> tuple[int, str]:
        before = sorted(folder.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert sorted(folder.rglob("*")) == before, "a wrong command leaves nothing behind"
        return int(ended.value.code or 0), said.err

    return call


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_a_wrong_command_line_ends_with_2(wrong: Wrong, command: str) -> None:
    code, said = wrong(command)
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert COMMAND_LINES[command] in line


@pytest.mark.parametrize("command", NAMES)
def test_a_wrong_name_ends_with_1(wrong: Wrong, command: str) -> None:
    code, said = wrong(command)
    assert code == 1, said
    assert said.startswith("error: ") and len(said.splitlines()) == 1
    assert NAMES[command] in said


def test_all_wrong_settings_are_told_at_once(wrong: Wrong) -> None:
    code, said = wrong("train shapes --set txt.steps=3 --set image.steps=x --set seed --seed 2")
    assert code == 1
    assert (
        "'seed' is no setting" in said and "did you mean 'text'?" in said and "image.steps: found 'x'" in said
    )


def test_a_wrong_level_of_the_log_is_told(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIRL_LOG", "debgu")
    assert wrong("info store") == (2, "error: UNIRL_LOG is 'DEBGU'; did you mean 'DEBUG'?\n")
