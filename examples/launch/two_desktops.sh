#!/usr/bin/env bash
# Two desktops on one cable: two DGX Spark, two workstations. Box 0 leads. Each has a clone at the same place.
#   once after each boot    box 0: sudo NETWORK=enp1s0f1np1 examples/launch/two_desktops.sh cable 0
#                           box 1: sudo NETWORK=enp1s0f1np1 examples/launch/two_desktops.sh cable 1
#   to train                box 0: NETWORK=enp1s0f1np1 examples/launch/two_desktops.sh train 0 [SCRIPT.py ARGS]
#                           box 1: NETWORK=enp1s0f1np1 examples/launch/two_desktops.sh train 1 [SCRIPT.py ARGS]
# Change: NETWORK, the interface at the cable on this box (`ip -brief link`; on a Spark `ibdev2netdev` shows the one that
# is Up); MTU=1500 if a switch between the boxes knows no jumbo frames; RANKS, the GPUs of a box.
# On two Sparks, NCCL uses both halves of the port with NCCL_IB_HCA=rocep1s0f1,roceP2p1s0f1 in the environment.
set -euo pipefail
: "${NETWORK:?name the interface at the cable, as in NETWORK=enp1s0f1np1}" "${MTU:=9000}" "${RANKS:=1}" "${PORT:=29500}"
addresses=(192.168.77.1 192.168.77.2)
case "${1:-} ${2:-}" in
  "cable 0" | "cable 1" | "train 0" | "train 1") ;;
  *) echo "usage: two_desktops.sh cable|train 0|1 [SCRIPT.py ARGS]" >&2 && exit 2 ;;
esac
action=$1 box=$2
shift 2

if [ "$action" = cable ]; then
  ip link set "$NETWORK" mtu "$MTU" up
  ip address replace "${addresses[box]}/24" dev "$NETWORK"
  ip -brief address show dev "$NETWORK"
  exit
fi

[ $# -gt 0 ] || set -- -m laconic.train examples/pretrain.toml --train.resume auto
other=${addresses[1 - box]}
if ! ping -c 1 -W 5 -M "do" -s $((MTU - 28)) "$other" > /dev/null; then # in one frame of MTU bytes, or not at all
  echo "no frame of $MTU bytes reaches $other over $NETWORK: run 'cable' on both boxes with the same MTU" >&2
  exit 1
fi
# shellcheck source=/dev/null
source "${VENV:-.venv}/bin/activate"
export NCCL_SOCKET_IFNAME=$NETWORK GLOO_SOCKET_IFNAME=$NETWORK TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
ulimit -l unlimited || echo "locked memory is limited: add 'memlock unlimited' to /etc/security/limits.conf" >&2
exec torchrun --nnodes 2 --node-rank "$box" --nproc-per-node "$RANKS" \
  --master-addr "${addresses[0]}" --master-port "$PORT" "$@"
