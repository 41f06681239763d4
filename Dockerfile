# The service as an image: no root, no write outside /tmp and /data, checkpoints mounted read-only.
#
#   docker build -t glassblock .                                          for GPU nodes
#   docker build -t glassblock --build-arg TORCH_INDEX=INDEX .            another build of torch, the CPU one say
#   docker build -t glassblock --secret id=pip_conf,src=pip.conf .        a mirror, credentials stay outside
#   docker run --gpus all --read-only --tmpfs /tmp -v /my/models:/checkpoints:ro \
#     -p 127.0.0.1:8080:8080 -e GLASSBLOCK_ALLOW_OPEN=1 glassblock
#
# BASE_IMAGE needs python3 (3.11 or newer) with venv and pip, nothing else.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Glassblock" \
      org.opencontainers.image.description="Looks inside the blocks of a transformer checkpoint and names the porting mistakes that raise no error." \
      org.opencontainers.image.licenses="Apache-2.0"

# A number beside the name, so that an orchestrator can see that it is not root.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin glassblock \
    && mkdir /checkpoints /data \
    && chown glassblock:glassblock /data

# An index beside the usual one; its torch 2.13.0+cpu or +cu126 is preferred to the plain 2.13.0.
ARG TORCH_INDEX
# A mirror in place of the usual index. For credentials or a certificate use the secrets below:
# arguments can be read back from an image's history.
ARG PIP_INDEX_URL
WORKDIR /build
# Dependencies first, over two empty packages: this layer, the large one, outlives every change of the source.
# The project's files are lent to the builder, not copied: there is one stage, and each byte is stored once.
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/run/secrets/ca_bundle \
    --mount=type=bind,source=pyproject.toml,target=/lent/pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=/lent/constraints.txt \
    cp /lent/* . \
    && mkdir -p service/glassblock clients/glassblock_client \
    && touch service/glassblock/__init__.py clients/glassblock_client/__init__.py README.md LICENSE \
    && python3 -m venv /opt/glassblock \
    && /opt/glassblock/bin/python -m pip install --cache-dir /var/cache/pip --constraint constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[service,postgres,tracing]" \
    && rm -r /build/*
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/run/secrets/ca_bundle \
    --mount=type=bind,target=/lent \
    cp -r /lent/. . \
    && /opt/glassblock/bin/python -m pip install --cache-dir /var/cache/pip --no-deps --force-reinstall . \
    && rm -r /build/*

ENV PATH=/opt/glassblock/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/.cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GLASSBLOCK_ROOTS=/checkpoints \
    GLASSBLOCK_DATA=/data \
    GLASSBLOCK_DEVICE=auto \
    GLASSBLOCK_HOST=0.0.0.0 \
    GLASSBLOCK_PORT=8080

WORKDIR /tmp
USER 10001:10001
VOLUME ["/checkpoints", "/data"]
EXPOSE 8080
STOPSIGNAL SIGTERM
# Straight to the service, past any proxy that the container's environment names.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['GLASSBLOCK_PORT'] + '/health/ready', timeout=4)"]
ENTRYPOINT ["glassblock", "serve"]
