#!/usr/bin/env bash
# The judge's table on the demo pair: heads from tuples, mined labels and likelihood, of both kinds, against every other rule.
# Everything is kept in a folder, and a run that was interrupted goes on where it stopped.
#   scripts/demo_tables.sh [PROBLEMS (1000)] [FOLDER (checkpoints/demo-tables)]
set -euo pipefail
cd "$(dirname "$0")/.."
problems=${1:-1000}
folder=${2:-checkpoints/demo-tables}
pair=(--target demo/target --draft demo/draft)
mkdir -p "$folder"

python scripts/label.py mine --task demo-train --limit 200 "${pair[@]}" --dtype float32 --out "$folder/mine.jsonl"
# a wording of several tokens costs the first of them about 30 nats, a wrong number about 50
python scripts/label.py likelihood --task demo-train --limit 400 --threshold 40 "${pair[@]}" --dtype float32 --out "$folder/likelihood.jsonl"
cp demo/judge_tuples.jsonl "$folder/tuples.jsonl"

heads=()
train() { # labels, kind, rule for what follows a mistake, name
    head="$folder/$4.pt"
    heads+=("$head")
    [ -e "$head" ] || python scripts/train_judge.py "$folder/$1.jsonl" --target demo/target --dtype float32 --kind "$2" \
        --labels-after "$3" --lr 1e-3 --recall 0.99 --out "$head"
}
for kind in post_norm pre_norm; do
    train tuples "$kind" span "tuples-$kind"
    train tuples "$kind" rest "tuples-rest-$kind"
    train mine "$kind" span "mine-$kind"
    train likelihood "$kind" span "likelihood-$kind"
done

python scripts/evaluate.py --limit "$problems" --judge "${heads[@]}" --out "$folder/answers.jsonl" --plot "$folder/trade-off.png" \
    --rules plain,draft,standard,judge:0.5,judge,topk:1,topk:3,topk:5,typical,kl
