# Score my folder of pictures with a VLM and look at the worst: the commands of docs/howto_score_folder.md.
set -euo pipefail
python "$WALKS/make_files.py" .

unirl ingest 'photos-{000..001}.tar' data/store
unirl reward train data/store --out models/vlm --steps 30 --batch-size 32
unirl score photos/ --reward models/vlm --question "does this picture show a red circle ?" --worst 6 --sheet worst.png --out scores.parquet
unirl score data/store --reward models/vlm --worst 8 --sheet misfits.png --json
unirl show data/store photos-000/0-0003
