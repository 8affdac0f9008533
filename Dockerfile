# All roles, nats-server and etcd in one image.
#   docker build -t pullfill:latest .                              # CPU
#   docker build -t pullfill:latest --build-arg DEVICE=cuda13 .    # NVIDIA
FROM python:3.11-slim-bookworm
ARG DEVICE=cpu
ARG TORCH_INDEX=
# libnuma and libgomp: vLLM's CPU build. g++: what torch compiles without --enforce-eager.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home pullfill
ENV PULLFILL_VENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /opt/pullfill
COPY . .
RUN PULLFILL_DEVICE=$DEVICE PULLFILL_TORCH_INDEX=$TORCH_INDEX PIP_NO_CACHE_DIR=1 \
    python -m pullfill.deploy.install \
    && server=$(/opt/venv/bin/python -c "from pullfill.deploy.local_servers import etcd_binary; print(etcd_binary())") \
    && ln -s "$server" /usr/local/bin/etcd \
    && mkdir -p /home/pullfill/.cache \
    && chown -R pullfill /home/pullfill
USER 1000
WORKDIR /home/pullfill
ENTRYPOINT ["pullfill"]
