#!/usr/bin/env bash
# laconic on Slurm. Submit it in a clone on a file system that all nodes share:
#   NETWORK=ib0 sbatch --nodes 4 examples/launch/slurm.sh                       examples/pretrain.toml
#   sbatch examples/launch/slurm.sh examples/minimal.py                         a script of yours
# Change: the #SBATCH lines (or give them to sbatch), the environment below, and NETWORK, the interface that joins the
# nodes (`ip -brief address` on a node lists them).
#SBATCH --job-name=laconic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1       # torchrun starts the ranks
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300       # five minutes before the end: save, and queue again
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
[ $# -gt 0 ] || set -- -m laconic.train examples/pretrain.toml --train.resume auto

# shellcheck source=/dev/null
source "${VENV:-.venv}/bin/activate"
export NCCL_SOCKET_IFNAME=${NETWORK:-eth0} GLOO_SOCKET_IFNAME=${NETWORK:-eth0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
ulimit -l unlimited || echo "slurm.sh: locked memory is limited; see PropagateResourceLimits in slurm.conf" >&2

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node do not meet
# SLURM_NODEID is known on the node only, so the inner shell reads it
# shellcheck disable=SC2016
srun --wait 60 bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-gpu}" \
  --master-addr "$head" --master-port "$port" "$@" &
step=$!

# laconic train saves on SIGTERM and ends. srun itself would kill on it, so the signal goes to the tasks.
again=
trap 'again=yes; scancel --signal TERM "$SLURM_JOB_ID"' USR1
code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do # a trap ends `wait` early
  code=0
  wait "$step" || code=$?
done
[ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
