# An image in which `make demo` and `make test` run, on CPUs or, with the NVIDIA runtime, on GPUs:
#   docker build -t holdfast . && docker run --rm --shm-size 8g holdfast
FROM python:3.11-slim-bookworm
# On a GPU, Triton and torch's compiler call gcc and g++, and need Python's headers, which this image has.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ gcc git libc6-dev make procps && rm -rf /var/lib/apt/lists/*
WORKDIR /holdfast
# What is installed follows from these files alone, so that a change of code does not install anew.
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY src/holdfast/__init__.py src/holdfast/__init__.py
RUN make setup
COPY . .
# Copied files are newer than the mark of what is installed.
RUN touch .venv/.installed
CMD ["make", "demo"]
