#!/usr/bin/env bash
# laconic on machines that you reach by ssh, with keys and without a password. Run it anywhere:
#   examples/launch/ssh.sh box1,box2                                            examples/pretrain.toml
#   RANKS=8 examples/launch/ssh.sh box1,me@box2 examples/minimal.py             a script of yours
# Change: (in the environment) FOLDER, the clone on every machine, and VENV in it; RANKS, the GPUs of each; HEAD,
# the address of the first machine as the others see it; NETWORK, the interface that joins them. Ctrl-C saves and ends.
set -euo pipefail
: "${FOLDER:=laconic}" "${VENV:=.venv}" "${RANKS:=1}" "${NETWORK:=eth0}" "${PORT:=29500}"
IFS=, read -ra hosts <<< "${1:?give the machines as box1,box2}"
shift
[ $# -gt 0 ] || set -- -m laconic.train examples/pretrain.toml --train.resume auto
: "${HEAD:=${hosts[0]#*@}}"
pid_file=/tmp/laconic-$PORT.pid

command_of() { # what the machine with this number runs
  printf '%q ' cd "$FOLDER"
  printf '%s' "&& echo \$\$ > $pid_file && { ulimit -l unlimited || echo locked memory is limited; } && exec "
  printf '%q ' env "NCCL_SOCKET_IFNAME=$NETWORK" "GLOO_SOCKET_IFNAME=$NETWORK" TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 \
    "$VENV/bin/torchrun" --nnodes "${#hosts[@]}" --node-rank "$1" --nproc-per-node "$RANKS" \
    --master-addr "$HEAD" --master-port "$PORT" "${@:2}"
}

stop_command="kill -TERM \$(cat $pid_file)"
stopped=
stop() { # laconic train saves on SIGTERM; a second one would break that off
  [ -z "$stopped" ] || return 0
  stopped=yes
  for host in "${hosts[@]}"; do
    ssh -n "$host" "$stop_command" || true
  done
}

trap stop INT TERM
for number in "${!hosts[@]}"; do
  ssh -n "${hosts[number]}" "$(command_of "$number" "$@")" & # Ctrl-C does not reach what runs in the background
done
code=0
while [ -n "$(jobs -rp)" ]; do
  wait -n || { code=$?; stop; } # where one machine fails, the others end, too
done
exit "$code"
