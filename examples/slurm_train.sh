#!/bin/bash
# Trains on several nodes of a Slurm cluster with torchrun; submitted again, it continues.
#
# Use:     set --nodes, --gpus-per-node, the data and the run directory (both on storage that all nodes see), activate the
#          environment below if there is one, then: sbatch slurm_train.sh
# Tested:  the shell's syntax (tests/examples/test_ray_train.py); torchrun across hosts is tested in network namespaces.
# Not run: under Slurm, and on GPUs.
#SBATCH --job-name=patchword
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

DATA=${DATA:-/data/imagenet}
OUT=${OUT:-/shared/runs/imagenet}
# source /shared/venv/bin/activate

HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One torchrun per node starts one process per GPU. If a process dies, torchrun starts all of them again, up to three
# times; if a node dies, Slurm runs the job again. Both resume from the last checkpoint. Three minutes before the time
# limit Slurm sends SIGTERM, and the run saves a checkpoint and stops.
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_PER_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$HEAD_NODE:29500" \
    -m patchword train imagenet_augreg --data.source "$DATA" --out "$OUT" --resume auto
