# Holdfast on NVIDIA GPUs. Build from the repository's root:
#   docker build -f docker/cuda.Dockerfile -t holdfast:cuda .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" holdfast:cuda holdfast sft run.yaml
# torch's wheel brings CUDA's libraries, so the host needs a driver alone.
FROM python:3.12-slim-bookworm
# Triton and torch's compiler call gcc and g++ during a run.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ gcc git libc6-dev procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/holdfast
# torch goes first and alone: beside other packages pip may choose another build of it.
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir -c constraints.txt '.[gpu,math,vlm]'
WORKDIR /work
ENV OMP_NUM_THREADS=1
CMD ["holdfast", "doctor"]
