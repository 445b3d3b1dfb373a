# tierfs with RDMA: rdma-core and pyverbs of one release in the image, whatever the host has of them. The host needs the
# kernel's drivers only. From the repository's root:
#
#   docker build -f deploy/container/rdma.Dockerfile -t tierfs-rdma .
#
# docs/rdma.md says what the container has to be given (devices, locked memory).
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS rdma
RUN apt-get update && apt-get install -y --no-install-recommends \
        gcc libc6-dev cmake ninja-build pkg-config libnl-3-dev libnl-route-3-dev && rm -rf /var/lib/apt/lists/*
COPY deploy/container/build-rdma.sh /
# In one place of its own, so that the base image's rdma-core, if it has one, stays as it is.
RUN /build-rdma.sh /opt/rdma python3

FROM ${BASE} AS tierfs
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev pkg-config libfuse3-dev \
        && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv /opt/tierfs && /opt/tierfs/bin/pip install --no-cache-dir '/source[etcd,s3]'

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends fuse3 libfuse3-3 libnl-3-200 libnl-route-3-200 \
        && rm -rf /var/lib/apt/lists/*
COPY --from=rdma /opt/rdma /opt/rdma
COPY --from=tierfs /opt/tierfs /opt/tierfs
# By the loader's cache and not by LD_LIBRARY_PATH, which programs drop that mount tierfs by mount(8).
RUN echo /opt/rdma/lib >/etc/ld.so.conf.d/00-rdma.conf && ldconfig \
        && ln -s /opt/rdma/python/pyverbs "$(/opt/tierfs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/" \
        && /opt/tierfs/bin/python -c 'import pyverbs.device, pyverbs.providers.efa.efadv' \
        && ln -s /opt/tierfs/bin/mount.tierfs /sbin/mount.tierfs && ln -s mount.tierfs /sbin/mount.fuse.tierfs
ENV PATH=/opt/tierfs/bin:$PATH
ENTRYPOINT ["tierfs"]
