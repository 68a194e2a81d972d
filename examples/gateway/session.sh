#!/usr/bin/env bash
# A session with the gateway in front of payments.py, with curl: prints what is typed and what
# comes back, and fails where it is not what it should be.
#
#     cargo build --release && examples/gateway/session.sh [PATH/TO/hapax]
#
# Ports are free ones, unless SERVICE_PORT, GATEWAY_PORT and ADMIN_PORT say which.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
hapax=${1:-$here/../../target/release/hapax}
[[ -x $hapax ]] || { echo "session: there is no program at $hapax: cargo build --release" >&2; exit 1; }
work=$(mktemp -d)
service=
gateway=
trap 'kill -9 $service $gateway 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
fail() { echo "session: expected $1" >&2; exit 1; }
say() { printf '\n# %s\n' "$*"; }
# Runs a command as a reader would type it, and keeps what it printed in $seen.
run() {
    local typed=${*//$work\//}
    printf '$ %s\n' "${typed//$hapax/hapax}"
    seen=$(eval "{ $*; } 2>&1") || true
    seen=${seen//$work\//}
    printf '%s\n' "$seen"
}
expect() { [[ $seen == *"$1"* ]] || fail "$1"; }
until_up() { for _ in $(seq 200); do curl -s -o /dev/null "$1" && return; sleep 0.05; done; fail "an answer from $1"; }

port=${SERVICE_PORT:-$(free_port)}
python3 "$here/payments.py" "$port" 2>"$work/service.log" & service=$!
until_up "http://127.0.0.1:$port/ledger"
gate=${GATEWAY_PORT:-$(free_port)}
admin=${ADMIN_PORT:-$(free_port)}
start() {
    "$hapax" gateway --upstream "http://127.0.0.1:$port" --listen "127.0.0.1:$gate" \
        --admin "127.0.0.1:$admin" --store "file:$work/hapax.db" --lease 2s --upstream-timeout 6s \
        "$@" >>"$work/gateway.log" 2>&1 & gateway=$!
    until_up "http://127.0.0.1:$admin/readyz"
}
stop() { kill "$1" "$gateway"; wait "$gateway" 2>/dev/null || true; gateway=; }
url=http://127.0.0.1:$gate
pay="curl -si $url/payments -H 'Authorization: Bearer me' -H 'Content-Type: application/json'"
# Starts no interpreter: on a busy machine a charge would be over before its begin is seen.
count() { curl -s "http://127.0.0.1:$port/ledger" | grep -o "\"$1\": [0-9]*" | grep -o '[0-9]*$'; }
charges() { count charges; }
# Waits until the service has that many: charges begun, or charges made.
reached() { for _ in $(seq 200); do [ "$(count "$1")" -ge "$2" ] && return; sleep 0.05; done; fail "$2 $1"; }

start
say "The first request is executed."
run "$pay -H 'Idempotency-Key: \"k-1\"' -d '{\"amount\": 100}'"
expect "201 Created"; expect "idempotency-replayed: false"; expect '"ch_1"'

say "A retry, even with other white space, is answered with the same bytes."
run "$pay -H 'Idempotency-Key: k-1' -d '{ \"amount\":100 }'"
expect "201 Created"; expect "idempotency-replayed: true"; expect '"ch_1"'
[ "$(charges)" = 1 ] || fail "one charge"

say "Another request under the same key is rejected."
run "$pay -H 'Idempotency-Key: \"k-1\"' -d '{\"amount\": 999}'"
expect "422"; expect '"key-reused"'

say "A duplicate of a request in flight is rejected, with the time after which to retry."
eval "$pay -H 'Idempotency-Key: \"k-2\"' -d '{\"amount\": 200, \"seconds\": 2}'" >/dev/null &
first=$!
reached begun 2
run "$pay -H 'Idempotency-Key: \"k-2\"' -d '{\"amount\": 200, \"seconds\": 2}'"
expect "409"; expect '"in-flight"'; expect "retry-after: "
wait "$first"

say "A client disconnects: the charge continues, and the retry gets its response."
run "$pay -H 'Idempotency-Key: \"k-3\"' -d '{\"amount\": 300, \"seconds\": 2}' --max-time 1"
reached charges 3
# From the charge to its record.
while [[ $(curl -s "$url/payments" -H 'Authorization: Bearer me' \
    -H 'Content-Type: application/json' -H 'Idempotency-Key: "k-3"' \
    -d '{"amount": 300, "seconds": 2}') == *'"in-flight"'* ]]; do sleep 0.05; done
run "$pay -H 'Idempotency-Key: \"k-3\"' -d '{\"amount\": 300, \"seconds\": 2}'"
expect "201 Created"; expect "idempotency-replayed: true"; expect '"ch_3"'
[ "$(charges)" = 3 ] || fail "three charges"
stop -TERM

# The gateway is killed while the service is charging; the charge happens, its reply is lost.
killed() { # KEY AMOUNT
    local client before
    before=$(charges)
    eval "$pay -H 'Idempotency-Key: \"$1\"' -d '{\"amount\": $2, \"seconds\": 2}'" >/dev/null 2>&1 &
    client=$!
    reached begun $((before + 1))
    printf '$ kill -KILL $GATEWAY   # while it waits for the charge\n'
    stop -KILL
    wait "$client" || true
    reached charges $((before + 1))
}

say "SIGKILL in mid-request, --on-unknown reexecute: the retry executes again (at-least-once)."
start --on-unknown reexecute
killed k-4 400
start --on-unknown reexecute
run "$pay -H 'Idempotency-Key: \"k-4\"' -d '{\"amount\": 400, \"seconds\": 2}'"
expect "201 Created"; expect "idempotency-replayed: false"; expect '"ch_5"'
[ "$(charges)" = 5 ] || fail "five charges: one twice"
stop -TERM

say "--on-unknown block, the default: the retry does not execute; an operator decides what happened."
start --on-unknown block
killed k-5 500
start --on-unknown block
run "$pay -H 'Idempotency-Key: \"k-5\"' -d '{\"amount\": 500, \"seconds\": 2}'"
expect "409"; expect '"outcome-unknown"'
run "$hapax keys resolve k-5 --scope 'Bearer me' --store file:$work/hapax.db --reason \"on the bank's list\" --outcome happened --status 201 --body '{\"id\": \"ch_6\"}'"
run "$pay -H 'Idempotency-Key: \"k-5\"' -d '{\"amount\": 500, \"seconds\": 2}'"
expect "201 Created"; expect "idempotency-replayed: true"; expect '"ch_6"'
[ "$(charges)" = 6 ] || fail "six charges"
stop -TERM

say "--on-unknown reconcile: the service returns the response, which is replayed."
ask="--on-unknown reconcile --reconcile-url http://127.0.0.1:$port/charges/by-operation"
# shellcheck disable=SC2086
start $ask
killed k-6 600
# shellcheck disable=SC2086
start $ask
for _ in $(seq 300); do
    run "$pay -H 'Idempotency-Key: \"k-6\"' -d '{\"amount\": 600, \"seconds\": 2}'" >"$work/out"
    [[ $seen == *"201 Created"* ]] && break
    expect '"outcome-unknown"'
    sleep 0.1
done
cat "$work/out"
expect "201 Created"; expect '"ch_7"'
[ "$(charges)" = 7 ] || fail "seven charges"

say "A second gateway on the same file prints an error, and ends with 69."
run "$hapax gateway --upstream http://127.0.0.1:$port --listen 127.0.0.1:0 --admin off --store file:$work/hapax.db; echo \"exit \$?\""
expect "exit 69"
stop -TERM
printf '\n# 7 charges: k-4 was charged twice, as reexecute allows; every other key once.\n'
