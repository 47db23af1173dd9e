# ipu_lean on CPU:   docker build -f docker/cpu.Dockerfile -t ipu_lean:cpu .
#                    docker run --rm -v "$PWD/runs:/home/user/ipu_lean/runs" ipu_lean:cpu train configs/quickstart.yaml
FROM python:3.11-slim
RUN useradd --create-home user
USER user
WORKDIR /home/user/ipu_lean
# torch first: it is large and changes seldom, so this layer is kept.
RUN python -m venv /home/user/venv \
 && /home/user/venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY --chown=user . .
RUN /home/user/venv/bin/pip install --no-cache-dir -e ".[corpora,tokenizers]" && mkdir -p runs
ENTRYPOINT ["/home/user/venv/bin/ipu-lean"]
CMD ["--help"]
