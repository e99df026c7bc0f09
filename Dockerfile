# docker build -t megatron-verified .                              # CPUs
# docker build --build-arg DEVICE=cuda -t megatron-verified:cuda . # GPUs, with the CUDA kernels
#
# The CUDA of the image has to be that of the torch wheel, or the CUDA kernels are left out, which the
# build announces. tini hands signals on, so that a run saves when the container is stopped.
ARG DEVICE=cpu
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM python:3.12-slim-bookworm AS cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG TORCH=torch==2.13.0+cpu

FROM ${CUDA_IMAGE} AS cuda
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv
ARG TORCH=torch==2.13.0

FROM ${DEVICE}
ARG TORCH
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ tini \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /workspace
RUN pip install "setuptools>=77.0.3" wheel "pybind11>=2.11" "$TORCH"
COPY pyproject.toml setup.py README.md LICENSE pretrain_gpt.py pretrain_bert.py \
    pretrain_prefix_lm.py pretrain_t5.py pretrain_ict.py pretrain_vit.py \
    finetune_t0_non_causal_decoder.py ./
COPY csrc csrc
COPY megatron megatron
COPY tools tools
COPY tasks tasks
COPY examples examples
RUN pip install --no-build-isolation --editable ".[s3,wandb]"
RUN useradd --uid 1000 --create-home trainer && chown trainer /workspace
USER 1000
ENTRYPOINT ["tini", "--"]
CMD ["python", "pretrain_gpt.py", "--help"]
