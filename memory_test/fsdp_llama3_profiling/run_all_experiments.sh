#!/usr/bin/env bash
# Measure all modes at all lengths, each in processes of its own.
#
#   ./run_all_experiments.sh                                  # 1B shape, all modes, all GPUs
#   MODEL=tiny LENGTHS="16 32" MODES="no_dp ghost_fsdp" ./run_all_experiments.sh
#
# Settings are environment variables, below with their defaults. A run has a folder of its own:
# result.json or result.failure.json, and log.txt. What has a result is not run again, so a
# stopped series goes on where it was; failures are tried again (RETRY=0: they are not). A
# failure is recorded and the rest goes on; the exit status is then 1.
set -u

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-llama3-1b}           # built-in shape, local folder or hub id
LENGTHS=${LENGTHS:-"1024 2048 4096 8192"}
BATCHES=${BATCHES:-1}               # samples of a process
MODES=${MODES:-}                    # default: all that the installed opacus has
DEFERRED=${DEFERRED:-"0 1"}         # values of OPACUS_USE_DEFERRED_NORM, where it matters
OUT=${OUT:-results}
NUM_ITER=${NUM_ITER:-5}
WARMUP_ITER=${WARMUP_ITER:-2}
TIMEOUT=${TIMEOUT:-1800}            # seconds for one run
RETRY=${RETRY:-1}
EXTRA=${EXTRA:-}                    # further arguments, as "--dtype bf16 --task classify"

trap 'echo "stopped; run again to go on"; exit 130' INT TERM

if [ -z "$MODES" ]; then
  MODES=$("$PYTHON" "$HERE/single_experiment.py" --list-modes) || exit 2
fi

done_count=0 failed=()

run_one() {  # mode length batch deferred
  local mode=$1 length=$2 batch=$3 deferred=$4
  local name="${mode}_T${length}_B${batch}"
  [ "$deferred" = 1 ] && name="${name}_deferred"
  local folder="$OUT/${MODEL//\//_}/$name"
  if [ -s "$folder/result.json" ]; then
    echo "have    $name"; done_count=$((done_count + 1)); return
  fi
  if [ "$RETRY" = 0 ] && [ -s "$folder/result.failure.json" ]; then
    echo "failed  $name (before)"; failed+=("$name"); return
  fi
  mkdir -p "$folder" || { echo "failed  $name: no folder $folder"; failed+=("$name"); return; }
  echo "run     $name"
  # shellcheck disable=SC2086  # EXTRA is a list of words
  OPACUS_USE_DEFERRED_NORM=$deferred "$PYTHON" "$HERE/single_experiment.py" \
    --mode "$mode" --seq-length "$length" --batch-size "$batch" --model-name "$MODEL" \
    --num-iter "$NUM_ITER" --warmup-iter "$WARMUP_ITER" --timeout "$TIMEOUT" \
    --output "$folder/result.json" $EXTRA >"$folder/log.txt" 2>&1
  local status=$?
  if [ $status -eq 0 ]; then
    done_count=$((done_count + 1)); echo "ok      $(grep -m1 'ms a step' "$folder/log.txt")"
  else
    failed+=("$name"); echo "failed  $name (exit status $status): $(tail -n 1 "$folder/log.txt")"
  fi
}

for batch in $BATCHES; do
  for length in $LENGTHS; do
    for mode in $MODES; do
      case "$mode" in
        ghost*|flash*|auto) for deferred in $DEFERRED; do run_one "$mode" "$length" "$batch" "$deferred"; done ;;
        *) run_one "$mode" "$length" "$batch" 0 ;;
      esac
    done
  done
done

echo "$done_count measured, ${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
echo "plots: $PYTHON $HERE/visualize_results.py --input-dir $OUT --output-dir $OUT/plots"
[ ${#failed[@]} -eq 0 ]
