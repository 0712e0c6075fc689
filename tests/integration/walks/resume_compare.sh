# My run was killed; continue and compare: the commands of docs/howto_resume_compare.md.
set -euo pipefail
sed -n '/title="small.txt"/,/^```$/p' "$DOCS/howto_resume_compare.md" | sed '1d;$d' > small.txt

# Killed as soon as its first checkpoint is there.
unirl train shapes --run runs/ppo --settings small.txt &
run=$!
until compgen -G 'runs/ppo/checkpoints/step-*' > /dev/null; do
  kill -0 "$run"
  read -rt 0.05 <> <(:) || true
done
kill -9 "$run"
wait "$run" || test $? -eq 137
test ! -e runs/ppo/summary.json

unirl resume runs/ppo
unirl eval runs/ppo
unirl eval runs/ppo --weights start
unirl eval runs/ppo --weights newest --json
unirl train shapes --run runs/grpo --settings small.txt --set text.algorithm=grpo --set image.algorithm=grpo --set tokenizer.model=runs/ppo/models/tokenizer --set sft.model=runs/ppo/models/sft --set reward.model=runs/ppo/models/reward
unirl compare runs/ppo runs/grpo
unirl compare runs/ppo runs/grpo --kind train --figure curves.png --measure reward
