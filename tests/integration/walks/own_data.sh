# My tars and a prompt list to a first RL run: the commands of docs/howto_own_data.md.
set -euo pipefail
python "$WALKS/make_files.py" .
sed -n '/title="small.txt"/,/^```$/p' "$DOCS/howto_own_data.md" | sed '1d;$d' > small.txt

unirl doctor
unirl ingest 'photos-{000..001}.tar' prompts.txt data/store
unirl info data/store
unirl query data/store "SELECT modality, count(*) AS rows FROM samples GROUP BY modality"
unirl show data/store --sheet sheet.png --limit 24
unirl train own_data --store data/store --run runs/first --settings small.txt --dry-run
unirl train own_data --store data/store --run runs/first --settings small.txt
unirl eval runs/first
unirl report runs/first
unirl query runs/first/experience "SELECT stage, step, round(avg(reward), 3) AS reward FROM samples GROUP BY ALL ORDER BY step"
