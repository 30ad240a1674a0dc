# The course with everything installed, JupyterLab on port 8888.
#
#   docker build -t gpu-finetuning-lab --build-arg COMMIT="$(git rev-parse --short=12 HEAD)" .
#   docker run --rm --gpus all --shm-size=8g -p 127.0.0.1:8888:8888 -v "$PWD/results:/home/learner/course/results" \
#     -v finetuning-notebooks:/home/learner/course/notebooks gpu-finetuning-lab   # prints an address with its token
#   docker run --rm --gpus all --shm-size=8g -v "$PWD/results:/home/learner/course/results" gpu-finetuning-lab make course
#
# --shm-size: DataLoader workers hand batches over through /dev/shm, and Docker's default of 64 MB is too small (lab 03).
# --gpus all needs the NVIDIA container toolkit; without it the labs run on the CPU at the scale tiny.
# The CUDA libraries come with PyTorch's wheels, so the image needs none of its own.
FROM python:3.12.12-slim-bookworm

# g++ for torch.compile, make for the course, git for the commit that results are stamped with
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 learner \
    && install --directory --owner=learner /home/learner/course /home/learner/course/results

USER 1000
WORKDIR /home/learner/course

# The packages first: a change of a notebook must not install them again.
COPY --chown=learner pyproject.toml constraints.txt requirements.txt Makefile README.md LICENSE ./
COPY --chown=learner labutils/__init__.py labutils/
RUN PIP_NO_CACHE_DIR=1 make install
COPY --chown=learner . .

ARG COMMIT=unknown
ENV LABUTILS_COMMIT=${COMMIT} \
    JUPYTER_CONFIG_PATH=/home/learner/course/jupyter \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/home/learner/course/.venv/bin:${PATH}

EXPOSE 8888
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8888/api', timeout=4)"]

# Jupyter makes a fresh token at each start and prints it; nothing here turns that off.
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser"]
