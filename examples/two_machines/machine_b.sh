#!/bin/sh
# Decode instance. ROUTER: address of machine A, whose cluster.secret lies here too.
set -eu
MODEL=${MODEL:-smollm2} ROUTER=${ROUTER:-127.0.0.1} CLUSTER_PORT=${CLUSTER_PORT:-8100} SECRET=${SECRET:-cluster.secret} OWN_PORT=${OWN_PORT:-8002}
exec baton serve "$MODEL" --role decode --name b --port "$OWN_PORT" --router "tcp://$ROUTER:$CLUSTER_PORT" --cluster-secret "$SECRET"
