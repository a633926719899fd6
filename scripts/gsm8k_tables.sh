#!/usr/bin/env bash
# The judge's tables on a real pair: heads from mined labels and from likelihood on GSM8K's training questions, against every
# other rule on its test problems; how far given answers are accepted; the same head on code it never saw; how stable labels are.
# Everything is kept in a folder, and a run that was interrupted goes on where it stopped. Two processes of one thread each.
#   TARGET=… DRAFT=… scripts/gsm8k_tables.sh TRAIN.jsonl TEST.jsonl HUMANEVAL.jsonl [PROBLEMS (200)] [QUESTIONS (300)] [FOLDER]
set -euo pipefail
set -m # a job in the background is a process group: its end, should this script end early, is that of all it started
train=$(realpath "$1") test=$(realpath "$2") humaneval=$(realpath "$3")
problems=${4:-200} questions=${5:-300}
cd "$(dirname "$0")/.."
folder=${6:-checkpoints/gsm8k-tables}
export OMP_NUM_THREADS=1
target=${TARGET:-qwen2.5-coder-1.5b-instruct-int8} draft=${DRAFT:-qwen2.5-coder-0.5b-instruct-int8}
pair=(--target "$target" --draft "$draft")
mkdir -p "$folder"

evaluate() { # name, options: rules on the test problems, answers kept under the name
    local name=$1
    shift
    python scripts/evaluate.py --task gsm8k --data "$test" --limit "$problems" "${pair[@]}" --out "$folder/$name.jsonl" "$@"
}

label() { # method, name, options
    local method=$1 name=$2
    shift 2
    python scripts/label.py "$method" --task gsm8k --data "$train" "${pair[@]}" --out "$folder/$name.jsonl" "$@"
}

first() { # what needs no judge, beside the labelling
    # topk:1 isn't asked: it is the standard test, where decoding is greedy
    evaluate others --rules plain,draft,standard,standard@25,topk:3,topk:5,kl >"$folder/others.txt"
    for seed in 1 2; do
        label mine "sampled-$seed" --limit $((questions / 6)) --temperature 0.3 --seed "$seed"
    done
    python scripts/compare_labels.py "$folder/sampled-1.jsonl" "$folder/sampled-2.jsonl" | tee "$folder/stability.txt"
}

second() { # the judge elsewhere, beside the test problems
    python scripts/accept.py "$test" --task gsm8k --limit "$problems" "${pair[@]}" --judge "$folder/mine.pt" \
        --plot "$folder/runs.png" --rules standard,topk:3,topk:5,kl,judge:0.5,judge | tee "$folder/accept.txt"
    python scripts/evaluate.py --task humaneval --data "$humaneval" --limit $((problems / 2)) "${pair[@]}" \
        --judge "$folder/mine.pt" --rules plain,draft,standard,standard@25,judge \
        --out "$folder/humaneval.jsonl" | tee "$folder/humaneval.txt"
}

first &
trap 'kill -- -$! 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
label mine mine --limit "$questions"
label likelihood likelihood --limit $((questions / 2))
heads=()
for how in mine likelihood; do
    heads+=("$folder/$how.pt")
    [ -e "$folder/$how.pt" ] || python scripts/train_judge.py "$folder/$how.jsonl" --target "$target" --out "$folder/$how.pt"
done
wait $!
second &
evaluate judges --judge "${heads[@]}" --rules judge:0.3,judge:0.5,judge:0.7,judge
wait $!
trap - EXIT
{ cat "$folder/others.jsonl"; tail -n +2 "$folder/judges.jsonl"; } >"$folder/all.jsonl"
evaluate all --judge "${heads[@]}" --rules plain,draft,standard,standard@25,judge:0.3,judge:0.5,judge:0.7,judge,topk:3,topk:5,kl \
    --plot "$folder/trade-off.png" | tee "$folder/all.txt"
