# Varve in a container: locked versions, kernels compiled at build, an unprivileged user.
#
#   docker build -t varve .
#   docker run -p 127.0.0.1:9092:9092 -p 127.0.0.1:9644:9644 -v varve-data:/var/lib/varve \
#     --read-only --tmpfs /tmp:size=64m --cap-drop ALL --security-opt no-new-privileges varve \
#     --advertise localhost:9092
#
# The broker writes to its volume and to /tmp only. With Prometheus and Grafana: deploy/compose.yaml.
#
# The broker alone: `varve pipeline` with Spark and its 1.2 GB runs elsewhere, beside it or on a
# cluster (pip install 'varve[pipeline]'), and asks this one over HTTP.
#
# Without --advertise clients are told the container's own address. The image's settings
# authenticate no client: publish the ports on loopback, as above, or inside a network you trust.

FROM python:3.11-slim AS build

# Numba's cache is valid only for the processor it was compiled for. Pinned here, so that it holds
# on other machines than the one that builds: every x86-64 since 2009, with the CRC32 instruction.
# For arm64: --build-arg CPU_NAME=generic --build-arg CPU_FEATURES=+crc
ARG CPU_NAME=x86-64-v2
ARG CPU_FEATURES=+sse4.2
ENV NUMBA_CPU_NAME=$CPU_NAME \
    NUMBA_CPU_FEATURES=$CPU_FEATURES \
    VARVE_KERNEL_CACHE=/opt/varve/kernels

WORKDIR /src
RUN python -m venv /opt/varve
COPY requirements-build.lock requirements.lock ./
RUN /opt/varve/bin/python -m pip install --no-cache-dir --require-hashes -r requirements-build.lock \
 && /opt/varve/bin/python -m pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY config config
COPY storage storage
COPY protocol protocol
COPY cleaner cleaner
COPY admin admin
COPY broker broker
RUN /opt/varve/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/varve/bin/varve warmup

FROM python:3.11-slim

ARG CPU_NAME=x86-64-v2
ARG CPU_FEATURES=+sse4.2
ENV NUMBA_CPU_NAME=$CPU_NAME \
    NUMBA_CPU_FEATURES=$CPU_FEATURES \
    VARVE_KERNEL_CACHE=/opt/varve/kernels \
    PATH=/opt/varve/bin:$PATH \
    PYTHONUNBUFFERED=1

RUN useradd --system --uid 9092 --user-group --no-create-home --shell /usr/sbin/nologin varve \
 && install -d -o varve -g varve /var/lib/varve
COPY --from=build /opt/varve /opt/varve
# Numba uses a cache only where it may write; on a read-only root, the broker copies it to /tmp.
COPY --from=build --chown=varve:varve /opt/varve/kernels /opt/varve/kernels
COPY deploy/container.yaml /etc/varve/varve.yaml

USER varve
WORKDIR /var/lib/varve
VOLUME /var/lib/varve
EXPOSE 9092 9644
STOPSIGNAL SIGTERM
# Liveness, not readiness: one partition that is offline, or a long recovery, is no reason to restart.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python", "-c", "from http.client import *; c = HTTPConnection('127.0.0.1:9644', timeout=2); c.request('GET', '/healthz'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["varve", "serve", "--config", "/etc/varve/varve.yaml"]
