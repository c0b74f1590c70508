# docker build -t baton . && docker build -t baton-gpu -f deploy/gpu.Dockerfile .
# docker run --gpus all -p 8000:8000 -v baton-cache:/cache baton-gpu serve --host 0.0.0.0 Qwen/Qwen3-8B
FROM baton
USER root
# Triton compiles the module that launches its kernels with a C compiler, at the first start on a new volume.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# torch brings Triton and the libraries of CUDA; the driver is the host's.
RUN python -m pip install --no-cache-dir --disable-pip-version-check torch==2.13.0
ENV TRITON_CACHE_DIR=/cache/triton NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER baton
