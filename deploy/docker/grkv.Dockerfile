# syntax=docker/dockerfile:1.7
# One image for the engine and both services: they share the package and torch. Targets: `cpu`, and `gpu`, which adds the
# CUDA toolkit that SGLang and FlashInfer compile kernels with at run time. About 11 GB, `gpu` about 17 GB.

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu22.04

FROM ${CUDA_IMAGE} AS cuda

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/grkv
WORKDIR /src
# Dependencies first: they change less often than the code, and take half an hour.
COPY pyproject.toml requirements.lock deploy/docker/requirements.py ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py > needed.txt \
    && /opt/grkv/bin/pip install --constraint requirements.lock --requirement needed.txt
COPY README.md LICENSE ./
COPY kernels kernels
COPY grkv_sglang grkv_sglang
RUN /opt/grkv/bin/pip install --no-cache-dir --no-deps .

FROM ${PYTHON_IMAGE} AS cpu
# g++ and ninja: Triton, SGLang and FlashInfer compile small parts when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 ninja-build \
    && rm -rf /var/lib/apt/lists/*
# The folders that volumes are mounted on, with the owner that Docker gives new volumes.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin grkv \
    && install --directory --owner grkv --group grkv /data /home/grkv/.cache
COPY --from=build /opt/grkv /opt/grkv
COPY --chmod=0755 deploy/docker/serve.sh /usr/local/bin/grkv-engine
ENV PATH=/opt/grkv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /home/grkv
# The engine, the chat server and the RAG service; Compose publishes what is needed.
EXPOSE 30000 8100 8200
CMD ["grkv", "--help"]

FROM cpu AS gpu
# Not the compiler from PyPI: the newest that the lock file allows does not accept the headers of torch's CUDA 13.0.
COPY --from=cuda /usr/local/cuda-13.0 /usr/local/cuda
ENV CUDA_HOME=/usr/local/cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
