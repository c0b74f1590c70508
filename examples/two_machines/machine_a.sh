#!/bin/sh
# Router and prefill instance. ADDRESS: of this machine, as machine B reaches it.
set -eu
MODEL=${MODEL:-smollm2} ADDRESS=${ADDRESS:-127.0.0.1} PORT=${PORT:-8000} CLUSTER_PORT=${CLUSTER_PORT:-8100}
SECRET=${SECRET:-cluster.secret} OWN_PORT=${OWN_PORT:-8001}
[ -s "$SECRET" ] || (umask 077; head -c 32 /dev/urandom | base64 > "$SECRET")
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT INT TERM
baton router "$MODEL" --host "$ADDRESS" --port "$PORT" --cluster-host "$ADDRESS" --cluster-port "$CLUSTER_PORT" --cluster-secret "$SECRET" &
baton serve "$MODEL" --role prefill --name a --port "$OWN_PORT" --router "tcp://$ADDRESS:$CLUSTER_PORT" --cluster-secret "$SECRET" &
wait
