# docker build -t minispec .
# docker run --rm -p 8000:8000 -v minispec-models:/models minispec --target smollm2-135m --draft auto
# with a GPU: docker run --gpus all …
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# Compilers: of C for the small launchers that Triton builds for its kernels, of C++ for the compiled step of a CPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 minispec && mkdir /models && chown minispec /models
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY minispec ./minispec
COPY weights ./weights
# torch is the build with CUDA, which runs on a CPU too; an index of CPU builds makes the image much smaller
ARG TORCH_INDEX=
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} '.[pull]'

USER minispec
ENV MINISPEC_WEIGHTS=/models HF_HOME=/models/huggingface TRITON_CACHE_DIR=/models/triton XDG_CACHE_HOME=/models/cache PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["minispec", "serve", "--host", "0.0.0.0", "--pull"]
CMD ["--help"]
