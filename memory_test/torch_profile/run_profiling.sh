#!/usr/bin/env bash
# Profile the 1B model on a GPU, then check the traces.
#
#   ./run_profiling.sh                                # everything; without a GPU the small model
#   ./run_profiling.sh --trainers DPSGDTrainer        # arguments go to profiling_script.py
#   MODE=test OUT=/tmp/runs ./run_profiling.sh
#
# The exit status is not 0 if a run failed or a trace is not sound.
set -u

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
MODE=${MODE:-profile}               # profile (GPU) or test (CPU)
OUT=${OUT:-runs}

# Large and small blocks of the three trainers alternate; segments that grow fragment less.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

"$PYTHON" "$HERE/test_syntax.py" --quiet || exit 2
"$PYTHON" "$HERE/profiling_script.py" --mode="$MODE" --output-dir "$OUT" "$@"
status=$?
[ $status -eq 2 ] && exit 2
"$PYTHON" "$HERE/check_traces.py" "$OUT" || status=$(( status ? status : 1 ))
exit $status
