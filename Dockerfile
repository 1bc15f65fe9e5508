# Vivace on Debian, with the packages and the steps of .ci/run (tests/test_container.py holds both equal).
#
#   docker build -t vivace .                                        # PyTorch as your package index serves it
#   docker build -t vivace --build-arg EXTRA_INDEX=... .            # its CPU build: see docs/install.md; with no
#                                                                   # password in it, which the image would keep
#   docker build --target checked .                                 # all checks and all tests, as CI runs them
#   docker run --rm -v "$PWD:/home/job" vivace tune train.py:job    # --gpus all where there are some
FROM debian:12-slim AS base
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ python3 python3-dev python3-venv git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/vivace
COPY . .
ARG EXTRA_INDEX=""
ENV PIP_EXTRA_INDEX_URL=$EXTRA_INDEX
RUN scripts/setup torch

FROM base AS checked
RUN scripts/browser
RUN scripts/check
RUN scripts/test
RUN scripts/test --lowest

FROM base
ENV PATH=/opt/vivace/.venv/bin:$PATH PIP_EXTRA_INDEX_URL=""
WORKDIR /home/job
ENTRYPOINT ["vivace"]
CMD ["--help"]
