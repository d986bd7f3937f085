# Holdfast and vLLM, each in its own environment. Build from the repository's root:
#   docker build -f docker/cuda.Dockerfile -t holdfast:cuda .
#   docker build -f docker/vllm.Dockerfile -t holdfast:vllm .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" holdfast:vllm holdfast grpo run.yaml
# In run.yaml: rollout: {engine: {kind: vllm, start: {python: /opt/vllm/bin/python}}}
ARG HOLDFAST_IMAGE=holdfast:cuda
FROM ${HOLDFAST_IMAGE}
ARG VLLM_VERSION=0.32.0
RUN python -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir "vllm==${VLLM_VERSION}"
