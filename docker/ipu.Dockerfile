# ipu_lean beside the Poplar SDK, whose image brings Python 3.8, PopTorch and torch 2.0.1.
#
#   docker build -f docker/ipu.Dockerfile -t ipu_lean:ipu .
#   gc-docker -- --rm -e IPUOF_VIPU_API_HOST -e IPUOF_VIPU_API_PARTITION_ID \
#       -v "$PWD/runs:/home/user/ipu_lean/runs" ipu_lean:ipu doctor
#
# gc-docker (part of the SDK's command line tools) hands the IPUs of this host to the container; the two variables name the
# V-IPU controller and the partition.
ARG BASE=graphcore/pytorch:3.3.0-ubuntu-20.04-20230703
FROM ${BASE}
RUN useradd --create-home user
WORKDIR /home/user/ipu_lean
# The pins come first and without dependencies: a plain pip install would replace the SDK's torch and take numpy 2.
COPY requirements/pod.txt requirements/pod.txt
RUN python3 -m pip install --no-cache-dir --no-deps -r requirements/pod.txt
COPY --chown=user . .
RUN python3 -m pip install --no-cache-dir --no-deps -e . \
 && python3 -c "import torch; assert torch.__version__.startswith('2.0.1'), torch.__version__" \
 && mkdir -p runs && chown user runs
USER user
ENTRYPOINT ["python3", "-m", "ipu_lean"]
CMD ["--help"]
