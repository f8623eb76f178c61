# One image for every service; build arguments say what it holds. docker-compose.yml has three of it, docs/deploy.md the rest.
ARG BASE=python:3.11-slim-bookworm

# Wheels that no index has: docker build --build-context wheels=FOLDER. Nothing unless given.
FROM scratch AS wheels

FROM ${BASE}
# An address with a password in it would stay in the image: give wheels instead.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_CACHE_DIR=1
ARG PIP_DISABLE_PIP_VERSION_CHECK=1

# Debian packages: vLLM compiles kernels at run time and wants a C compiler.
ARG APT=""
RUN if [ -n "$APT" ]; then apt-get update && apt-get install -y --no-install-recommends $APT \
    && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --no-create-home --uid 10001 penstock \
    && install -d -o penstock -g penstock /penstock /penstock/runs /models \
    && python3 -m venv /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH

# The heaviest first, in a layer that no change of ours builds again.
ARG TORCH=""
RUN --mount=type=bind,from=wheels,target=/wheels \
    if [ -n "$TORCH" ]; then pip install --find-links /wheels $TORCH; fi

# What pyproject.toml asks for, without our own code; nothing is left of what stands in for it.
ARG EXTRAS=data
COPY pyproject.toml setup.py LICENSE /src/
RUN --mount=type=bind,from=wheels,target=/wheels \
    cd /src && touch README.md && for folder in penstock protocols services pipeline; do mkdir $folder && touch $folder/__init__.py; done \
    && pip install --find-links /wheels ".[$EXTRAS]" && pip uninstall -q -y penstock \
    && rm -rf build *.egg-info penstock protocols services pipeline

COPY README.md /src/
COPY penstock /src/penstock
COPY protocols /src/protocols
COPY services /src/services
COPY pipeline /src/pipeline
RUN pip install --no-deps /src
COPY configs /penstock/configs

# The root is read-only where it runs; what libraries want to keep goes to /tmp, what shall last to /models.
# /penstock/code is for what is the user's own: rewards, losses, files of data.
ENV PYTHONPATH=/penstock/code PENSTOCK_FOLDERS='["/penstock/code"]' HOME=/tmp HF_HOME=/models VLLM_CACHE_ROOT=/models/vllm PENSTOCK_HEALTH_FILE=/tmp/penstock.health PENSTOCK_ONE_PER_HOST=1 PYTHONUNBUFFERED=1
WORKDIR /penstock
USER penstock
ENTRYPOINT ["penstock"]
